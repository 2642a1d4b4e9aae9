"README.md and stall.png, from the figures of all benchmarks."

from __future__ import annotations


def of_others(files):
    "Tables of all ratios of the other benchmarks."
    for n, t in files['rendezvous']['seconds'].items():
        yield (
            f'A rendezvous of {n} ranks, µs',
            ('', 'a call', 'of dist.barrier', 'our barrier, of it', 'our agree, of it'),
            [
                (
                    k,
                    f'{v * 1e6:.0f}',
                    f"{v / t['dist.barrier']:.2f}",
                    f"{t['barrier'] / v:.2f}",
                    f"{t['agree'] / v:.2f}",
                )
                for k, v in t.items()
            ],
        )
    for mb, m in files['save_load']['medians'].items():
        others = [o for o in m['save'] if o != 'ours']
        yield (
            f'One checkpoint of {mb} MB, ms (memory: in models)',
            ('', 'ours', *others, *(f'ours of {o}' for o in others)),
            [
                (
                    k,
                    *(f'{v[o] * (1 if k == "memory" else 1e3):.3g}' for o in ('ours', *others)),
                    *(f"{v['ours'] / v[o]:.2f}" if v[o] else '' for o in others),
                )
                for k, v in m.items()
            ],
        )


def markdown(title, columns, rows):
    return '\n'.join(
        [f'**{title}**', '', *(f'| {" | ".join(o)} |' for o in (columns, ('---',) * len(columns), *rows)), '', '']
    )


def write(
    here,  # the folder of both
    r,  # what `fit.py` has measured
    targets,  # rows of what is aimed at
    tables,  # (title, names of columns, rows) of what it has measured
    files,  # what the other benchmarks have measured, by name
    contenders,  # whose stalls are drawn, in order
):
    (here / 'README.md').write_text(
        '# Measured\n\nWritten by `python benchmarks/fit.py --write`. What is measured, and how, each script '
        f"tells with `--help`. Ratios are of medians of one run.\n\n{r['made']}\n\n"
        '![stall of training by size of the model](stall.png)\n\n## Saving that training does not feel: fit.py\n\n'
        + markdown('Targets', ('', 'is', 'at most', ''), targets)
        + ''.join(markdown(*o) for o in tables)
        + 'By default each rank reads: on one machine that is quicker whatever the number of ranks, as the file is in '
        'the page cache and comes from there faster than through a socket. Rank 0 reads and sends where a rank does '
        'not see the file.\n\n## Rendezvous and files: rendezvous.py, save_load.py\n\n'
        + ''.join(markdown(*o) for o in of_others(files)).rstrip()
        + '\n'
    )
    picture(r['stalls'], contenders, here / 'stall.png')


def picture(stalls, contenders, path):
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot as plt

    names = {
        'stock': 'stock: learn.save',
        'ours': 'ours',
        'background': 'ours, background',
        'copy': 'a copy in memory',
        'lightning': 'Lightning',
        'lightning async': 'Lightning, async',
    }
    fig, ax = plt.subplots(figsize=(8, 5), dpi=120, layout='constrained')
    sizes = sorted(stalls)
    for i, (name, marker) in enumerate(zip(contenders, 'osDx^v')):
        y = [stalls[o][name]['stall'] * 1e3 for o in sizes]
        ax.plot(
            sizes,
            y,
            marker=marker,
            color=f'C{i}',
            linestyle='--' if name == 'copy' else '-',
            linewidth=2.5 if name in ('ours', 'background') else 1.3,
            label=names[name],
        )
    handles, labels = ax.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda i: -handles[i].get_ydata()[-1])
    ax.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc='center left',
        bbox_to_anchor=(1, 0.5),
        frameon=False,
    )  # in the order of their ends
    ax.set(
        xscale='log',
        yscale='log',
        xlabel='size of the model, MB',
        ylabel='stall of training per save, ms',
        title='How long training stands still for a save',
    )
    ax.set_xticks(sizes, map(str, sizes))
    ax.minorticks_off()
    ax.grid(alpha=0.3)
    ax.yaxis.set_major_formatter('{x:g}')
    fig.savefig(path)

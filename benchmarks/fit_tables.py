"The figures of fit.py as tables, and as the ratios that have targets."

from __future__ import annotations
import os, platform, time
from importlib.metadata import version

from contenders import MISSING, STALLS
from fit_contenders import EPOCHS, FITS, FIT_MB

SIZES = (100, 500)  # MB for which the targets of a stall hold
TARGETS = {  # at most
    'stall in the background, of learn.save': 0.2,
    'stall in the background, of a copy in memory': 1.5,
    'median step while writing, of undisturbed': 1.1,
    'worst step while writing, ms longer': 20,
    'memory of the background, rank 0, models': 1.1,
    'memory of the background, rank 1, models': 0.1,
    'whole fit, ours of stock': 1,
    'whole fit, background of stock': 1,
    'time in checkpointing, ours of lightning': 0.5,
    'time in checkpointing, background of lightning': 0.5,
    'no save due, % of an epoch of 1 s': 1,
}


def ratios(r):
    "What the targets are about, as (where, what, value)."
    for mb, o in r['stalls'].items():
        if mb not in SIZES:
            continue
        b, where = o['background'], f'{mb} MB: '
        yield where, 'stall in the background, of learn.save', b['stall'] / o['stock']['stall']
        yield where, 'stall in the background, of a copy in memory', b['stall'] / o['copy']['stall']
        yield where, 'median step while writing, of undisturbed', b['step'] / b['alone']
        yield where, 'worst step while writing, ms longer', (b['worst'] - b['worst_alone']) * 1e3
    f = r['fits']
    for i in range(2):
        yield '', f'memory of the background, rank {i}, models', f['background'][f'memory{i}'] - f['none'][f'memory{i}']
    for o in 'ours', 'background':
        yield '', f'whole fit, {o} of stock', f[o]['fit'] / f['stock']['fit']
        if 'lightning' in f:
            yield (
                '',
                f'time in checkpointing, {o} of lightning',
                f[o]['checkpointing'] / f['lightning']['checkpointing'],
            )
    yield '', 'no save due, % of an epoch of 1 s', (f['idle']['with'] - f['idle']['without']) * 100


def tables(r):
    "(title, names of columns, rows) of what was measured here."
    for mb, o in r['stalls'].items():

        def written(v):
            return (
                (
                    f"{v['write'] * 1e3:.0f}",
                    f"{v['step'] / v['alone']:.2f}",
                    f"{v['worst'] * 1e3:.1f}",
                    f"{v['worst_alone'] * 1e3:.1f}",
                )
                if 'write' in v
                else ('',) * 4
            )

        yield (
            f"{mb} MB: stall of a save, ms, and steps while it is written; medians of {o['rounds']} saves",
            (
                '',
                'stall',
                'of stock',
                'of copy',
                'the first',
                'written after',
                'median step, of undisturbed',
                'worst step',
                'undisturbed',
            ),
            [
                (
                    k,
                    f"{v['stall'] * 1e3:.1f}",
                    f"{v['stall'] / o['stock']['stall']:.2f}",
                    f"{v['stall'] / o['copy']['stall']:.2f}",
                    f"{o['first'][k] * 1e3:.1f}",
                    *written(v),
                )
                for k in STALLS
                if (v := o.get(k))
            ],
        )
    f = r['fits']
    of = [(k, f[k]['checkpointing']) for k in ('stock', 'lightning', 'lightning async') if k in f]
    yield (
        f'Whole fits of {EPOCHS} epochs with as many saves of {FIT_MB} MB on 2 ranks, ms; '
        f"medians of {f['rounds']} fits",
        (
            '',
            'fit',
            'of stock',
            'in saves',
            'at the end',
            *(f'both, of {k}' for k, _ in of),
            'memory, models',
            'on rank 1',
            'collectives per epoch',
        ),
        [
            (
                k,
                f"{v['fit'] * 1e3:.0f}",
                f"{v['fit'] / f['stock']['fit']:.2f}",
                f"{v['saving'] * 1e3:.0f}",
                f"{v['end'] * 1e3:.0f}",
                *(f"{v['checkpointing'] / o:.2f}" for _, o in of),
                f"{v['memory0']:.2f}",
                f"{v['memory1']:.2f}",
                f"{v['collectives']:.1f}",
            )
            for k in FITS
            if (v := f.get(k))
        ],
    )
    a, b = (f['idle'][k] * 1e3 for k in ('with', 'without'))
    yield (
        'No save due: an epoch on 2 ranks, ms',
        ('with our callback', 'without', 'more'),
        [(f'{a:.2f}', f'{b:.2f}', f'{a - b:.2f}')],
    )
    yield (
        f'End of fit: {FIT_MB} MB into the model of every rank of this machine, ms',
        ('ranks', 'each reads the file', 'rank 0 reads and sends', 'reading, of sending'),
        [
            (str(n), f"{o['read'] * 1e3:.0f}", f"{o['sent'] * 1e3:.0f}", f"{o['read'] / o['sent']:.2f}")
            for n, o in r['ends'].items()
        ],
    )


def show(title, columns, rows):
    print(f'\n{title}')
    widths = [max(map(len, o)) for o in zip(columns, *rows)]
    for row in columns, *rows:
        print(
            '  ' + '  '.join(f'{o:{"<" if i == 0 else ">"}{w}}' for i, (o, w) in enumerate(zip(row, widths))),
            flush=True,
        )


def machine():
    with open('/proc/cpuinfo') as f:
        cpu = next((o.split(':')[1].strip() for o in f if o.startswith('model name')), platform.machine())
    return (
        f'{time.strftime("%Y-%m-%d")}, {cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, '
        + ', '.join(f'{o} {version(o)}' for o in ('torch', 'fastai', 'lightning') if o not in MISSING)
        + '.'
    )

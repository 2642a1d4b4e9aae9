"""Who waited for whom: the rendezvous of the ranks as a table, as a picture, and as one line after a fit.

Nothing is measured for this. Every rank remembers its last 2000 rendezvous, and when each rank came. What ranks wait for
each other within DDP's own exchange of gradients is no rendezvous, and not seen here."""

from __future__ import annotations
import math, re
from pathlib import Path

import numpy as np, pandas as pd

from .distributed import all_gather, run_on_main, print_on_main
from .distributed.current import current_control, known_control
from .errors import DDPError
from .installed import fastai_line

__all__ = ['timeline', 'waits_by_name', 'waits_by_rank', 'plot_timeline', 'straggler_summary']

_NEAR = 51  # rendezvous by which a clock is judged: it may drift in a day
_WORTH = 0.1, 1.0  # part of a fit, and seconds, from which on waiting is told of
_SAVE = re.compile(r'(run_on_main|main_process_only)\((.*\.)?_*(write|save|export|settle|finished)\w*\)')
_LOAD = re.compile(
    r'''all_or_none\(.(before loading|load|compare|resume from) |broadcast_tensors\(.weights of |run_on_main\(_from_main\.'''
)


# -- the table


def timeline() -> pd.DataFrame:  # one row per rendezvous, in order; empty in one process
    """Every rendezvous that all ranks remember. To be called on all ranks: it gathers what they remember, and gives it to all.

    Columns: `name`; `where` it stands in the code; `begin` and `end`, when the first and the last rank came, in seconds
    since the beginning of the first one; `straggler`, the last rank to come; `waited`, the seconds that all ranks together
    waited; and what each waited, as `rank 0`, `rank 1`, ... The clocks of the ranks need not agree: all leave a rendezvous
    at the same moment, and so tell how far apart they are. `DDPError` in code that runs on one rank only."""
    places, entered = _gathered()
    waits = entered.max(1, keepdims=True) - entered
    about = dict(
        name=[o.call for o in places],
        where=[o.where for o in places],
        begin=entered.min(1),
        end=entered.max(1),
        straggler=entered.argmax(1),
        waited=waits.sum(1),
    )
    return pd.DataFrame(about | {f'rank {r}': o for r, o in enumerate(waits.T)})


def _gathered():
    "The places, and when each rank came, by rank 0's clock, in seconds since the first one."
    control = current_control('timeline()')
    if control is None:
        return [], np.zeros((0, 1))
    mine = list(control.record)
    told = all_gather(
        {entered[0]: left for _, entered, left in mine}, 'timeline'
    )  # when rank 0 came tells one rendezvous from the others
    if len(told) < control.size:
        raise DDPError('timeline() was called in code that runs on one rank only: it needs what all ranks remember.')
    mine = [
        (place, entered, [o[entered[0]] for o in told])
        for place, entered, _ in mine
        if all(entered[0] in o for o in told)
    ]
    if not mine:
        return [], np.zeros((0, control.size))
    entered, left = (np.array([o[i] for o in mine]) for i in (1, 2))
    apart = pd.DataFrame(left - left[:, :1]).rolling(_NEAR, center=True, min_periods=1).median().to_numpy()
    entered = (entered - entered[0, 0] - apart) / 1e9
    return [o for o, *_ in mine], entered - entered[0].min()


def _ranks(table):
    return [o for o in table.columns if o.startswith('rank ')]


def _kind(name):
    return re.sub(r'\bepoch \d+', 'an epoch', name)


def waits_by_name(
    table: pd.DataFrame
    | None = None,  # as `learn.ddp_timeline()` gives it; by default what it gives now, to be asked for on all ranks
) -> pd.DataFrame:  # the longest in sum first
    "Seconds of waiting by name of the rendezvous: how often it took place, in sum, and by the rank that waited. Epochs are added up."
    if table is None:
        table = timeline()
    sums = table.groupby(table['name'].map(_kind), sort=False)[['waited', *_ranks(table)]].sum()
    sums.insert(0, 'times', table['name'].map(_kind).value_counts())
    return sums.sort_values('waited', ascending=False)


def waits_by_rank(
    table: pd.DataFrame
    | None = None,  # as `learn.ddp_timeline()` gives it; by default what it gives now, to be asked for on all ranks
) -> pd.DataFrame:  # a row for each rank that waited, a column for each rank that it waited for
    "Seconds of waiting in sum, by who waited for whom."
    if table is None:
        table = timeline()
    ranks = _ranks(table)
    sums = table.groupby('straggler')[ranks].sum().reindex(range(len(ranks)), fill_value=0.0)
    return sums.set_axis([f'for {o}' for o in ranks]).T


# -- one line after a fit


def straggler_summary(
    begin: int,  # of the fit, by `time.time_ns()` of rank 0
    end: int,  # of the fit
) -> str | None:  # on rank 0; None on the others, and if there is nothing to tell
    """Which rank cost the others more than a tenth of the time (and a second), each of them, in the mean. From what rank 0 remembers: no rendezvous.

    Waits at a rendezvous count for the rank that came last."""
    control = known_control()
    if control is None or control.rank:
        return None
    met = [o for o in control.record if begin <= o[2] <= end]
    if not met:
        return None
    entered, left = np.array([o for _, o, _ in met]), np.array([o for *_, o in met])
    entered = np.maximum(entered - _apart(entered, left), begin)
    waits, last = (entered.max(1, keepdims=True) - entered).sum(1) / 1e9 / (control.size - 1), entered.argmax(1)
    costs = np.bincount(last, waits, control.size)
    rank = int(costs.argmax())
    part = costs[rank] * 1e9 / (end - begin)
    if part < _WORTH[0] or costs[rank] < _WORTH[1]:
        return None
    at = (
        pd.Series(waits[last == rank])
        .groupby([_kind(str(o[0])) for o, r in zip(met, last) if r == rank])
        .sum()
        .idxmax()
    )
    least = (
        'at least ' if len(control.record) == control.record.maxlen and control.record[0] is met[0] else ''
    )  # earlier ones are forgotten
    return (
        f'rank {rank} cost {"the other" if control.size == 2 else "each of the others"} {least}{costs[rank]:.1f} s of waiting '
        f'({100 * part:.0f} % of this fit), mostly at {at}'
    )


def _apart(entered, left):
    """How far each rank's clock is ahead of rank 0's, as far as rank 0 can tell by itself: nobody came after rank 0 left, and
    nobody came before it left the rendezvous before. Clocks that fit are taken to be right."""
    least = (entered - left[:, None]).max(0)
    most = (
        np.quantile(entered[1:] - left[:-1, None], 0.1, axis=0, method='lower') if len(left) > 1 else 0
    )  # rank 0 may have dozed before it noted that it left
    return np.maximum(np.minimum(most, 0), least) * (np.arange(entered.shape[1]) > 0)


# -- the picture

_COLOURS = dict(wait='#E69F00', save='#0072B2', load='#009E73')  # those of Okabe and Ito, that every eye tells apart
_NAMED = 6  # of the longest waits


def plot_timeline(
    path: str | Path | None = None,  # where to save the picture; its suffix tells the format
):  # matplotlib's `Figure` on rank 0; None on the others, and if there is nothing to draw
    """Draw `timeline()`: one row per rank, with what it waited, saved and loaded. To be called on all ranks; rank 0 draws.
    If it cannot draw or save, all ranks raise, as `run_on_main` does."""
    table, fig = timeline(), None
    if not len(table):
        return print_on_main('There is no timeline to draw: this process has met no other rank.')

    def draw():
        nonlocal fig
        fig = _draw(table)
        if path is not None:
            fig.savefig(path, dpi=150)

    run_on_main(draw)  # which does not return the figure: all ranks would get it
    return fig


def _draw(table):
    import matplotlib.pyplot as plt

    ranks, span = _ranks(table), max(table.end.max(), 1e-3)
    unit, per = next(
        (u, n) for u, n, limit in (('s', 1, 600), ('min', 60, 5 * 3600), ('h', 3600, math.inf)) if span < limit
    )
    longest = _longest(table, span)
    rows, key = 0.36 * len(ranks) + 0.1, 0.2 * max(len(longest), 1)  # inches
    width, height = 11, 0.85 + rows + 0.75 + key
    fig = plt.figure(figsize=(width, height), facecolor='white')
    plt.close(fig)  # a notebook shows what a cell ends in, and would show it once more
    ax = fig.add_axes((0.75 / width, (key + 0.75) / height, (width - 2.85) / width, rows / height))
    bars = _bars(table)
    for r in range(len(ranks)):
        ax.broken_barh([(0, span / per)], (r - 0.36, 0.72), color='#EEEEEE', linewidth=0)
        for kind, colour in _COLOURS.items():
            ax.broken_barh(
                [(a / per, (b - a) / per) for a, b in bars[kind][r] if b > a],
                (r - 0.36, 0.72),
                color=colour,
                linewidth=0.4,
            )
    for i, (end, straggler) in enumerate(zip(longest.end, longest.straggler)):
        ax.plot(
            end / per, straggler, 'o', markersize=11, color='black', markeredgecolor='white', clip_on=False, zorder=5
        )
        ax.text(
            end / per, straggler, str(i + 1), color='white', fontsize=8, ha='center', va='center_baseline', zorder=6
        )
    ax.set(
        xlim=(0, span / per),
        ylim=(len(ranks) - 0.45, -0.55),
        yticks=range(len(ranks)),
        yticklabels=ranks,
        xlabel=f'{unit} since the first rendezvous',
    )
    ax.tick_params(left=False)
    ax.spines[['left', 'top', 'right']].set_visible(False)
    _sums_beside(ax, waits_by_rank(table))
    waited = table.waited.sum() / len(ranks)
    fig.text(
        0.75 / width,
        1 - 0.28 / height,
        f'{len(ranks)} ranks met {len(table)} times in {_seconds(span)}, and waited for {100 * waited / span:.0f} % of it',
        fontsize=12,
        weight='bold',
    )
    _legend(fig, ax, (0.75 / width, 1 - 0.68 / height))
    lines = [
        f'{i + 1}   {_seconds(o.end - o.begin)} for rank {o.straggler}, at {_shortened(o.name, o.where)}'
        for i, o in enumerate(longest.itertuples())
    ]
    for i, o in enumerate(lines or ['No rank waited for another one for long.']):
        fig.text(
            0.75 / width, (key - 0.2 * i) / height, o, fontsize=9, va='center', parse_math=False
        )  # users chose the names
    return fig


def _bars(table):
    "Begin and end of what each rank did that is worth a bar, by kind and rank."
    n, begun = len(_ranks(table)), [0.0, *table.end[:-1]]  # when all left the one before
    came = table.end.to_numpy()[:, None] - table[_ranks(table)].to_numpy()
    bars = {k: [[] for _ in range(n)] for k in _COLOURS}
    for name, since, end, each in zip(table.name, begun, table.end, came):
        for r in range(n):
            bars['wait'][r].append((each[r], end))
        if _SAVE.match(name):
            bars['save'][0].append((max(since, each[1:].min()), each[0]))  # the others come when it begins
        if _LOAD.match(name):
            for r in range(n):
                bars['load'][r].append((since, each[r]))
    return bars


def _longest(table, span):
    "The rendezvous with the longest waits, in order, no two of them so close that their marks would overlap."
    chosen, length = [], table.end - table.begin
    for i in length[length >= max(span / 2000, 0.01)].sort_values(ascending=False).index:
        if len(chosen) < _NAMED and (abs(table.end[chosen] - table.end[i]) > span / 40).all():
            chosen.append(i)
    return table.loc[sorted(chosen)]


def _sums_beside(ax, sums):
    at = ax.get_yaxis_transform()
    for x, title, values in (
        (1.105, 'waited', sums.sum(axis=1)),
        (1.235, 'was waited for', sums.sum(axis=0) / (len(sums) - 1)),
    ):
        ax.text(x, -0.6, title, transform=at, ha='right', va='bottom', fontsize=9, color='#444444')
        for r, o in enumerate(values):
            ax.text(
                x,
                r,
                _seconds(o),
                transform=at,
                ha='right',
                va='center',
                fontsize=9,
                weight='bold' if o == values.max() else 'normal',
            )


def _legend(fig, ax, at):
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    shown = [
        Patch(color=c, label=t)
        for c, t in zip(
            [*_COLOURS.values(), '#EEEEEE'],
            ('waits for the last rank', 'saves', 'loads', 'trains, or does other things'),
        )
    ]
    fig.legend(
        handles=[
            *shown,
            Line2D(
                [],
                [],
                marker='o',
                color='black',
                linestyle='',
                markersize=9,
                label='the last to come, after a long wait',
            ),
        ],
        loc='lower left',
        bbox_to_anchor=at,
        ncols=5,
        frameon=False,
        fontsize=9,
        borderpad=0,
        borderaxespad=0,
        handlelength=1.2,
        columnspacing=1.5,
    )


def _seconds(s):
    return (
        f'{s:.2f} s'
        if s < 10
        else f'{s:.1f} s'
        if s < 600
        else f'{s / 60:.1f} min'
        if s < 5 * 3600
        else f'{s / 3600:.1f} h'
    )


def _shortened(name, where):
    "What fits under the picture: of paths the last part only."
    name = re.sub(r'''[^\s'"]*/(?=[^/\s'"])''', '', name)
    text = name if name.endswith(where) else f'{name} at {where}'
    return text if len(text) <= 110 else f'{text[:80]} ... {text[-25:]}'


# -- fastai 2

if fastai_line() == 2:
    from fastai.basics import Learner, patch

    @patch
    def ddp_timeline(self: Learner) -> pd.DataFrame:
        "The table of `timeline()`: who waited how long for whom. To be called on all ranks."
        return timeline()

    @patch
    def plot_ddp_timeline(
        self: Learner,
        path: str | Path | None = None,  # where to save the picture; its suffix tells the format
    ):
        "Draw `timeline()`, on rank 0. To be called on all ranks."
        return plot_timeline(path)

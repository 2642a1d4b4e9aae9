"The timeline as a picture: one row per rank, with what it waited, saved and loaded."

from __future__ import annotations
import re
from pathlib import Path
from typing import TYPE_CHECKING


from ..distributed import print_on_main, run_on_main
from .table import rank_columns, timeline, waits_by_rank

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ['plot_timeline']

_COLOURS = dict(wait='#E69F00', save='#0072B2', load='#009E73')  # of Okabe and Ito, which every eye can distinguish
_BACKGROUND = '#EEEEEE'
_MARKED = 6  # of the longest waits
_ROW = 0.36  # half the height of a bar, in rows
_LEFT, _RIGHT, _WIDTH = 0.75, 2.1, 11  # inches beside the bars, and of the whole picture


def plot_timeline(
    path: str | Path | None = None,  # where to save the picture, in the format of its suffix
) -> Figure | None:  # on rank 0; None on the others, and if there is nothing to draw
    """Draw `timeline()`: one row per rank, with what it waited, saved and loaded. Call it on all ranks; rank 0 draws.
    If it cannot draw or save, all ranks raise, as `run_on_main` does."""
    table = timeline()
    if not len(table):
        print_on_main('There is no timeline to draw: this process has met no other rank.')
        return None
    figures = []

    def draw():
        figures.append(_draw(table))
        if path is not None:
            figures[0].savefig(path, dpi=150)

    run_on_main(draw)  # which does not return the figure: it would be sent to all ranks
    return figures[0] if figures else None


def _draw(table):
    import matplotlib.pyplot as plt

    ranks = rank_columns(table)
    span = max(table.end.max(), 1e-3)
    longest = _longest_waits(table, span)
    lines = [_explanation(i, wait) for i, wait in enumerate(longest.itertuples(), 1)]
    lines = lines or ['No rank waited for another one for long.']
    rows = 0.36 * len(ranks) + 0.1  # heights in inches
    below = 0.2 * len(lines)
    height = 0.85 + rows + 0.75 + below
    fig = plt.figure(figsize=(_WIDTH, height), facecolor='white')
    plt.close(fig)  # a notebook shows what a cell ends in, and would show it a second time
    area = (_LEFT / _WIDTH, (below + 0.75) / height, (_WIDTH - _LEFT - _RIGHT) / _WIDTH, rows / height)
    ax = fig.add_axes(area)
    unit, seconds_per_unit = _unit(span)
    _draw_bars(ax, table, span, seconds_per_unit)
    _mark(ax, longest, seconds_per_unit)
    ax.set(
        xlim=(0, span / seconds_per_unit),
        ylim=(len(ranks) - 0.45, -0.55),
        yticks=range(len(ranks)),
        yticklabels=ranks,
        xlabel=f'{unit} since the first rendezvous',
    )
    ax.tick_params(left=False)
    ax.spines[['left', 'top', 'right']].set_visible(False)
    _draw_sums(ax, waits_by_rank(table))
    left = _LEFT / _WIDTH
    part = table.waited.sum() / len(ranks) / span
    title = f'{len(ranks)} ranks met {len(table)} times in {_seconds(span)}, and waited for {100 * part:.0f} % of it'
    fig.text(left, 1 - 0.28 / height, title, fontsize=12, weight='bold')
    _draw_legend(fig, (left, 1 - 0.68 / height))
    for i, line in enumerate(lines):
        # no formulas: the names are the users', and may have a dollar sign
        fig.text(left, (below - 0.2 * i) / height, line, fontsize=9, va='center', parse_math=False)
    return fig


def _unit(span):
    "The unit of the axis, and its seconds."
    if span < 600:
        return 's', 1
    return ('min', 60) if span < 5 * 3600 else ('h', 3600)


def _draw_bars(ax, table, span, seconds_per_unit):
    bars = _bars(table)
    for rank in range(len(rank_columns(table))):
        row = (rank - _ROW, 2 * _ROW)
        ax.broken_barh([(0, span / seconds_per_unit)], row, color=_BACKGROUND, linewidth=0)
        for kind, colour in _COLOURS.items():
            spans = [
                (begin / seconds_per_unit, (end - begin) / seconds_per_unit)
                for begin, end in bars[kind][rank]
                if end > begin
            ]
            ax.broken_barh(spans, row, color=colour, linewidth=0.4)


def _bars(table):
    "{kind: for each rank the (begin, end), in seconds, of what is worth a bar}."
    size = len(rank_columns(table))
    all_left_previous = [0.0, *table.end[:-1]]
    arrived = table.end.to_numpy()[:, None] - table[rank_columns(table)].to_numpy()
    bars = {kind: [[] for _ in range(size)] for kind in _COLOURS}
    for kind, since, end, by_rank in zip(table.kind, all_left_previous, table.end, arrived):
        for rank in range(size):
            bars['wait'][rank].append((by_rank[rank], end))
        if kind == 'save':
            bars['save'][0].append((max(since, by_rank[1:].min()), by_rank[0]))  # the others arrive when it begins
        if kind in ('load', 'send'):
            for rank in range(size):
                bars['load'][rank].append((since, by_rank[rank]))
    return bars


def _longest_waits(table, span):
    "The rendezvous with the longest waits, in order of time, no two of them so close that their marks would overlap."
    length = table.end - table.begin
    chosen = []
    for i in length[length >= max(span / 2000, 0.01)].sort_values(ascending=False).index:
        if len(chosen) < _MARKED and (abs(table.end[chosen] - table.end[i]) > span / 40).all():
            chosen.append(i)
    return table.loc[sorted(chosen)]


def _mark(ax, longest, seconds_per_unit):
    "A numbered dot for each of the longest waits, on the row of the rank that arrived last."
    for i, wait in enumerate(longest.itertuples(), 1):
        at = (wait.end / seconds_per_unit, wait.straggler)
        ax.plot(*at, 'o', markersize=11, color='black', markeredgecolor='white', clip_on=False, zorder=5)
        ax.text(*at, str(i), color='white', fontsize=8, ha='center', va='center_baseline', zorder=6)


def _explanation(number, wait):
    place = _shortened(wait.name, wait.where)
    return f'{number}   {_seconds(wait.end - wait.begin)} for rank {wait.straggler}, at {place}'


def _draw_sums(ax, sums):
    "Two columns beside the bars: what each rank waited, and how long it was waited for."
    at = ax.get_yaxis_transform()
    waited = sums.sum(axis=1)
    was_waited_for = sums.sum(axis=0) / (len(sums) - 1)
    for x, title, values in (1.105, 'waited', waited), (1.235, 'was waited for', was_waited_for):
        ax.text(x, -0.6, title, transform=at, ha='right', va='bottom', fontsize=9, color='#444444')
        for rank, seconds in enumerate(values):
            weight = 'bold' if seconds == values.max() else 'normal'
            ax.text(x, rank, _seconds(seconds), transform=at, ha='right', va='center', fontsize=9, weight=weight)


def _draw_legend(fig, at):
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    labels = 'waits for the last rank', 'saves', 'loads', 'trains, or does other things'
    handles = [Patch(color=colour, label=label) for colour, label in zip([*_COLOURS.values(), _BACKGROUND], labels)]
    dot = dict(marker='o', color='black', linestyle='', markersize=9)
    handles.append(Line2D([], [], label='the last to arrive, after a long wait', **dot))
    fig.legend(
        handles=handles,
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


def _seconds(seconds):
    "A duration in the unit that people would choose."
    if seconds < 10:
        return f'{seconds:.2f} s'
    if seconds < 600:
        return f'{seconds:.1f} s'
    return f'{seconds / 60:.1f} min' if seconds < 5 * 3600 else f'{seconds / 3600:.1f} h'


def _shortened(name, where):
    "What fits under the picture: of paths the last part only."
    name = re.sub(r'''[^\s'"]*/(?=[^/\s'"])''', '', name)
    text = name if name.endswith(where) else f'{name} at {where}'
    return text if len(text) <= 110 else f'{text[:80]} ... {text[-25:]}'

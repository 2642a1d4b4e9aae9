"""Draw the pictures of `how-it-works.md`, each as an SVG that can be read on a light and on a dark page.

python docs/pictures/draw.py

`timeline.png` is not drawn here: it is the picture that `fastai-ddp demo --ranks 3 --delay 1` leaves."""

from __future__ import annotations
from pathlib import Path

import matplotlib

matplotlib.use('svg')
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
# of Okabe and Ito, whom every eye can tell apart; each is dark enough on white and light enough on black
WAIT, SAVE, LOAD, FAIL, OTHER = '#E69F00', '#3A8FCB', '#009E73', '#D55E00', '#9A9A9A'
TEXT = '#808080'  # on the page itself
FONT = 10.5
plt.rcParams.update({'svg.hashsalt': 'fastai_ddp_callbacks', 'font.family': 'DejaVu Sans', 'svg.fonttype': 'none'})


def canvas(
    width: float,  # inches
    height: float,  # inches
):  # the axes, in inches, with no frame and nothing behind them
    fig = plt.figure(figsize=(width, height))
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set(xlim=(0, width), ylim=(0, height))
    ax.axis('off')
    return ax


def save(ax, name):
    ax.figure.savefig(FOLDER / f'{name}.svg', transparent=True, metadata={'Date': None})
    plt.close(ax.figure)


def bar(ax, x, y, width, text, color, height=0.36):
    "A coloured bar with its middle at height `y`, and black text in it."
    ax.broken_barh([(x, width)], (y - height / 2, height), color=color, linewidth=0)
    ax.text(x + width / 2, y, text, ha='center', va='center', fontsize=FONT, color='black')


def note(ax, x, y, text, ha='left', va='center', color=TEXT, weight='normal', size=FONT):
    ax.text(x, y, text, ha=ha, va=va, fontsize=size, color=color, weight=weight)


def arrow(ax, start, end, color=TEXT, style='-|>', curve=0.0):
    props = dict(arrowstyle=style, color=color, linewidth=1.4, shrinkA=0, shrinkB=0, mutation_scale=13)
    ax.annotate('', xy=end, xytext=start, arrowprops={**props, 'connectionstyle': f'arc3,rad={curve}'})


def row_names(ax, ys, x=0.1):
    for rank, y in enumerate(ys):
        note(ax, x, y, f'rank {rank}', weight='bold')


def rendezvous():
    "Rank 1 comes late; each rank sends its row to all others, and compares what it gets."
    ax = canvas(9.4, 2.75)
    ys = [2.05, 1.5, 0.95]
    row_names(ax, ys)
    meets = 4.3
    for y, came in zip(ys, (2.1, meets, 1.5)):
        bar(ax, 0.8, y, came - 0.8, 'trains', OTHER)
        if came < meets:
            bar(ax, came, y, meets - came, 'waits, looks at the board', WAIT)
        bar(ax, meets + 1.15, y, 0.95, 'compares', LOAD)
        bar(ax, meets + 2.1, y, 1.15, 'continues', OTHER)
    for start in ys:
        for end in ys:
            if start != end:
                arrow(ax, (meets + 0.05, start), (meets + 1.1, end))
    note(ax, meets + 0.58, 2.5, 'one all-to-all', ha='center')
    note(ax, 7.75, 2.42, 'a row, of each rank:', weight='bold', size=FONT - 1)
    for y, text in zip(
        (2.1, 1.8, 1.5, 1.2), ('hash of the place', 'value, or "failed"', 'when it came', 'few bytes of data')
    ):
        note(ax, 7.75, y, text, size=FONT - 1)
    note(ax, 0.8, 0.35, "rank 1 is the last to come to barrier('data is ready'): the others have waited for it")
    save(ax, 'rendezvous')


def failure():
    "Rank 1 fails outside of any rendezvous. Its note on the board ends the wait of the others."
    ax = canvas(9.4, 3.7)
    ys = [3.0, 2.45, 1.9]
    row_names(ax, ys)
    for y in (ys[0], ys[2]):
        bar(ax, 0.8, y, 1.3, 'trains', OTHER)
        bar(ax, 2.1, y, 2.35, 'waits', WAIT)
        bar(ax, 4.45, y, 1.75, 'RankFailedError', FAIL)
    bar(ax, 0.8, ys[1], 2.1, 'trains', OTHER)
    bar(ax, 2.9, ys[1], 1.55, 'ValueError', FAIL)
    for y in ys:
        bar(ax, 6.75, y, 1.6, 'meet again', LOAD)
    ax.plot([6.47, 6.47], [1.55, 3.3], color=TEXT, linewidth=1.2, linestyle=(0, (4, 3)))
    note(ax, 3.4, 3.5, 'generation 0', ha='center', weight='bold')
    note(ax, 7.55, 3.5, 'generation 1', ha='center', weight='bold')
    ax.broken_barh([(0.8, 7.55)], (0.62, 0.62), facecolor='none', edgecolor=TEXT, linewidth=1.2)
    note(ax, 0.95, 1.08, 'board, in the job\'s store', weight='bold', size=FONT - 1)
    note(ax, 0.95, 0.8, 'note/0', size=FONT - 1)
    bar(ax, 2.9, 0.8, 3.3, 'rank 1, place, error, traceback', FAIL, 0.28)
    arrow(ax, (3.2, ys[1] - 0.2), (3.2, 0.98), FAIL)
    arrow(ax, (4.6, 0.98), (4.6, ys[2] - 0.2), FAIL)
    arrow(ax, (5.9, 0.98), (5.9, ys[0] - 0.2), FAIL)
    note(ax, 3.12, 1.42, 'writes it, if it is the first', ha='right', size=FONT - 1)
    note(ax, 6.02, 1.42, 'read it', size=FONT - 1)
    note(
        ax,
        0.8,
        0.3,
        'All ranks raise within about a second, then drop the group: what is under way in it may never end.',
    )
    save(ax, 'failure')


STEPS = (  # system call, what it is for, what a kill after it leaves
    (
        'open(".model.pth....writing", O_EXCL)',
        'a name that only this process uses',
        'the old file, an empty .writing',
        WAIT,
    ),
    ('writev(...)  1 MB at a time', 'tensors, metadata, checksum', 'the old file, a part of the new one', WAIT),
    ('fsync(file)', 'the bytes are on disk before the name', 'the old file, a whole .writing', WAIT),
    (
        'rename(".writing", "model.pth")',
        'the new file, in one step',
        'the new file (power cut: perhaps the old one)',
        SAVE,
    ),
    ('fsync(folder)', 'the name is on disk', 'the new file', SAVE),
    ('link, rename  "last.pth"', 'the second name, in one step', 'both names lead to the new file', SAVE),
    ('unlink("model_3.pth")', 'what is no longer to be kept', 'one file fewer; the next start deletes the rest', LOAD),
)


def save_steps():
    "The order of the system calls of a save, and what a kill right after each of them leaves."
    ax = canvas(10.2, 4.05)
    top, gap = 3.3, 0.46
    for x, title in ((0.62, 'rank 0 calls'), (4.0, 'for'), (6.6, 'a kill right after it leaves')):
        note(ax, x, 3.75, title, weight='bold')
    ax.plot([0.3, 0.3], [top - gap * (len(STEPS) - 1), top], color=TEXT, linewidth=1.6, zorder=0)
    for i, (call, purpose, left, color) in enumerate(STEPS):
        y = top - gap * i
        ax.plot(0.3, y, 'o', markersize=12, color=color)
        ax.text(0.3, y, str(i + 1), ha='center', va='center_baseline', fontsize=8, color='black')
        note(ax, 0.62, y, call, size=FONT - 0.5)
        note(ax, 4.0, y, purpose, size=FONT - 0.5)
        note(ax, 6.6, y, left, size=FONT - 0.5, weight='bold')
    save(ax, 'save')


def resume():
    "A fit that is killed, and what the run that follows it does."
    ax = canvas(9.4, 2.65)
    note(ax, 0.1, 1.9, 'first run', weight='bold')
    note(ax, 0.1, 0.95, 'second run', weight='bold')
    start, width = 1.3, 1.75
    for epoch in range(2):
        bar(ax, start + epoch * width, 1.9, width - 0.04, f'epoch {epoch}', OTHER)
    bar(ax, start + 2 * width, 1.9, 1.2, 'epoch 2', OTHER)
    killed = start + 2 * width + 1.2
    ax.plot(killed + 0.12, 1.9, 'x', color=FAIL, markersize=11, markeredgewidth=3)
    note(ax, killed + 0.3, 1.9, 'killed', color=FAIL, weight='bold')
    for x, name in (
        (start + width, 'resume_8'),
        (start + 2 * width, 'resume_16'),
        (start + 2 * width + 0.75, 'resume_20'),
    ):
        ax.plot([x - 0.02] * 2, [1.68, 2.12], color=SAVE, linewidth=4)
        note(ax, x, 2.38, name, ha='center', color=SAVE, weight='bold', size=FONT - 1.5)
    again = start + 2 * width + 0.75
    bar(ax, start, 0.95, 2 * width - 0.04, 'passed over: no event, only their rows', 'none')
    ax.broken_barh([(start, 2 * width - 0.04)], (0.77, 0.36), facecolor='none', edgecolor=TEXT, linewidth=1)
    ax.texts[-1].set_color(TEXT)
    ax.broken_barh([(start + 2 * width, 0.75 - 0.04)], (0.77, 0.36), facecolor='none', edgecolor=TEXT, linewidth=1)
    note(ax, start + 2 * width + 0.36, 0.95, 'seen', ha='center', size=FONT - 1)
    bar(ax, again, 0.95, width - 0.75, 'rest', LOAD)
    bar(ax, start + 3 * width + 0.04, 0.95, width, 'epoch 3', OTHER)
    arrow(ax, (again, 1.64), (again, 1.18), SAVE)
    note(ax, again + 0.1, 1.42, 'weights, optimizer, order of samples, random states', color=SAVE, size=FONT - 1)
    note(ax, start, 0.4, 'The batches between resume_20 and the kill are trained once more, and give the same.')
    save(ax, 'resume')


if __name__ == '__main__':
    rendezvous()
    failure()
    save_steps()
    resume()

"""What a checkpoint costs: ours against stock fastai, Lightning and the bare disk, on this machine's CPU. Needs Linux.

    python benchmarks/save_load.py [--quick] [--sizes 10 100 500] [--folder DIR] [--json FILE] [--check]

`ours` writes a checksum and waits until the disk has it, replaces the old file in one step, and verifies what it reads.
`stock` is `learn.save` and `learn.load`. `lightning` is what its ModelCheckpoint calls, `trainer.save_checkpoint`, and
what its trainer does to restore weights. `raw` is the limit: the bytes of our file, already in memory, written, synced
and moved over the old file; read into memory that is already there. Stock and lightning neither wait for the disk nor
verify.

All contenders save the same weights over their own last file, and take turns, round after round; everything dirty is
flushed before each run. Loads go into the model that is there, on 1, 2 and 4 ranks at once from one file in the page
cache; the time is the slowest rank's. Memory is the peak of anonymous memory during a load on one rank, above that
before it, as a fraction of the model: mapped pages of the file do not count, as the system takes them back at will.
The targets that `--check` holds, as ratios of medians:"""

from __future__ import annotations
import argparse, json, os, statistics, sys, tempfile, time, warnings
from pathlib import Path

_START = time.monotonic()  # the imports count

import torch, torch.multiprocessing as mp

from contenders import SAVES_AND_LOADS, lightning, learner
from memory import anonymous, release_free_memory

from fastai_ddp_callbacks.checkpoint.state import model_state

SIZES = 100, 500  # MB, for which the targets hold
TARGETS = [  # what, of which other, at most
    ('save', 'stock', 0.8),
    ('save', 'raw', 1.2),
    ('load on 1', 'stock', 0.5),
    ('load on 2', 'stock', 0.5),
    ('load on 4', 'stock', 0.5),
    ('memory', 'model', 0.2),
]
RANKS = 1, 2, 4
MISSING = [] if lightning else ['lightning']


class Ranks:
    "What the processes share: a place to meet, a number from each, and one to tell all."

    def __init__(self, n):
        self.meet, self.times, self.word = (
            mp.get_context('fork').Barrier(n, timeout=120).wait,
            mp.RawArray('d', n),
            mp.RawValue('q'),
        )


def run(rank, n, f, ranks):
    "The slowest time of `f` on the first `n` ranks at once, with nothing left to be written from before."
    if rank == 0:
        os.sync()
    ranks.meet()
    start = time.perf_counter()
    if rank < n:
        f()
    ranks.times[rank] = time.perf_counter() - start
    ranks.meet()
    return max(ranks.times[:n])


def memory(rank, f, ranks):
    "The peak of rank 0's own memory during `f` above that before, in bytes, as rank 1 sees it."
    release_free_memory()
    if rank == 0:
        ranks.word.value = os.getpid()
    ranks.meet()
    pid, start, peak = ranks.word.value, anonymous(ranks.word.value), 0
    ranks.meet()
    if rank == 0:
        f()
        ranks.word.value = 0
    while rank == 1 and ranks.word.value:
        peak = max(peak, anonymous(pid) - start)
    if rank == 1:
        ranks.times[1] = peak
    ranks.meet()
    return ranks.times[1]


def warm_up(rank, name, o, weights, ranks):
    "The first save, and a load that must give back the weights; then the memory of a load."
    if rank == 0:
        o.save()
    ranks.meet()
    saved = weights.clone()
    if name != 'raw':
        weights.zero_()
    o.load()
    if not torch.equal(weights, saved):
        raise AssertionError(f'{name} has not loaded what it saved')
    return memory(rank, o.load, ranks)


def worker(rank, mb, folder, rounds, end, ranks, queue):
    torch.set_num_threads(1)  # as launchers set it
    torch.set_grad_enabled(False)
    warnings.simplefilter('ignore')
    learn = learner(mb, folder)
    state, those, names = (
        model_state(learn.model),
        {k: v(learn) for k, v in SAVES_AND_LOADS.items()},
        [*SAVES_AND_LOADS],
    )
    size = sum(o.nbytes for o in state.values())
    figures = {'save': {}, **{f'load on {n}': {} for n in RANKS}, 'memory': {'model': [1.0]}}

    def note(what, name, x):
        figures[what].setdefault(name, []).append(x)

    for name in names:
        note('memory', name, warm_up(rank, name, those[name], next(iter(state.values())), ranks) / size)
    ranks.word.value = 0
    for i in range(rounds * len(RANKS)):
        n = RANKS[i % len(RANKS)]
        if i >= len(RANKS) and ranks.word.value:
            break
        start = time.monotonic()
        for name in names:
            note('save', name, run(rank, 1, those[name].save, ranks))  # more often than a load, as disks are capricious
        for name in names:
            note(f'load on {n}', name, run(rank, n, those[name].load, ranks))
        names = names[1:] + names[:1]  # nobody always comes after the same one
        if rank == 0:
            ranks.word.value = 2 * time.monotonic() - start > end  # another turn would take too long
        ranks.meet()
    if rank == 0:
        queue.put((size, figures))


def measure(mb, folder, rounds, end):
    queue = mp.get_context('fork').SimpleQueue()
    with tempfile.TemporaryDirectory(dir=folder) as d:
        mp.start_processes(
            worker, (mb, Path(d), rounds, end, Ranks(max(RANKS)), queue), max(RANKS), start_method='fork'
        )
        size, figures = queue.get()
    return (
        size,
        {what: {name: statistics.median(v) for name, v in o.items()} for what, o in figures.items()},
        len(figures['save']['ours']),
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='\n'.join(
            f'  {what} at most {r:.2f} of {o} at {" and ".join(map(str, SIZES))} MB' for what, o, r in TARGETS
        ),
    )
    parser.add_argument(
        '--sizes',
        type=int,
        nargs='+',
        default=[10, *SIZES],
        help='models to measure, in MB; four processes hold up to four times as much each',
    )
    parser.add_argument(
        '--folder', type=Path, help='a folder on the disk to measure; by default that for temporary files'
    )
    parser.add_argument('--quick', action='store_true', help='end within 50 s on two cores')
    parser.add_argument('--json', type=Path, help='write the figures to this file')
    parser.add_argument('--check', action='store_true', help='exit with 1 if a target is missed')
    args = parser.parse_args()
    for name in MISSING:
        print(f'missing: {name} is not installed (pip install fastai_ddp_callbacks[bench])')
    others, results, missed = [o for o in SAVES_AND_LOADS if o != 'ours'], {}, []
    end = _START + (44 if args.quick else 240)
    for i, mb in enumerate(args.sizes):
        share = (mb + 30) / sum(o + 30 for o in args.sizes[i:])  # of the time that is left
        size, medians, saves = measure(mb, args.folder, 50, time.monotonic() + share * (end - time.monotonic()))
        results[mb] = medians
        print(
            f'\n{f"{size / 1e6:.0f} MB, ms, medians of {saves} saves":34}'
            + ''.join(f'{o:>10}' for o in SAVES_AND_LOADS)
            + '   ours of'
            + ''.join(f'{o:>10}' for o in others)
        )
        for what, m in medians.items():
            if what == 'memory':
                print(f'  {"memory, of the model":32}' + ''.join(f'{m[o]:10.2f}' for o in SAVES_AND_LOADS), flush=True)
            else:
                print(
                    f'  {what:32}'
                    + ''.join(f'{m[o] * 1e3:10.1f}' for o in SAVES_AND_LOADS)
                    + ' ' * 10
                    + ''.join(f'{m["ours"] / m[o]:10.2f}' for o in others)
                )
        if mb in SIZES:
            missed += [
                f'{mb} MB: {what} takes {medians[what]["ours"] / medians[what][o]:.2f} of {o}, the target is {r:.2f}'
                for what, o, r in TARGETS
                if medians[what]['ours'] > r * medians[what][o]
            ]
    if args.json:
        args.json.write_text(
            json.dumps(dict(medians=results, missing=MISSING, torch=torch.__version__, cpus=os.cpu_count()), indent=1)
        )
    for o in missed:
        print('missed:', o)
    unknown = [o for o in SIZES if o not in results]
    for o in unknown:
        print(f'not measured: {o} MB, for which there are targets')
    if not missed and not unknown:
        print('\nAll targets are met.')
    if args.check and (missed or unknown):
        sys.exit(1)


if __name__ == '__main__':
    main()

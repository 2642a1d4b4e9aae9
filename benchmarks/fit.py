"""Saving that training does not feel: ours against stock fastai and Lightning, on this machine's CPU. Needs Linux.

    python benchmarks/fit.py [--quick] [--sizes 10 100 500] [--folder DIR] [--json FILE] [--check] [--write [JSON ...]]

Stall: how long a save keeps one process from its next step. `stock` is `learn.save`; `ours` is a save in the
foreground; `background` copies the weights and writes them in a thread, as `DDPSaveModelCallback(background=True)`
does; `copy` is the limit, a copy of the weights into memory that is there; `lightning` is what its ModelCheckpoint
calls; `lightning async` is the same with its AsyncCheckpointIO. Then steps, which are almost only Python, as long as
the write is under way; as many undisturbed ones are run beside them. Ours wait for the disk and verify; the others do
neither.

Whole fits: 2 ranks with gloo, frozen embeddings of 100 MB and a head that is trained, and a save after every epoch, as
each is better than the one before; at the end the best is loaded on both ranks. `none` saves nothing. Lightning's fit
is its own Trainer with DDP and ModelCheckpoint. Time in checkpointing is rank 0's in the callback (and in the loading
that Lightning's user does), and starts when both ranks are there. Collectives are those of Python, not the gradients';
memory is anonymous.

No save due: epochs with our callback, whose value does not improve, against epochs without any callback, on 2 ranks.
End of fit: each rank reads and verifies the file, or rank 0 does and sends the weights.

All contenders take turns, round after round (Lightning's in every other one); what is dirty is flushed before each.
Medians. `--write` makes README.md and stall.png beside this file, with the figures of the other benchmarks too: from
the JSON files that are given, or measured now. The targets that `--check` holds:"""

from __future__ import annotations
import argparse, json, subprocess, sys, tempfile, time
from pathlib import Path

_START = time.monotonic()  # the imports count

import torch.multiprocessing as mp

import report
from contenders import MISSING, STALLS
from fit_ends import ends
from fit_tables import SIZES, TARGETS, machine, ratios, show, tables
from fits import fits
from on_ranks import on_ranks
from stalls import stalls


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='\n'.join(f'  {k}: at most {v:g}' for k, v in TARGETS.items()),
    )
    parser.add_argument(
        '--sizes', type=int, nargs='+', default=[10, *SIZES], help='models whose stall is measured, in MB'
    )
    parser.add_argument(
        '--folder', type=Path, help='a folder on the disk to measure; by default that for temporary files'
    )
    parser.add_argument(
        '--quick',
        action='store_true',
        help='fewer rounds, in about a minute: the disk has not settled then, '
        'and a ratio of whole fits may be off by a fifth',
    )
    parser.add_argument('--json', type=Path, help='write the figures to this file')
    parser.add_argument('--check', action='store_true', help='exit with 1 if a target is missed')
    parser.add_argument(
        '--write',
        type=Path,
        nargs='*',
        metavar='JSON',
        help='make README.md and stall.png, with figures of these files; what is missing is measured',
    )
    args = parser.parse_args()
    for name in MISSING:
        print(f'missing: {name} is not installed (pip install fastai_ddp_callbacks[bench])')
    files = {
        'rendezvous' if 'seconds' in o else 'save_load' if 'medians' in o else 'fit': o
        for o in (json.loads(o.read_text()) for o in args.write or [])
    }
    r = files.get('fit') or measure(
        args.sizes, args.folder, _START + (32 if args.quick else 300), (2, 4) if args.quick else (2, 4, 8)
    )
    files['fit'] = r = dict(r, **{k: {int(n): v for n, v in r[k].items()} for k in ('stalls', 'ends')})
    for o in tables(r):
        show(*o)
    if args.json:
        args.json.write_text(json.dumps(r, indent=1))
    if args.write is not None:
        here = Path(__file__).parent
        for name in {'rendezvous', 'save_load'} - files.keys():
            with tempfile.NamedTemporaryFile(suffix='.json') as f:
                subprocess.run(
                    [sys.executable, here / f'{name}.py', '--json', f.name, *(['--quick'] if args.quick else [])],
                    check=True,
                )
                files[name] = json.load(f)
        targets = [
            (where + what, f'{v:.2f}', f'{TARGETS[what]:g}', 'met' if v <= TARGETS[what] else 'missed')
            for where, what, v in ratios(r)
        ]
        report.write(here, r, targets, tables(r), files, STALLS)
    missed = [
        f'{where}{what} is {v:.2f}, the target is {TARGETS[what]:g}'
        for where, what, v in ratios(r)
        if not v <= TARGETS[what]
    ]
    unknown = [f'{o} MB' for o in SIZES if o not in r['stalls']] + MISSING
    print()
    for o in missed:
        print('missed:', o)
    for o in unknown:
        print(f'not measured: {o}, for which there are targets')
    if not missed and not unknown:
        print('All targets are met.')
    if args.check and (missed or unknown):
        sys.exit(1)


def measure(sizes, folder, end, ranks):
    "In turn, each with its share of the time that there is."
    now, stall = time.monotonic(), {}

    def until(share):
        return now + share * (end - now)

    with tempfile.TemporaryDirectory(dir=folder) as d:
        d = Path(d)
        for i, mb in enumerate(sizes):
            queue, share = (
                mp.get_context('fork').SimpleQueue(),
                0.5 * sum(o + 60 for o in sizes[: i + 1]) / sum(o + 60 for o in sizes),
            )
            mp.start_processes(stalls, (mb, d, until(share), queue), 1, start_method='fork')
            stall[mb] = queue.get()
        fit = on_ranks(fits, 2, d, until(0.8))
        return dict(
            stalls=stall,
            fits=fit,
            ends={n: on_ranks(ends, n, d, until(1 - 0.2 * (1 - (i + 1) / len(ranks)))) for i, n in enumerate(ranks)},
            missing=MISSING,
            made=machine(),
        )


if __name__ == '__main__':
    main()

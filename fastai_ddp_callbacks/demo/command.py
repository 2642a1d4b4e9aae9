"""The demonstration: ranks race to load the best model while rank 0 is late to save it.

    python -m fastai_ddp_callbacks.demo [--ranks N] [--epochs N] [--delay S] [--path DIR] [--stock]

A parent starts the ranks through torch's launcher. They train, and each notes what it does and when. Then the parent
orders the notes by time and judges by them: no rank needs another one to report, whatever happened to it."""

from __future__ import annotations
import argparse, json, os, signal, sys, tempfile, time
from pathlib import Path

from ..commands.arguments import folder_for_models, number
from ..installed import fastai_line
from .launch import launch
from .notes import STARTED, WEIGHTS, read_notes
from .race import FNAME, PICTURE, Race, digest_of_file
from .verdict import figures, first_line, judge

__all__ = ['main', 'add_arguments', 'run']

_INTRO = """\
{ranks}, {epochs} on handwritten digits (8x8), a small CNN, {saver}.
Staged: the column `score` is nan until the last epoch, which is thereby the best one and the only one that is saved.
Rank 0 sleeps {delay:g} s before that save. Before it loads, every rank overwrites its weights: only the file has the
right ones.
"""
_HOLDS = 'holds. No rank loaded before the save was complete, and every rank has the weights of the file.'
_STOCK_HOLDS = (
    'The barrier inside Learner.load of fastai 2 covers this race. '
    'It does not cover at_end=True, nor a save that fails on rank 0.'
)


def add_arguments(
    parser: argparse.ArgumentParser,
) -> None:
    "Add the demonstration's options to a parser."
    parser.add_argument('--ranks', type=number(int, 1, 16), default=3, metavar='N', help='how many ranks (default 3)')
    parser.add_argument('--epochs', type=number(int, 1, 1000), default=3, metavar='N', help='how many (default 3)')
    parser.add_argument(
        '--delay',
        type=number(float, 0, 600),
        default=3.0,
        metavar='S',
        help='seconds that rank 0 sleeps before it saves (default 3)',
    )
    parser.add_argument(
        '--path',
        type=folder_for_models,
        metavar='DIR',
        help='folder for the model (default: a new temporary one, which is kept)',
    )
    parser.add_argument(
        '--stock', action='store_true', help="use fastai's own SaveModelCallback, to see what that does"
    )
    parser.add_argument(
        '--json', action='store_true', help='print the figures as JSON; what the ranks print goes to the error output'
    )


def run(
    args: argparse.Namespace,  # as `add_arguments` defines them
) -> int:  # the exit status: 0 if the verdict holds, else 1; 130 after Ctrl-C
    "Start the ranks, wait for them, report."
    folder = Path(args.path or tempfile.mkdtemp(prefix='fastai-ddp-demo-')).absolute()
    model = folder / 'models' / f'{FNAME}.pth'
    for file in model, folder / PICTURE:
        file.unlink(missing_ok=True)  # those of an old run must not hide the race
    _introduce(args)
    with tempfile.TemporaryDirectory(prefix='fastai-ddp-notes-') as notes_folder:
        try:
            failure = launch(args, folder, notes_folder)
        except KeyboardInterrupt:
            print('interrupted: all ranks have been stopped', file=sys.stderr)
            return 128 + signal.SIGINT
        notes = read_notes(notes_folder)
    digest = digest_of_file(model)
    problems, evidence = judge(notes, args.ranks, digest)
    if failure:
        problems.insert(0, failure)
    picture = folder / PICTURE
    if args.json:
        report = dict(
            holds=not problems,
            problems=problems,
            stock=args.stock,
            ranks=figures(notes),
            weights=digest,
            saved=str(model) if model.exists() else None,
            picture=str(picture) if picture.exists() else None,
        )
        print(json.dumps(report), flush=True)
    else:
        _print_events(notes)
        _print_verdict(args, problems, evidence)
        if picture.exists():
            print(f'Who waited for whom: {picture}')
        print(f'Saved model: {model}' if model.exists() else f'No model was saved as {model}', flush=True)
    return 1 if problems else 0


def _introduce(args):
    text = _INTRO.format(
        ranks=_count(args.ranks, 'rank'),
        epochs=_count(args.epochs, 'epoch'),
        delay=args.delay,
        saver="fastai's own SaveModelCallback" if args.stock else 'DDPSaveModelCallback',
    )
    print(text, file=sys.stderr if args.json else sys.stdout, flush=True)


def _print_events(notes):
    print()
    for note in notes:
        if note['what'] not in (STARTED, WEIGHTS):
            error = f": {first_line(note['error'])}" if 'error' in note else ''
            print(f"{_clock(note['time'])}  rank {note['rank']}  {note['what']}{error}")


def _print_verdict(args, problems, evidence):
    print(f'\nVerdict: {"does not hold." if problems else _HOLDS}')
    for problem in problems:
        print(f'  {problem}')
    if args.stock and args.ranks > 1 and not problems and fastai_line() == 2:
        print(f'  {_STOCK_HOLDS}')
    print('Evidence:')
    for line in evidence:
        print(f'  {line}')


def _clock(seconds):
    return time.strftime('%H:%M:%S', time.localtime(seconds)) + f'.{int(seconds % 1 * 1000):03d}'


def _count(n, what):
    return f'{n} {what}{"" if n == 1 else "s"}'


def main(
    argv: list[str] | None = None,  # arguments, by default those of the process
) -> int:  # the exit status
    "`python -m fastai_ddp_callbacks.demo`, for the parent and, with `--worker`, for each rank."
    parser = argparse.ArgumentParser(
        prog='python -m fastai_ddp_callbacks.demo',
        description='Ranks race to load the best model while rank 0 is late to save it. The exit status is 0 if no '
        'rank loaded before the save was complete and all have the same weights, else 1.',
    )
    add_arguments(parser)
    parser.add_argument('--worker', metavar='NOTES', help=argparse.SUPPRESS)  # given to a rank: folder for its notes
    args = parser.parse_args(argv)
    if not args.worker:
        return run(args)
    Race(args).work()
    # Not by way of the interpreter's end: DistributedDataParallel keeps gloo's threads alive for good (torch 2.14), and
    # one that still has a tensor to free then aborts the process, and with it the other ranks.
    for stream in sys.stdout, sys.stderr:
        stream.flush()
    os._exit(0)

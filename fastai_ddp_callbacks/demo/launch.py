"The ranks of the demonstration, started through torch's launcher and ended with it."

from __future__ import annotations
import os, signal, subprocess, sys
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from ..commands.termination import termination_raises
from .notes import STARTED, read_notes

__all__ = ['launch']


def launch(
    args: Namespace,  # of the command
    folder: Path,  # for the model
    notes: str | Path,  # folder for the ranks' notes
) -> str | None:  # what was wrong with the run as a whole
    "Run the ranks until they end, but not longer than they can reasonably take."
    command = [
        *(sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node', args.ranks),
        *('-m', 'fastai_ddp_callbacks.demo', '--worker', notes),
        *('--epochs', args.epochs, '--delay', args.delay, '--path', folder),
    ]
    if args.stock:
        command.append('--stock')
    limit = 90 + 10 * args.ranks + 5 * args.epochs + 2 * args.delay
    with termination_raises():
        # in a session of its own: Ctrl-C reaches this process alone, which ends the ranks
        launcher = subprocess.Popen(
            [str(word) for word in command],
            env={'OMP_NUM_THREADS': '1', **os.environ},
            start_new_session=True,
            stdout=sys.stderr if args.json else None,
        )
        try:
            status = launcher.wait(limit)
        except subprocess.TimeoutExpired:
            return f'The ranks were still running after {limit:g} s and were stopped.'
        finally:
            _end(launcher, notes)
    return f'The launcher ended with exit status {status}.' if status else None


def _end(launcher, notes):
    if launcher.poll() is not None:
        return
    launcher.terminate()  # it terminates the ranks
    try:
        launcher.wait(10)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
        for note in read_notes(notes):
            if note['what'] == STARTED:
                with suppress(ProcessLookupError):
                    os.kill(note['pid'], signal.SIGKILL)

"""The command line: `fastai-ddp COMMAND`.

A command is a pair of functions: one adds its arguments to a parser, one takes them and returns the exit status."""

from __future__ import annotations
import argparse, os, sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import __version__
from . import demo
from .commands import doctor, files

__all__ = ['main']

_BROKEN_PIPE = 141  # as the shell reports a process that SIGPIPE has ended
_INTERRUPTED = 130  # and one that Ctrl-C has ended

_CHECKS = (
    ' The exit status is 0 if each file is whole, or has no checksum to compare, as one that this package did not '
    'write; 1 if a file is damaged or cannot be read{}; 2 if a path is missing or the output cannot be written. '
    'Nothing in a file is executed.'
)
_DOCTOR = (
    ' Alone, or on every rank: torchrun --nproc_per_node=N -m fastai_ddp_callbacks.cli doctor. The exit status is 0, '
    'or 1 if there is a problem.'
)


class _Command(NamedTuple):
    add_arguments: Callable  # to a parser
    run: Callable  # takes the arguments and returns the exit status
    text: str  # what it does
    more: str = ''  # for its own help


_COMMANDS = {
    'demo': _Command(
        demo.add_arguments,
        demo.run,
        'show that no rank loads the best model before rank 0 has saved it',
    ),
    'ls': _Command(
        files.ls_arguments,
        files.ls,
        'list the checkpoints in a folder, each one read and verified',
        _CHECKS.format(''),
    ),
    'verify': _Command(
        files.verify_arguments,
        files.verify,
        'read checkpoints and compare their checksums',
        _CHECKS.format(', or there was nothing to verify'),
    ),
    'show': _Command(
        files.show_arguments,
        files.show,
        'show what a checkpoint says of itself, and whether it is whole',
        _CHECKS.format(''),
    ),
    'doctor': _Command(
        doctor.add_arguments,
        doctor.run,
        'look for what goes wrong in practice: launcher, devices, network, disks, clocks, versions',
        _DOCTOR,
    ),
}


def main(
    argv: Sequence[str] | None = None,  # arguments, without the program's name; those of the process by default
) -> int:  # the exit status
    "Run a command."
    args = _parser().parse_args(argv)
    try:
        status = args.run(args)
        print(end='', flush=True)  # a reader that is gone shows here, and not when Python ends
        return status
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        _discard_output()
        return _BROKEN_PIPE
    except OSError as e:
        try:
            print(end='', flush=True)  # which fails once more if it was the output
        except OSError:
            _discard_output()
        else:
            raise
        print(f'fastai-ddp: the output cannot be written: {e.strerror}', file=sys.stderr)
        return 2


def _parser():
    parser = argparse.ArgumentParser(
        prog='fastai-ddp', description='fastai callbacks that are right under DistributedDataParallel.'
    )
    parser.add_argument('--version', action='version', version=f'fastai_ddp_callbacks {__version__}')
    commands = parser.add_subparsers(title='commands', required=True, dest='command', metavar='COMMAND')
    for name, command in _COMMANDS.items():
        description = f'{command.text[0].upper()}{command.text[1:]}.{command.more}'
        subparser = commands.add_parser(name, help=command.text, description=description)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def _discard_output():
    "Where Python's last flush goes."
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == '__main__':
    sys.exit(main())

"The command line: `fastai-ddp COMMAND`. A command is a pair of functions: one adds its arguments to a parser, one takes them and gives the exit status."

from __future__ import annotations
import argparse, os, sys

from . import __version__
from . import demo
from .commands import doctor, files

__all__ = ['main']

_CHECKS = (
    ' The exit status is 0 if each file is whole, or has no checksum to compare, as one that this package did not write; 1 if a file is damaged or cannot be '
    'read{}; 2 if a path is missing or the output cannot be written. Nothing in a file is executed.'
)
_DOCTOR = ' Alone, or on every rank: torchrun --nproc_per_node=N -m fastai_ddp_callbacks.cli doctor. The exit status is 0, or 1 if there is a problem.'
_COMMANDS = dict(
    demo=(demo.add_arguments, demo.run, 'show that no rank loads the best model before rank 0 has saved it', ''),
    ls=(
        files.ls_arguments,
        files.ls,
        'list the checkpoints in a folder, each one read and verified',
        _CHECKS.format(''),
    ),
    verify=(
        files.verify_arguments,
        files.verify,
        'read checkpoints and compare their checksums',
        _CHECKS.format(', or there was nothing to verify'),
    ),
    show=(
        files.show_arguments,
        files.show,
        'show what a checkpoint says of itself, and whether it is whole',
        _CHECKS.format(''),
    ),
    doctor=(
        doctor.add_arguments,
        doctor.run,
        'look for what goes wrong in practice: launcher, devices, network, disks, clocks, versions',
        _DOCTOR,
    ),
)


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog='fastai-ddp', description='fastai callbacks that are right under DistributedDataParallel.'
    )
    parser.add_argument('--version', action='version', version=f'fastai_ddp_callbacks {__version__}')
    commands = parser.add_subparsers(title='commands', required=True, dest='command', metavar='COMMAND')
    for name, (add_arguments, run, text, more) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f'{text[0].upper()}{text[1:]}.{more}')
        add_arguments(command)
        command.set_defaults(run=run)
    args = parser.parse_args(argv)
    try:
        status = args.run(args)
        print(end='', flush=True)  # a reader that is gone shows here, and not when Python ends
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # where Python's last flush goes
        return 141
    except OSError as e:
        try:
            print(end='', flush=True)  # which fails once more if it was the output
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        else:
            raise
        print(f'fastai-ddp: the output cannot be written: {e.strerror}', file=sys.stderr)
        return 2


if __name__ == '__main__':
    sys.exit(main())

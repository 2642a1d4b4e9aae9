"The command line: `fastai-ddp COMMAND`. A command is a module with `add_arguments(parser)` and `run(args)`, which gives the exit status."
from __future__ import annotations
import argparse, sys

from . import __version__, demo

__all__ = ['main']

_COMMANDS = dict(demo=(demo, 'show that no rank loads the best model before rank 0 has saved it'))

def main(argv=None) -> int:
    parser = argparse.ArgumentParser(prog='fastai-ddp', description='fastai callbacks that are right under DistributedDataParallel.')
    parser.add_argument('--version', action='version', version=f'fastai_ddp_callbacks {__version__}')
    commands = parser.add_subparsers(title='commands', required=True, dest='command', metavar='COMMAND')
    for name,(module,text) in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f'{text[0].upper()}{text[1:]}.')
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    return args.run(args)

if __name__ == '__main__': sys.exit(main())

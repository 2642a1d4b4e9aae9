"The race between saving and loading, staged: `fastai-ddp demo`, or `python -m fastai_ddp_callbacks.demo`."

from .command import add_arguments as add_arguments, main as main, run as run
from .verdict import judge as judge

__all__ = ['main', 'add_arguments', 'run', 'judge']

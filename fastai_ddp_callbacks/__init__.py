"""Callbacks for fastai under DistributedDataParallel, and the barrier utility that they stand on.

The same names under both lines of fastai. What needs fastai is imported when it is first asked for."""

from importlib import import_module
from typing import TYPE_CHECKING

from . import checkpoint, distributed, errors
from .checkpoint import *
from .distributed import *
from .errors import *
from .installed import fastai_line

if TYPE_CHECKING:  # what `__getattr__` brings, for editors
    from .fastai2.context import *
    from .fastai2.resume import *
    from .fastai2.save_model import *
    from .fastai2.stop import *
    from .fastai2.tracker import *
    from .timeline import plot_timeline as plot_timeline, waits_by_name as waits_by_name, waits_by_rank as waits_by_rank

__version__ = '0.1.0'

_BOTH = dict.fromkeys(('plot_timeline', 'waits_by_name', 'waits_by_rank'), 'timeline')
_FASTAI2 = dict(
    DDPTrackerCallback='fastai2.tracker',
    DDPEarlyStoppingCallback='fastai2.tracker',
    DDPReduceLROnPlateau='fastai2.tracker',
    DDPSaveModelCallback='fastai2.save_model',
    DDPTerminateOnNaNCallback='fastai2.stop',
    DDPStopCallback='fastai2.stop',
    DDPResumeCallback='fastai2.resume',
    ddp_ctx='fastai2.context',
)
_FASTAI1 = dict(
    DDPTrackerCallback='fastai1.tracker',
    DDPEarlyStoppingCallback='fastai1.tracker',
    DDPReduceLROnPlateau='fastai1.tracker',
    DDPReduceLROnPlateauCallback='fastai1.tracker',
    DDPSaveModelCallback='fastai1.save_model',
    DDPTerminateOnNaNCallback='fastai1.stop',
    DDPResumeCallback='fastai1.resume',
    ddp_ctx='fastai1.context',
)
_callbacks = {**(_FASTAI1 if fastai_line() == 1 else _FASTAI2), **_BOTH}

__all__ = [*errors.__all__, *distributed.__all__, *checkpoint.__all__, *_callbacks]


def __getattr__(name):
    if name not in _callbacks:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if fastai_line() is None:
        raise ImportError(f'{name} needs fastai: pip install fastai')
    return getattr(import_module(f'.{_callbacks[name]}', __name__), name)


def __dir__():
    return sorted({*globals(), *__all__})

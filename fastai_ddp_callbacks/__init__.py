"""Callbacks for fastai under DistributedDataParallel, and the barrier utility that they stand on.

The same names under both lines of fastai. What needs fastai is imported when it is first asked for."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from . import buckets, checkpoint, distributed, errors, weights
from .buckets import *
from .checkpoint import *
from .distributed import *
from .errors import *
from .weights import *

if TYPE_CHECKING:  # what `__getattr__` brings, for editors
    from .context import *
    from .resume import *
    from .save_model import *
    from .stop import *
    from .timeline import plot_timeline as plot_timeline, waits_by_name as waits_by_name, waits_by_rank as waits_by_rank
    from .tracker import *

__version__ = '0.1.0'

_BOTH = dict(plot_timeline='timeline', waits_by_name='timeline', waits_by_rank='timeline')
_V2 = dict(
    DDPTrackerCallback='tracker',
    DDPEarlyStoppingCallback='tracker',
    DDPReduceLROnPlateau='tracker',
    DDPSaveModelCallback='save_model',
    DDPTerminateOnNaNCallback='stop',
    DDPStopCallback='stop',
    DDPResumeCallback='resume',
    ddp_ctx='context',
    **_BOTH,
)
_V1 = dict.fromkeys((*(o for o in _V2 if o != 'DDPStopCallback'), 'DDPReduceLROnPlateauCallback'), 'fastai1') | dict(
    DDPResumeCallback='resume1', **_BOTH
)
_fastai = find_spec('fastai')  # not imported by this
_callbacks = (
    _V1
    if _fastai and not any(Path(o, 'learner.py').exists() for o in _fastai.submodule_search_locations or ())
    else _V2
)

__all__ = [*errors.__all__, *distributed.__all__, *buckets.__all__, *checkpoint.__all__, *weights.__all__, *_callbacks]


def __getattr__(name):
    if name not in _callbacks:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    if not _fastai:
        raise ImportError(f'{name} needs fastai: pip install fastai')
    return getattr(import_module(f'.{_callbacks[name]}', __name__), name)


def __dir__():
    return sorted({*globals(), *__all__})

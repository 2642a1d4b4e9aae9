"""fastai's own names for our callbacks, for a script that is to change by one line, below its imports of fastai:

    from fastai_ddp_callbacks.patch import *

What the script calls `SaveModelCallback` from there on is ours. Nothing in fastai is changed, and whatever has imported
the stock classes before keeps them. `learn.distrib_ctx` stays fastai's; `ddp_ctx` is one more import."""

from . import (
    DDPEarlyStoppingCallback as EarlyStoppingCallback,
    DDPSaveModelCallback as SaveModelCallback,
    DDPTerminateOnNaNCallback as TerminateOnNaNCallback,
    DDPTrackerCallback as TrackerCallback,
    _callbacks,
)

__all__ = ['TrackerCallback', 'SaveModelCallback', 'EarlyStoppingCallback', 'TerminateOnNaNCallback']

if 'DDPReduceLROnPlateauCallback' in _callbacks:  # its name in fastai 1
    from . import DDPReduceLROnPlateauCallback as ReduceLROnPlateauCallback

    __all__ += ['ReduceLROnPlateauCallback']
else:
    from . import DDPReduceLROnPlateau as ReduceLROnPlateau

    __all__ += ['ReduceLROnPlateau']

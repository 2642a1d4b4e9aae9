"The `Control` of the default process group at hand, made when it is first needed."

from __future__ import annotations
import atexit, os, threading, weakref

import torch.distributed as dist

from ..errors import DDPError, RankFailedError
from .control import Control
from .ranks import has_group

__all__ = ['current_control', 'known_control']

_making = threading.Lock()
_control: Control | None = None
_inherited = None  # the group of the rank from which this process was forked


def known_control() -> Control | None:
    "The `Control` that was used last, if there is one. Makes none."
    return _control


def current_control(
    call: object = 'A rendezvous',  # what needs it, for the message
) -> Control | None:  # None where there is only one rank
    """The `Control` of the default process group. `DDPError` in a forked process, `RankFailedError` if the store is
    gone."""
    global _control
    if not has_group() or dist.get_world_size() == 1:
        _control = None
        return None
    if _inherited is not None and _inherited() is dist.group.WORLD:
        raise DDPError(
            f"{call} was called in a process forked from rank {dist.get_rank()} (a data loader's worker?): "
            'only the rank itself can meet the other ranks.'
        )
    with _making:  # two of one rank would not find the other ranks
        if _control is None or _control.world() is not dist.group.WORLD:
            _control = _new_control()
        return _control


def _new_control():
    try:
        return Control()
    except RuntimeError as e:
        raise RankFailedError(
            f"The job's store does not answer rank {dist.get_rank()}: the process that keeps it, rank 0 under most "
            f'launchers, is gone ({str(e).splitlines()[0]}).',
            rank=None,
            place='',
            error_type='ProcessDied',
            error_text=str(e),
            traceback_text='',
        ) from e


def _forked():
    "A child of a rank holds the rank's group, but is not the rank."
    global _inherited
    _inherited = weakref.ref(dist.group.WORLD) if has_group() else None


if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _close():
    """Close the group while its threads can still be joined: at the end of the interpreter it sometimes aborts the
    process."""
    global _control
    _control = None

"An exception on one rank reaches the others, which would wait for that rank."

from __future__ import annotations
import re, warnings
from contextlib import contextmanager, suppress
from typing import Iterator

import torch.distributed as dist

from ..errors import DDPError, Preempted
from . import heard
from .current import current_control
from .heard import Heard
from .ranks import rank

__all__ = ['propagate_failure', 'reports_failure']

# gloo has no class of its own for the errors of a connection
_NETWORK = re.compile('gloo|nccl|connection|timed out|timeout|pair closure', re.IGNORECASE)


@contextmanager
def propagate_failure(
    place: str | None = None,  # what this rank is doing, for the others' message; by default the line that raises
) -> Iterator[None]:
    """Whatever leaves this block as an exception (`KeyboardInterrupt` and `SystemExit` too) reaches the other ranks:
    those that wait in a rendezvous, or come to one, raise `RankFailedError` within a second or so.

    The exception itself passes through unchanged, with one exception: a network error of torch on a rank that was left
    alone is raised as what has led to it. That is `RankFailedError` if another rank has failed or died, and
    `BarrierMismatchError` if another one waits at a rendezvous instead."""
    with suppress(DDPError):  # of a forked process, or of a store that is gone, which a rendezvous inside reports
        current_control()  # makes it known where this process can be seen to live or to be gone
    with heard.listening() as known:
        try:
            yield
        except GeneratorExit:
            raise  # of a generator that is closed early, which is no failure
        except BaseException as e:
            cause = report_failure(e, place, known)
            if cause is not None:
                raise cause from e
            raise


def report_failure(
    error: BaseException,  # that ends this rank's part of the work
    place: object = None,  # where; by default the line that raised it
    known: Heard = heard.since_last_meeting,  # what all ranks have heard of
) -> DDPError | None:  # what has led to `error` on another rank, if anything has: to be raised instead
    "Let the other ranks know of `error`, unless they do. Never raises."
    if isinstance(error, Preempted):
        return None  # all ranks have agreed to exit
    try:
        control = current_control()
        if control is None or error in known:
            return None
        cause = control.lookout.find_cause(error) if is_network_error(error) else None
        if cause is None:
            control.reports.report_failure(error, place)
        elif cause not in known:
            control.reports.report_failure(cause, place or 'a collective of torch')
        return cause
    except RuntimeError as e:
        warnings.warn(f'rank {rank()} failed and cannot report it to the other ranks: {e}')
        return None


def is_network_error(
    error: BaseException,
) -> bool:
    "Whether `error` is what torch raises when other ranks do not come, or are gone."
    if not isinstance(error, RuntimeError) or isinstance(error, DDPError):
        return False
    return isinstance(error, dist.DistError) or _NETWORK.search(str(error)) is not None


reports_failure = propagate_failure  # its name in 0.1, until 0.3

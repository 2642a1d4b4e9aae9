"One wait at a time in a process, whose failure the other ranks hear of."

from __future__ import annotations
import threading
from contextlib import contextmanager
from typing import Iterator

from ..errors import DDPError
from . import heard
from .call_site import Place
from .reports import Reports
from .wait import Wait

__all__ = ['ExclusiveWait']


class ExclusiveWait:
    "Lets one thread of this rank wait for the others, and reports whatever ends its wait early."

    def __init__(
        self,
        reports: Reports,
    ) -> None:
        self.reports = reports
        self._lock = threading.Lock()

    @contextmanager
    def begin(
        self,
        place: Place,
        timeout: float,  # seconds
        failure: BaseException | None = None,  # with which this rank comes, if it has failed
    ) -> Iterator[Wait]:
        """One wait at a time, in a group of all ranks; whatever ends it early is reported to the others. A rank that
        has failed raises its own `failure`."""
        if not self._lock.acquire(blocking=False):
            raise DDPError(
                f'{place} was called on rank {self.reports.rank} while another of its threads waits in a rendezvous. '
                'Let one thread of each rank do all the meeting.'
            )
        try:
            with heard.listening() as known:
                try:
                    yield Wait(place, timeout, self.reports.generation, failure)
                except BaseException as e:
                    if e not in known:
                        self.reports.report_failure(e, place)
                    if failure is None or e is failure:
                        raise
                    heard.mark(failure)
                    raise failure from e
        finally:
            self._lock.release()

"Waiting for the other ranks, with an eye on those who fail, die or do not come. Every wait has an end."

from __future__ import annotations
import time
from contextlib import suppress
from typing import Any, Callable, NoReturn

import torch.distributed as dist

from ..errors import DDPError
from .presence import Presence
from .reports import Reports
from .wait import FIRST_LOOK, Wait
from .witness import Witness

__all__ = ['Lookout']


class Lookout:
    "Waits, sees to it that all ranks raise one error when one of them fails, and gives up the group then."

    def __init__(
        self,
        presence: Presence,
        reports: Reports,
    ):
        self.presence, self.reports = presence, reports
        self.witness = Witness(presence, reports.board)

    def wait_until(
        self,
        ended: Callable[[float], bool],  # waits for so many seconds; whether it has ended by then
        wait: Wait,
    ) -> None:
        "Wait until it has ended. Raises if a rank fails, dies, or does not come in time."
        wait.look_often()
        while not ended(wait.turn()):
            store_error = self._look_out(wait)
            if store_error is not None or wait.is_long and self.presence.dead():
                if ended(0.001):
                    break  # to come here was the last thing that the rank did
                self.raise_connection_lost(store_error, wait)
            if wait.is_over:
                time.sleep(2 * FIRST_LOOK)  # a rank that comes in the last moment is not missing
                if ended(0.001):
                    break
                self._raise_timeout(wait)
            wait.slow_down()
        wait.generation.count += 1

    def wait_for(
        self,
        work: dist.Work,  # of all ranks, in any group
        wait: Wait,
    ) -> None:
        "Wait until `work` has ended. Raises if a rank fails, dies, or does not come in time."

        def ended(seconds):
            try:
                return wait.generation.has_ended(work, seconds)
            except RuntimeError as e:
                self.raise_connection_lost(e, wait)

        self.wait_until(ended, wait)

    def run(
        self,
        start: Callable[[], tuple[dist.Work, Callable[[], Any]]],  # begins a collective in the group of `wait`
        wait: Wait,
    ) -> Any:  # what the second thing that `start` gives returns when the first has ended
        "The result of a collective of all ranks."
        try:
            work, result = start()
        except RuntimeError as e:
            self.raise_connection_lost(e, wait)  # a connection that is closed already
        wait.generation.pending = work
        self.wait_for(work, wait)
        wait.generation.pending = None
        return result()

    def check_for_failure(self, wait: Wait) -> RuntimeError | None:  # the error, if the store does not answer
        "Raise if a rank has reported a failure."
        try:
            note = self.reports.board.first(wait.generation.number)
        except RuntimeError as e:
            return e
        if note is not None:
            self.reports.discard_group(wait.generation)
            raise self.reports.error(note)
        return None

    def _look_out(self, wait):
        "The same; the first time, let the others know where this rank waits."
        try:
            if wait.is_new:
                self.presence.announce(wait.generation.spot, str(wait.place))
        except RuntimeError as e:
            return e
        return self.check_for_failure(wait)

    def find_cause(
        self,
        error: BaseException,  # of the network, in a collective that is not ours
    ) -> DDPError | None:
        "The failure, death or absence of another rank that has led to `error`, as an error to raise; None if unknown."
        generation = self.reports.generation
        found = self.witness.find_out(error, generation)
        if found.note is not None:
            return None if found.note.rank == self.presence.rank else self.reports.error(found.note)
        if found.dead:
            return self.reports.error(self.reports.post_if_possible(self.witness.note_of_death(found), generation))
        if found.store_is_gone:
            return None
        return self.witness.absence_from_torch(error, generation)

    def raise_connection_lost(self, error: BaseException | None, wait: Wait) -> NoReturn:
        "A connection is closed or a process is gone: find out whose, let everyone know, raise."
        with suppress(RuntimeError):  # the store may be what is gone
            self.presence.announce(wait.generation.spot, str(wait.place))
        found = self.witness.find_out(error, wait.generation)
        note = found.note
        if note is None:
            note = self.reports.post_if_possible(
                self.witness.note_of_death(found, wait.generation.spot), wait.generation
            )
        self.reports.discard_group(wait.generation)
        raise self.reports.error(note, wait.place) from found.error

    def _raise_timeout(self, wait):
        if wait.failure is not None:
            raise wait.failure
        store_error = self.check_for_failure(wait)
        if store_error is not None:
            self.raise_connection_lost(store_error, wait)
        raise self.reports.error(self.reports.post(self.witness.note_of_absence(wait), wait.generation), wait.place)

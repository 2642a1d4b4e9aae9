"Waiting for the other ranks, with an eye on those who fail, die or do not come. Every wait has an end."

from __future__ import annotations
import time, warnings
from contextlib import suppress
from typing import Any, Callable, NoReturn

import torch.distributed as dist

from ..errors import DDPError
from . import heard
from .failure import Board, Note, failed
from .group import Generation
from .presence import Presence
from .wait import FIRST_LOOK, Wait
from .witness import Witness

__all__ = ['Lookout']


class Lookout:
    "Waits, sees to it that all ranks raise one error when one of them fails, and gives up the group then."

    def __init__(
        self,
        presence: Presence,
        board: Board,
    ):
        self.presence, self.board, self.rank = presence, board, presence.rank
        self.witness = Witness(presence, board)
        self.generation = Generation(0, presence.size)

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
            note = self.board.first(wait.generation.number)
        except RuntimeError as e:
            return e
        if note is not None:
            self.discard_group(wait.generation)
            raise self._error(note)
        return None

    def _look_out(self, wait):
        "The same; the first time, let the others know where this rank waits."
        try:
            if wait.is_new:
                self.presence.announce(wait.generation.spot, str(wait.place))
        except RuntimeError as e:
            return e
        return self.check_for_failure(wait)

    def report_failure(
        self,
        error: BaseException,  # that ends this rank's part of the work
        place: object = None,  # where; by default the line that raised it
    ) -> None:
        "Let the other ranks know of `error`; with a warning if the store is gone."
        try:
            self._post(failed(error, place, self.rank), self.generation)
        except RuntimeError as e:
            warnings.warn(f'rank {self.rank} failed and could not report it to the other ranks: {e}')
        heard.mark(error)

    def discard_group(self, generation: Generation) -> None:
        "Give up the group of this generation, once: another thread of this rank may have done so."
        if generation is self.generation:
            self.generation = generation.discard()
            heard.forget()

    def find_cause(
        self,
        error: BaseException,  # of the network, in a collective that is not ours
    ) -> DDPError | None:
        "The failure, death or absence of another rank that has led to `error`, as an error to raise; None if unknown."
        generation = self.generation
        found = self.witness.find_out(error, generation)
        if found.note is not None:
            return None if found.note.rank == self.rank else self._error(found.note)
        if found.dead:
            return self._error(self._posted_if_possible(self.witness.note_of_death(found), generation))
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
            note = self._posted_if_possible(self.witness.note_of_death(found, wait.generation.spot), wait.generation)
        self.discard_group(wait.generation)
        raise self._error(note, wait.place) from found.error

    def _raise_timeout(self, wait):
        if wait.failure is not None:
            raise wait.failure
        store_error = self.check_for_failure(wait)
        if store_error is not None:
            self.raise_connection_lost(store_error, wait)
        raise self._error(self._post(self.witness.note_of_absence(wait), wait.generation), wait.place)

    def _post(self, note: Note, generation: Generation) -> Note:
        "Put `note` where all ranks look, and give up the group. Gives the note that counts."
        try:
            return self.board.post(generation.number, note)
        finally:
            self.discard_group(generation)

    def _posted_if_possible(self, note, generation):
        try:
            return self._post(note, generation)
        except RuntimeError:  # without the store nobody is left to read it
            return note

    def _error(self, note, place=None):
        "The exception for `note`, of which all ranks hear."
        error = note.error(self.rank, place)
        heard.mark(error)
        return error

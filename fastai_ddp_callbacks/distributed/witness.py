"What is known of a rank that does not answer, put into words."

from __future__ import annotations
import time
from typing import NamedTuple

from ..errors import BarrierMismatchError
from .call_site import Place
from .failure import Board, Note
from .group import Generation
from .presence import Presence
from .wait import FIRST_LOOK, Wait

__all__ = ['Finding', 'Witness', 'mismatch']

_LAST_WORDS = 1.5  # seconds in which the note of a rank that failed, or the end of its process, can be seen


class Finding(NamedTuple):
    "What came out about a connection that was closed."

    note: Note | None  # what the rank that failed has left
    dead: list[int]  # the ranks whose process is gone
    error: BaseException | None  # of the store, if that is gone too, else of the connection
    store_is_gone: bool


class Witness:
    "Finds out which rank failed, died or does not come."

    def __init__(
        self,
        presence: Presence,
        board: Board,
    ):
        self.presence, self.board = presence, board
        self._last: tuple[Place, float] | None = None

    def have_met(self, place: Place) -> None:
        "All ranks have just been at this place."
        self._last = place, time.monotonic()

    def last_seen(self) -> str:
        "Where and when all ranks were last seen."
        if self._last is None:
            return 'not seen at any rendezvous yet'
        place, when = self._last
        return f'last seen leaving {place}, {time.monotonic() - when:.1f} s ago'

    def find_out(
        self,
        error: BaseException | None,  # of the connection
        generation: Generation,  # in which it was closed
    ) -> Finding:
        "Look for a note and for processes that are gone, for a short while: a rank that fails leaves its note first."
        end = time.monotonic() + _LAST_WORDS
        while True:
            try:
                note = self.board.first(generation.number)
            except RuntimeError as e:  # the store went with the process that kept it
                return Finding(None, self.presence.dead(), e, True)
            dead = [] if note else self.presence.dead()
            if note is not None or dead or time.monotonic() > end:
                return Finding(note, dead, error, False)
            time.sleep(FIRST_LOOK)

    def note_of_death(
        self,
        found: Finding,  # without a note
        spot: str | None = None,  # where this rank waits: who is not there is taken for dead, if no process is gone
    ) -> Note:
        "For ranks that went without a note."
        gone = found.dead
        if not gone and spot and not found.store_is_gone:
            gone = [rank for rank in self.presence.missing(spot) if rank != self.presence.rank]
        who = ', '.join(f'rank {rank}' for rank in gone)
        if not gone:
            who = "a rank that kept the job's store (rank 0 under most launchers)"
        what = 'the connection is closed, and it gives no sign of life'
        if found.dead:
            what = 'its process is gone: it was killed, or it exited early'
        text = f'{who} died ({what}; {self.last_seen()}).'
        if found.error is not None:
            text += f' The network said: {found.error}'
        return Note('dead', gone[0] if gone else None, self.last_seen(), 'ProcessDied', text)

    def note_of_absence(
        self,
        wait: Wait,  # that has lasted too long
    ) -> Note:
        "For ranks that do not come."
        missing = self.presence.missing(wait.generation.spot)
        who = ', '.join(f'rank {rank}' for rank in missing) or 'ranks that wait too, but at another place'
        text = (
            f'{wait.place}: waited {wait.timeout:g} s for {who}.\n'
            + ''.join(f'  rank {rank}: {self.last_seen()}\n' for rank in missing)
            + 'Either it is slow (give this rendezvous more time) or it will never come (look for a branch on the '
            'rank, or a loop with another number of turns there).'
        )
        return Note(
            'timeout',
            self.presence.rank,
            str(wait.place),
            'BarrierTimeoutError',
            text,
            missing=missing,
            seconds=wait.timeout,
        )

    def absence_from_torch(
        self,
        error: BaseException,  # of a collective of torch
        generation: Generation,  # the one at hand
    ) -> BarrierMismatchError | None:
        """The error of a collective of torch that some ranks did not come to, as they wait at a rendezvous; None if
        none do."""
        waiting = self.presence.waiting(generation.spot)
        if not waiting:
            return None
        lines = str(error).strip().splitlines() or [repr(error)]
        waiting[self.presence.rank] = f'in a collective of torch, which failed: {lines[0]}'
        return mismatch(dict(sorted(waiting.items())))


def mismatch(
    places: dict[int, str],  # rank to place
) -> BarrierMismatchError:
    "The error of ranks that are at different places."
    return BarrierMismatchError(
        'The ranks are at different places:\n'
        + ''.join(f'  rank {rank}: {place}\n' for rank, place in places.items())
        + 'Each rendezvous must be reached by all ranks in the same order. '
        'Look for a branch on the rank around one of these places; `run_on_main` is for what one rank does alone.',
        places=places,
    )

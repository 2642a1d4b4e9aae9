"When a fit saves within an epoch, and when all ranks meet to agree on that and on whether to exit."

from __future__ import annotations
import time
from typing import NamedTuple

from ..distributed import all_gather, world_size

__all__ = ['SaveSchedule', 'Decision']

_INTERVAL = 1.0  # seconds between two meetings
_MOST_BATCHES = 50  # between two meetings, if batches become slower than they were


class Decision(NamedTuple):
    "What all ranks do after this batch."

    exit: bool  # save and exit, as a signal has asked one of them to
    save: bool


class SaveSchedule:
    "Decides after each batch. All ranks meet about once a second; rank 0's clock counts."

    def __init__(
        self,
        every_batches: int | None,  # save after so many batches
        every_minutes: float | None,  # save after so many minutes
    ):
        self.every_batches = every_batches
        self.every_minutes = every_minutes
        self.saved_at = time.monotonic()
        self._meet_at = 1  # the batch of the fit after which all ranks meet next
        self._last_meeting: tuple[int, float] | None = None  # the batch after which they met, and when

    def note_save(self) -> None:
        "From now on the minutes until the next save are counted."
        self.saved_at = time.monotonic()

    def decide(
        self,
        batches: int,  # trained in this fit
        asked: bool,  # whether a signal has asked this rank to exit
    ) -> Decision:  # the same on all ranks
        "What to do after a batch. A rendezvous, about once a second."
        exits, is_late = self._agreed(batches, asked)
        is_due = self.every_batches is not None and batches % self.every_batches == 0
        return Decision(exits, is_late or is_due)

    def _agreed(self, batches, asked):
        if world_size() == 1:
            return asked, self._is_late()
        if batches < self._meet_at:
            return False, False
        by_rank = all_gather((asked, self._is_late(), self._until_next(batches)), 'resume: save or leave?')
        _, is_late, until_next = by_rank[0]
        self._meet_at = batches + until_next
        return any(asked for asked, _, _ in by_rank), is_late

    def _is_late(self):
        return self.every_minutes is not None and time.monotonic() - self.saved_at >= 60 * self.every_minutes

    def _until_next(self, batches):
        "In how many batches to meet again, by how long they have taken since the last meeting."
        now = time.monotonic()
        last_batches, then = self._last_meeting or (batches, 0)
        self._last_meeting = (batches, now)
        expected = int(_INTERVAL * (batches - last_batches) / max(now - then, 1e-6))
        return max(1, min(expected, _MOST_BATCHES))

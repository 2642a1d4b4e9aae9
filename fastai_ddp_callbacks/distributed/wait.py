"One wait of a rank for the others, as a value."

from __future__ import annotations
import time

from .call_site import Place
from .group import Generation

__all__ = ['FIRST_LOOK', 'Wait']

FIRST_LOOK, _SLOWEST_LOOK = 0.05, 0.5  # seconds between looks at the store while waiting


class Wait:
    "One wait of this rank for the others: where, how long, when to look out next, and in which generation."

    def __init__(
        self,
        place: Place,
        timeout: float,  # seconds
        generation: Generation,  # in which it began: a failure there ends it
        failure: BaseException | None = None,  # with which this rank comes, if it has failed
    ):
        self.place, self.timeout, self.generation, self.failure = place, timeout, generation, failure
        # A rank that has failed does not wait for those who are late: after half a second it leaves a note instead.
        self.deadline = time.monotonic() + (timeout if failure is None else min(timeout / 2, 0.5))
        self.pause = FIRST_LOOK  # seconds until the next look

    @property
    def is_over(self) -> bool:
        "Whether its time limit is reached."
        return time.monotonic() >= self.deadline

    @property
    def is_new(self) -> bool:
        "Whether nobody has looked out yet."
        return self.pause == FIRST_LOOK

    @property
    def is_long(self) -> bool:
        "Whether it lasts so long already that looks are rare, and may cost something."
        return self.pause == _SLOWEST_LOOK

    def turn(self) -> float:  # seconds
        "How long to wait before the next look."
        return min(self.pause, max(self.deadline - time.monotonic(), 0.001))

    def slow_down(self) -> None:
        "Look out less and less often."
        self.pause = min(2 * self.pause, _SLOWEST_LOOK)

    def look_often(self) -> None:
        "Something new is waited for: look out soon."
        self.pause = FIRST_LOOK

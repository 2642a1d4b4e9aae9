"One rendezvous of all ranks: where it is, whether it takes place, and what this rank brings to it."

from __future__ import annotations
import pickle
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Iterator

from ..errors import BarrierInBranchError
from .call_site import place_of
from .current import current_control
from .heard import listening
from .pickling import dumps
from .propagate import propagate_failure, report_failure
from .ranks import alone, rank
from .this_thread import innermost, is_alone, raises_on_all
from .time_limit import in_seconds
from .wire import BYTES, NOTHING, Row, decode, encode, fits

__all__ = ['Outcome', 'Rendezvous']


class Outcome:
    "What this rank brings to a rendezvous: a number, or bytes that follow, or an exception."

    def __init__(self) -> None:
        self.kind, self.bits = NOTHING, 0
        self.data: bytes | memoryview = b''
        self.error: Exception | None = None

    def carry(
        self,
        obj: Any,  # anything that can be pickled
    ) -> None:
        "Bring `obj`: in the row itself if it is a number. `TypeError` if it cannot be pickled."
        if obj is None or type(obj) in (bool, int, float) and fits(obj):
            self.kind, self.bits = encode(obj)
        else:
            self.pickle(obj)

    def pickle(
        self,
        obj: Any,  # anything that can be pickled
    ) -> None:
        "Bring `obj` as bytes. `TypeError` if it cannot be pickled."
        try:
            self.data = dumps(obj)
        except Exception as e:
            raise TypeError(f'A {type(obj).__name__} cannot be sent to the other ranks: {e}') from e
        self.kind, self.bits = BYTES, len(self.data)


class Rendezvous:
    "One call at which all ranks meet, unless there is one rank only, or one executes it for all."

    def __init__(
        self,
        call: str,  # as `call_text` gives it, the same on all ranks
        timeout: float | timedelta | None,  # time limit, in seconds; `get_timeout()` by default
        named: bool = False,  # whether the user gave it a name; else it is known by where it stands
        where: str | None = None,  # file and line; by default those of the call
    ):
        self.place, self.timeout = place_of(call, named, where), in_seconds(timeout)
        self.skipped = is_alone()
        section = innermost()
        if section is not None and not self.skipped:
            self._refuse(section)
        self.control = None if self.skipped else current_control(self.place)
        if self.control is None:
            alone(self.place, None)

    def _refuse(self, section):
        error = BarrierInBranchError(
            f'rank {rank()}: {self.place} is inside {section.place}, where {section.why}: it would wait for ranks '
            'that never come. Move it out of the block, so that all ranks reach it, or use run_on_main, inside which '
            'barriers are skipped.',
            call=str(self.place),
            block=section.place.where,
        )
        if not raises_on_all():
            report_failure(error, self.place)
        raise error

    @contextmanager
    def collect(self) -> Iterator[Outcome]:
        "What goes wrong inside is kept in the outcome, to be raised on all ranks when they meet."
        outcome = Outcome()
        if self.control is None:
            yield outcome
            return
        # what is more urgent than to wait for the others, as KeyboardInterrupt, is reported at once
        with propagate_failure(str(self.place)), listening() as known:
            try:
                yield outcome
            except Exception as e:
                if e in known:
                    raise  # on all ranks, none of which comes here
                outcome.error = e

    def meet(self, outcome: Outcome) -> list[Row]:  # one per rank
        "Meet the other ranks."
        if self.control is None:
            return [Row(0, outcome.kind, outcome.bits, 0)]
        return self.control.meet(
            self.place, self.timeout, outcome.kind, outcome.bits, outcome.data, failure=outcome.error
        )

    def share(
        self,
        outcome: Outcome,
        src: int,  # the rank whose object this rank is to get; ranks may ask for different ones
    ) -> Any:  # None on rank `src` itself, which has it
        "Meet, and get what rank `src` brings."
        assert self.control is not None  # several ranks are around
        result = None
        for source, row in enumerate(self.meet(outcome)):
            data = self._bytes_of(source, row, outcome)
            if source == src != self.control.rank:
                with propagate_failure(str(self.place)):
                    result = pickle.loads(data) if data else decode(row)
            del data  # before the next one comes: it may be as large as a model
        return result

    def _bytes_of(self, source, row, outcome):
        "What rank `source` brings beside its row. All ranks get it, also those that ask for another's."
        if row.kind != BYTES or row.data:
            return row.data
        return self.control.broadcast_bytes(outcome.data, row.bits, source, self.place, self.timeout)

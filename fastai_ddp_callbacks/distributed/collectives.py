"""What all ranks do together: meet, agree on a value, exchange objects. Each call is a rendezvous with a name and an
end."""

from __future__ import annotations
import pickle
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Iterator, Literal, Protocol, TypeVar, overload

from .call_site import call_text
from .propagate import propagate_failure
from .ranks import is_main_process as is_main_process, print_on_main as print_on_main, rank, world_size
from .reductions import REDUCTIONS
from .rendezvous import Outcome, Rendezvous
from .sections import run_on_main as run_on_main  # `is_main_process` and these two: where they were before
from .wire import decode, encode, to_number

__all__ = ['barrier', 'agree', 'broadcast', 'all_gather', 'all_or_none', 'together']

_Object = TypeVar('_Object')


class _Scalar(Protocol):
    "A 0-d tensor or a numpy scalar."

    def item(self) -> Any: ...


def barrier(
    name: str | None = None,  # what this barrier is for, the same on all ranks; by default where it stands in the code
    timeout: float | timedelta | None = None,  # time limit, in seconds; `get_timeout()` by default
) -> None:
    """Wait until all ranks are here.

    Raises on every rank: `BarrierMismatchError` if they are at different places, `RankFailedError` if one has failed or
    died, `BarrierTimeoutError` if one does not come; `BarrierInBranchError` on a rank inside `no_collectives()`.
    Skipped in code that runs on one rank only (`run_on_main`)."""
    Rendezvous(call_text('barrier', name), timeout, name is not None).meet(Outcome())


@overload
def agree(
    value: float | _Scalar,
    how: Literal['any', 'all'],
    name: str | None = None,
    timeout: float | timedelta | None = None,
) -> bool: ...
@overload
def agree(
    value: float | _Scalar, how: str = 'mean', name: str | None = None, timeout: float | timedelta | None = None
) -> int | float: ...
@overload
def agree(
    value: float | _Scalar | None, how: str = 'mean', name: str | None = None, timeout: float | timedelta | None = None
) -> int | float | None: ...
def agree(
    value,  # this rank's value: a number, bool, 0-d tensor or numpy scalar; None if it has none
    how='mean',  # 'mean', 'main' (rank 0's), 'min', 'max', 'any', 'all'
    name=None,  # what is agreed upon, the same on all ranks; by default where the call stands in the code
    timeout=None,  # time limit, in seconds; `get_timeout()` by default
):  # the same on every rank
    """Make one value out of one per rank, in one collective, which is a `barrier` too and raises what that raises.

    Ranks without a value are left out; the result is None if all are. NaN on any rank gives NaN (`'main'` looks at
    rank 0 alone). If all ranks hold the same value, exactly that comes back. `TypeError` for a value that is no
    number, `ValueError` for an unknown `how`; either makes the other ranks raise `RankFailedError`."""
    meeting = Rendezvous(call_text('agree', name, f'how={how!r}'), timeout, name is not None)
    with meeting.collect() as outcome:
        if how not in REDUCTIONS:
            raise ValueError(f'agree(how={how!r}): choose one of {", ".join(map(repr, REDUCTIONS))}.')
        outcome.kind, outcome.bits = encode(to_number(value))
    values = [decode(row) for row in meeting.meet(outcome)]  # raises on all ranks if `how` is unknown on one
    return REDUCTIONS[how].of(values)


@overload
def broadcast(
    obj: None = None, src: int = 0, name: str | None = None, timeout: float | timedelta | None = None
) -> Any: ...
@overload
def broadcast(
    obj: _Object | None, src: int = 0, name: str | None = None, timeout: float | timedelta | None = None
) -> _Object: ...
def broadcast(
    obj=None,  # what rank `src` sends; ignored on the others. Anything that can be pickled
    src=0,  # the rank that sends
    name=None,  # what is sent, the same on all ranks; by default where the call stands in the code
    timeout=None,  # time limit, in seconds; `get_timeout()` by default
):  # `obj` of rank `src`; there it is `obj` itself
    """Give `obj` of rank `src` to every rank. A `barrier` too, which raises what that raises.

    One collective for numbers and for what is small (480 bytes when pickled, up to 64 ranks), two for everything else.
    No rank holds more than two copies of it, pickled or not. What cannot be pickled raises on every rank."""
    meeting = Rendezvous(call_text('broadcast', name, f'src={src}'), timeout, name is not None)
    if meeting.skipped:
        return obj
    with meeting.collect() as outcome:
        if not 0 <= src < world_size():
            raise ValueError(f'broadcast(src={src}): ranks go from 0 to {world_size() - 1}.')
        if meeting.control is not None and src == rank():
            outcome.carry(obj)
    if meeting.control is None:
        return obj
    shared = meeting.share(outcome, src)
    return obj if src == rank() else shared


def all_gather(
    obj: _Object,  # what this rank sends. Anything that can be pickled
    name: str | None = None,  # what is sent, the same on all ranks; by default where the call stands in the code
    timeout: float | timedelta | None = None,  # time limit, in seconds; `get_timeout()` by default
) -> list[_Object]:  # the objects of all ranks, in their order
    """Give what every rank has to every rank. A `barrier` too, which raises what that raises. Two collectives, one for
    what is small."""
    meeting = Rendezvous(call_text('all_gather', name), timeout, name is not None)
    if meeting.control is None:
        return [obj]
    with meeting.collect() as outcome:
        outcome.pickle(obj)
    rows = meeting.meet(outcome)
    found: list = [row.data for row in rows]
    if not all(found):
        longest = max(row.bits for row in rows)
        found = meeting.control.all_gather_bytes(outcome.data, longest, meeting.place, meeting.timeout)
    with propagate_failure(str(meeting.place)):
        return [pickle.loads(data[: row.bits]) for data, row in zip(found, rows)]


@contextmanager
def all_or_none(
    name: str | None = None,  # what the block does, the same on all ranks; by default where it stands in the code
    timeout: float | timedelta | None = None,  # of the wait at the end, in seconds; `get_timeout()` by default
) -> Iterator[SimpleNamespace]:
    """Run the block on every rank, then meet: if it raises on one rank, all raise. Raises what `barrier` raises.

    Gives an object: the number that the block puts into its `value` is afterwards in the list `values` of all ranks."""
    meeting = Rendezvous(call_text('all_or_none', name), timeout, name is not None)
    shared = SimpleNamespace(value=None, values=[])
    with meeting.collect() as outcome:
        yield shared
        outcome.kind, outcome.bits = encode(to_number(shared.value))
    shared.values = [decode(row) for row in meeting.meet(outcome)]


together = all_or_none  # its name in 0.1, until 0.3

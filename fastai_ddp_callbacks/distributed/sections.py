"Code that one rank executes for all, or one rank after the other, or that branches on the rank."

from __future__ import annotations
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from typing import Any, Callable, Iterator, TypeVar, cast

from ..errors import BarrierInBranchError, DDPError
from .call_site import Place, call_site, call_text, label
from .nodes import agreed_leader
from .propagate import report_failure
from .ranks import has_group, is_main_process, launched_without_group, rank, world_size
from .rendezvous import Outcome, Rendezvous
from .this_thread import Section, in_section, innermost, is_alone, raises_on_all

__all__ = [
    'run_on_main',
    'main_process_only',
    'run_once_per_node',
    'once_per_node',
    'main_process_first',
    'no_collectives',
    'no_barrier',
]

_Result = TypeVar('_Result')
_Function = TypeVar('_Function', bound=Callable[..., Any])


def run_on_main(
    func: Callable[..., _Result],  # runs on rank 0 while the others wait
    args: tuple | list | None = None,  # its arguments
    kwargs: dict | None = None,  # its keyword arguments
    post_func: Callable | None = None,  # then runs on every rank but 0, for instance to read what rank 0 has written
    post_args: tuple | list | None = None,  # its arguments
    post_kwargs: dict | None = None,  # its keyword arguments
    run_post_on_main: bool = False,  # whether `post_func` runs on rank 0 too
    timeout: float | timedelta | None = None,  # how long the others wait, in seconds; `get_timeout()` by default
) -> _Result:  # what `func` returned, on every rank
    """Run `func` on rank 0 only, and wait for it everywhere.

    Inside `func` barriers, broadcasts and agreements are skipped, since only one rank is there; calls nest. If `func`
    raises, every rank raises: rank 0 that exception, the others `RankFailedError`. The result must be None or
    something that can be pickled. After `post_func` all ranks meet again. `DDPError` where a launcher has started
    several ranks and there is no process group yet: all would run it. The signature is SpeechBrain's, with one
    difference: what `func` returns and raises reaches all ranks."""
    where = call_site()
    result = _run_on(0, f'run_on_main({label(func)})', where, func, args, kwargs, timeout)
    if post_func is not None:
        meeting = Rendezvous(f'run_on_main(post_func={label(post_func)})', timeout, where=where)
        with meeting.collect() as outcome:
            if run_post_on_main or not is_main_process():
                post_func(*(post_args or ()), **(post_kwargs or {}))
        meeting.meet(outcome)
    return result


def main_process_only(
    func: _Function,  # runs on rank 0 only
) -> _Function:
    """Decorator: calls of `func` become `run_on_main(func, ...)`. Every rank must call, rank 0 runs it, all get the
    result."""

    @wraps(func)
    def inner(*args, **kwargs):
        return _run_on(0, f'main_process_only({label(func)})', call_site(), func, args, kwargs)

    return cast(_Function, inner)


def run_once_per_node(
    func: Callable[..., _Result],  # runs on the first rank of each node while the others wait
    args: tuple | list | None = None,  # its arguments
    kwargs: dict | None = None,  # its keyword arguments
    timeout: float | timedelta | None = None,  # how long the others wait, in seconds; `get_timeout()` by default
) -> _Result:  # what `func` returned on this rank's node
    "As `run_on_main`, for what each node needs once, such as files on a disk of its own."
    return _run_on(None, f'run_once_per_node({label(func)})', call_site(), func, args, kwargs, timeout)


def once_per_node(
    func: _Function,  # runs on the first rank of each node only
) -> _Function:
    "Decorator: calls of `func` become `run_once_per_node(func, ...)`."

    @wraps(func)
    def inner(*args, **kwargs):
        return _run_on(None, f'once_per_node({label(func)})', call_site(), func, args, kwargs)

    return cast(_Function, inner)


@contextmanager
def main_process_first(
    name: str | None = None,  # what the block does, the same on all ranks; by default where it stands in the code
    timeout: float | timedelta | None = None,  # of each of the two waits, in seconds; `get_timeout()` by default
) -> Iterator[None]:
    """Rank 0 runs the block first, then the others do, each for itself: what rank 0 has downloaded or cached is there.

    For what cannot be sent to the other ranks, such as a `Learner`. If the block raises on rank 0, every rank raises
    and the others do not enter it; if it raises on another rank, every rank raises at the end. A rendezvous inside
    raises `BarrierInBranchError`, since the ranks are not there at the same time."""
    call = call_text('main_process_first', name)
    _refuse_without_group(call)
    first = Rendezvous(call, timeout, name is not None)
    others = Rendezvous(call_text('main_process_first', name, 'the others'), timeout, name is not None)
    section = Section(first.place, 'the ranks come one after the other')
    if first.control is None:
        with in_section(section):
            yield
    elif first.control.rank == 0:
        with first.collect() as outcome, in_section(section):
            yield
        first.meet(outcome)  # the others may come in, or raise
        others.meet(Outcome())
    else:
        first.meet(Outcome())
        with others.collect() as outcome, in_section(section):
            yield
        others.meet(outcome)


@contextmanager
def no_collectives() -> Iterator[bool]:
    """Marks code that branches on the rank; gives whether this is rank 0:
    `with no_collectives() as on_main: if on_main: ...`.

    A barrier, broadcast or agreement inside would wait for ranks that never come: it raises `BarrierInBranchError` at
    once, in one process too, and the other ranks hear of it at their next rendezvous."""
    where = call_site()
    place = Place(f'the no_collectives() block at {where}', where)
    with in_section(Section(place, 'the ranks take different ways', raises_on_all=False)):
        yield is_main_process()


def refuse_on_one_rank(
    what: str,  # what the user has called, as 'learn.fit'
) -> None:
    """Raise `BarrierInBranchError` where code is called by one rank, or by one after the other, in which all ranks
    have to take part: gradients and values are exchanged by torch, which would wait for the others until its own
    limit."""
    section = innermost()
    if section is None or not has_group() or world_size() == 1:
        return
    error = BarrierInBranchError(
        f'rank {rank()}: {what} is inside {section.place}, where {section.why}: it would exchange gradients or values '
        'with ranks that never come. Call it outside, on all ranks.',
        call=what,
        block=section.place.where,
    )
    if not raises_on_all():
        report_failure(error, what)
    raise error


def _refuse_without_group(call):
    "All ranks of a launcher would run what is meant for one of them, and write the same files."
    said = None if is_alone() else launched_without_group()
    if said:
        raise DDPError(
            f'{call}: the environment has {said}, but there is no process group yet, so that every rank would take '
            'itself for rank 0 and run it. Make the group first with `torch.distributed.init_process_group()`, or call '
            'it inside `ddp_ctx(learn)`; if this process is alone, unset these variables.'
        )


def _run_on(src, call, where, func, args, kwargs, timeout=None):
    "Run `func` on rank `src` (None: on the first rank of each node), give its result to every rank (of the node)."
    _refuse_without_group(f'{call} at {where}')
    meeting = Rendezvous(call, timeout, where=where)
    control = meeting.control
    if control is not None and src is None:
        src = agreed_leader(meeting)
    result = None
    with meeting.collect() as outcome:
        if control is None or control.rank == src:
            with in_section(Section(meeting.place, 'one rank executes it for all', skips=True)):
                result = func(*(args or ()), **(kwargs or {}))
            if control is not None:
                outcome.carry(result)
    if control is None:
        return result
    shared = meeting.share(outcome, src)
    return result if control.rank == src else shared


no_barrier = no_collectives  # its name in 0.1, until 0.3

"""Barriers that have a name, carry an outcome and end; code for one rank only; one decision out of one value per rank.

Needs torch, not fastai. Ranks are those of the default process group; without one, or in a group of one, everything
here has its single-process meaning and costs next to nothing."""

from __future__ import annotations
import atexit, math, os, pickle, re, sys, threading, warnings, weakref
from contextlib import contextmanager
from datetime import timedelta
from functools import wraps
from types import SimpleNamespace
from typing import Any, Callable, Iterator, TypeVar, cast

import torch.distributed as dist

from .control import BYTES, INT, NOTHING, Control, Place, Row
from ..errors import BarrierInBranchError, DDPError, Preempted, RankFailedError
from .wire import REDUCERS, decode, encode, fits, plain

__all__ = [
    'rank',
    'world_size',
    'is_main_process',
    'is_local_main_process',
    'barrier',
    'agree',
    'broadcast',
    'all_gather',
    'all_or_none',
    'run_on_main',
    'main_process_only',
    'run_once_per_node',
    'once_per_node',
    'no_collectives',
    'propagate_failure',
    # their names in 0.1, until 0.3
    'together',
    'no_barrier',
    'reports_failure',
    'get_timeout',
    'set_timeout',
]


class _State(threading.local):
    "What this thread is in."

    alone = 0  # depth of sections that only one rank executes
    branches: tuple = ()  # where the `no_collectives()` blocks around us began


_state = _State()
_Function = TypeVar('_Function', bound=Callable[..., Any])
_making = threading.Lock()
_timeout = 1800.0
_control = None


# -- who am I


def _grouped():
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    "The rank of this process in the default process group; 0 without one."
    return dist.get_rank() if _grouped() else _single('rank()', 0)


def world_size() -> int:
    "The number of ranks in the default process group; 1 without one."
    return dist.get_world_size() if _grouped() else _single('world_size()', 1)


def is_main_process() -> bool:
    "Whether this is rank 0, the one that writes files and prints. True without a process group."
    return dist.get_rank() == 0 if _grouped() else _single('is_main_process()', True)


def is_local_main_process() -> bool:
    """Whether this is the first rank of its node. True without a process group.
    The launcher's `LOCAL_RANK` tells; where it sets none, the first call is a rendezvous of all ranks."""
    control = _get_control()
    if control is None:
        return _single('is_local_main_process()', True)
    return _node_leader(control, Place('is_local_main_process()', _caller()), _timeout) == control.rank


def _single(call, value=None):
    """`value`, which is right for a process alone. Warns, once, where a launcher says that it is one of several: it comes
    here before the group is made, as the others do, and all of them take themselves for rank 0."""
    global _warned
    if _warned or _grouped() or 'RANK' not in os.environ or os.environ.get('WORLD_SIZE', '') in ('', '0', '1'):
        return value
    f, level = sys._getframe(1), 2
    while _is_ours(f.f_code.co_filename):
        f, level = f.f_back, level + 1
    if f.f_globals.get('__name__', '').startswith(_PACKAGE + '.'):
        return value  # a callback, which has a warning of its own
    _warned = True
    warnings.warn(
        f'{call}: the environment has RANK={os.environ["RANK"]} and WORLD_SIZE={os.environ["WORLD_SIZE"]}, but there is no process group: this '
        'process is rank 0 of 1 here, and so is every other one. Call it inside `ddp_ctx(learn)` or after `torch.distributed.init_process_group()`; '
        'if this process is alone, unset these variables.',
        stacklevel=level,
    )
    return value


_warned = False


# -- time limits


def get_timeout() -> float:
    "How many seconds a rendezvous waits for the slowest rank, unless it is told otherwise."
    return _timeout


def set_timeout(
    seconds: float | timedelta,  # time limit for every later rendezvous of this process; half an hour unless set
) -> None:
    "Set the default time limit. Each rank uses its own for its own waits, so set it on all of them. `ValueError` unless above 0."
    global _timeout
    _timeout = _seconds(seconds)


def _seconds(timeout):
    if timeout is None:
        return _timeout
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < 1e8:
        raise ValueError(f'timeout={timeout!r}: a number of seconds above 0 (and below 1e8) is needed.')
    return seconds


# -- the rendezvous


def barrier(
    name: str | None = None,  # what this barrier is for, the same on all ranks; by default where it stands in the code
    timeout: float | timedelta | None = None,  # time limit, in seconds; `get_timeout()` by default
) -> None:
    """Wait until all ranks are here.

    Raises on every rank: `BarrierMismatchError` if they are at different places, `RankFailedError` if one has failed or
    died, `BarrierTimeoutError` if one does not come; `BarrierInBranchError` on a rank inside `no_collectives()`.
    Skipped in code that runs on one rank only (`run_on_main`)."""
    _Meeting(_call('barrier', name), timeout, name is not None).meet(_Outcome())


def agree(
    value,  # this rank's value: a number, bool, 0-d tensor or numpy scalar; None if it has none
    how: str = 'mean',  # 'mean', 'main' (rank 0's), 'min', 'max', 'any', 'all'
    name: str | None = None,  # what is agreed upon, the same on all ranks; by default where the call stands in the code
    timeout: float | timedelta | None = None,  # time limit, in seconds; `get_timeout()` by default
) -> float | int | bool | None:  # the same on every rank
    """Make one value out of one per rank, in one collective, which is a `barrier` too and raises what that raises.

    Ranks without a value are left out; the result is None if all are. NaN on any rank gives NaN (`'main'` looks at rank 0
    alone). If all ranks hold the same value, exactly that comes back. `TypeError` for a value that is no number, `ValueError` for an unknown `how`;
    either makes the other ranks raise `RankFailedError`."""
    meeting = _Meeting(_call('agree', name, f'how={how!r}'), timeout, name is not None)
    with meeting.failing_together() as outcome:
        if how not in REDUCERS:
            raise ValueError(f'agree(how={how!r}): choose one of {", ".join(map(repr, REDUCERS))}.')
        outcome.row = encode(plain(value))
    values = [decode(o.kind, o.bits) for o in meeting.meet(outcome)]
    if how == 'main':
        return values[0]
    values = [o for o in values if o is not None]
    if not values:
        return None
    if any(isinstance(o, float) and math.isnan(o) for o in values):
        return math.nan
    if how in ('any', 'all'):
        return REDUCERS[how](map(bool, values))
    if all(type(o) is type(values[0]) and o == values[0] for o in values):
        return values[0]
    return REDUCERS[how](values)


def broadcast(
    obj=None,  # what rank `src` has to tell; ignored on the others. Anything that can be pickled
    src: int = 0,  # the rank that tells
    name: str | None = None,  # what is told, the same on all ranks; by default where the call stands in the code
    timeout: float | timedelta | None = None,  # time limit, in seconds; `get_timeout()` by default
):  # `obj` of rank `src`
    """Give `obj` of rank `src` to every rank. A `barrier` too, which raises what that raises.

    One collective for numbers and for what is small (480 bytes when pickled, up to 64 ranks), two for everything else. What cannot be pickled raises on every rank."""
    meeting = _Meeting(_call('broadcast', name, f'src={src}'), timeout, name is not None)
    if meeting.alone:
        return obj
    with meeting.failing_together() as outcome:
        if not 0 <= src < world_size():
            raise ValueError(f'broadcast(src={src}): ranks go from 0 to {world_size() - 1}.')
        if meeting.control is not None and src == rank():
            outcome.carry(obj)
    return obj if meeting.control is None else meeting.share(outcome, src)


def all_gather(
    obj,  # what this rank has to tell. Anything that can be pickled
    name: str | None = None,  # what is told, the same on all ranks; by default where the call stands in the code
    timeout: float | timedelta | None = None,  # time limit, in seconds; `get_timeout()` by default
) -> list:  # the objects of all ranks, in their order
    "Give what every rank has to every rank. A `barrier` too, which raises what that raises. Two collectives, one for what is small."
    meeting = _Meeting(_call('all_gather', name), timeout, name is not None)
    if meeting.control is None:
        return [obj]
    with meeting.failing_together() as outcome:
        outcome.pack(obj)
    rows = meeting.meet(outcome)
    found, longest = [o.data for o in rows], max(o.bits for o in rows)
    if not all(found):
        found = [
            o[: row.bits]
            for o, row in zip(meeting.control.swap(outcome.data, longest, meeting.place, meeting.timeout), rows)
        ]
    with propagate_failure(meeting.place):
        return [pickle.loads(o) for o in found]


@contextmanager
def all_or_none(
    name: str | None = None,  # what the block does, the same on all ranks; by default where it stands in the code
    timeout: float
    | timedelta
    | None = None,  # how long a rank waits at the end for the others, in seconds; `get_timeout()` by default
) -> Iterator[SimpleNamespace]:
    """Run the block on every rank, then meet: if it raises on one rank, all raise. Raises what `barrier` raises.

    Gives an object: the number that the block puts into its `value` is afterwards in the list `values` of all ranks."""
    meeting, shared = (
        _Meeting(_call('all_or_none', name), timeout, name is not None),
        SimpleNamespace(value=None, values=[]),
    )
    with meeting.failing_together() as outcome:
        yield shared
        outcome.row = encode(plain(shared.value))
    shared.values = [decode(o.kind, o.bits) for o in meeting.meet(outcome)]


def print_on_main(
    text: str,  # one line for the user
    warn: bool = False,  # whether as a warning
) -> None:
    "Print `text` on rank 0, in the manner of fastai. No rendezvous."
    if is_main_process():
        warnings.warn(text, stacklevel=3) if warn else print(text)


# -- code for one rank


def run_on_main(
    func,  # runs on rank 0 while the others wait
    args: tuple | list | None = None,  # its arguments
    kwargs: dict | None = None,  # its keyword arguments
    post_func=None,  # then runs on every rank but 0, for instance to read what rank 0 has written
    post_args: tuple | list | None = None,  # its arguments
    post_kwargs: dict | None = None,  # its keyword arguments
    run_post_on_main: bool = False,  # whether `post_func` runs on rank 0 too
    timeout: float | timedelta | None = None,  # how long the others wait, in seconds; `get_timeout()` by default
):  # what `func` returned, on every rank
    """Run `func` on rank 0 only, and wait for it everywhere.

    Inside `func` barriers, broadcasts and agreements are skipped, since only one rank is there; calls nest. If `func`
    raises, every rank raises: rank 0 that exception, the others `RankFailedError`. The result must be None or something
    that can be pickled. After `post_func` all ranks meet again. The signature is SpeechBrain's, with one difference:
    what `func` returns and raises reaches all ranks."""
    where = _caller()
    result = _run_on(0, f'run_on_main({_label(func)})', where, func, args, kwargs, timeout)
    if post_func is not None:
        meeting = _Meeting(f'run_on_main(post_func={_label(post_func)})', timeout, where=where)
        with meeting.failing_together() as outcome:
            if run_post_on_main or not is_main_process():
                post_func(*(post_args or ()), **(post_kwargs or {}))
        meeting.meet(outcome)
    return result


def main_process_only(func: _Function) -> _Function:
    "Decorator: calls of `func` become `run_on_main(func, ...)`. Every rank must call, rank 0 runs it, all get the result."

    @wraps(func)
    def inner(*args, **kwargs):
        return _run_on(0, f'main_process_only({_label(func)})', _caller(), func, args, kwargs, None)

    return cast(_Function, inner)


def run_once_per_node(
    func,  # runs on the first rank of each node while the others wait
    args: tuple | list | None = None,  # its arguments
    kwargs: dict | None = None,  # its keyword arguments
    timeout: float | timedelta | None = None,  # how long the others wait, in seconds; `get_timeout()` by default
):  # what `func` returned on this rank's node
    "As `run_on_main`, for what each node needs once, such as files on a disk of its own."
    return _run_on(None, f'run_once_per_node({_label(func)})', _caller(), func, args, kwargs, timeout)


def once_per_node(func: _Function) -> _Function:
    "Decorator: calls of `func` become `run_once_per_node(func, ...)`."

    @wraps(func)
    def inner(*args, **kwargs):
        return _run_on(None, f'once_per_node({_label(func)})', _caller(), func, args, kwargs, None)

    return cast(_Function, inner)


@contextmanager
def no_collectives() -> Iterator[bool]:
    """Marks code that branches on the rank; gives whether this is rank 0: `with no_collectives() as on_main: if on_main: ...`.

    A barrier, broadcast or agreement inside would wait for ranks that never come: it raises `BarrierInBranchError` at
    once, in one process too, and the other ranks hear of it at their next rendezvous."""
    block = [_caller()]  # an object of its own: blocks in generators may end in another order than they began
    _state.branches = (*_state.branches, block)
    try:
        yield is_main_process()
    finally:
        _state.branches = tuple(o for o in _state.branches if o is not block)


@contextmanager
def propagate_failure(
    place: str | None = None,  # what this rank is doing, for the others' message; by default the line that raises
) -> Iterator[None]:
    """Whatever leaves this block as an exception (`KeyboardInterrupt` and `SystemExit` too) is told to the other ranks:
    those that wait in a rendezvous, or come to one, raise `RankFailedError` within a second or so.

    The exception itself goes on unchanged, with one exception: a network error of torch on a rank that was left alone by
    a failed one is raised as that rank's failure."""
    control = _control
    since = control.marks if control is not None else 0
    try:
        yield
    except GeneratorExit:
        raise  # of a generator that is closed early, which is no failure
    except BaseException as e:
        # each default group counts its own marks: those of the one before would hide that all ranks know of `e`
        cause = _tell(e, place, since if _control is control else 0)
        if cause is not None:
            raise cause from e
        raise


def _tell(error, place, since=0):
    "Tell the other ranks of `error`. Gives the failure of another rank that has led to it, if so."
    try:
        if isinstance(error, Preempted):
            return None  # all ranks have agreed to leave
        control = _get_control()
        if control is None:
            return None
        cause = control.cause() if _is_network_error(error) else None
        if cause is None:
            control.report(error, place, since)
        return cause
    except RuntimeError as e:
        warnings.warn(f'rank {rank()} failed and cannot tell the other ranks: {e}')


def _is_network_error(error):
    "Whether `error` is what torch raises when other ranks do not come, or go. gloo has no class of its own for it."
    if not isinstance(error, RuntimeError) or isinstance(error, DDPError):
        return False
    return (
        isinstance(error, dist.DistError)
        or re.search('gloo|nccl|connection|timed out|timeout|pair closure', str(error), re.IGNORECASE) is not None
    )


# -- how it is done


def _get_control(call='A rendezvous'):
    "The `Control` of the default process group, or None where there is only one rank."
    global _control
    if not _grouped() or dist.get_world_size() == 1:
        _control = None
        return None
    if _inherited is not None and _inherited() is dist.group.WORLD:
        raise DDPError(
            f'{call} was called in a process forked from rank {rank()} (a data loader\'s worker?): only the rank itself can meet the other ranks.'
        )
    with _making:  # two of one rank would not find the other ranks
        if _control is None or _control.world() is not dist.group.WORLD:
            try:
                _control = Control()
            except RuntimeError as e:
                raise RankFailedError(
                    f"The job's store does not answer rank {rank()}: the process that keeps it, rank 0 under most launchers, is gone "
                    f'({str(e).splitlines()[0]}).',
                    rank=None,
                    place='',
                    error_type='ProcessDied',
                    error_text=str(e),
                    traceback_text='',
                ) from e
        return _control


def _forked():
    "A child of a rank holds the rank's group, but is not the rank."
    global _inherited
    _inherited = weakref.ref(dist.group.WORLD) if _grouped() else None


_inherited = None
if hasattr(os, 'register_at_fork'):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _leave():
    "Close the group while its threads can still be joined: left to the end of the interpreter, it sometimes aborts the process."
    global _control
    _control = None


def _caller():
    "File and line of the code that called into this module."
    f = sys._getframe(1)
    while _is_ours(f.f_code.co_filename):
        f = f.f_back
    return f'{os.path.basename(f.f_code.co_filename)}:{f.f_lineno}'


def _is_ours(filename):
    "Whether the code is of this folder, or of a context manager: a call is known by where the user's code stands."
    return os.path.dirname(filename) == os.path.dirname(__file__) or filename == contextmanager.__code__.co_filename


_PACKAGE = __package__.partition('.')[0]


def _call(kind, name, detail=''):
    return f"{kind}({', '.join(filter(None, ['' if name is None else repr(name), detail]))})"


def _label(func):
    return getattr(func, '__qualname__', None) or type(func).__name__


class _Outcome:
    "What this rank brings to a meeting: a row, the bytes that it announces, or an exception."

    row, data, error = (NOTHING, 0), b'', None

    def carry(self, obj):
        if obj is None or type(obj) in (bool, int, float) and fits(obj):
            self.row = encode(obj)
        else:
            self.pack(obj)

    def pack(self, obj):
        try:
            self.data = pickle.dumps(obj)
        except Exception as e:
            raise TypeError(f'A {type(obj).__name__} cannot be sent to the other ranks: {e}') from e
        self.row = BYTES, len(self.data)


class _Meeting:
    "One rendezvous of all ranks: where it is, and whether it takes place."

    def __init__(self, call, timeout, named=False, where=None):
        where = where or _caller()
        # without a name of its own, a rendezvous is known by where it stands
        self.place, self.timeout = Place(call if named else f'{call} at {where}', where), _seconds(timeout)
        self.alone = _state.alone > 0
        if not self.alone and _state.branches:
            self._refuse()
        self.control = None if self.alone else _get_control(self.place)
        if self.control is None:
            _single(self.place)

    def _refuse(self):
        block = _state.branches[-1][0]
        error = BarrierInBranchError(
            f'rank {rank()}: {self.place} is inside the no_collectives() block at {block}, where the ranks take '
            'different ways: it would wait for ranks that never come. Move it out of the block, so that all ranks reach it, '
            'or use run_on_main, inside which barriers are skipped.',
            call=str(self.place),
            block=block,
        )
        _tell(error, self.place)
        raise error

    @contextmanager
    def failing_together(self):
        "What goes wrong inside is kept in the outcome, to be raised on all ranks when they meet."
        outcome = _Outcome()
        if self.control is None:
            yield outcome
        else:
            since = self.control.marks
            with propagate_failure(self.place):  # what is more urgent than to wait for the others (KeyboardInterrupt)
                try:
                    yield outcome
                except Exception as e:
                    if self.control.knows(e, since):
                        raise  # and so do the others, who do not come here either
                    outcome.error = e

    def meet(self, outcome):
        "Meet; gives a `Row` of every rank."
        if self.control is None:
            return [Row(0, *outcome.row, 0)]
        return self.control.meet(self.place, self.timeout, *outcome.row, outcome.data, failure=outcome.error)

    def share(self, outcome, src):
        "Meet, and get what rank `src` carries."
        result = None
        for r, o in enumerate(self.meet(outcome)):
            data = o.data
            if o.kind == BYTES and not data:
                data = self.control.send(outcome.data, o.bits, r, self.place, self.timeout)
            if r == src:
                with propagate_failure(self.place):
                    result = pickle.loads(data) if data else decode(o.kind, o.bits)
        return result


def _run_on(src, call, where, func, args, kwargs, timeout):
    "Run `func` on rank `src` (None: on the first rank of each node), give its result to every rank (of the node)."
    meeting = _Meeting(call, timeout, where=where)
    control = meeting.control
    if control is not None and src is None:
        src = _agreed_leader(meeting)
    result = None
    with meeting.failing_together() as outcome:
        if control is None or control.rank == src:
            with _alone():
                result = func(*(args or ()), **(kwargs or {}))
            if control is not None:
                outcome.carry(result)
    if control is None:
        return result
    shared = meeting.share(outcome, src)
    return result if control.rank == src else shared


@contextmanager
def _alone():
    _state.alone += 1
    try:
        yield
    finally:
        _state.alone -= 1


def _local_rank():
    "What the launcher says, or -1."
    local = os.environ.get('LOCAL_RANK', '')
    return int(local) if local.isascii() and local.isdecimal() else -1


def _node_leader(control, place, timeout):
    "The first rank of this rank's node: the launcher says so, or else the first one on this host."
    return control.rank - _local_rank() if 0 <= _local_rank() <= control.rank else control.node(place, timeout)[0]


def _agreed_leader(meeting):
    "The same, but the launcher's word counts only if the ranks' make sense together."
    local = [o.bits for o in meeting.control.meet(meeting.place, meeting.timeout, INT, _local_rank())]
    if all(0 <= o <= r and local[r - o] == 0 for r, o in enumerate(local)):
        return meeting.control.rank - local[meeting.control.rank]
    return meeting.control.node(meeting.place, meeting.timeout)[0]


together, no_barrier, reports_failure = all_or_none, no_collectives, propagate_failure  # their names in 0.1, until 0.3

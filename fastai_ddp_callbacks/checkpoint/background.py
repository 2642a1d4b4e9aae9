"Writing while training continues: a copy of the state in memory, and a thread that writes it."

from __future__ import annotations
import signal, threading, warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack

import torch
from torch.nn.parameter import is_lazy

from ..signals import handle
from .state import tensors_of, tree_map

__all__ = ['Writer']


class Writer:
    """Writes one thing at a time, in the background, from a copy that it keeps for the next time.

    `start` waits for what is under way, so that nothing is dropped and one copy is enough. What went wrong in the
    thread is raised by the next `wait`. The end of the interpreter and SIGTERM wait until what is under way is
    written. The thread runs no collective, and holds the interpreter for short moments only."""

    def __init__(self):
        self._job: _Job | None = None
        self._copy = _Copy()

    def __reduce__(self):
        return Writer, ()  # a copy has nothing under way

    @property
    def _copies(self):
        return self._copy.tensors

    def start(
        self,
        write: Callable,  # called in the thread with the copy
        state,  # what is to be copied: tensors and plain values in dicts and lists
    ) -> None:
        "Copy `state` and begin. Returns when training may change it again."
        self.wait()
        copy, filled = self._copy.make(state)
        job = _Job(write, copy, filled)
        job.thread.start()
        self._job = job
        _wait_at_sigterm(job.thread)

    @property
    def busy(self) -> bool:
        "Whether there is a result that nobody has waited for."
        return self._job is not None

    @property
    def done(self) -> bool:
        "Whether what was started has ended, well or not."
        return self._job is not None and not self._job.thread.is_alive()

    @property
    def under_way(self) -> list[threading.Thread]:
        "Threads that others may join; the result is not theirs."
        return [self._job.thread] if self._job else []

    @property
    def error(self) -> BaseException | None:
        "What went wrong, if it has by now."
        return self._job.error() if self._job and self.done else None

    def join(self) -> None:
        "Let what is under way end, well or not."
        if self._job:
            self._job.thread.join()
            _forget(self._job.thread)

    def check(self) -> None:
        "Raise what went wrong, if it has by now; the result is kept for `wait`."
        if self.error is not None:
            self.wait()

    def wait(self):
        "The result of what was started last, when it is done; None if there is none. Raises what went wrong."
        if self._job is None:
            return None
        self.join()
        job = self._job
        self._job = None
        return job.take()


class _Job:
    "One write: its thread, and its result."

    def __init__(self, write, copy, filled):
        self.result: Future = Future()
        self.is_known = False  # whether anybody has asked what became of it
        # no daemon: the interpreter waits for it
        self.thread = threading.Thread(target=self._run, args=(write, copy, filled), name='checkpoint writer')

    def _run(self, write, copy, filled):
        try:
            for event in filled:
                event.synchronize()
            self.result.set_result(write(copy))
        except BaseException as e:
            self.result.set_exception(e)  # raised by `take`
            self = write = copy = None  # the exception has this frame, and would keep them for as long as a cycle lives

    def take(self):
        "What `write` returned or raised."
        self.is_known = True
        return self.result.result(0)

    def error(self):
        "What `write` raised, if it has ended."
        self.is_known = True
        return self.result.exception(0)

    def __del__(self):
        if not self.is_known and self.result.done() and self.result.exception() is not None:
            warnings.warn(
                f'A save in the background has failed, and nobody has asked for it: {self.result.exception()}'
            )


class _Copy:
    "Tensors of our own with what a state was, made once and used for each state of these shapes."

    def __init__(self):
        self.tensors = []
        self._streams = {}

    def make(self, state):
        "`state` in these tensors; and the events after which a GPU has filled them."
        old = iter(self.tensors)
        self.tensors = []
        made = {}

        def copied(t):  # what several names share is one tensor here too
            key = _identity(t)
            if key not in made:
                made[key] = self._fill(t, old)
            return made[key]

        devices = {t.device for t in tensors_of(state) if t.is_cuda}
        training = [torch.cuda.current_stream(device) for device in devices]
        with ExitStack() as stack:
            for stream in training:
                side = self._streams.setdefault(stream.device, torch.cuda.Stream(stream.device))
                side.wait_stream(stream)
                stack.enter_context(torch.cuda.stream(side))
            copy = tree_map(state, copied)
        filled = [self._streams[stream.device].record_event() for stream in training]
        for stream in training:  # the next step on the GPU, not this thread, waits until the weights are copied
            stream.wait_stream(self._streams[stream.device])
        return copy, filled

    def _fill(self, t, old):
        if is_lazy(t):
            return t
        if t.layout != torch.strided:
            return t.detach().cpu() if t.is_cuda else t.detach().clone()
        mine = next(old, None)
        if mine is None or (mine.shape, mine.dtype) != (t.shape, t.dtype) or mine.is_pinned() != t.is_cuda:
            mine = torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
        self.tensors.append(mine)
        return mine.copy_(t, non_blocking=t.is_cuda)


def _identity(t):
    if is_lazy(t) or t.layout != torch.strided:
        return id(t)
    return t.device, t.data_ptr(), t.dtype, t.shape, t.stride()


# -- SIGTERM, which waits until all writers have ended

_writing: dict[threading.Thread, Callable[[], None]] = {}  # what gives each one's handler back


def _wait_at_sigterm(thread):
    def wait_first(number, frame, earlier):
        thread.join()
        return False  # then the one below reacts

    _writing[thread] = handle(signal.SIGTERM, wait_first)


def _forget(thread):
    release = _writing.pop(thread, None)
    if release:
        release()

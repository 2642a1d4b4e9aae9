"Writing while training goes on: a copy of the state in memory, and a thread that writes it."

from __future__ import annotations
import signal, threading
from contextlib import ExitStack

import torch

from .state import tree_map, tensors_of

__all__ = ['Writer']


class Writer:
    """Writes one thing at a time, in the background, from a copy that it keeps for the next time.

    `start` waits for what is under way, so that nothing is dropped and one copy is enough. What went wrong in the thread
    is raised by the next `wait`. The end of the interpreter and SIGTERM wait until what is under way is written. The
    thread runs no collective, and holds the interpreter for short moments only."""

    def __init__(self):
        self._thread, self._copies, self._result, self._streams = None, [], None, {}

    def __reduce__(self):
        return Writer, ()  # a copy has nothing under way

    def start(
        self,
        write,  # called in the thread with the copy
        state,  # what is to be copied: tensors and plain values in dicts and lists
    ) -> None:
        "Copy `state` and begin. Returns when training may change it again."
        self.wait()
        copy, ready = self._copy(state)
        thread = threading.Thread(
            target=self._run, args=(write, copy, ready), name='checkpoint writer'
        )  # no daemon: the interpreter waits for it
        thread.start()
        self._thread = thread
        _wait_at_sigterm(thread)

    @property
    def busy(self) -> bool:
        return self._thread is not None

    @property
    def done(self) -> bool:
        return self.busy and not self._thread.is_alive()

    @property
    def under_way(self) -> list:
        return [self._thread] if self.busy else []  # threads that others may join; the result is not theirs

    @property
    def error(self):
        return self._result[1] if self.done else None

    def join(self):
        "Let what is under way come to its end, whatever it is."
        if self._thread is None:
            return
        self._thread.join()
        _done(self._thread)

    def check(self):
        "Raise what went wrong, if it has by now; the result is kept for `wait`."
        if self.error is not None:
            self.wait()

    def wait(self):
        "The result of what was started last, when it is done; None if there is none. Raises what went wrong."
        if self._thread is None:
            return None
        self.join()
        self._thread, (result, error) = None, self._result
        if error is not None:
            raise error
        return result

    def _run(self, write, copy, ready):
        try:
            for o in ready:
                o.synchronize()
            self._result = write(copy), None
        except BaseException as e:
            self._result = None, e  # raised by `wait`

    def _copy(self, state):
        "`state` in tensors of our own, those of the last time where they fit; and what tells when a GPU has filled them."
        old, self._copies, made = iter(self._copies), [], {}

        def filled(t):  # what several names share is one tensor here too
            key = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride()) if t.layout == torch.strided else id(t)
            if key not in made:
                made[key] = self._filled(t, old)
            return made[key]

        training = [torch.cuda.current_stream(o) for o in {o.device for o in tensors_of(state) if o.is_cuda}]
        with ExitStack() as stack:
            for o in training:
                side = self._streams.setdefault(o.device, torch.cuda.Stream(o.device))
                side.wait_stream(o)
                stack.enter_context(torch.cuda.stream(side))
            copy = tree_map(state, filled)
        ready = [self._streams[o.device].record_event() for o in training]
        for o in training:
            o.wait_stream(
                self._streams[o.device]
            )  # the next step on the GPU, not this thread, waits until the weights are copied
        return copy, ready

    def _filled(self, t, old):
        if t.layout != torch.strided:
            return t.detach().cpu() if t.is_cuda else t.detach().clone()
        mine = next(old, None)
        if mine is None or (mine.shape, mine.dtype) != (t.shape, t.dtype) or mine.is_pinned() != t.is_cuda:
            mine = torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
        self._copies.append(mine)
        return mine.copy_(t, non_blocking=t.is_cuda)


_writing, _before = [], []  # the threads of all writers; the handler of SIGTERM that was there before the first of them


def _wait_at_sigterm(thread):
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is None:
        return  # none of Python's
    _writing.append(thread)
    if not _before:
        _before.append(signal.signal(signal.SIGTERM, _wait_first))


def _wait_first(number, frame):
    for o in tuple(_writing):
        o.join()
    _writing.clear()
    _restore_sigterm()
    signal.raise_signal(signal.SIGTERM)


def _done(thread):
    if threading.current_thread() is not threading.main_thread():
        return
    if thread in _writing:
        _writing.remove(thread)
    if not _writing:
        _restore_sigterm()


def _restore_sigterm():
    before = _before.pop() if _before else None
    if before is not None and signal.getsignal(signal.SIGTERM) is _wait_first:
        signal.signal(signal.SIGTERM, before)

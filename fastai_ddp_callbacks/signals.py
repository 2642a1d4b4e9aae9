"""The signals that this package handles for a while, and the order in which handlers are given back.

Python has one handler per signal. Here those who react to one stand on a stack: the newest reacts first, they may go in
any order, and the handler that was there before has its place again when the last one is gone."""

from __future__ import annotations
import os, signal, threading
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ['handle']


def handle(
    number: int,  # the signal
    react: Callable[
        [int, FrameType | None, Any], bool
    ],  # gets the earlier handler too; True if nobody else is to react
) -> Callable[[], None]:
    """Call `react` at each such signal, until the function that is returned is called. Does nothing outside of the main
    thread, and where the handler is not one of Python's, which could not be given back."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(number) is None:
        return _nothing_to_release
    stack = _stack_of(number)
    stack.reactions.append(react)
    if signal.getsignal(number) != stack.dispatch:
        signal.signal(number, stack.dispatch)
    return lambda: stack.release(react)


def _nothing_to_release():
    pass


def _stack_of(number):
    "The one whose handler is in place; a new one on top of somebody else's handler, which may call ours below it."
    handler = signal.getsignal(number)
    owner = getattr(handler, '__self__', None)
    return owner if isinstance(owner, _Stack) else _Stack(number, handler)


class _Stack:
    "Those who react to one signal, the newest last, over the handler that was there before them."

    def __init__(self, number, earlier):
        self.number = number
        self.earlier = earlier
        self.reactions = []
        self.pid = os.getpid()

    def dispatch(self, number, frame):
        "The handler that Python calls."
        if os.getpid() != self.pid:
            # a data loader's worker has inherited it: its parent says when it ends, also at Ctrl-C, which both get
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else self.earlier)
            signal.raise_signal(number)
            return
        for react in reversed(self.reactions.copy()):
            if react(number, frame, self.earlier):
                return
        self.reactions.clear()
        signal.signal(number, self.earlier)
        signal.raise_signal(number)

    def release(self, react):
        if react in self.reactions:
            self.reactions.remove(react)
        if self.reactions or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(self.number) == self.dispatch:
            signal.signal(
                self.number, self.earlier
            )  # else whoever is on top of us calls us, and we call the earlier one

"Signals that ask a training to save and exit, noted until all ranks can act on them."

from __future__ import annotations
import os, signal
from collections.abc import Callable

from ..signals import handle

__all__ = ['SignalWatch']

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class SignalWatch:
    """Notes SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) in its block, in the main thread, unless they are ignored.

    Handlers that were there before are called too. A second Ctrl-C interrupts at once."""

    def __init__(self):
        self.by: str | None = None  # the signal that came first
        self._releases: list[Callable[[], None]] = []

    def __reduce__(self):
        return SignalWatch, ()  # a copy watches nothing

    def __enter__(self):
        for number in _SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored, as in the background of a script
                self._releases.append(handle(number, self._note))
        return self

    def __exit__(self, *_):
        while self._releases:
            self._releases.pop()()

    def _note(self, number, frame, earlier):
        is_first = self.by is None
        if number == signal.SIGINT and not is_first:
            signal.default_int_handler(number, frame)  # raises `KeyboardInterrupt`
        if is_first:
            self.by = signal.Signals(number).name
            hint = ' Once more to stop at once.' if number == signal.SIGINT else ''
            # not by `print`, which may be what was interrupted
            os.write(2, f'\n{self.by}: training saves after the next batch and exits.{hint}\n'.encode())
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)
        return True

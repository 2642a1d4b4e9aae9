"Signals that ask a training to save and leave, noted for the next moment at which all ranks can."

from __future__ import annotations
import os, signal, threading

__all__ = ['SignalWatch']


class SignalWatch:
    """Notes SIGTERM, SIGUSR1 and SIGINT (Ctrl-C) between `watch` and `release`, in the main thread, unless they are ignored.

    `by` is the name of the first that came. Handlers of others are called too. A second Ctrl-C interrupts at once."""

    def __init__(self):
        self.by, self._before, self._over, self._pid = None, {}, False, os.getpid()

    def __reduce__(self):
        return SignalWatch, ()

    def watch(self):
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            if signal.getsignal(number) not in (
                None,
                signal.SIG_IGN,
            ):  # not Python's to give back; ignored, as in the background of a script
                self._before[number] = signal.signal(number, self._note)

    def release(self):
        self._over = True
        for number, before in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)  # else whoever has come on top will give it back to us

    def _note(self, number, frame):
        if (
            os.getpid() != self._pid
        ):  # a data loader's worker, which has our handlers and is told by its parent when to end
            signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.SIG_IGN)
            return signal.raise_signal(number)
        again, name, before = self.by, signal.Signals(number).name, self._before.get(number)
        if self._over:
            signal.signal(number, before)
            return signal.raise_signal(number)
        if again and number == signal.SIGINT:
            return signal.default_int_handler(number, frame)
        self.by = name
        more = ' Once more to stop at once.' if number == signal.SIGINT else ''
        if not again:
            os.write(
                2, f'\n{name}: training saves at the next batch and leaves.{more}\n'.encode()
            )  # `print` may be what was interrupted
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

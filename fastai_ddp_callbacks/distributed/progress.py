"A bar for what takes long, on rank 0, by fastprogress as fastai's own: in a terminal and in a notebook."

from __future__ import annotations
import threading, time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from .collectives import is_main_process

__all__ = ['Progress', 'with_progress']

_PATIENCE = 2.0  # seconds without a bar


class Progress:
    """Shows how far something has come, once it has taken two seconds. Silent on other ranks than 0, in other threads than the
    main one (whose lines it would break), and without fastprogress. The bar goes when the `with` block ends."""

    def __init__(
        self,
        what: str,  # is done, as 'saving model.pth'
    ):
        self.what, self.begun, self.percent = what, time.monotonic(), 0
        self.bar: Any = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.bar is not None:
            self.bar.on_iter_end()
        self.bar = None

    def update(
        self,
        done: int,  # so much, in whatever unit
        total: int,  # of so much
    ) -> None:
        "To be called as often as there is something to tell: before the bar is due it looks at the clock and does no more."
        if self.bar is None:
            if time.monotonic() - self.begun < _PATIENCE or not self._shown():
                return
            self._open()
        percent = min(int(100 * done / max(total, 1)), 99)  # at 100 fastprogress would take the bar away: `with` does
        if percent <= self.percent:
            return
        self.percent = percent
        self.bar.update(percent)

    def _shown(self):
        return (
            is_main_process()
            and threading.current_thread() is threading.main_thread()
            and find_spec('fastprogress') is not None
        )

    def _open(self):
        from fastprogress.fastprogress import progress_bar

        self.bar = progress_bar(range(100), leave=False)
        self.bar.comment = self.what
        self.bar.update(0)
        self.bar.start_t -= time.monotonic() - self.begun  # so that the time to come is judged by all of it


def with_progress(
    what: str,  # is done, as 'saving model.pth'
    function: Callable,  # takes a `progress`, to be called with what is done and what there is
    *args,  # for it
    **kwargs,  # for it
):  # its result
    "Call `function` with a bar."
    with Progress(what) as bar:
        return function(*args, progress=bar.update, **kwargs)

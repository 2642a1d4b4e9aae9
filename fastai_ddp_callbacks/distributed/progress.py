"A bar for what takes long, on rank 0, by tqdm: in a terminal and in a notebook."

from __future__ import annotations
import threading, warnings
from collections.abc import Callable
from typing import Any

from .ranks import is_main_process

__all__ = ['Progress', 'with_progress']

_DELAY = 2.0  # seconds without a bar


class Progress:
    """Shows how far something has come, once it has taken two seconds. Silent on other ranks than 0, and in other
    threads than the main one, whose lines it would break. The bar goes when the `with` block ends."""

    def __init__(
        self,
        what: str,  # is done, as 'saving model.pth'
    ):
        self.what = what
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if is_main_process() and threading.current_thread() is threading.main_thread():
            self._bar = _new_bar(self.what)
        return self

    def __exit__(self, *_) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def update(
        self,
        done: int,  # so much, in whatever unit
        total: int,  # of so much
    ) -> None:
        "Can be called as often as there is something to show."
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)


def _new_bar(what):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # a notebook without ipywidgets gets a bar of characters
        from tqdm.auto import tqdm  # late: importing this package stays cheap

    class Bar(tqdm):
        monitor_interval = 0  # no thread, which a data loader's workers would be forked from

    form = '{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}'
    return Bar(desc=what, total=1, delay=_DELAY, leave=False, bar_format=form, mininterval=0.25)


def with_progress(
    what: str,  # is done, as 'saving model.pth'
    function: Callable,  # takes a `progress`, to be called with what is done and what there is
    *args,  # for it
    **kwargs,  # for it
):  # its result
    "Call `function` with a bar."
    with Progress(what) as bar:
        return function(*args, progress=bar.update, **kwargs)

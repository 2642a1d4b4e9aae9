"Where in the user's code a call stands, under which name all ranks know it, and what it is for."

from __future__ import annotations
import os, sys, threading
from contextlib import contextmanager
from types import FrameType
from typing import Callable, Iterator, NamedTuple

__all__ = ['Place', 'call_site', 'call_text', 'doing', 'frame_outside', 'label', 'place_of']

_HERE = os.path.dirname(__file__)
_CONTEXTLIB = contextmanager.__code__.co_filename


class _Thread(threading.local):
    kind = 'wait'


_thread = _Thread()


class Place(NamedTuple):
    "Where a rank is: `call` must be the same on all ranks; `where` and `kind` are for the reader."

    call: str
    where: str
    kind: str = 'wait'  # what the rendezvous is for: 'wait', 'save', 'load' or 'send'

    def __str__(self):
        return self.call if self.call.endswith(self.where) else f'{self.call} at {self.where}'


@contextmanager
def doing(
    kind: str,  # 'save', 'load' or 'send'
) -> Iterator[None]:
    """Every rendezvous that this thread enters inside is of this kind, for `timeline()`; of nested ones the outermost
    counts. For the callers in this package, as a block or as a decorator."""
    before = _thread.kind
    if before == 'wait':
        _thread.kind = kind
    try:
        yield
    finally:
        _thread.kind = before


def place_of(
    call: str,  # what is called, as `call_text` gives it
    named: bool,  # whether the user gave it a name; else the rendezvous is known by where it stands
    where: str | None = None,  # file and line; by default those of the call
) -> Place:
    "The `Place` of a rendezvous that is called right now."
    where = where or call_site()
    return Place(call if named else f'{call} at {where}', where, _thread.kind)


def frame_outside() -> tuple[FrameType, int]:
    "The innermost frame that is not of this folder, and the `stacklevel` by which the caller warns of it."
    frame, level = sys._getframe(1), 1
    while _is_ours(frame.f_code.co_filename):
        assert frame.f_back is not None  # a call into this folder came from somewhere
        frame, level = frame.f_back, level + 1
    return frame, level


def call_site() -> str:
    "File and line of the code that called into this folder, as 'train.py:12'."
    frame, _ = frame_outside()
    return f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}'


def _is_ours(filename: str) -> bool:
    "Whether code is of this folder, or of a context manager, through which our blocks are entered."
    return os.path.dirname(filename) == _HERE or filename == _CONTEXTLIB


def call_text(
    function: str,  # its name
    name: str | None,  # the name that the user gave to the rendezvous
    detail: str = '',  # another argument that must be the same on all ranks
) -> str:
    "A call as it is shown to the user: `barrier('epoch')`."
    arguments = ['' if name is None else repr(name), detail]
    return f'{function}({", ".join(filter(None, arguments))})'


def label(
    func: Callable,  # any callable
) -> str:
    "How a function is shown to the user."
    return getattr(func, '__qualname__', None) or type(func).__name__

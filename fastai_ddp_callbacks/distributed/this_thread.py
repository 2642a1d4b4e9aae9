"The sections that a thread is in: code that not all ranks execute at the same time."

from __future__ import annotations
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Iterator

from .call_site import Place

__all__ = ['Section', 'in_section', 'innermost', 'is_alone', 'raises_on_all']


@dataclass(frozen=True, eq=False)
class Section:
    "Code that not all ranks execute at the same time."

    place: Place
    why: str  # what keeps the ranks from meeting inside
    skips: bool = False  # whether a rendezvous inside is skipped, as one rank executes it for all; else it is refused
    raises_on_all: bool = True  # whether what goes wrong inside is raised on all ranks at its end


class _Thread(threading.local):
    sections: tuple[Section, ...] = ()


_thread = _Thread()


@contextmanager
def in_section(section: Section) -> Iterator[None]:
    "The block is such a section of this thread."
    _thread.sections = (*_thread.sections, section)
    try:
        yield
    finally:  # not the last one: blocks in generators may end in another order than they began
        _thread.sections = tuple(other for other in _thread.sections if other is not section)


def is_alone() -> bool:
    "Whether one rank executes this for all of them."
    return any(section.skips for section in _thread.sections)


def raises_on_all() -> bool:
    "Whether a section around sees to it that all ranks hear of what goes wrong inside."
    return any(section.raises_on_all for section in _thread.sections)


def innermost() -> Section | None:
    "The section around the code that runs, if there is one."
    return _thread.sections[-1] if _thread.sections else None

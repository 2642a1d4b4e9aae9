"""Which errors all ranks have heard of.

An error that has reached everyone passes through the blocks around it without being sent once more. When it is raised
again later, in a block that began after it was heard, or after the ranks have met once more, it is news again."""

from __future__ import annotations
from contextlib import contextmanager
from typing import Iterator

__all__ = ['Heard', 'forget', 'listening', 'mark', 'since_last_meeting']


class Heard:
    "What all ranks have heard of since a block began, and since they last met."

    def __init__(self) -> None:
        self._tokens: set[object] = set()  # not the errors themselves, which hold whole stacks of frames

    def __contains__(self, error: BaseException) -> bool:
        return getattr(error, '_heard', None) in self._tokens


since_last_meeting = Heard()
_open = [since_last_meeting]


@contextmanager
def listening() -> Iterator[Heard]:
    "A block: gives what is heard of while it lasts."
    heard = Heard()
    _open.append(heard)
    try:
        yield heard
    finally:
        _open.remove(heard)  # not the last one: blocks in generators and threads end in any order


def mark(
    error: BaseException,  # that all ranks have heard of
) -> None:
    "All ranks have heard of `error`."
    error._heard = token = object()  # type: ignore[attr-defined]
    for heard in list(_open):
        heard._tokens.add(token)


def forget() -> None:
    "The ranks have met, or a group was given up: what was heard before is over."
    for heard in list(_open):
        heard._tokens.clear()

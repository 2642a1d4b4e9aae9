"A command that is terminated cleans up first."

from __future__ import annotations
import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ['termination_raises']


@contextmanager
def termination_raises() -> Iterator[None]:
    "Let SIGTERM raise `SystemExit` in the block, so that its `finally` clauses run: they end ranks and remove files."

    def leave(*_):
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

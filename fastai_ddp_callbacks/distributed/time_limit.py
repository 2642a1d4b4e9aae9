"How long a rendezvous waits for the slowest rank."

from __future__ import annotations
from datetime import timedelta

__all__ = ['get_timeout', 'set_timeout']

_timeout = 1800.0  # seconds


def get_timeout() -> float:
    "How many seconds a rendezvous waits for the slowest rank, unless it is given a limit of its own."
    return _timeout


def set_timeout(
    seconds: float | timedelta,  # time limit for every later rendezvous of this process; half an hour unless set
) -> None:
    """Set the default time limit. Each rank uses its own for its own waits, so set it on all of them. `ValueError`
    unless above 0."""
    global _timeout
    _timeout = in_seconds(seconds)


def in_seconds(
    timeout: float | timedelta | None,  # None for the default
) -> float:
    "A time limit as a number of seconds. `ValueError` unless above 0."
    if timeout is None:
        return _timeout
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < 1e8:
        raise ValueError(f'timeout={timeout!r}: a number of seconds above 0 (and below 1e8) is needed.')
    return seconds

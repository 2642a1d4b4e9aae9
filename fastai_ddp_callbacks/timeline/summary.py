"One line after a fit: which rank cost the others how much time."

from __future__ import annotations

import numpy as np, pandas as pd

from ..distributed.current import known_control
from .table import without_epoch

__all__ = ['straggler_summary']

_MIN_PART = 0.1  # of a fit, below which waiting is not mentioned
_MIN_SECONDS = 1.0  # the same in seconds


def straggler_summary(
    begin: int,  # of the fit, as `time.time_ns()` of rank 0
    end: int,  # of the fit, likewise
) -> str | None:  # on rank 0; None on the others, and if no rank cost the others much
    """Which rank cost each of the others more than a tenth of the time, and more than a second, on average.

    Waits at a rendezvous count for the rank that arrived last. Known from what rank 0 remembers: no rendezvous."""
    control = known_control()
    if control is None or control.rank:
        return None
    met = [entry for entry in control.record if begin <= entry[2] <= end]
    if not met:
        return None
    arrived = np.array([arrived for _, arrived, _ in met])
    left = np.array([left for _, _, left in met])
    arrived = np.maximum(arrived - _clocks_ahead(arrived, left), begin)
    waits = (arrived.max(1, keepdims=True) - arrived).sum(1) / 1e9 / (control.size - 1)
    last = arrived.argmax(1)
    costs = np.bincount(last, waits, control.size)
    rank = int(costs.argmax())
    part = costs[rank] * 1e9 / (end - begin)
    if part < _MIN_PART or costs[rank] < _MIN_SECONDS:
        return None
    names = [without_epoch(str(place)) for (place, _, _), straggler in zip(met, last) if straggler == rank]
    place = pd.Series(waits[last == rank]).groupby(names).sum().idxmax()
    others = 'the other' if control.size == 2 else 'each of the others'
    forgotten = len(control.record) == control.record.maxlen and control.record[0] is met[0]
    at_least = 'at least ' if forgotten else ''
    return (
        f'rank {rank} cost {others} {at_least}{costs[rank]:.1f} s of waiting ({100 * part:.0f} % of this fit), '
        f'mostly at {place}'
    )


def _clocks_ahead(arrived, left):
    """How many ns each rank's clock is ahead of rank 0's, as far as rank 0 can know by itself.

    No rank arrived after rank 0 left, and none before rank 0 left the rendezvous before. Clocks that agree with this
    are taken to be right."""
    least = (arrived - left[:, None]).max(0)
    most = 0
    if len(left) > 1:
        # not the minimum: rank 0 may have been descheduled before it noted that it left
        most = np.quantile(arrived[1:] - left[:-1, None], 0.1, axis=0, method='lower')
    ahead = np.maximum(np.minimum(most, 0), least)
    ahead[0] = 0
    return ahead

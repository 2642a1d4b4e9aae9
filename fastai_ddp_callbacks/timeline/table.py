"The rendezvous that all ranks remember, as a table with one clock, and its sums by name and by rank."

from __future__ import annotations
import re

import numpy as np, pandas as pd

from ..distributed import all_gather
from ..distributed.current import current_control
from ..errors import DDPError

__all__ = ['timeline', 'waits_by_name', 'waits_by_rank', 'rank_columns', 'without_epoch']

_CLOCK_WINDOW = 51  # how many neighbouring rendezvous a clock is compared over: it may drift in a day


def timeline() -> pd.DataFrame:  # one row per rendezvous, in order; empty in one process
    """Every rendezvous that all ranks remember. Call it on all ranks: it gathers what they remember.

    Columns: `name`; `where` it stands in the code; `kind`, one of 'wait', 'save', 'load' and 'send'; `begin` and
    `end`, when the first and the last rank arrived, in seconds since the beginning of the first one; `straggler`, the
    last rank to arrive; `waited`, the seconds that all ranks together waited; and the seconds that each waited, as
    `rank 0`, `rank 1`, ... The clocks of the ranks need not agree: all leave a rendezvous at the same moment, which
    shows how far apart they are. `DDPError` in code that runs on one rank only."""
    places, arrived = _gather_record()
    waits = arrived.max(1, keepdims=True) - arrived
    columns = dict(
        name=[place.call for place in places],
        where=[place.where for place in places],
        kind=[place.kind for place in places],
        begin=arrived.min(1),
        end=arrived.max(1),
        straggler=arrived.argmax(1),
        waited=waits.sum(1),
    )
    return pd.DataFrame(columns | {f'rank {r}': seconds for r, seconds in enumerate(waits.T)})


def _gather_record():
    """The places, and when each rank arrived there, by rank 0's clock.

    An array of float64 seconds since the first arrival, one row per rendezvous and one column per rank."""
    control = current_control('timeline()')
    if control is None:
        return [], np.zeros((0, 1))
    own = list(control.record)
    # no rendezvous has a number that all ranks know; the moment at which rank 0 arrived identifies it
    left_by_rank = all_gather({arrived[0]: left for _, arrived, left in own}, 'timeline')
    if len(left_by_rank) < control.size:
        raise DDPError('timeline() was called in code that runs on one rank only: it needs what all ranks remember.')
    shared = [
        (place, arrived, [left[arrived[0]] for left in left_by_rank])
        for place, arrived, _ in own
        if all(arrived[0] in left for left in left_by_rank)
    ]
    if not shared:
        return [], np.zeros((0, control.size))
    places = [place for place, _, _ in shared]
    arrived = np.array([arrived for _, arrived, _ in shared])
    left = np.array([left for _, _, left in shared])
    ahead = pd.DataFrame(left - left[:, :1]).rolling(_CLOCK_WINDOW, center=True, min_periods=1).median().to_numpy()
    seconds = (arrived - arrived[0, 0] - ahead) / 1e9
    return places, seconds - seconds[0].min()


def rank_columns(
    table: pd.DataFrame,  # as `timeline()` returns it
) -> list[str]:
    "The columns with what each rank waited, in the order of the ranks."
    return [column for column in table.columns if column.startswith('rank ')]


def without_epoch(
    name: str,  # of a rendezvous
) -> str:
    "The name under which the epochs of one rendezvous are added up."
    return re.sub(r'\bepoch \d+', 'an epoch', name)


def waits_by_name(
    table: pd.DataFrame | None = None,  # as `timeline()` returns it; by default what it returns now, on all ranks
) -> pd.DataFrame:  # the longest in sum first
    """Seconds of waiting by name of the rendezvous: how often it took place, in sum, and by the rank that waited.

    Epochs are added up."""
    if table is None:
        table = timeline()
    names = table['name'].map(without_epoch)
    sums = table.groupby(names, sort=False)[['waited', *rank_columns(table)]].sum()
    sums.insert(0, 'times', names.value_counts())
    return sums.sort_values('waited', ascending=False)


def waits_by_rank(
    table: pd.DataFrame | None = None,  # as `timeline()` returns it; by default what it returns now, on all ranks
) -> pd.DataFrame:  # a row for each rank that waited, a column for each rank that it waited for
    "Seconds of waiting in sum, by which rank waited for which."
    if table is None:
        table = timeline()
    ranks = rank_columns(table)
    sums = table.groupby('straggler')[ranks].sum().reindex(range(len(ranks)), fill_value=0.0)
    return sums.set_axis([f'for {rank}' for rank in ranks]).T

"One monitored value, agreed upon by all ranks: whether it is the best so far, and how long ago that was."

from __future__ import annotations
import math, re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..distributed import agree
from ..distributed.reductions import NUMERIC

__all__ = ['Tracker', 'Verdict', 'check_patience', 'check_reduce', 'is_higher_better']


class Verdict(NamedTuple):
    "What all ranks decide about one epoch."

    epoch: int
    value: float | None  # the agreed value; None if no rank has one, or it is not finite
    best: bool  # whether it is the best so far


class Tracker:
    """Values of one column in, verdicts out. The same on all ranks, as they agree on each value first.

    NaN and infinity are never best, whatever `comp` says of them."""

    def __init__(
        self,
        monitor: str,  # name of the column
        comp: Callable = np.less,  # whether its first argument is better than its second
        min_delta: float = 0.0,  # subtracted from a value before it is compared: below 0 where lower is better
        reduce: str = 'mean',  # how the values of the ranks become one: one of `NUMERIC`
    ):
        self.monitor = monitor
        self.comp = comp
        self.min_delta = min_delta
        self.reduce = reduce
        self.best: Any = None  # a number, from the first fit on
        self.wait = 0  # epochs since the best one

    @property
    def lower(self) -> bool:
        "Whether lower values are better."
        return bool(self.comp(0.0, 1.0))

    @property
    def worst(self) -> float:
        "A value that any other is better than."
        return math.inf if self.lower else -math.inf

    def reset(self) -> None:
        "Forget all values."
        self.best = self.worst
        self.wait = 0

    def better(
        self,
        value: float,  # what is compared
        best: float,  # to this
    ) -> bool:
        "Whether a value counts as an improvement."
        return math.isfinite(value) and bool(self.comp(value - self.min_delta, best))

    def follow(
        self,
        epoch: int,  # which the value is of
        value: float | None,  # agreed; None if no rank has one
    ) -> Verdict:
        "Compare a value to the best so far. An epoch without a value decides nothing."
        if value is None:
            return Verdict(epoch, None, False)
        improved = self.better(value, self.best)
        if improved:
            self.best = value
        self.wait = 0 if improved else self.wait + 1
        return Verdict(epoch, float(value) if math.isfinite(value) else None, improved)

    def agreed(
        self,
        shared: dict,  # the values of this epoch that trackers have agreed upon; gets the new one
        own_value,  # function without arguments that gives this rank's value; None if it has none
        epoch: int,  # for the name of the rendezvous
    ) -> tuple:  # the value, and whether the ranks have just met for it
        "The value of all ranks. Trackers of one column share one collective."
        key = self.monitor, self.reduce
        meets = key not in shared
        if meets:
            shared[key] = agree(own_value(), self.reduce, f'{self.monitor} of epoch {epoch}')
        return shared[key], meets


def check_reduce(
    who: str,  # name of the class, for the message
    reduce: str,  # its argument
) -> None:
    "`ValueError` for a way that ranks' values cannot become one."
    if reduce not in NUMERIC:
        raise ValueError(f'{who}(reduce={reduce!r}): choose one of {", ".join(map(repr, NUMERIC))}.')


def check_patience(
    who: str,  # name of the class, for the message
    patience: int,  # its argument
) -> None:
    "`TypeError` or `ValueError` unless it is a number of epochs."
    if isinstance(patience, bool) or not isinstance(patience, int):
        raise TypeError(f'{who}(patience={patience!r}): a whole number of epochs is needed.')
    if patience < 0:
        raise ValueError(f'{who}(patience={patience!r}): a number of epochs from 0 on is needed.')


def check_min_delta(
    who: str,  # name of the class, for the message
    min_delta: float,  # its argument
) -> None:
    "`TypeError` or `ValueError` unless it is a finite number."
    if isinstance(min_delta, bool) or not isinstance(min_delta, (int, float, np.number)):
        raise TypeError(f'{who}(min_delta={min_delta!r}): a number is needed.')
    if not math.isfinite(min_delta):
        raise ValueError(f'{who}(min_delta={min_delta!r}): a finite number is needed.')


_SURE = {
    'accuracy',
    'acc',
    'precision',
    'recall',
    'f1',
    'fbeta',
    'auc',
    'dice',
    'jaccard',
    'iou',
    'kappa',
    'r2',
    'bleu',
}


def is_higher_better(
    monitor: str,  # name of a column
) -> bool | None:  # None if the name does not say
    "Whether a name leaves no doubt that higher, or lower, is better. Whole words count: `mape` is no `map`."
    if 'loss' in monitor or 'error' in monitor:  # stock's own rule
        return False
    return True if _SURE & set(re.split(r'[^a-z0-9]+', monitor.lower())) else None

"""fastai 2: averages over the samples of all ranks, each sample counted once.

Stock averages gather a number from every rank in every batch, and count samples twice that are repeated to make the
ranks even. Here each rank adds up what it evaluates, without repeated samples, and all averages of an epoch are
gathered in one go. Metrics that add up counts, as Dice does, are gathered with them: in stock each rank has its own."""

from __future__ import annotations
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

import torch
from fastai.basics import Learner
from fastai.learner import AvgLoss, AvgMetric, Metric
from fastai.metrics import CorpusBLEUMetric, Dice, DiceMulti
from fastai.torch_core import find_bs

from ..distributed import all_gather, all_or_none

__all__ = ['ExactAverages']

# what these add up, in classes of their own or derived ones that add up in the same way
_SUMS: dict[type, tuple[str, ...]] = {
    Dice: ('inter', 'union'),
    DiceMulti: ('inter', 'union'),
    CorpusBLEUMetric: ('pred_len', 'targ_len', 'corrects', 'counts'),
}


class ExactAverages:
    "Puts exact averages in the place of a learner's loss and metrics, until `restore`."

    def __init__(
        self,
        learn: Learner,
    ):
        self.learn, self.stock = learn, (learn.recorder.loss, learn.metrics)
        self.sums: list[_Average | _Sums] = []
        self._put(self._exact(learn.recorder.loss))
        learn.metrics = [self._exact(metric) for metric in learn.metrics]

    def _put(self, loss):
        vars(self.learn.recorder)['loss'] = loss  # `setattr` warns, as the learner has a `loss` too

    def _exact(self, metric):
        exact = _exact(metric)
        if exact is None:
            return metric  # others gather what they need
        self.sums.append(exact)
        return exact

    def gather(
        self,
        place: str,  # name of the rendezvous
    ) -> None:
        """Add up what the ranks have. Call it on all ranks, before the values are read.

        `ValueError` on all ranks if their metrics differ."""
        by_rank = all_gather(self._own(), place)
        names = [[name for name, _ in own] for own in by_rank]
        if any(of_rank != names[0] for of_rank in names):
            lines = [f'  rank {rank}: {", ".join(of_rank)}\n' for rank, of_rank in enumerate(names)]
            with all_or_none('metrics that differ'):  # all ranks come here and raise: none hears of it from another one
                raise ValueError(
                    f'The ranks have different metrics:\n{"".join(lines)}'
                    'Give the learner the same metrics on all ranks, also those that only one of them prints.'
                )
        for i, metric in enumerate(self.sums):
            metric.set_state(_added(own[i][1] for own in by_rank))

    def _own(self):
        "(name, what this rank has added up) of each metric; of those that are not gathered here the name only."
        others = [metric for metric in self.learn.metrics if metric not in self.sums]
        return [(metric.name, metric.state()) for metric in self.sums] + [(metric.name, None) for metric in others]

    def restore(self) -> None:
        "Give the learner back its own, with the values of the last epoch."
        loss, self.learn.metrics = self.stock
        self._put(loss)
        for metric in self.sums:
            metric.restore()


def _exact(metric: Metric) -> _Average | _Sums | None:
    "What takes the place of a metric; None for one that is none of the known kinds."
    how = type(metric).accumulate, type(metric).reset
    if how in ((AvgLoss.accumulate, AvgLoss.reset), (AvgMetric.accumulate, AvgMetric.reset)):
        return _Average(metric)
    for kind, fields in _SUMS.items():
        if how == (kind.accumulate, kind.reset):  # type: ignore[attr-defined]
            return _Sums(metric, fields)
    return None


def _added(states: Iterable[Any]) -> Any:
    "The sum of numbers, or of numbers in lists, or in dicts that need not have the same keys."
    states = list(states)
    if isinstance(states[0], dict):
        keys = dict.fromkeys(key for state in states for key in state)
        return {key: _added(state[key] for state in states if key in state) for key in keys}
    lists = [state for state in states if isinstance(state, list)]
    if lists:  # a rank that has evaluated no sample of its own has the number 0 instead
        return [_added(parts) for parts in zip(*lists)]
    return sum(states)


class _Average(Metric):
    "Adds up what `stock` averages, over this rank's own samples."

    def __init__(self, stock):
        self.stock = stock
        self.reset()

    def reset(self):
        self.total, self.count = torch.zeros((), dtype=torch.float64), 0

    def accumulate(self, learn):
        if getattr(learn.dl, 'is_repeat', False):
            return
        n = find_bs(learn.yb)
        value = learn.loss.mean() if isinstance(self.stock, AvgLoss) else self.stock.func(learn.pred, *learn.yb)
        value = torch.as_tensor(value).detach().double()
        self.total = self.total.to(value.device) + value * n
        self.count += n

    def state(self):
        return [self.total.tolist(), self.count]

    def set_state(self, state):
        total, self.count = state
        self.total = torch.tensor(total, dtype=torch.float64)

    @property
    def value(self):
        if not self.count:
            return None
        self.restore()
        return self.stock.value

    def restore(self):
        self.stock.total, self.stock.count = self.total.float(), self.count

    @property
    def name(self):
        return self.stock.name


class _Sums(Metric):
    "Adds up the counts of `stock`, over this rank's own samples."

    def __init__(self, stock, fields):
        self.stock, self.fields = stock, fields
        self.reset()

    def reset(self):
        self.stock.reset()
        self._keep()

    def _keep(self):
        # here and not only in `stock`: a fit keeps what its metrics hold while something else is evaluated
        self.sums = deepcopy([getattr(self.stock, field) for field in self.fields])

    def accumulate(self, learn):
        if not getattr(learn.dl, 'is_repeat', False):
            self.restore()
            self.stock.accumulate(learn)
            self._keep()

    def state(self):
        return self.sums

    def set_state(self, state):
        self.sums = state

    @property
    def value(self):
        self.restore()
        return self.stock.value

    def restore(self):
        for field, value in zip(self.fields, deepcopy(self.sums)):
            setattr(self.stock, field, value)

    @property
    def name(self):
        return self.stock.name

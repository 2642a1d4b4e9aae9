"""fastai 2: averages over the samples of all ranks, each sample counted once.

When the samples do not divide evenly, `DistributedDL` repeats some so that every rank has as many. Stock averages count
those twice, and gather a number from every rank in every batch. Here each rank leaves the repeated ones out and adds up
its own, and all averages of an epoch are gathered in one go."""

from __future__ import annotations

import torch
from fastai.learner import AvgLoss, AvgMetric, Metric
from fastai.torch_core import Tensor, apply, find_bs

from ..distributed import all_gather, all_or_none

__all__ = ['ExactAverages']


class ExactAverages:
    "Puts exact averages in the place of a learner's loss and of its averaged metrics, until `restore`."

    def __init__(
        self,
        learn,  # the `Learner`, with data loaders that are `DistributedDL`
    ):
        self.learn, self.stock = learn, (learn.recorder.loss, learn.metrics)
        self.all = []
        self._put(self._exact(learn.recorder.loss))
        learn.metrics = [self._exact(o) for o in learn.metrics]

    def _put(self, loss):
        vars(self.learn.recorder)['loss'] = loss  # `setattr` warns, as the learner has a `loss` too

    def _exact(self, metric):
        if type(metric) not in (AvgLoss, AvgMetric):
            return metric  # others gather what they need
        self.all.append(_Average(metric))
        return self.all[-1]

    def gather(self) -> None:
        "Let all ranks know the averages. To be called on all ranks, before the values are read. `ValueError` if their metrics differ."
        told = all_gather(
            self._own(), f'averages of epoch {getattr(self.learn, "epoch", 0)}'
        )  # before any fit there is no epoch
        names = [[name for name, _ in o] for o in told]
        if any(o != names[0] for o in names):
            with all_or_none(
                'metrics that differ'
            ):  # all ranks come here, and raise: none hears of it from another one
                raise ValueError(
                    'The ranks have different metrics:\n'
                    + ''.join(f'  rank {r}: {", ".join(o)}\n' for r, o in enumerate(names))
                    + 'Give the learner the same metrics on all ranks, also those that only one of them prints.'
                )
        for i, o in enumerate(self.all):
            o.total, o.count = map(sum, zip(*(rank[i][1] for rank in told)))

    def _own(self):
        "(name, what this rank has added up) of each metric; of the averages first, and of the others the name only."
        others = [o for o in self.learn.metrics if o not in self.all]
        return [(o.name, (float(o.total), int(o.count))) for o in self.all] + [(o.name, None) for o in others]

    def restore(self) -> None:
        self._put(self.stock[0])
        self.learn.metrics = self.stock[1]
        for o in self.all:
            o.stock.total, o.stock.count = o.total, o.count


class _Average(Metric):
    "Adds up what `stock` averages, over this rank's own samples."

    def __init__(self, stock):
        self.stock = stock
        self.reset()

    def reset(self):
        self.total, self.count = 0.0, 0

    def accumulate(self, learn):
        n = find_bs(learn.yb)
        own = learn.dl.n_own(n) if hasattr(learn.dl, 'n_own') else n
        if not own:
            return
        self.total = self.total + torch.as_tensor(self._of(learn, own, n)).detach().double() * own
        self.count += own

    def _of(self, learn, own, n):
        if own == n and isinstance(self.stock, AvgLoss):
            return learn.loss.mean()
        pred, yb = (
            (learn.pred, learn.yb)
            if own == n
            else apply(lambda o: o[:own] if isinstance(o, Tensor) and o.ndim else o, (learn.pred, learn.yb))
        )
        return learn.loss_func(pred, *yb).mean() if isinstance(self.stock, AvgLoss) else self.stock.func(pred, *yb)

    @property
    def value(self):
        return torch.as_tensor(self.total / self.count) if self.count else None

    @property
    def name(self):
        return self.stock.name

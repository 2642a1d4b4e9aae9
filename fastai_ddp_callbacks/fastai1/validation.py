"fastai 1: validation on several ranks, in which every sample counts once."

from __future__ import annotations
from collections.abc import Callable, Iterator

import torch
from fastai.callback import AverageMetric, Callback, add_metrics
from torch.utils.data import Sampler

from ..distributed import all_gather, rank, world_size

__all__ = ['EvenBatches', 'Shares', 'ExactMetric', 'exact_metrics']


class EvenBatches(Sampler):
    """Every sample on one rank, in as many batches on each.

    A rank that would have one batch less repeats one sample in a batch of its own, which does not count: the model and
    metrics may have a collective in every batch."""

    def __init__(
        self,
        size: int,  # of the dataset
        batch_size: int,  # on one rank
    ):
        indices = list(range(rank(), size, world_size()))
        longest = -(-size // world_size())
        self.n_batches = -(-longest // batch_size)
        self.repeats = self.n_batches > -(-len(indices) // batch_size)
        self.indices = indices + [0] * self.repeats

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Shares:
    "The average of one validation's losses over the samples of all ranks."

    def __init__(
        self,
        sampler: EvenBatches | None,  # None if every batch counts
    ):
        self.sampler = sampler
        self.reset()

    def reset(self) -> None:
        "Begin a validation."
        self.batches = 0
        self.loss = 0.0
        self.count = 0

    def counting(
        self,
        batch: int,  # from 0 on
        target,  # of the batch: a tensor, or a list of them
    ) -> int:
        "How many samples of a batch count."
        sampler = self.sampler
        is_repeated = sampler is not None and sampler.repeats and batch == sampler.n_batches - 1
        return 0 if is_repeated else _size(target)

    def add(
        self,
        loss: torch.Tensor,  # mean of the next batch
        target,  # of that batch: a tensor, or a list of them
    ) -> None:
        "Count a batch."
        samples = self.counting(self.batches, target)
        self.batches += 1
        if samples:
            self.loss += float(loss) * samples
            self.count += samples

    def average(self) -> float:
        "The loss of all samples of all ranks. A rendezvous."
        shares = all_gather((self.loss, self.count), 'validation loss')
        return sum(loss for loss, _ in shares) / max(1, sum(count for _, count in shares))


class ExactMetric(AverageMetric):
    "A metric that is averaged over the samples of all ranks, in one rendezvous per epoch."

    def __init__(
        self,
        func: Callable,  # the metric
        shares: Shares,  # of the same validation
    ):
        super().__init__(func)
        self.shares = shares
        self.batches = 0

    def on_epoch_begin(self, **kwargs):
        super().on_epoch_begin(**kwargs)
        self.batches = 0

    def on_batch_end(self, last_output, last_target, **kwargs):
        "Add a batch, as far as it counts."
        samples = self.shares.counting(self.batches, last_target)
        self.batches += 1
        if samples:
            targets = last_target if isinstance(last_target, (list, tuple)) else [last_target]
            self.val += samples * self.func(last_output, *targets).detach().cpu()
            self.count += samples

    def on_epoch_end(self, last_metrics, **kwargs):
        shares = all_gather((self.val, self.count), f'metric {self.name}')
        total = sum(count for _, count in shares)
        return add_metrics(last_metrics, sum(value for value, _ in shares) / max(1, total))


def exact_metrics(
    metrics: list,  # functions and callbacks
    shares: Shares,
) -> list:
    "The metrics that fastai averages by itself, averaged over all ranks; callbacks stay as they are."
    made = []
    for metric in metrics:
        if type(metric) is AverageMetric:
            made.append(ExactMetric(metric.func, shares))
        else:
            made.append(metric if isinstance(metric, Callback) else ExactMetric(metric, shares))
    return made


def _size(target):
    while isinstance(target, (list, tuple)):
        target = target[0]
    return target.shape[0]

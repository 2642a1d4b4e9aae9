"""fastai 2: how the samples of a data loader are divided among the ranks.

In training every rank has a run of the order to itself, as in stock. In evaluation each batch of all ranks together is
the next stretch of the order, so that gathering batch by batch gives the samples in their order, and no batch mixes
samples of this rank with repeated ones."""

from __future__ import annotations
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fastai.data.load import DataLoader
from fastai.distributed import DistributedDL
from fastai.torch_core import Tensor, apply, maybe_gather, to_detach
from torch.utils.data import (
    BatchSampler,
    DataLoader as TorchLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from ..distributed import broadcast

__all__ = ['DDPLoader', 'EvaluationLoader', 'OwnLoader', 'Stretch', 'stretches', 'divisible', 'is_divided']


class DDPLoader(DistributedDL):
    "A `DistributedDL` that shares the order of the samples at a rendezvous, and is whole: it can be shown and copied."

    place = 'order of samples'  # the name of the rendezvous: which samples, and of which epoch

    def _broadcast(self, t, rank):
        return broadcast(t, rank, self.place)

    def get_idxs(self) -> list[int]:
        "This rank's samples of the epoch."
        if self.dl.n != 0:
            return super().get_idxs()
        self.n = self.n_padded = 0  # nothing to share, as in a validation set that is empty
        return []

    def after_iter(self) -> None:
        "Leave no iterator on the loader within, which could not be copied or pickled."
        super().after_iter()
        if hasattr(self.dl, 'it'):
            del self.dl.it

    # What is asked of a loader besides batches concerns the one within: `DistributedDL` has other arguments than `new`
    # gives to its constructor, and methods where others have the transforms that `decode` looks for.

    def new(self, dataset=None, cls=None, **kwargs):
        "A loader as the one within, not divided: whoever iterates over it divides it first."
        return self.dl.new(dataset, cls, **kwargs)

    def one_batch(self):
        "A batch of the loader within: loggers and `show_results` ask for one on rank 0 alone."
        return self.dl.one_batch()

    def decode(self, b):
        return self.dl.decode(b)

    def decode_batch(self, b, *args, **kwargs):
        return self.dl.decode_batch(b, *args, **kwargs)

    def show_batch(self, *args, **kwargs):
        return self.dl.show_batch(*args, **kwargs)

    def show_results(self, *args, **kwargs):
        return self.dl.show_results(*args, **kwargs)

    @property
    def n_inp(self) -> int:
        return self.dl.n_inp


class Stretch(NamedTuple):
    "One batch of all ranks: which samples, counted in the order of the epoch, each rank has."

    begins: list[int]  # the first sample of each rank
    counts: list[int]  # how many samples each rank loads, at least one
    real: list[bool]  # whether they count; a rank for which none is left repeats another rank's

    @property
    def even(self) -> bool:
        "Whether all ranks have as many."
        return len(set(self.counts)) == 1


def stretches(
    n: int,  # samples
    bs: int,  # samples per batch and rank
    size: int,  # ranks
) -> Iterator[Stretch]:
    "The batches of an evaluation. Ranks have as many batches; in the last one, they may differ by a sample."
    for begin in range(0, n, bs * size):
        m = min(bs * size, n - begin)
        shares = [m // size + (rank < m % size) for rank in range(size)]
        begins = [begin + sum(shares[:rank]) for rank in range(size)]
        yield Stretch(
            [first if share else begin for first, share in zip(begins, shares)],
            [max(share, 1) for share in shares],
            [share > 0 for share in shares],
        )


class EvaluationLoader(DDPLoader):
    "Divides the samples of an evaluation so that each one counts once."

    def __init__(
        self,
        dl,  # the loader to divide
        rank: int,  # this one
        world_size: int,
        device: torch.device,  # of the batches
    ):
        # what one process drops is left out in `get_idxs`: it is the end of the order, not of every rank's part
        self.dropped = getattr(dl, 'drop_last', False) and dl.bs
        super().__init__(dl.new(drop_last=False) if self.dropped else dl, rank, world_size, device)
        self.order: list[int] | None = None  # of the samples, once shared and until the iteration begins
        self.plan: list[Stretch] = []
        self.batch = -1  # of `plan`, the one that was loaded last

    def __len__(self):
        n = self.dl.n
        if n is None:
            return super().__len__()
        if self.dropped:
            n = n // self.dropped * self.dropped
        return -(-n // ((self.bs or 1) * self.world_size))

    def share_order(self) -> list[int]:
        "Share the order of the samples at a rendezvous, for the iteration that follows."
        own = self.dl.get_idxs()
        order = self._broadcast(list(own), 0)
        if isinstance(own, list):
            own[:] = order  # `get_preds` puts predictions back into order by this list, which it made on each rank
        self.order = order[: len(order) // self.dropped * self.dropped] if self.dropped else order
        return self.order

    def get_idxs(self) -> list[int]:
        "This rank's samples."
        self.batch = -1
        order = self.share_order() if self.order is None else self.order
        self.order = None
        self.plan = list(stretches(len(order), self.bs or 1, self.world_size))
        idxs: list[int] = []
        for stretch in self.plan:
            begin = stretch.begins[self.rank]
            idxs += order[begin : begin + stretch.counts[self.rank]]
        return idxs

    def after_batch(self, b):
        self.batch += 1
        return self.dl.after_batch(b)

    @property
    def stretch(self) -> Stretch | None:
        "The batch that was loaded last; None before the first one, and where there are more than the indices fill."
        return self.plan[self.batch] if 0 <= self.batch < len(self.plan) else None

    @property
    def is_repeat(self) -> bool:
        "Whether the batch that was loaded last has no samples but another rank's."
        return self.stretch is not None and not self.stretch.real[self.rank]

    def to_detach(self, b, cpu: bool = True, gather: bool = True):
        "Detached, and of all ranks in the order of the samples."

        def detach(x):
            if not isinstance(x, Tensor):
                return x
            x = self._gather(x.detach()) if gather else x.detach()
            return x.cpu() if cpu else x

        return apply(detach, b)

    def _gather(self, x):
        stretch = self.stretch
        if stretch is None:
            return maybe_gather(x)
        real = [rank for rank, counts in enumerate(stretch.real) if counts]
        if x.ndim == 0:
            return maybe_gather(x[None])[real].mean()
        # rows are gathered as they are where all ranks have as many, which is so in all batches but the last
        shapes = [tuple(x.shape)] * self.world_size
        if not stretch.even or not self.bs:
            shapes = [tuple(shape) for shape in maybe_gather(torch.tensor([x.shape], device=x.device)).tolist()]
        most = [max(sizes) for sizes in zip(*shapes)]
        padding = [n for size, largest in zip(reversed(x.shape), reversed(most)) for n in (0, largest - size)]
        gathered = maybe_gather(F.pad(x, padding) if any(padding) else x).chunk(self.world_size)
        return torch.cat([gathered[rank][: shapes[rank][0]] for rank in real])


class OwnLoader:
    "What a rank evaluates by itself: nothing is divided and nothing gathered, so that no other rank has to take part."

    def __init__(
        self,
        batches: Iterable,  # a loader, or a list of batches
    ):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == 'batches':
            raise AttributeError(name)  # of an object that is being copied, and has none yet
        return getattr(self.batches, name)

    def to_detach(self, b, cpu: bool = True, gather: bool = True):
        "Detached, of this rank."
        return to_detach(b, cpu, gather=False)


def divisible(
    dl,  # a loader of fastai or torch
    name: str,  # which one it is, for the message
):  # a loader of fastai
    """The loader, as one that can be divided among the ranks.

    `TypeError` for a loader of torch of which a part would be lost by that, and for what is no loader that we know."""
    if isinstance(dl, DataLoader):
        return dl
    if not isinstance(dl, TorchLoader):
        raise TypeError(
            f'The {name} loader is a {type(dl).__name__}, which cannot be divided among the ranks: '
            'use the DataLoader of fastai.data.load.'
        )
    plain = TorchLoader(dl.dataset, batch_size=dl.batch_size or 1)
    kept = dict(
        sampler=type(dl.sampler) in (RandomSampler, SequentialSampler),
        batch_sampler=type(dl.batch_sampler) is BatchSampler,
        collate_fn=dl.collate_fn is plain.collate_fn,
        worker_init_fn=dl.worker_init_fn is None,
        generator=dl.generator is None,
    )
    lost = [argument for argument, is_kept in kept.items() if not is_kept]
    if type(dl) is not TorchLoader or lost:
        what = f'the {", ".join(lost)}' if lost else f'what {type(dl).__name__} adds to it'
        raise TypeError(
            f"The {name} loader is a torch DataLoader, and {what} would be lost when its samples are divided among the "
            'ranks. Use the DataLoader of fastai.data.load, or one with a DistributedSampler, which is divided already.'
        )
    return DataLoader(
        dl.dataset,
        bs=dl.batch_size,
        num_workers=dl.num_workers,
        pin_memory=dl.pin_memory,
        timeout=dl.timeout,
        shuffle=type(dl.sampler) is RandomSampler,
        drop_last=dl.drop_last,
        persistent_workers=dl.persistent_workers,
    )


def is_divided(
    dl,  # a loader of fastai or torch
) -> bool:
    "Whether each rank loads a part of its own already, by a sampler of torch that divides."
    return isinstance(getattr(dl, 'sampler', None), DistributedSampler)

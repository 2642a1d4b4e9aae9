"fastai 2: training on those samples of an epoch that were not seen when it was interrupted."

from __future__ import annotations
from collections.abc import Callable
from typing import NamedTuple

from fastai.distributed import DistributedDL
from fastai.learner import Learner

from ..distributed import rank, world_size
from .loader_state import restore_own

__all__ = ['Stage', 'remaining_samples', 'train_on_rest']


class Stage(NamedTuple):
    "A part of an epoch that was trained: so many ranks took so many batches each."

    world_size: int
    bs: int
    batches: int


def remaining_samples(
    idxs: list,  # the samples of the epoch in their order
    stages: list[Stage],  # that are trained, in their order
    size: int,  # how many ranks are to share the rest
) -> list:  # (sample, whether it is a repeated one that makes the ranks even), a number that `size` divides
    """What is left of an epoch, as `DistributedDL` would continue it: each rank has a run of the order to itself, and
    its first samples make up for what is missing to equal runs. With as many ranks as before, each continues
    its own."""
    samples = [(sample, False) for sample in idxs]
    sizes = [stage.world_size for stage in stages]
    for stage, previous in zip(stages, [None, *sizes]):
        if previous not in (None, stage.world_size):
            samples = _without_repeated(samples)
        samples = _even(samples, stage.world_size)
        run = len(samples) // stage.world_size
        done = stage.bs * stage.batches
        samples = [sample for i, sample in enumerate(samples) if i % run >= done]
    if sizes and size != sizes[-1]:
        samples = _without_repeated(samples)
    return _even(samples, size)


def _without_repeated(samples):
    return [(sample, is_repeated) for sample, is_repeated in samples if not is_repeated]


def _even(samples, size):
    if len(samples) % size == 0:
        return samples
    samples = _without_repeated(samples)
    missing = -len(samples) % size
    repeated = samples * (missing // max(len(samples), 1) + 1)
    return samples + [(sample, True) for sample, _ in repeated[:missing]]


def train_on_rest(
    learn: Learner,  # in the training part of an epoch
    stages: list[Stage],  # that are trained
    order: dict,  # random states when the epoch began
    restore_random_states: Callable[[], None],  # called when the samples are known, before the first is loaded
) -> None:
    "What `learn.all_batches` does, for the rest of the epoch."
    restore_own(learn, order)
    learn.n_iter = len(learn.dl)
    if not hasattr(type(learn.dl), 'get_idxs'):
        _skip_batches(learn, sum(stage.batches for stage in stages), restore_random_states)
        return
    rest = _Rest(learn.dl, stages, restore_random_states)
    rest.replace_methods()
    try:
        for i, batch in enumerate(learn.dl):
            if i == 0:
                first = rest.first_batch(learn.n_iter)
            learn.one_batch(first + i, batch)
    finally:
        rest.restore_methods()


def _skip_batches(learn, trained, restore_random_states):
    "The same with a loader of torch, whose first batches are loaded and thrown away."
    for i, batch in enumerate(learn.dl):
        if i >= trained:
            learn.one_batch(i, batch)
        elif i == trained - 1:
            restore_random_states()


class _Rest:
    "The methods of a loader of fastai by which it loads the rest of an epoch only."

    def __init__(self, dl, stages, restore_random_states):
        self.dl = dl
        self.stages = stages
        self.restore_random_states = restore_random_states
        self.base = dl.dl if isinstance(dl, DistributedDL) else dl
        self.is_divided = self.base is not dl
        self.size = world_size() if self.is_divided else 1
        self.batches_left = 0
        self.get_idxs = self.base.get_idxs
        self.create_batches = dl.create_batches
        self.after_batch = dl.after_batch
        self.is_restored = False

    def replace_methods(self):
        self.shadowed = {k: v for k, v in vars(self.dl).items() if k in ('get_idxs', 'create_batches')}
        self.dl.get_idxs = self._rest_of_idxs
        if self.dl.fake_l.num_workers == 0:  # samples are loaded here, with the random states of this process
            self.dl.create_batches = self._create_batches
        else:
            self.dl.after_batch = self._after_batch

    def restore_methods(self):
        for name in ('get_idxs', 'create_batches'):
            vars(self.dl).pop(name, None)
        vars(self.dl).update(self.shadowed)
        if self.dl.fake_l.num_workers:
            self.dl.after_batch = self.after_batch

    def first_batch(self, n_iter):
        "The number in the epoch of the first batch."
        if all(stage.world_size == self.size for stage in self.stages):
            return sum(stage.batches for stage in self.stages)
        return max(0, n_iter - self.batches_left)

    def _rest_of_idxs(self):
        idxs = list(self.get_idxs())
        if self.is_divided:
            idxs = self.dl._broadcast(idxs, 0)
        rest = remaining_samples(idxs, self.stages, self.size)
        run = len(rest) // self.size
        self.batches_left = run // (self.dl.bs or 1)
        if self.is_divided:
            self.dl.n = sum(not is_repeated for _, is_repeated in rest)
            self.dl.n_padded = len(rest)
            rest = rest[rank() * run : (rank() + 1) * run]
        return [sample for sample, _ in rest]

    def _create_batches(self, samples):
        self.restore_random_states()
        yield from self.create_batches(samples)

    def _after_batch(self, batch):
        if not self.is_restored:
            self.is_restored = True
            self.restore_random_states()  # after the workers have been started, which drew a number of this process's
        return self.after_batch(batch)

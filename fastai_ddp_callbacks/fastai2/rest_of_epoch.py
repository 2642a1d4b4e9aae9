"fastai 2: training on those samples of an epoch that were not seen when it was interrupted."

from __future__ import annotations
from typing import NamedTuple

from fastai.distributed import DistributedDL

from ..distributed import rank, world_size
from .loader_state import restore_own

__all__ = ['Stage', 'left', 'train_on_rest']


class Stage(NamedTuple):
    "A part of an epoch that was trained: so many ranks took so many batches each."

    world_size: int
    bs: int
    batches: int


def left(
    idxs: list,  # the samples of the epoch in their order
    stages: list,  # the `Stage`s that are over, in their order
    size: int,  # how many ranks are to share the rest
) -> list:  # (sample, whether it is a repeated one that makes the ranks even), a number that `size` divides
    """What is left of an epoch, as `DistributedDL` would go on with it: each rank has a run of the order to itself, and
    its first samples make up for what is missing to equal runs. With as many ranks as before, each goes on with its own."""
    rest = [(o, False) for o in idxs]
    for i, stage in enumerate(stages):
        if i and stage.world_size != stages[i - 1].world_size:
            rest = [o for o in rest if not o[1]]
        rest = _even(rest, stage.world_size)
        run, done = len(rest) // stage.world_size, stage.bs * stage.batches
        rest = [o for i, o in enumerate(rest) if i % run >= done]
    if stages and size != stages[-1].world_size:
        rest = [o for o in rest if not o[1]]
    return _even(rest, size)


def _even(rest, size):
    if len(rest) % size == 0:
        return rest
    rest = [o for o in rest if not o[1]]
    missing = -len(rest) % size
    return rest + [(o, True) for o, _ in (rest * (missing // max(len(rest), 1) + 1))[:missing]]


def train_on_rest(
    learn,  # in the training part of an epoch
    stages: list,  # the `Stage`s that are over
    order,  # random states when the epoch began
    begin,  # called when the samples are known, before the first is loaded: brings back the random states
) -> None:
    "What `learn.all_batches` does, for the rest of the epoch."
    dl = learn.dl
    if not hasattr(type(dl), 'get_idxs'):
        return _train_on_later(learn, stages, order, begin)
    base = dl.dl if isinstance(dl, DistributedDL) else dl
    learn.n_iter, alone = (
        len(dl),
        dl.fake_l.num_workers == 0,
    )  # then samples are loaded here, and use this process's random states
    size = world_size() if base is not dl else 1
    same = all(o.world_size == size for o in stages)
    get_idxs, create_batches = base.get_idxs, dl.create_batches

    def rest():
        idxs = list(get_idxs())
        if base is not dl:
            idxs = dl._broadcast(idxs, 0)
        rest = left(idxs, stages, size)
        dl.batches_left = len(rest) // size // (dl.bs or 1)
        if base is dl:
            return [o for o, _ in rest]
        dl.n, dl.n_padded, run = sum(not again for _, again in rest), len(rest), len(rest) // size
        return [o for o, _ in rest[rank() * run : (rank() + 1) * run]]

    def batches(samples):
        if alone:
            begin()
        yield from create_batches(samples)

    after, begun = dl.after_batch, []

    def after_batch(b):
        if not begun:
            begun.append(begin())  # the workers have been started, which drew a number of this process's
        return after(b)

    restore_own(learn, order)
    if not alone:
        dl.after_batch = after_batch
    before = {k: vars(dl)[k] for k in ('get_idxs', 'create_batches') if k in vars(dl)}
    dl.get_idxs, dl.create_batches, dl.batches_left = rest, batches, 0
    try:
        i = None
        for b in dl:
            if i is None:
                i = sum(o.batches for o in stages) if same else max(0, learn.n_iter - dl.batches_left)
            learn.one_batch(i, b)
            i += 1
    finally:
        del dl.get_idxs, dl.create_batches, dl.batches_left
        if not alone:
            dl.after_batch = after
        for k, f in before.items():
            setattr(dl, k, f)


def _train_on_later(learn, stages, order, begin):
    "The same with a loader of torch, whose first batches are loaded and passed over."
    restore_own(learn, order)
    learn.n_iter, over = len(learn.dl), sum(o.batches for o in stages)
    for i, b in enumerate(learn.dl):
        if i >= over:
            learn.one_batch(i, b)
        elif i == over - 1:
            begin()

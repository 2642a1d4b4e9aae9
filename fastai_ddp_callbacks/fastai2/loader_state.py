"fastai 2: the states of one rank from which random numbers and the order of samples follow."

from __future__ import annotations
from collections.abc import Iterator

import torch
from fastai.distributed import DistributedDL
from fastai.learner import Learner

from ..checkpoint.state import to_builtin
from ..training.random_state import nested, random_state, restore_random

__all__ = ['loaders', 'own_state', 'restore_own']


def loaders(
    learn: Learner,
) -> list:
    "Its data loaders, without what divides them among the ranks."
    return [dl.dl if isinstance(dl, DistributedDL) else dl for dl in learn.dls.loaders]


def own_state(
    learn: Learner,
) -> dict:
    "The random states of this rank."
    return dict(
        random_state(),
        loaders=[to_builtin(dl.rng.getstate()) for dl in _with_rng(learn)],
        orders=[torch.tensor(list(dl.items.idxs)) for dl in _reordering(learn)],
        generators=[generator.get_state() for generator in _generators(learn)],
    )


def restore_own(
    learn: Learner,
    state: dict,  # as `own_state` gave it
) -> None:
    "Let the random numbers and the order of samples continue from there."
    restore_random(state)
    for dl, rng in zip(_with_rng(learn), state['loaders']):
        dl.rng.setstate(nested(rng))
    for dl, order in zip(_reordering(learn), state['orders']):
        _reorder(dl, order.tolist())
    for generator, saved in zip(_generators(learn), state.get('generators', ())):
        generator.set_state(saved.cpu())


def _with_rng(learn):
    return [dl for dl in loaders(learn) if hasattr(dl, 'rng')]


def _reordering(learn):
    "Loaders that shuffle their items in place, so that an order comes out of the one before: those of language models."
    # by its name, as to import the class takes seconds
    return [dl for dl in _with_rng(learn) if type(getattr(dl, 'items', None)).__name__ == 'ReindexCollection']


def _reorder(dl, order):
    "In place: the lengths of the texts have the same list."
    idxs = dl.items.idxs
    if list(idxs) == order:
        return
    for i, index in enumerate(order):
        idxs[i] = index
    if hasattr(dl, 'make_chunks'):
        dl.make_chunks()  # where each text begins


def _generators(learn) -> Iterator[torch.Generator]:
    "Those of torch's own loaders, each once."
    seen = set()
    for dl in loaders(learn):
        batch_sampler = getattr(dl, 'batch_sampler', None)
        for owner in (dl, getattr(dl, 'sampler', None), batch_sampler, getattr(batch_sampler, 'sampler', None)):
            generator = getattr(owner, 'generator', None)
            if isinstance(generator, torch.Generator) and id(generator) not in seen:
                seen.add(id(generator))
                yield generator

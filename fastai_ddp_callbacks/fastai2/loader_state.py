"fastai 2: the states of one rank from which random numbers and the order of samples follow."

from __future__ import annotations

import torch
from fastai.distributed import DistributedDL

from ..checkpoint.state import to_builtin
from ..training.random_state import nested, random_state, restore_random

__all__ = ['loaders', 'own_state', 'restore_own']


def loaders(learn) -> list:
    "fastai's data loaders, without what splits them over the ranks."
    return [o.dl if isinstance(o, DistributedDL) else o for o in learn.dls.loaders]


def own_state(learn) -> dict:
    "The random states of this rank."
    return dict(
        random_state(),
        loaders=[to_builtin(o.rng.getstate()) for o in loaders(learn) if hasattr(o, 'rng')],
        orders=[torch.tensor(list(o.items.idxs)) for o in _reordering(learn)],
    )


def _reordering(learn):
    "Loaders that shuffle their items in place, so that an order comes out of the one before: those of language models."
    return [
        o
        for o in loaders(learn)
        if hasattr(o, 'rng') and type(getattr(o, 'items', None)).__name__ == 'ReindexCollection'
    ]  # to import it takes seconds


def restore_own(learn, state) -> None:
    restore_random(state)
    for o, s in zip((o for o in loaders(learn) if hasattr(o, 'rng')), state['loaders']):
        o.rng.setstate(nested(s))
    for o, s in zip(_reordering(learn), state['orders']):
        o.items.idxs = s.tolist()

"The random states of a process, in plain values and tensors."

from __future__ import annotations
import random

import numpy as np, torch

from ..checkpoint.state import to_builtin

__all__ = ['random_state', 'restore_random', 'nested']


def random_state() -> dict:
    "Those of Python, numpy, torch, and of the GPU in use."
    name, keys, *rest = np.random.get_state(legacy=True)
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return dict(
        python=to_builtin(random.getstate()),
        numpy=[name, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        torch=torch.get_rng_state(),
        cuda=cuda,
    )


def restore_random(
    state: dict,  # as `random_state` gave it
) -> None:
    "Let the random numbers continue from there."
    random.setstate(nested(state['python']))
    name, keys, *rest = state['numpy']
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state['torch'].cpu())
    if state['cuda'] and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state['cuda'][0].cpu())


def nested(
    value,  # lists in lists
):  # tuples in tuples, which `random.setstate` needs
    "Lists as tuples, at every depth."
    return tuple(map(nested, value)) if isinstance(value, (list, tuple)) else value

"What is in a checkpoint: the states of a model and an optimizer, in plain types and under plain names."

from __future__ import annotations
import re

import numpy as np, torch, xxhash

from ..errors import MismatchedCheckpointError

__all__ = ['model_state', 'load_model_state']


def to_builtin(
    o,  # a state of an optimizer, say
):  # the same in types that torch loads safely
    "numpy's numbers as Python's; lists and tensors of any class as lists and tensors."
    if isinstance(o, dict):
        return {k: to_builtin(v) for k, v in o.items()}
    if isinstance(o, torch.Tensor):
        return o.detach() if type(o).__module__.startswith('torch') else o.detach().as_subclass(torch.Tensor)
    if isinstance(o, (np.generic, np.ndarray)):
        return o.tolist()
    if isinstance(o, tuple):
        return tuple(map(to_builtin, o))
    return o if isinstance(o, (str, bytes)) or not hasattr(o, '__iter__') else list(map(to_builtin, o))


def tensors_of(o) -> list:
    "The tensors in dicts and lists, in order."
    if isinstance(o, torch.Tensor):
        return [o]
    return [
        t
        for v in (o.values() if isinstance(o, dict) else o if isinstance(o, (list, tuple)) else ())
        for t in tensors_of(v)
    ]


def tree_map(o, f, kinds=torch.Tensor):
    "`o` with `f` of each tensor (or of what else is of one of `kinds`) in its dicts and lists."
    if isinstance(o, kinds):
        return f(o)
    if isinstance(o, dict):
        return {k: tree_map(v, f, kinds) for k, v in o.items()}
    return type(o)(tree_map(v, f, kinds) for v in o) if isinstance(o, (list, tuple)) else o


def size_of(o) -> int:
    "How many bytes the tensors in `o` have, about."
    return sum(t.nbytes for t in tensors_of(o) if t.layout == torch.strided)


def detached_copy(
    o,  # what `read_checkpoint` gave, or a part of it
    device='cpu',  # where to put it
):  # the same with tensors of its own, which do not need the file
    "Copy tensors out of the mapped file."
    return tree_map(o, lambda t: t.to(device, copy=True))


def unwrap_model(model):
    "The model inside wrappers for distribution and compilation."
    while True:
        inner = getattr(model, '_orig_mod', None) or (model.module if isinstance(model, _WRAPPERS) else None)
        if inner is None:
            return model
        model = inner


_WRAPPERS = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)


def _plain_name(key):
    return re.sub(r'(^|(?<=\.))_orig_mod\.', '', re.sub(r'^((module|_orig_mod)\.)+', '', key))


def model_state(model) -> dict:
    "The state dict of a model, wrapped or not, with the names that the bare model has."
    return {
        re.sub(r'(^|(?<=\.))_orig_mod\.', '', k): to_builtin(v) if isinstance(v, torch.Tensor) else v
        for k, v in unwrap_model(model).state_dict().items()
    }


def load_model_state(
    model,  # wrapped or not
    state: dict,  # a state dict, saved from a wrapped or a bare model
    path='',  # the file that it comes from, for messages
) -> None:
    "Copy `state` into `model`; `MismatchedCheckpointError`, with the model unchanged, if names or shapes differ."
    unwrap_model(model).load_state_dict(matched_state(model, state, path))


def matched_state(model, state, path=''):
    "`state` under the names that the bare model has. `MismatchedCheckpointError` if names or shapes differ."
    own = unwrap_model(model).state_dict()
    if not isinstance(state, dict) or not all(isinstance(k, str) for k in state):
        raise MismatchedCheckpointError(
            f'{path or "The checkpoint"} does not fit this model: it does not hold tensors by name.', path
        )
    if state.keys() != own.keys():
        names = {_plain_name(k): k for k in own}
        state = {names.get(_plain_name(k), k): v for k, v in state.items()}

    def some(keys):
        return ', '.join(list(keys)[:3]) + (f' and {len(keys) - 3} more' if len(keys) > 3 else '')

    missing, extra = [k for k in own if k not in state], [k for k in state if k not in own]
    other = [
        f'{k} ({_told(state[k])} in the file, {_told(v)} in the model)'
        for k, v in own.items()
        if k in state and _kind(v) != _kind(state[k])
    ]
    wrong = '; '.join(
        f'{what} {some(keys)}'
        for what, keys in (('missing:', missing), ('not in the model:', extra), ('of another shape or kind:', other))
        if keys
    )
    if wrong:
        raise MismatchedCheckpointError(f'{path or "The checkpoint"} does not fit this model: {wrong}.', path)
    return state


def _kind(o):
    "What must be equal for `copy_` to do what one expects."
    if isinstance(o, torch.Tensor):
        return tuple(o.shape), o.layout, o.is_complex(), o.is_quantized, o.is_meta
    stands_for_one = isinstance(getattr(o, 'dtype', None), torch.dtype)
    return (tuple(o.shape), torch.strided, o.dtype.is_complex, False, False) if stands_for_one else type(o)


def _told(o):
    return f'{tuple(o.shape)}' if hasattr(o, 'shape') else type(o).__name__


def digest(
    model,  # wrapped or not
) -> int:  # of 64 bits
    "A number that differs between models whose weights or buffers differ in a bit. Needs memory for one tensor at a time, if not on the CPU."
    seen = xxhash.xxh3_64()
    for v in model_state(model).values():
        if isinstance(v, torch.Tensor):
            seen.update(_bytes(v.detach().cpu()).numpy())
    return seen.intdigest() - (1 << 63)


def _bytes(t):
    return (t if t.layout == torch.strided else t.to_dense()).contiguous().reshape(-1).view(torch.uint8)

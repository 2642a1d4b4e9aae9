"Which names a model's tensors have without its wrappers, and whether a saved state fits them."

from __future__ import annotations
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

__all__ = ['unwrap_model', 'bare_names', 'match_keys', 'mismatches', 'Mismatch', 'loads_by_itself']

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


# -- names


def _inside(module):
    "The attribute under which a wrapper has its model; None for what is no wrapper."
    if '_orig_mod' in module._modules:
        return '_orig_mod'  # by torch.compile
    return 'module' if isinstance(module, _WRAPPERS) else None


def unwrap_model(
    model: nn.Module,  # wrapped or not
) -> nn.Module:
    "The model inside wrappers for distribution and compilation."
    while (inside := _inside(model)) is not None:
        model = getattr(model, inside)
    return model


def bare_names(
    model: nn.Module,  # of which parts may be wrapped
) -> Callable[[str], str]:
    "A function from a key of the model's state dict to the key that it would have without wrappers."
    wrapped = {
        '.'.join(filter(None, [name, inside])) + '.'
        for name, module in model.named_modules(remove_duplicate=False)
        if (inside := _inside(module))
    }

    def bare(key):
        parts = key.split('.')
        kept = [part for i, part in enumerate(parts) if '.'.join(parts[: i + 1]) + '.' not in wrapped]
        return '.'.join(kept)

    return bare if wrapped else str


def match_keys(
    model: nn.Module,  # not wrapped as a whole
    state: dict[str, object],  # saved from it with any wrappers
) -> dict[str, object]:
    "`state` under the keys of the model's own state dict, as far as they can be told."
    own = model.state_dict()
    if state.keys() == own.keys():
        return state
    bare = bare_names(model)
    known = {bare(k): k for k in own}
    loose = _unique({k: _without_wrappers(k) for k in own})
    theirs = _unique({k: _without_wrappers(k) for k in state})
    loosely = {k: loose[name] for name, k in theirs.items() if name in loose}
    return {known.get(k, loosely.get(k, k)): v for k, v in state.items()}


def _unique(names):
    "From name to key, for names that only one key has."
    count = Counter(names.values())
    return {name: key for key, name in names.items() if count[name] == 1}


def _without_wrappers(key):
    "Without what may come from wrappers. A module of the user's may be called `module` too, hence `_unique`."
    return '.'.join(part for part in key.split('.') if part not in ('module', '_orig_mod'))


# -- shapes and kinds


class Mismatch(NamedTuple):
    "One key by which a state does not fit a model."

    what: str  # 'missing', 'not in the model' or 'of another shape or kind'
    key: str
    text: str  # for a message
    only_shape: bool = False  # whether the two are tensors that differ in their shapes only


def mismatches(
    model: nn.Module,  # not wrapped as a whole
    state: dict[str, object],  # under the keys of the model
) -> list[Mismatch]:
    "Where a state does not fit a model, as far as keys, shapes and kinds tell."
    own = model.state_dict()
    found = [Mismatch('missing', k, k) for k in own if k not in state]
    found += [Mismatch('not in the model', k, k) for k in state if k not in own]
    for key, value in own.items():
        if key in state and _kind(value) != _kind(state[key]):
            text = f'{key} ({_shape(state[key])} in the file, {_shape(value)} in the model)'
            found.append(Mismatch('of another shape or kind', key, text, _differ_in_shape(value, state[key])))
    return found


def _kind(value):
    "What must be equal for `copy_` to do what one expects: the shape first."
    if isinstance(value, torch.Tensor):
        shape = None if is_lazy(value) else tuple(value.shape)
        return shape, value.layout, value.is_complex(), value.is_quantized, value.is_meta
    stands_for_one = isinstance(getattr(value, 'dtype', None), torch.dtype)
    if stands_for_one:
        return tuple(value.shape), torch.strided, value.dtype.is_complex, False, False
    return type(value)


def _differ_in_shape(a, b):
    a, b = _kind(a), _kind(b)
    return isinstance(a, tuple) and isinstance(b, tuple) and a[1:] == b[1:]


def _shape(value):
    if isinstance(value, torch.Tensor) and is_lazy(value):
        return 'no shape yet'
    return str(tuple(value.shape)) if hasattr(value, 'shape') else type(value).__name__


def loads_by_itself(
    model: nn.Module,  # not wrapped as a whole
    mismatch: Mismatch,
) -> bool:
    "Whether the module that has this key may take it nevertheless, as it has a way of its own to load its state."
    if mismatch.what == 'of another shape or kind' and not mismatch.only_shape:
        return False
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return True
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = f'{name}.' if name else ''
        if mismatch.key.startswith(prefix) and _has_own_loading(module, mismatch, prefix):
            return True
    return False


def _has_own_loading(module, mismatch, prefix):
    if module._load_state_dict_pre_hooks:
        return True
    load = type(module)._load_from_state_dict
    if load is _NormBase._load_from_state_dict:  # which fills in what old files do not have
        return mismatch.what == 'missing' and mismatch.key == f'{prefix}num_batches_tracked'
    return load is not nn.Module._load_from_state_dict

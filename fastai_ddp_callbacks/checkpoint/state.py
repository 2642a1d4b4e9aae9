"What is in a checkpoint: the states of a model and an optimizer, in plain types and under plain names."

from __future__ import annotations
from collections.abc import Callable, Iterator

import numpy as np, torch, xxhash
from torch.nn.parameter import is_lazy

from ..errors import CheckpointError, MismatchedCheckpointError
from .matching import bare_names, loads_by_itself, match_keys, mismatches, unwrap_model

__all__ = ['model_state', 'load_model_state']


# -- trees of dicts and lists


def to_builtin(
    value,  # a state of an optimizer, for instance
):  # the same in types that torch loads safely
    "numpy's numbers as Python's; lists and tensors of any class as lists and tensors."
    if isinstance(value, dict):
        return {k: to_builtin(v) for k, v in value.items()}
    if isinstance(value, torch.Tensor):
        return _to_builtin_tensor(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, tuple):
        return tuple(map(to_builtin, value))
    return value if isinstance(value, (str, bytes)) or not hasattr(value, '__iter__') else list(map(to_builtin, value))


def _to_builtin_tensor(t):
    if is_lazy(t):
        return t  # there are no numbers yet, and torch saves it as it is
    return t.detach() if type(t).__module__.startswith('torch') else t.detach().as_subclass(torch.Tensor)


def tensors_of(
    tree,  # dicts and lists
) -> list[torch.Tensor]:
    "The tensors in dicts and lists, in order."
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [t for part in tree for t in tensors_of(part)]


def tree_map(
    tree,  # dicts and lists
    function: Callable,  # called with each leaf
    kinds=torch.Tensor,  # class or classes of the leaves
):
    "`tree` with `function` of each tensor (or of what else is of one of `kinds`) in its dicts and lists."
    if isinstance(tree, kinds):
        return function(tree)
    if isinstance(tree, dict):
        return {k: tree_map(v, function, kinds) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(tree_map(v, function, kinds) for v in tree)
    return tree


def size_of(
    tree,  # dicts and lists
) -> int:
    "How many bytes the tensors in `tree` have, about."
    return sum(t.nbytes for t in tensors_of(tree) if t.layout == torch.strided and not is_lazy(t))


def detached_copy(
    tree,  # what `read_checkpoint` returned, or a part of it
    device='cpu',  # where to put it
):  # the same with tensors of its own, which do not need the file
    "Copy tensors out of the mapped file."
    return tree_map(tree, lambda t: t if is_lazy(t) else t.to(device, copy=True))


# -- models


def model_state(
    model: torch.nn.Module,  # wrapped or not
) -> dict:
    "The state dict of a model, wrapped or not as a whole or in part, with the names that the bare model has."
    model = unwrap_model(model)
    names = bare_names(model)
    return {names(k): to_builtin(v) if isinstance(v, torch.Tensor) else v for k, v in model.state_dict().items()}


def load_model_state(
    model: torch.nn.Module,  # wrapped or not
    state: dict,  # a state dict, saved from a wrapped or a bare model
    path='',  # the file that it comes from, for messages
) -> None:
    "Copy `state` into `model`; `MismatchedCheckpointError`, with the model unchanged, if it does not fit."
    bare = unwrap_model(model)
    matched = matched_state(model, state, path)
    # a module that loads by itself may refuse, after others have loaded
    before = detached_copy(bare.state_dict()) if mismatches(bare, matched) else None
    try:
        bare.load_state_dict(matched)
    except (RuntimeError, LookupError, AttributeError, TypeError, ValueError) as e:
        if before is not None:
            bare.load_state_dict({k: v for k, v in before.items() if not _is_lazy_tensor(v)}, strict=False)
        raise _mismatch(path, ' '.join(str(e).split())[:300].rstrip('.')) from e


def _is_lazy_tensor(value):
    return isinstance(value, torch.Tensor) and is_lazy(value)


def matched_state(
    model: torch.nn.Module,  # wrapped or not
    state: dict,  # as for `load_model_state`
    path='',  # the file that it comes from, for messages
) -> dict:  # `state` under the names that the unwrapped model has
    """`MismatchedCheckpointError` if names or shapes differ. A module with a way of its own to load its state, as
    lazy and quantized ones, decides by itself what it takes, when it loads."""
    bare = unwrap_model(model)
    if not isinstance(state, dict) or not all(isinstance(k, str) for k in state):
        raise _mismatch(path, 'it does not hold tensors by name')
    state = match_keys(bare, state)
    wrong = [mismatch for mismatch in mismatches(bare, state) if not loads_by_itself(bare, mismatch)]
    if wrong:
        raise _mismatch(path, '; '.join(_summaries(wrong)))
    return state


def _mismatch(path, reason):
    return MismatchedCheckpointError(f'{path or "The checkpoint"} does not fit this model: {reason}.', path)


def _summaries(wrong) -> Iterator[str]:
    for what in 'missing', 'not in the model', 'of another shape or kind':
        texts = [mismatch.text for mismatch in wrong if mismatch.what == what]
        if texts:
            more = f' and {len(texts) - 3} more' if len(texts) > 3 else ''
            yield f'{what}: {", ".join(texts[:3])}{more}'


def digest(
    model: torch.nn.Module,  # wrapped or not
) -> int:  # of 64 bits
    """A number that differs between models whose weights or buffers differ in a bit. Needs memory for one tensor at a
    time, if not on the CPU."""
    seen = xxhash.xxh3_64()
    for value in model_state(model).values():
        if isinstance(value, torch.Tensor) and not is_lazy(value):
            seen.update(_bytes(value.detach().cpu()).numpy())
    return seen.intdigest() - (1 << 63)


def _bytes(t):
    return (t if t.layout == torch.strided else t.to_dense()).contiguous().reshape(-1).view(torch.uint8)


# -- models that are sharded over ranks


def is_sharded(value) -> bool:
    "Whether it is a tensor of which each rank holds a part."
    return isinstance(value, torch.Tensor) and any(
        cls.__name__ in ('DTensor', 'ShardedTensor') and cls.__module__.startswith('torch.distributed')
        for cls in type(value).__mro__
    )


def sharded_message(value) -> str:
    return (
        f'is sharded over ranks (a {type(value).__name__}), so that no rank holds it whole. '
        'Save such a model with torch.distributed.checkpoint.'
    )


def refuse_sharded(
    model: torch.nn.Module,  # wrapped or not
    who: str,  # the callback that would save it, for the message
) -> None:
    """`CheckpointError` for a model that no rank holds whole (FSDP, tensor parallel). To be called before the first
    batch."""
    for name, module in model.named_modules():
        if type(module).__name__ == 'FullyShardedDataParallel':
            raise CheckpointError(f'{who}: {(name or "all")!r} of the model {sharded_message(module)}')
    for kind in model.named_parameters(), model.named_buffers():
        for name, value in kind:
            if is_sharded(value):
                raise CheckpointError(f'{who}: {name!r} of the model {sharded_message(value)}')

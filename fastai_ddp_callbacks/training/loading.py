"One checkpoint into the model of every rank, also of those that cannot see the file."

from __future__ import annotations
import os, time
from contextlib import suppress
from typing import NamedTuple

import torch
from torch.nn.parameter import is_lazy

from ..distributed.progress import with_progress
from ..distributed.tensors import broadcast_tensors
from ..checkpoint.file import read_checkpoint, read_metadata
from ..distributed import is_main_process, run_on_main, all_or_none
from ..distributed.call_site import doing
from ..errors import CheckpointError, CorruptCheckpointError, UnequalWeightsError
from ..checkpoint.state import (
    unwrap_model,
    digest,
    matched_state,
    load_model_state,
    tree_map,
    detached_copy,
    tensors_of,
)

__all__ = ['load_everywhere']

_LAG = 2.0  # seconds that a shared disk may take to show a new file; after that, to send the weights is quicker


class _Sent(NamedTuple):
    "Stands for a tensor that is sent by itself."

    shape: tuple
    dtype: torch.dtype


@doing('load')
def load_everywhere(
    model,  # wrapped or not
    path: str,  # the checkpoint, on a disk that rank 0 sees
    checksum: str | None,  # of the one file that is meant; None for a file that has none, of stock fastai
    also=None,  # called with what else the file holds, as {'opt':...}, if it holds anything else
    fits=None,  # called with the same before anything is changed, to refuse it
) -> None:
    """Every rank reads and verifies the file, if all of them see it; else rank 0 does, and sends what is in it.

    Two rendezvous, at both of which all ranks are: nobody reads before rank 0 has written, nobody goes on, perhaps to
    write or to delete, before all have read. What goes wrong on one rank is raised on all (`CheckpointError`, on the
    others `RankFailedError`), and the model is then unchanged, unless a rank died while weights were sent.
    `UnequalWeightsError` if the ranks do not hold the same weights at the end."""
    with all_or_none(f'before loading {path}') as ranks:  # nobody changes its model before all have found that they can
        state = _fitting(model, _read(path, checksum), path, fits) if _sees(path, checksum) else None
        ranks.value = state is not None
    if not all(ranks.values):
        state = _from_main(model, path, checksum, fits)
    with all_or_none(f'load {path}') as ranks:
        _load(model, state, path, also)
        ranks.value = digest(model)
    if len(set(ranks.values)) > 1:
        raise UnequalWeightsError(
            f'The ranks have loaded {path}, but do not hold the same weights: '
            + '; '.join(f'rank {r}: {o & (1 << 64) - 1:016x}' for r, o in enumerate(ranks.values))
            + '. Does the model change what it loads, by a hook or a state of its own?',
            digests=ranks.values,
        )


def _read(path, checksum):
    name = os.path.basename(path)
    return with_progress(f'verifying {name}', read_checkpoint, path, checksum=checksum)[0]


def _load(model, state, path, also):
    weights, rest = _parted(state)
    load_model_state(model, weights, path)
    if rest and also is not None:
        also(detached_copy(rest))


def _fitting(model, state, path, fits):
    weights, rest = _parted(state)
    matched_state(model, weights, path)
    if rest and fits:
        fits(rest)
    return state


def _parted(state):
    "The weights, and what else there is."
    if not isinstance(state, dict) or not isinstance(state.get('model'), dict):
        return state, {}
    return state['model'], {k: v for k, v in state.items() if k != 'model'}


def _sees(path, checksum):
    "Whether this rank finds the very file, on a disk that may lag behind. A damaged one is refused when it is read."
    end = time.monotonic() + (0 if is_main_process() else _LAG)
    while True:
        try:
            meta = read_metadata(path)
            if (meta and meta['checksum']) == checksum:
                return True
        except CorruptCheckpointError:
            return True
        except CheckpointError:
            pass  # not there, or not for this rank
        if time.monotonic() > end:
            return False
        with suppress(OSError):
            os.listdir(os.path.dirname(path))  # makes a network disk look again
        time.sleep(0.02)


def _from_main(model, path, checksum, fits):
    "What rank 0 reads, on every rank: in the model's own tensors where they are of the same kind."
    kept = []

    def read():
        kept.append(_read(path, checksum))
        return tree_map(kept[0], lambda t: _Sent(tuple(t.shape), t.dtype) if t.layout == torch.strided else t)

    outline = run_on_main(read)
    with all_or_none(f'compare {path} to the model'):
        weights, rest = _parted(outline)
        weights, targets = matched_state(model, weights, path), unwrap_model(model).state_dict()
        if rest and fits:
            fits(rest)

        def place(k, o):
            return targets[k] if isinstance(o, _Sent) and _holds(targets.get(k), o) else _empty(o)

        weights = {k: place(k, o) for k, o in weights.items()}
        state = kept[0] if kept else {'model': weights, **tree_map(rest, _empty, _Sent)} if rest else weights
    broadcast_tensors([o for o in tensors_of(state) if o.layout == torch.strided], name=f'weights of {path}')
    return state


def _holds(target, sent):
    "Whether a tensor of the model can take what is sent; one that loads by itself may have another shape, or none yet."
    if not isinstance(target, torch.Tensor) or is_lazy(target):
        return False
    return tuple(target.shape) == sent.shape and target.dtype == sent.dtype and target.is_contiguous()


def _empty(o):
    return torch.empty(o.shape, dtype=o.dtype) if isinstance(o, _Sent) else o

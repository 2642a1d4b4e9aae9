"fastai 2: what rank 0 saves of a learner at one moment, and whether it can be saved."

from __future__ import annotations
import math
from importlib.metadata import version
from pathlib import Path

from fastai.learner import Learner
from torch import nn

from ..checkpoint.safety import refuse_unsafe
from ..checkpoint.state import model_state, refuse_sharded, size_of, to_builtin
from ..distributed import world_size
from ..training.saving import Snapshot
from ..training.tracking import Verdict

__all__ = ['checked_size', 'snapshot']

_MOST_METRICS, _LONGEST_NAME = 100, 200  # the metadata must fit in 65 kB


def checked_size(
    model: nn.Module,  # wrapped or not
    path: Path,  # where it would be saved, for messages
    who: str,  # the callback, for messages
    with_opt: bool,  # whether the optimizer's state is saved too
) -> int:  # bytes of one checkpoint, about
    "`CheckpointError` for a model that is sharded over ranks, or whose state would be unsafe to load."
    refuse_sharded(model, who)
    state = model_state(model)
    refuse_unsafe(state, path)
    return size_of(state) * (3 if with_opt else 1)


def snapshot(
    learn: Learner,  # in a fit
    columns: tuple[list[str], list[str]],  # names of what the Recorder records in training and in validation
    row: dict,  # this rank's values of the last epoch, by column
    verdict: Verdict,  # on the epoch
    monitor: str,  # the column that the verdict is about
    with_opt: bool,  # whether to save the optimizer's state too
) -> Snapshot:
    "The state of the model, what a file's name may say, and what the file says of itself."
    state = model_state(learn.model)
    if with_opt and learn.opt is not None:
        state = {'model': state, 'opt': to_builtin(learn.opt.state_dict())}
    values = {**dict.fromkeys(sum(columns, [])), **{name: _plain(value) for name, value in row.items()}}
    if verdict.value is not None:
        values[monitor] = verdict.value
    numbers = {k: v for k, v in values.items() if isinstance(v, float) and math.isfinite(v) and len(k) < _LONGEST_NAME}
    meta = dict(
        epoch=learn.epoch,
        iteration=learn.train_iter,
        monitor=monitor,
        value=verdict.value,
        world_size=world_size(),
        fastai=version('fastai'),
        metrics=dict(list(numbers.items())[:_MOST_METRICS]),
    )
    return Snapshot(state, {**values, 'epoch': learn.epoch, 'iteration': learn.train_iter}, meta)


def _plain(value):
    "A metric as a number or text; None for what is neither."
    if getattr(value, 'ndim', None) == 0:
        value = value.item()
    if isinstance(value, str):
        return value
    return float(value) if isinstance(value, (bool, int, float)) else None

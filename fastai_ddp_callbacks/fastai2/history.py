"fastai 2: what the Recorder, the progress table and `CSVLogger` have of a fit, saved and shown again."

from __future__ import annotations
import math
import os
from typing import Any

import numpy as np, torch
from fastai.basics import L
from fastai.callback.progress import CSVLogger
from fastai.learner import Learner

from ..checkpoint.state import to_builtin
from ..training.resume_files import callback_keys

__all__ = ['recorded', 'loadable', 'recorder_state', 'restore_recorder', 'CSVTables', 'show_rows']


# -- values of metrics

_ARRAY = 'numpy array'  # the key under which an array is saved, as a tensor


def recorded(
    value: Any,  # of a metric
) -> Any:
    "A value as it is saved: numbers, texts, tensors, lists and dicts of these; NaN for what is none of them."
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.item() if math.prod(value.shape) == 1 else _recorded_array(value)
    if isinstance(value, dict):
        return {key: recorded(v) for key, v in value.items() if isinstance(key, (str, int))}
    if isinstance(value, (list, tuple)):
        return [recorded(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else math.nan


def _recorded_array(value):
    if isinstance(value, torch.Tensor):
        return to_builtin(value).cpu().clone()
    if value.dtype.kind in 'biuf':
        return {_ARRAY: torch.from_numpy(np.ascontiguousarray(value))}
    return math.nan


def loadable(
    value: Any,  # as `recorded` gave it
) -> Any:
    "The value again."
    if isinstance(value, dict):
        return value[_ARRAY].numpy() if value.keys() == {_ARRAY} else {k: loadable(v) for k, v in value.items()}
    return [loadable(v) for v in value] if isinstance(value, list) else value


# -- the Recorder


def recorder_state(
    learn: Learner,  # in a fit
) -> dict:
    "The Recorder's history."
    recorder = learn.recorder
    smooth = recorder.smooth_loss
    return dict(
        values=[[recorded(value) for value in row] for row in recorder.values],
        lrs=torch.tensor([float(lr) for lr in recorder.lrs], dtype=torch.float64),
        iters=list(recorder.iters),
        losses=torch.stack([to_builtin(loss).cpu() for loss in recorder.losses]) if recorder.losses else None,
        smooth_loss=to_builtin(smooth.val).cpu(),
        count=smooth.count,
    )


def restore_recorder(
    learn: Learner,  # in a fit
    state: dict,  # as `recorder_state` gave it
) -> None:
    "Give the Recorder its history."
    recorder = learn.recorder
    recorder.values = [L(loadable(list(row))) for row in state['values']]
    recorder.lrs = state['lrs'].tolist()
    recorder.iters = list(state['iters'])
    recorder.losses = list(state['losses']) if state['losses'] is not None else []
    smooth = recorder.smooth_loss
    smooth.val = state['smooth_loss'].to(smooth.val.device)
    smooth.count = state['count']
    if recorder.losses:
        learn.smooth_loss = recorder.losses[-1]
    if recorder.values:
        learn.final_record = recorder.values[-1].copy()


# -- tables


class CSVTables:
    "Where in the file of each `CSVLogger` the rows of this fit begin, so that a resumed fit does not write them twice."

    def __init__(
        self,
        learn: Learner,  # in a fit, whose loggers have written the names of the columns
    ):
        self.files = {key: file for key, cb in callback_keys(learn.cbs) if (file := _open_file(cb))}
        self.starts = {key: _position(file) for key, file in self.files.items()}
        self.header = ','.join(learn.recorder.metric_names) + '\n'

    def rewind(
        self,
        starts: dict[str, int],  # of the interrupted fit, by callback
    ) -> None:
        "Delete what the interrupted fit has written after its header, and the header that was written just now."
        for key, file in self.files.items():
            start = starts.get(key)
            if start is not None and self._is_own(file, start):
                file.truncate(start)
                file.seek(0, os.SEEK_END)
                self.starts[key] = start

    def _is_own(self, file, start):
        "Whether what comes after `start` is of the interrupted fit: others may have appended to the file since."
        with open(file.name, newline='') as written:
            text = written.read().replace('\r\n', '\n')
        before, after = text[:start], text[start:]
        return before.endswith(self.header) and after.count(self.header) == 1 and after.endswith(self.header)


def _open_file(cb):
    file = vars(cb).get('file')
    return file if isinstance(cb, CSVLogger) and cb.append and file is not None and not file.closed else None


def _position(file):
    file.flush()
    return os.path.getsize(file.name)


def show_rows(
    learn: Learner,  # in a fit
    rows: list,  # of the epochs before, as they were shown
) -> None:
    "Fill the table of epochs with what the interrupted fit had in it."
    bar = getattr(getattr(learn, 'progress', None), 'mbar', None)
    if bar:
        bar.update(0)  # begins the table, which only epoch 0 would do
    for row in rows:
        learn.logger(loadable(list(row)))

"fastai 2: the tracker family, with one value and one decision for all ranks."
from __future__ import annotations
import math

import numpy as np
from fastai.callback.tracker import TrackerCallback

from .context import hide_stray_environment, restore_environment
from .distributed import REDUCTIONS, agree, reports_failure

__all__ = ['DDPTrackerCallback']


class DDPTrackerCallback(TrackerCallback):
    "A `TrackerCallback` that follows one value, agreed upon by all ranks, so that they all decide alike."
    name = 'tracker'

    def __init__(self,
        monitor='valid_loss', # value (usually loss or metric) being monitored.
        comp=None, # numpy comparison operator; np.less if monitor is loss, np.greater if monitor is metric.
        min_delta=0., # minimum delta between the last monitor value and the best monitor value.
        reset_on_fit=True, # before model fitting, reset value being monitored to -infinity (if monitor is metric) or +infinity (if monitor is loss).
        reduce='mean' # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'.
    ):
        super().__init__(monitor=monitor, comp=comp, min_delta=min_delta, reset_on_fit=reset_on_fit)
        self._reduce_by(reduce)

    def _reduce_by(self, reduce):
        if reduce not in REDUCTIONS: raise ValueError(f'{type(self).__name__}(reduce={reduce!r}): choose one of {", ".join(map(repr, REDUCTIONS))}.')
        self.reduce,self.new_best,self._training = reduce,False,False

    def before_fit(self):
        "Take no part in `lr_find` and `get_preds`."
        self.run = not hasattr(self, 'lr_finder') and not hasattr(self, 'gather_preds')
        self._training = False # `validate` gets as far as here too, and no further

    def before_train(self):
        "Prepare the monitored value, once per fit."
        if not self._training: self._start()
        self._training = True

    def _start(self):
        hide_stray_environment()
        with reports_failure(f'{self.name}.before_train'):
            names = self._columns()
            if self.monitor not in names:
                raise ValueError(f'{type(self).__name__}(monitor={self.monitor!r}): no such column. The Recorder has {", ".join(names)}.')
        self.idx,self.new_best = names.index(self.monitor),False
        if self.reset_on_fit or self.best is None: self._forget()

    def _forget(self): self.best = float('inf') if self.comp == np.less else -float('inf')

    def _columns(self):
        "The names of what the Recorder records in this epoch: a cancelled part has no columns."
        names = list(self.recorder.metric_names[1:len(self.recorder.metric_names)-bool(self.recorder.add_time)])
        n_train = 1 + len(self.recorder.metrics)*bool(self.recorder.train_metrics)
        train = [] if getattr(self.recorder, 'cancel_train', False) else names[:n_train]
        return train + ([] if getattr(self.recorder, 'cancel_valid', False) else names[n_train:])

    def _own_value(self):
        "This rank's value of the epoch, None if it has none."
        values = self.recorder.values[-1] if self.recorder.values else []
        return dict(zip(self._columns(), values)).get(self.monitor)

    def _agreed_value(self):
        "The value of all ranks. Trackers of the same column share one collective."
        record = self.recorder.values[-1] if self.recorder.values else None
        epoch,agreed = getattr(self.learn, '_agreed_values', (None, {}))
        if epoch is not record or record is None: self.learn._agreed_values = record,(agreed := {})
        key = self.monitor,self.reduce
        if key not in agreed: agreed[key] = agree(self._own_value(), self.reduce, f'{self.monitor} of epoch {self.epoch}')
        return agreed[key]

    def after_epoch(self):
        "Agree on the last value and compare it to the best up to now."
        if self._training: self._compare(self._agreed_value())

    def after_fit(self):
        restore_environment()
        self._training = False

    def _compare(self, val):
        # nothing compares to NaN, but `not nan <= best` is true for a comparison that a user may have written so
        self.new_best = val is not None and math.isfinite(val) and bool(self.comp(val - self.min_delta, self.best))
        if self.new_best: self.best = val

"fastai 2: the tracker family, with one value and one decision for all ranks."

from __future__ import annotations
import math
from collections.abc import Callable

import numpy as np
from fastai.callback.core import CancelFitException
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, TrackerCallback

from .. import timeline  # noqa: F401 (gives it to Learner)
from ..distributed import agree, propagate_failure, print_on_main
from ..training.process_group import hide_stray_environment, restore_environment
from ..distributed.reductions import NUMERIC
from .fit import Fit, FitCallback, running_fit

__all__ = ['DDPTrackerCallback', 'DDPEarlyStoppingCallback', 'DDPReduceLROnPlateau']

_HIGHER_IS_BETTER = (
    'acc',
    'precision',
    'recall',
    'f1',
    'fbeta',
    'f_beta',
    'auc',
    'dice',
    'jaccard',
    'iou',
    'kappa',
    'matthews',
    'corr',
    'r2',
    'bleu',
    'score',
    'map',
    'top_k',
    'variance',
)


class DDPTrackerCallback(FitCallback, TrackerCallback):
    """A `TrackerCallback` that follows one value, agreed upon by all ranks, so that they all decide alike.

    An epoch without a value on any rank (skipped, cancelled, not validated) decides nothing. NaN and infinity are never
    best. `ValueError` on every rank, before the first batch, if the Recorder has no column `monitor`."""

    name, _resumed = 'tracker', None

    def __init__(
        self,
        monitor: str = 'valid_loss',  # value (usually loss or metric) being monitored.
        comp: Callable
        | None = None,  # numpy comparison operator; np.less if monitor is loss, np.greater if monitor is metric.
        min_delta: float = 0.0,  # minimum delta between the last monitor value and the best monitor value.
        reset_on_fit: bool = True,  # before model fitting, reset value being monitored to -infinity (if monitor is metric) or +infinity (if monitor is loss).
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'.
        **kwargs,
    ):
        if reduce not in NUMERIC:
            raise ValueError(
                f'{type(self).__name__}(reduce={reduce!r}): choose one of {", ".join(map(repr, NUMERIC))}.'
            )
        super().__init__(monitor=monitor, comp=comp, min_delta=min_delta, reset_on_fit=reset_on_fit, **kwargs)
        if self.comp is not np.less and self._lower_is_better():
            self.min_delta *= -1  # stock knows of `np.less` only
        self.reduce, self.new_best = reduce, False
        self._guessed = (
            comp is None
            and 'loss' not in monitor
            and 'error' not in monitor
            and not any(o in monitor.lower() for o in _HIGHER_IS_BETTER)
        )

    def before_fit(self):
        "All that stock does here is done in `begin`."

    def begin(self, fit: Fit) -> None:
        "Check the monitored column, and reset or restore the best value."
        hide_stray_environment()
        fit.callback(restore_environment)
        resumed, self._resumed = self._resumed, None
        self._start(resumed)

    def _start(self, resumed):
        names = sum(self._columns(), [])
        with propagate_failure(f'{self.name}.begin'):
            if self.monitor not in names:
                raise ValueError(
                    f'{type(self).__name__}(monitor={self.monitor!r}): no such column. The Recorder has {", ".join(names)}.'
                )
        if self._guessed:
            print_on_main(
                f'{type(self).__name__}: higher {self.monitor} is taken to be better. Pass comp=np.less if lower is, comp=np.greater '
                'to say so.',
                warn=True,
            )
        self.idx, self.new_best, self._guessed = names.index(self.monitor), False, False
        if resumed or self.reset_on_fit or self.best is None:
            self._forget()
        if resumed:
            self._resume(resumed)

    def state_dict(self) -> dict:
        "What a fit that is interrupted needs to go on: plain values."
        return dict(monitor=self.monitor, best=None if self.best is None else float(self.best))

    def load_state_dict(
        self,
        state: dict,  # as `state_dict` gave it, in a fit that was interrupted; with `finished=True` in one that had come to its end
    ):
        "Go on from there in the fit that begins. `ValueError` if another column was followed."
        if state['monitor'] != self.monitor:
            raise ValueError(
                f"{type(self).__name__}(monitor={self.monitor!r}): the fit to go on with followed {state['monitor']!r}."
            )
        self._resumed, self.best = None if state.get('finished') else state, state['best']

    def _resume(self, state):
        self.best = state['best']

    def _lower_is_better(self):
        return bool(self.comp(0.0, 1.0))

    def _worst(self):
        return math.inf if self._lower_is_better() else -math.inf

    def _forget(self):
        self.best = self._worst()

    def _columns(self):
        "The names of what the Recorder records in training and in validation."
        r = self.recorder
        names, n_train = (
            list(r.metric_names[1 : len(r.metric_names) - bool(r.add_time)]),
            1 + len(r.metrics) * bool(r.train_metrics),
        )
        return names[:n_train], names[n_train:]

    def _own_values(self):
        "This rank's values of the epoch, by column. A cancelled part has no columns."
        train, valid = self._columns()
        fit, recorder = running_fit(self.learn), self.recorder
        present = []
        if 'train' in fit.completed and not recorder.cancel_train:
            present += train
        if 'validate' in fit.completed and not recorder.cancel_valid:
            present += valid
        row = recorder.values[-1] if recorder.values else []
        return dict(reversed(list(zip(present, row))))  # of two with one name the first counts

    def _own_value(self):
        return self._own_values().get(self.monitor)

    def _agreed_value(self):
        "The value of all ranks. Trackers of the same column share one collective."
        agreed, key = running_fit(self.learn).agreed, (self.monitor, self.reduce)
        self._met = key not in agreed  # all ranks, just now
        if self._met:
            agreed[key] = agree(self._own_value(), self.reduce, f'{self.monitor} of epoch {self.epoch}')
        return agreed[key]

    def after_epoch(self):
        "Agree on the last value and decide."
        if not running_fit(self.learn).trained:
            return
        self.new_best = False
        val = self._agreed_value()
        if val is not None:
            self._decide(val)

    def _decide(self, val):
        "Compare the value to the best up to now."
        # nothing is less or greater than NaN, but a comparison that a user wrote may say otherwise
        self.new_best = self._better(val, self.best)
        if self.new_best:
            self.best = val

    def _better(self, val, best):
        return math.isfinite(val) and bool(self.comp(val - self.min_delta, best))

    def after_fit(self):
        "Nothing: stock sets `run`."


class _Patient(DDPTrackerCallback):
    "Counts the epochs without improvement, and acts after `patience` of them."

    wait = 0

    def _start(self, resumed):
        self.wait = 0
        super()._start(resumed)

    def state_dict(self) -> dict:
        return dict(super().state_dict(), wait=self.wait)

    def _resume(self, state):
        super()._resume(state)
        self.wait = state['wait']

    def _decide(self, val):
        super()._decide(val)
        self.wait = 0 if self.new_best else self.wait + 1
        if self.wait and self.wait >= self.patience:
            self._act()


class DDPEarlyStoppingCallback(_Patient, EarlyStoppingCallback):
    "An `EarlyStoppingCallback` that stops all ranks after the same epoch. `patience` counts epochs, whatever the world size."

    name = 'early_stopping'

    def __init__(
        self,
        monitor: str = 'valid_loss',  # value (usually loss or metric) being monitored.
        comp: Callable
        | None = None,  # numpy comparison operator; np.less if monitor is loss, np.greater if monitor is metric.
        min_delta: float = 0.0,  # minimum delta between the last monitor value and the best monitor value.
        patience: int = 1,  # number of epochs to wait when training has not improved model.
        reset_on_fit: bool = True,  # before model fitting, reset value being monitored to -infinity (if monitor is metric) or +infinity (if monitor is loss).
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'.
    ):
        super().__init__(monitor, comp, min_delta, reset_on_fit, reduce, patience=patience)

    def _act(self):
        print_on_main(f'No improvement since epoch {self.epoch - self.wait}: early stopping')
        raise CancelFitException()


class DDPReduceLROnPlateau(_Patient, ReduceLROnPlateau):
    "A `ReduceLROnPlateau` that keeps the learning rates of all ranks equal. `patience` counts epochs, whatever the world size."

    name = 'reduce_lr_on_plateau'

    def __init__(
        self,
        monitor: str = 'valid_loss',  # value (usually loss or metric) being monitored.
        comp: Callable
        | None = None,  # numpy comparison operator; np.less if monitor is loss, np.greater if monitor is metric.
        min_delta: float = 0.0,  # minimum delta between the last monitor value and the best monitor value.
        patience: int = 1,  # number of epochs to wait when training has not improved model.
        factor: float = 10.0,  # the denominator to divide the learning rate by, when reducing the learning rate.
        min_lr: float = 0,  # the minimum learning rate allowed; learning rate cannot be reduced below this minimum.
        reset_on_fit: bool = True,  # before model fitting, reset value being monitored to -infinity (if monitor is metric) or +infinity (if monitor is loss).
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'.
    ):
        super().__init__(
            monitor, comp, min_delta, reset_on_fit, reduce, patience=patience, factor=factor, min_lr=min_lr
        )

    def _act(self):
        self.wait, before = 0, self.opt.hypers[-1]['lr']
        for h in self.opt.hypers:
            h['lr'] = max(h['lr'] / self.factor, self.min_lr)
        if self.opt.hypers[-1]['lr'] < before:
            print_on_main(f'Epoch {self.epoch}: reducing lr to {self.opt.hypers[-1]["lr"]}')

"fastai 2: the tracker family, with one value and one decision for all ranks."

from __future__ import annotations
from collections.abc import Callable

import numpy as np
from fastai.callback.core import CancelFitException
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, TrackerCallback

from ..distributed import propagate_failure, print_on_main
from ..training.process_group import hide_stray_environment, restore_environment
from ..training.tracking import Tracker, Verdict, check_min_delta, check_patience, check_reduce, is_higher_better
from .fit import Fit, FitCallback, running_fit

__all__ = ['DDPTrackerCallback', 'DDPEarlyStoppingCallback', 'DDPReduceLROnPlateau']


class DDPTrackerCallback(FitCallback, TrackerCallback):
    """A `TrackerCallback` that follows one value, agreed upon by all ranks, so that they all decide alike.

    An epoch without a value on any rank (skipped, cancelled, not validated) decides nothing. NaN and infinity are never
    best. `ValueError` on every rank, before the first batch, if the Recorder has no column `monitor`."""

    name = 'tracker'
    _resumed: dict | None = None  # of an interrupted fit, which the next one continues

    def __init__(
        self,
        monitor: str = 'valid_loss',  # value (usually loss or metric) being monitored.
        comp: Callable | None = None,  # numpy comparison; np.less if monitor is loss, np.greater if monitor is metric.
        min_delta: float = 0.0,  # minimum delta between the last monitor value and the best monitor value.
        reset_on_fit: bool = True,  # before model fitting, reset the best value to the worst possible one.
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'.
        **kwargs,
    ):
        who = type(self).__name__
        check_reduce(who, reduce)
        check_min_delta(who, min_delta)
        self._tracker = Tracker(monitor, reduce=reduce)  # before stock sets `best`, which it holds
        super().__init__(monitor=monitor, comp=comp, min_delta=min_delta, reset_on_fit=reset_on_fit, **kwargs)
        self._tracker.comp = self.comp
        if self.comp is not np.less and self._tracker.lower:
            self.min_delta *= -1  # stock knows of `np.less` only
        self._tracker.min_delta = self.min_delta
        self.reduce = reduce
        self.new_best = False
        self._is_guess = comp is None and is_higher_better(monitor) is None

    @property
    def best(self) -> float | None:
        "The best value so far; the same on all ranks."
        return self._tracker.best

    @best.setter
    def best(self, value):
        self._tracker.best = value

    def before_fit(self):
        "What stock does here is done in `begin`."

    def begin(self, fit: Fit) -> None:
        "Check the monitored column, and reset or restore what was best."
        hide_stray_environment()
        fit.callback(restore_environment)
        names = sum(self._columns(), [])
        with propagate_failure(f'{self.name}.begin'):
            if self.monitor not in names:
                raise ValueError(
                    f'{type(self).__name__}(monitor={self.monitor!r}): no such column. '
                    f'The Recorder has {", ".join(names)}.'
                )
        if self._is_guess:
            print_on_main(
                f'{type(self).__name__}: higher {self.monitor} is taken to be better. '
                'Pass comp=np.less if lower is, comp=np.greater to confirm it.',
                warn=True,
            )
        self._is_guess = False
        self.idx = names.index(self.monitor)
        self.new_best = False
        resumed = self._resumed
        self._resumed = None
        if resumed or self.reset_on_fit or self.best is None:
            self._tracker.reset()
        if resumed:
            self._tracker.best = resumed['best']

    def state_dict(self) -> dict:
        "What an interrupted fit needs to be resumed: plain values."
        return dict(monitor=self.monitor, best=None if self.best is None else float(self.best))

    def load_state_dict(
        self,
        state: dict,  # as `state_dict` gave it; with `finished=True` of a fit that was not interrupted
    ) -> None:
        "Continue from there in the fit that begins. `ValueError` if another column was followed."
        if state['monitor'] != self.monitor:
            raise ValueError(
                f"{type(self).__name__}(monitor={self.monitor!r}): the fit to resume followed {state['monitor']!r}."
            )
        self._resumed = None if state.get('finished') else state
        self.best = state['best']

    def _columns(self):
        "The names of what the Recorder records in training and in validation."
        recorder = self.recorder
        names = list(recorder.metric_names[1 : len(recorder.metric_names) - bool(recorder.add_time)])
        n_train = 1 + len(recorder.metrics) * bool(recorder.train_metrics)
        return names[:n_train], names[n_train:]

    def _own_values(self):
        "This rank's values of the epoch, by column. A cancelled part has no columns."
        train, valid = self._columns()
        completed, recorder = running_fit(self.learn).completed, self.recorder
        present = []
        if 'train' in completed and not recorder.cancel_train:
            present += train
        if 'validate' in completed and not recorder.cancel_valid:
            present += valid
        row = recorder.values[-1] if recorder.values else []
        return dict(reversed(list(zip(present, row))))  # of two columns with one name the first counts

    def after_epoch(self):
        "Agree on the value, and decide."
        fit = running_fit(self.learn)
        if fit.trained:
            self._decide(self._follow(fit)[0])

    def _follow(self, fit):
        "The verdict on the epoch, and whether the ranks have just met for it."
        value, met = self._tracker.agreed(fit.agreed, lambda: self._own_values().get(self.monitor), self.epoch)
        verdict = self._tracker.follow(self.epoch, value)
        self.new_best = verdict.best
        return verdict, met

    def _decide(self, verdict: Verdict):
        "What a verdict leads to, in subclasses."

    def after_fit(self):
        "What stock does here is not needed: this callback hears of fits only."


class _Patient(DDPTrackerCallback):
    "Counts the epochs without improvement, and acts after `patience` of them."

    def __init__(self, *args, patience: int = 1, **kwargs):
        check_patience(type(self).__name__, patience)
        super().__init__(*args, patience=patience, **kwargs)

    @property
    def wait(self) -> int:
        "How many epochs ago the best one was."
        return self._tracker.wait

    @wait.setter
    def wait(self, epochs):
        self._tracker.wait = epochs

    def begin(self, fit: Fit) -> None:
        resumed = self._resumed
        super().begin(fit)
        self.wait = resumed['wait'] if resumed else 0

    def state_dict(self) -> dict:
        return dict(super().state_dict(), wait=self.wait)

    def _decide(self, verdict):
        if self.wait and self.wait >= self.patience:
            self._act()


class DDPEarlyStoppingCallback(_Patient, EarlyStoppingCallback):
    "An `EarlyStoppingCallback` that stops all ranks after the same epoch. `patience` counts epochs, not ranks."

    name = 'early_stopping'

    def __init__(
        self,
        monitor: str = 'valid_loss',  # value (usually loss or metric) being monitored.
        comp: Callable | None = None,  # numpy comparison; np.less if monitor is loss, np.greater if monitor is metric.
        min_delta: float = 0.0,  # minimum delta between the last monitor value and the best monitor value.
        patience: int = 1,  # number of epochs to wait when training has not improved model.
        reset_on_fit: bool = True,  # before model fitting, reset the best value to the worst possible one.
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'.
    ):
        super().__init__(monitor, comp, min_delta, reset_on_fit, reduce, patience=patience)

    def _act(self):
        print_on_main(f'No improvement since epoch {self.epoch - self.wait}: early stopping')
        raise CancelFitException()


class DDPReduceLROnPlateau(_Patient, ReduceLROnPlateau):
    "A `ReduceLROnPlateau` that keeps the learning rates of all ranks equal. `patience` counts epochs, not ranks."

    name = 'reduce_lr_on_plateau'

    def __init__(
        self,
        monitor: str = 'valid_loss',  # value (usually loss or metric) being monitored.
        comp: Callable | None = None,  # numpy comparison; np.less if monitor is loss, np.greater if monitor is metric.
        min_delta: float = 0.0,  # minimum delta between the last monitor value and the best monitor value.
        patience: int = 1,  # number of epochs to wait when training has not improved model.
        factor: float = 10.0,  # the denominator to divide the learning rate by, when reducing the learning rate.
        min_lr: float = 0,  # the minimum learning rate allowed; learning rate cannot be reduced below this minimum.
        reset_on_fit: bool = True,  # before model fitting, reset the best value to the worst possible one.
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'.
    ):
        super().__init__(
            monitor, comp, min_delta, reset_on_fit, reduce, patience=patience, factor=factor, min_lr=min_lr
        )

    def _act(self):
        self.wait = 0
        before = [hyper['lr'] for hyper in self.opt.hypers]
        reduced = [max(lr / self.factor, self.min_lr) for lr in before]
        self.opt.set_hyper('lr', reduced)  # the `hypers` of an `OptimWrapper` are copies
        if reduced[-1] < before[-1]:
            print_on_main(f'Epoch {self.epoch}: reducing lr to {reduced[-1]}')

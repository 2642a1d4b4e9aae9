"""fastai 1: one call of `learn.fit` is one object, and our callbacks hear of nothing else.

fastai sends `on_train_begin` from `fit`, `lr_find` and `validate` alike, sends `on_train_end` only if every callback
has begun, and does not let a callback know which others there are. `Learner.fit` passes through the function `fit` of
`fastai.basic_train`, which knows all of that; so that function is run inside a `Fit` where one of our callbacks takes
part, and as it is everywhere else."""

from __future__ import annotations
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from math import inf
from typing import Any

import fastai.basic_train
from fastai.basic_train import Learner, LearnerCallback, Recorder
from fastai.callback import Callback
from fastai.callbacks.lr_finder import LRFinder

from ..distributed import propagate_failure

__all__ = ['Fit', 'FitCallback']


class Fit(ExitStack):
    """One running call of `learn.fit`, until it has returned or raised.

    What a callback takes for the time of the fit (a lock, a wrapped model) it registers here, with `enter_context` or
    `callback`, and the fit gives it back in reverse order, however it ends."""

    def __init__(
        self,
        learn: Learner,  # the learner that is trained
        callbacks: list[Callback],  # all of the fit, the Recorder too
        n_epochs: int,  # how many epochs were asked for
    ):
        super().__init__()
        self.learn = learn
        self.callbacks = callbacks
        self.n_epochs = n_epochs
        self.recorder: Any = next((cb for cb in callbacks if isinstance(cb, Recorder)), None)
        self.pbar: Any = None  # the progress bar, by which the events of this fit are known from others
        self.trained = False  # whether an epoch has begun
        self.agreed: dict = {}  # (monitor, reduce) -> the value of this epoch, which all trackers share
        self.batch_loss: Any = None  # of the last batch, before any callback has changed it
        self._handled = sys.exc_info()[1]  # by somebody else: `fit` may be called in an `except` block
        is_lr_find = any(isinstance(cb, LRFinder) for cb in callbacks)  # trains, and throws the result away
        ours = (
            cb for cb in callbacks if isinstance(cb, FitCallback) and cb._fit is None
        )  # else it hears of an outer fit
        self.ours = sorted((cb for cb in ours if cb.hears_lr_find or not is_lr_find), key=lambda cb: cb._order)
        self._names = {name: cb for name, cb in vars(learn).items() if isinstance(cb, LearnerCallback)}

    def __enter__(self) -> Fit:
        self.callback(self.restore_names)
        for cb in self.ours:
            cb._fit = self
            self.callback(vars(cb).pop, '_fit', None)
        return self

    def begin(self) -> None:
        "Start our callbacks, in their order, now that every callback knows of the fit."
        for cb in self.ours:
            cb.begin(self)

    def error(
        self,
        exception: BaseException | bool,  # as fastai passes it to `on_train_end`
    ) -> BaseException | None:
        "What ends this fit, in `on_train_end`: fastai does not pass on a `KeyboardInterrupt`, but it is being handled."
        if isinstance(exception, BaseException):
            return exception
        handled = sys.exc_info()[1]
        return None if handled is self._handled else handled

    def restore_names(self) -> None:
        "`get_preds` makes a new callback of each in `callback_fns`, the Recorder too, and puts it on the learner."
        vars(self.learn).update(self._names)


class _First(Callback):
    "Keeps the object of the fit up to date, before any other callback hears of an event."

    _order: float = -inf

    def __init__(self, fit: Fit):
        self.fit = fit

    def on_train_begin(self, pbar, **kwargs):
        self.fit.pbar = pbar

    def on_epoch_begin(self, **kwargs):
        self.fit.trained = True
        self.fit.agreed = {}

    def on_batch_end(self, last_loss, **kwargs):
        self.fit.batch_loss = last_loss

    def on_epoch_end(self, **kwargs):
        self.fit.restore_names()


class _Last(Callback):
    "Starts our callbacks when all have heard that the fit begins."

    _order: float = inf

    def __init__(self, fit: Fit):
        self.fit = fit

    def on_train_begin(self, **kwargs):
        self.fit.begin()

    def on_epoch_begin(self, **kwargs):
        self.fit.restore_names()

    def on_epoch_end(self, **kwargs):
        self.fit.restore_names()


class FitCallback:
    """What our callbacks have in common: during a fit they know it as `_fit`, and `begin` is called once per fit.

    Events of an evaluation, or of another fit that is called during the fit, come with another progress bar or none."""

    _order: float
    _fit: Fit | None = None
    hears_lr_find = False  # whether `learn.lr_find` counts as a fit

    def begin(
        self,
        fit: Fit,  # the fit that begins; `on_train_begin` has been sent to all callbacks
    ) -> None:
        "Once per fit, before its first epoch."

    def on_epoch_begin(self, pbar=None, **kwargs):
        "`RuntimeError` in a fit that nobody has announced: this callback would do nothing, and not report that either."
        # `validate` has no progress bar, and `lr_find` has marked the one of its fit by now
        if self._fit is None and pbar is not None and not getattr(pbar, 'clean_on_interrupt', False):
            raise RuntimeError(
                f'{type(self).__name__} takes part in fits that run by the function `fit` of fastai.basic_train: '
                'import fastai_ddp_callbacks before that function is imported by name.'
            )

    def metrics_of(
        self,
        metrics: list,  # of the fit: functions and callbacks
    ) -> list:
        "The metrics that are to be computed in their place."
        return metrics

    def get_state(self, minimal: bool = True) -> dict:
        "What `learn.purge()` and `learn.export()` pickle: nothing of a fit."
        state = super().get_state(minimal)  # type: ignore[misc]
        state.pop('_fit', None)
        return state

    def _hears(self, pbar):
        "Whether an event with this progress bar is one of the running fit."
        return self._fit is not None and pbar is not None and pbar is self._fit.pbar


def _with_fit(loop: Callable) -> Callable:
    @wraps(loop)
    def fit(epochs, learn, callbacks=None, metrics=None):
        callbacks = list(callbacks or ())
        if not any(isinstance(cb, FitCallback) for cb in callbacks):
            return loop(epochs, learn, callbacks, metrics)
        with propagate_failure(), Fit(learn, callbacks, epochs) as running:
            metrics = list(metrics or ())
            for cb in running.ours:
                metrics = cb.metrics_of(metrics)
            return loop(epochs, learn, [_First(running), *callbacks, _Last(running)], metrics)

    return fit


fastai.basic_train.fit = _with_fit(fastai.basic_train.fit)

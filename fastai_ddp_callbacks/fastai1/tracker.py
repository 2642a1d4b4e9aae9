"fastai 1: the tracker family, with one value and one decision for all ranks."

from __future__ import annotations
from typing import Any

from fastai.basic_train import Learner
from fastai.callbacks.tracker import EarlyStoppingCallback, ReduceLROnPlateauCallback, TrackerCallback
from fastai.core import camel2snake

from ..distributed import print_on_main
from ..training.tracking import Tracker, Verdict, check_min_delta, check_patience, check_reduce, is_higher_better
from .fit import Fit, FitCallback

__all__ = [
    'DDPTrackerCallback',
    'DDPEarlyStoppingCallback',
    'DDPReduceLROnPlateauCallback',
    'DDPReduceLROnPlateau',
]


class DDPTrackerCallback(FitCallback, TrackerCallback):
    """A `TrackerCallback` that follows one value, agreed upon by all ranks, so that they all decide alike.

    An epoch without a value on any rank decides nothing. NaN and infinity are never best. `ValueError` on every rank,
    before the first batch, if the Recorder has no column `monitor`."""

    _resumed: dict | None = None  # state of an interrupted fit, or of a finished one, which the next one continues

    def __init__(
        self,
        learn: Learner,  # the `Learner`
        monitor: str = 'valid_loss',  # name of the column that is followed
        mode: str = 'auto',  # 'min' or 'max': what is better; 'auto' goes by the name
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'
        **kwargs,  # for the stock class
    ):
        who = type(self).__name__
        check_reduce(who, reduce)
        if not isinstance(monitor, str):
            raise TypeError(f'{who}(monitor={monitor!r}): the name of a column is needed.')
        super().__init__(learn, monitor=monitor, mode=mode, **kwargs)
        self.reduce = reduce
        self._tracker = Tracker(monitor, self.operator, reduce=reduce)
        self._is_guess = self.mode == 'auto' and is_higher_better(monitor) is None
        self.exclude += ['opt', '_tracker']  # `learn.purge()` and `learn.export()` pickle the rest

    @property
    def cb_name(self) -> str:
        "The stock name: `learn.save_model_callback`, ..."
        return camel2snake(type(self).__name__.removeprefix('DDP'))

    @property
    def best(self) -> Any:
        "The best value so far, the same on all ranks; None before the first fit."
        return self._tracker.best

    @best.setter
    def best(self, value):
        self._tracker.best = value

    # -- the beginning of a fit

    def on_train_begin(self, **kwargs):
        "What stock does here is done in `begin`."

    def begin(self, fit: Fit) -> None:
        "Check the monitored column, and reset or restore what was best."
        if self._tracks_metric():
            self._check_monitor()
        self._tracker.monitor = self.monitor
        self._tracker.min_delta = vars(self).get('min_delta', 0.0)
        self._tracker.reset()
        resumed = self._resumed
        self._resumed = None
        if resumed:
            self._tracker.best = resumed['best']
            self._tracker.wait = resumed['wait'] or 0

    def _tracks_metric(self):
        return True

    def _check_monitor(self):
        names = self._columns()
        who = f'{type(self).__name__}(monitor={self.monitor!r})'
        if self.monitor not in names:
            raise ValueError(f'{who}: no such column. The Recorder has {", ".join(names)}.')
        if self._is_guess:
            print_on_main(
                f'{type(self).__name__}: higher {self.monitor} is taken to be better. '
                "Pass mode='min' if lower is, mode='max' to confirm it.",
                warn=True,
            )
        self._is_guess = False

    def state_dict(self) -> dict:
        "What an interrupted fit needs to be resumed: plain values."
        best = None if self.best is None else float(self.best)
        return dict(monitor=self.monitor, best=best, wait=self._tracker.wait)

    def load_state_dict(
        self,
        state: dict,  # as `state_dict` gave it; with `finished=True` of a fit that was not interrupted
    ) -> None:
        "Continue from there in the fit that begins. `ValueError` if another column was followed."
        self.check_state(state)
        self._resumed = state
        self.best = state['best']

    def check_state(
        self,
        state: dict,  # as `state_dict` gave it
    ) -> None:
        "`ValueError` if another column was followed; nothing is changed."
        if state['monitor'] != self.monitor:
            raise ValueError(
                f"{type(self).__name__}(monitor={self.monitor!r}): the fit to resume followed {state['monitor']!r}."
            )

    # -- epochs

    def on_epoch_end(self, epoch, iteration=0, pbar=None, **kwargs):
        "Agree on the value, and decide. Gives what fastai is to change."
        if self._hears(pbar):
            return self._after_epoch(epoch, iteration)

    def _after_epoch(self, epoch, iteration):
        value, _ = self._agreed(epoch)
        if value is not None:
            return self._decide(self._tracker.follow(epoch, value))

    def _agreed(self, epoch):
        return self._tracker.agreed(self._fit.agreed, lambda: self._own_values().get(self.monitor), epoch)

    def _decide(self, verdict: Verdict):
        "What a verdict leads to, the same on all ranks: nothing, or what fastai is to change."

    def get_monitor_value(self) -> float | None:
        "The value of all ranks after this epoch, None if there is none. All ranks call it, after an epoch of a fit."
        fit: Any = self._fit
        return self._agreed(len(fit.recorder.nb_batches) - 1)[0]

    def on_train_end(self, exception=False, pbar=None, **kwargs):
        if self._hears(pbar) and not self._fit.error(exception):
            self._finish()

    def _finish(self):
        "What is to be done when training has ended well."

    # -- the Recorder of the fit: `learn.recorder` is another one after `learn.get_preds()`

    def _columns(self):
        recorder = self._fit.recorder
        return recorder.names[1 : len(recorder.names) - bool(recorder.add_time)]

    def _own_values(self):
        "This rank's values of the epoch, by column."
        recorder = self._fit.recorder
        values = [recorder.losses[-1] if recorder.losses else None]
        validated = bool(recorder.val_losses) and recorder.val_losses[-1] is not None
        if validated and not recorder.no_val:
            values.append(recorder.val_losses[-1])
        if (validated or recorder.no_val) and recorder.metrics:  # else they would be those of an earlier epoch
            values += recorder.metrics[-1]
        return dict(zip(self._columns(), values))


class _Patient(DDPTrackerCallback):
    "Counts the epochs without improvement, and acts after more than `patience` of them."

    def __init__(self, learn, monitor, mode, reduce, min_delta, patience, **kwargs):
        who = type(self).__name__
        check_patience(who, patience)
        check_min_delta(who, min_delta)
        # a pickled one comes back with the sign that the stock class has given it
        super().__init__(learn, monitor, mode, reduce, min_delta=abs(min_delta), patience=patience, **kwargs)

    @property
    def wait(self) -> int:
        "How many epochs ago the best one was."
        return self._tracker.wait

    @wait.setter
    def wait(self, epochs):
        self._tracker.wait = epochs

    def _decide(self, verdict):
        if self.wait > self.patience:
            return self._act(verdict.epoch)


class DDPEarlyStoppingCallback(_Patient, EarlyStoppingCallback):
    "An `EarlyStoppingCallback` that stops all ranks after the same epoch."

    def __init__(
        self,
        learn: Learner,  # the `Learner`
        monitor: str = 'valid_loss',  # name of the column that is followed
        mode: str = 'auto',  # 'min' or 'max': what is better; 'auto' goes by the name
        min_delta: float = 0,  # by how much a value must be better to count
        patience: int = 0,  # how many epochs without a better value are tolerated
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'
    ):
        super().__init__(learn, monitor, mode, reduce, min_delta, patience)

    def _act(self, epoch):
        print_on_main(f'Epoch {epoch}: early stopping')
        return {'stop_training': True}


class DDPReduceLROnPlateauCallback(_Patient, ReduceLROnPlateauCallback):
    "A `ReduceLROnPlateauCallback` that keeps the learning rates of all ranks equal."

    def __init__(
        self,
        learn: Learner,  # the `Learner`
        monitor: str = 'valid_loss',  # name of the column that is followed
        mode: str = 'auto',  # 'min' or 'max': what is better; 'auto' goes by the name
        patience: int = 0,  # how many epochs without a better value are tolerated
        factor: float = 0.2,  # what the learning rate is multiplied by
        min_delta: float = 0,  # by how much a value must be better to count
        min_lr: float = 0.001,  # learning rates up to this one are not reduced
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'
    ):
        super().__init__(learn, monitor, mode, reduce, min_delta, patience, factor=factor, min_lr=min_lr)

    def _act(self, epoch):
        opt = self.learn.opt
        if opt.lr <= self.min_lr:
            return
        opt.lr *= self.factor
        self.wait = 0
        print_on_main(f'Epoch {epoch}: reducing lr to {opt.lr}')


DDPReduceLROnPlateau = DDPReduceLROnPlateauCallback  # its name in fastai 2

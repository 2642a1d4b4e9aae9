"fastai 1: the callback that saves the best model and loads it at the end, on all ranks."

from __future__ import annotations
import os
from pathlib import Path
from typing import Any

from fastai.basic_train import Learner
from fastai.callbacks.tracker import SaveModelCallback

from ..checkpoint.safety import refuse_unsafe
from ..checkpoint.state import model_state, size_of
from ..distributed import print_on_main
from ..training.save_policy import SavePolicy
from ..training.saving import Saver
from .fit import Fit
from .saving import LearnerSaver

__all__ = ['DDPSaveModelCallback']


class DDPSaveModelCallback(LearnerSaver, SaveModelCallback):
    """A `SaveModelCallback` for which rank 0 saves while the others wait, and all ranks load the best at the end.

    `best`, `best_path`, `best_paths` and `last_saved_path` are the same on every rank and stay on this object after
    `fit`. The optimizer's state is saved and loaded too. Only what this callback has saved is loaded or deleted.
    `CheckpointInUseError` on every rank, before the first batch, if another running job saves under the same name."""

    last_saved_path: Path | None = None
    _is_finished = False  # whether the fit was found finished

    def __init__(
        self,
        learn: Learner,  # the `Learner`
        monitor: str = 'valid_loss',  # name of the column that is followed
        mode: str = 'auto',  # 'min' or 'max': what is better; 'auto' goes by the name
        every: str = 'improvement',  # 'improvement': save the best, load it at the end; 'epoch': save every epoch
        name: str = 'bestmodel',  # name of the file in `learn.model_dir`; may have fields: 'm-{epoch}-{accuracy:.3f}'
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'
        keep_best: int | None = None,  # how many of the best models of the fit to keep; the best is loaded at the end
        keep_last: int | None = None,  # how many of the newest to keep too; saves every epoch
        last: str | None = None,  # another name that the newest model always has, as 'last'; saves every epoch
        on_error: str = 'raise',  # when rank 0 cannot write: 'raise' on all ranks, or 'warn' and continue training
        background: bool = False,  # write while training continues, from a copy of the state in rank 0's memory
    ):
        _check_name(name)
        kept: dict[str, Any] = dict(keep_best=keep_best, keep_last=keep_last, last=last)
        kept.update(on_error=on_error, background=background)
        SavePolicy(name, **kept).check('DDPSaveModelCallback')
        super().__init__(learn, monitor, mode, reduce, every=every, name=name)
        self.exclude += ['_saver', '_row']
        self.last_saved_path = None
        self.__dict__.update(kept)

    @property
    def policy(self) -> SavePolicy:
        "The arguments as they are now."
        return SavePolicy(
            self.name,
            every_epoch=self.every == 'epoch',
            with_opt=True,
            keep_best=self.keep_best,
            keep_last=self.keep_last,
            last=self.last,
            on_error=self.on_error,
            background=self.background,
        )

    @property
    def best_paths(self) -> list[Path]:
        "The kept models that have a value, the best first."
        return [Path(saved.path) for saved in self._saver.store.ranked()] if self._saver else []

    @property
    def best_path(self) -> Path | None:
        "The best model."
        best = self._saver.store.best if self._saver else None
        return Path(best.path) if best else None

    # -- the beginning of a fit

    def begin(self, fit: Fit) -> None:
        "Reserve the name, and find what this fit continues."
        state = self._resumed
        super().begin(fit)
        self._check_others(fit)
        self._is_finished = state is not None and state.get('finished', False)
        self._continues = state is not None
        self._row = {}
        self._saver = Saver(self.policy, self._tracker, self._folder, self._columns())
        fit.callback(self._saver.release)
        self._saver.prepare(self._size_on_main, fit.n_epochs, state)
        if state is None:
            self.last_saved_path = None  # it is of another fit

    def _tracks_metric(self):
        return self.policy.tracks_metric

    def _check_others(self, fit):
        for other in fit.callbacks:
            if not isinstance(other, DDPSaveModelCallback) or other is self:
                continue
            if self.policy.targets() & other.policy.targets():
                raise ValueError(
                    f'Two callbacks save to {str(self.name)!r}: give each a name (and a `last`) of its own.'
                )

    def _size_on_main(self):
        state = model_state(self.learn.model)
        refuse_unsafe(state, self._folder / f'{self.name}.pth')
        return 3 * size_of(state)  # with the optimizer's state

    def state_dict(self) -> dict:
        state = super().state_dict()
        if not self._saver:
            return state  # before the first epoch
        last = self.last_saved_path
        return {**state, **self._saver.store.state(), 'last_saved': last and self._saver.store.name_of(last)}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        if 'run' not in state:
            self._resumed = None
            return
        self.last_saved_path = self._folder / state['last_saved'] if state['last_saved'] else None

    # -- epochs

    def _after_epoch(self, epoch, iteration):
        "Save if the agreed value is the best so far, or among those to keep, or if a save is due after this epoch."
        saver = self._saver
        self._row = self._own_values()
        self._iteration = iteration
        due = saver.policy.is_due(epoch)
        follows = saver.policy.needs_value(due)
        saver.check_background('save_model.on_epoch_end', meets=follows)
        value, met = self._agreed(epoch) if follows else (None, False)
        verdict = self._tracker.follow(epoch, value)
        if verdict.best:
            print_on_main(f'Better model found at epoch {epoch} with {self.monitor} value: {self.best}.')
        is_last = epoch == self._fit.n_epochs - 1
        if due or verdict.best or saver.is_wanted(verdict):
            saver.save(self._write, verdict, now=is_last or not self.background, met=met)
        elif is_last:
            saver.wait_for_write(met)
        self._note_paths(is_last)

    def _note_paths(self, is_over):
        "Loggers look for the best model at `last_saved_path` when the fit is over."
        self.last_saved_path = self._saver.last_path or self.last_saved_path
        if is_over and self._saver.policy.loads_best and self.best_path:
            self.last_saved_path = self.best_path

    def _finish(self):
        "Wait for what is being written, and load the best model."
        saver = self._saver
        if self._is_finished or not (self._fit.trained or self._continues):
            return
        saver.wait_for_write()
        self._note_paths(is_over=True)
        if saver.policy.loads_best:
            saver.load_best(self.learn.model, self._load_opt)


def _check_name(name):
    "fastai 1 calls `name` what is `fname` in fastai 2."
    who = f'DDPSaveModelCallback(name={name!r})'
    if not isinstance(name, (str, os.PathLike)):
        raise TypeError(f'{who}: the name of a file is needed.')
    if not str(name):
        raise ValueError(f'{who}: the name of a file is needed.')

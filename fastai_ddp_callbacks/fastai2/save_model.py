"fastai 2: the callback that saves the best model and loads it at the end, on all ranks."

from __future__ import annotations
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from fastai.callback.tracker import SaveModelCallback

from ..distributed import print_on_main, propagate_failure
from ..training.save_policy import SavePolicy
from ..training.saving import Saver
from ..training.tracking import Verdict
from .fit import Fit, running_fit
from .optimizer import check_optimizer, load_optimizer
from .snapshot import checked_size, snapshot
from .savers import replace_other_savers
from .tracker import DDPTrackerCallback

__all__ = ['DDPSaveModelCallback']


class DDPSaveModelCallback(DDPTrackerCallback, SaveModelCallback):
    """A `SaveModelCallback` for which rank 0 saves while the others wait, and all ranks load the best at the end.

    `best`, `best_path`, `best_paths` and `last_saved_path` are the same on every rank and stay on this object after
    `fit`. Only what this callback has saved is loaded or deleted. `CheckpointInUseError` on every rank, before the
    first batch, if another running job saves under the same name. See `docs/which-file-is-which.md`."""

    name = 'save_model'
    _saver: Any = None  # the `Saver` of the last fit
    _finished: dict | None = None  # state of a fit that was found finished
    _row: dict = {}  # this rank's values of the last epoch, by column

    def __init__(
        self,
        monitor: str = 'valid_loss',  # value (usually loss or metric) being monitored.
        comp: Callable | None = None,  # numpy comparison; np.less if monitor is loss, np.greater if monitor is metric.
        min_delta: float = 0.0,  # minimum delta between the last monitor value and the best monitor value.
        fname: str = 'model',  # model name to be used when saving model; may have fields: 'm-{epoch}-{accuracy:.3f}'.
        every_epoch: bool | int = False,  # if true, save model after every epoch (or so many); else only the best.
        at_end: bool = False,  # if true, save model when training ends; else load best model.
        with_opt: bool = False,  # if true, save optimizer state (if any available) when saving model.
        reset_on_fit: bool = True,  # before model fitting, reset the best value to the worst possible one.
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'.
        keep_best: int | None = None,  # how many of the best models of the fit to keep; the best is loaded at the end.
        keep_last: int | None = None,  # how many of the newest models to keep too; every epoch is saved.
        last: str | None = None,  # another name that the newest model always has, as 'last'; saves every epoch.
        on_error: str = 'raise',  # when rank 0 cannot write: 'raise' on all ranks, or 'warn' and continue training.
        background: bool = False,  # write while training continues, from a copy of the state in rank 0's memory.
    ):
        policy = SavePolicy(fname, every_epoch, at_end, with_opt, keep_best, keep_last, last, on_error, background)
        policy.check('DDPSaveModelCallback')
        stock = dict(fname=fname, every_epoch=every_epoch, at_end=at_end, with_opt=with_opt)
        super().__init__(monitor, comp, min_delta, reset_on_fit, reduce, **stock)
        self.__dict__.update(vars(policy))

    @property
    def policy(self) -> SavePolicy:
        "The arguments as they are now: loggers change `fname`."
        return SavePolicy(**{name: getattr(self, name) for name in SavePolicy.__dataclass_fields__})

    @property
    def best_paths(self) -> list[Path]:
        "The kept models that have a value, the best first."
        return self._saver.best_paths if self._saver else []

    @property
    def best_path(self) -> Path | None:
        "The best model."
        return self._saver.best_path if self._saver else None

    # -- the beginning of a fit

    def begin(self, fit: Fit) -> None:
        "Reserve the name, and find what this fit continues."
        state = self._resumed or self._finished
        self._is_finished = state is not None and self._resumed is None
        self._resumed, self._finished = state, None
        continued = self._saver if not state and not self.reset_on_fit and self.best is not None else None
        super().begin(fit)
        with propagate_failure(f'{self.name}.begin'):
            policy = self.policy
            if not continued or not continued.saves_to(policy, self._folder):
                continued = None
                self._saver = Saver(policy, self._tracker, self._folder, sum(self._columns(), []))
            replace_other_savers(self, fit)
        fit.callback(self._saver.release)
        path, who = self._folder / f'{self.fname}.pth', type(self).__name__
        size = partial(checked_size, self.learn.model, path, who, self.with_opt)
        self._saver.prepare(size, self.learn.n_epoch, state, bool(continued), takes_over=fit.starts_over)
        self._continues = state is not None
        if state is None:
            self.last_saved_path = None  # loggers take it for this fit's

    @property
    def _folder(self):
        return (self.learn.path / self.learn.model_dir).absolute()

    def state_dict(self) -> dict:
        state = super().state_dict()
        if not self._saver:
            return state  # before the first epoch
        last = self.last_saved_path
        return {**state, **self._saver.store.state(), 'last_saved': last and self._saver.store.name_of(last)}

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self._finished = None
        if 'run' not in state:
            self._resumed = None
            return
        self._finished = state if state.get('finished') else None
        self.last_saved_path = self._folder / state['last_saved'] if state['last_saved'] else None

    # -- epochs

    def after_epoch(self):
        "Save if the agreed value is the best so far, or among those to keep, or if a save is due after this epoch."
        fit, saver = running_fit(self.learn), self._saver
        if not fit.trained:
            return
        self._row = self._own_values()
        due = 'train' in fit.completed and saver.policy.is_due(self.epoch)
        follows = saver.policy.needs_value(due)
        saver.check_background(f'{self.name}.after_epoch', meets=follows)
        verdict, met = self._follow(fit) if follows else (Verdict(self.epoch, None, False), False)
        if verdict.best:
            print_on_main(f'Better model found at epoch {self.epoch} with {self.monitor} value: {self.best}.')
        is_last = self.epoch == self.n_epoch - 1
        if due or verdict.best or saver.is_wanted(verdict):
            verdict = saver.save(self._write, verdict, now=is_last or not self.background, met=met)
        elif is_last:
            saver.wait_for_write(met)
        self.new_best = verdict.best
        self._note_paths(is_last)

    def _note_paths(self, is_over):
        "Loggers look for the best model at `last_saved_path` when the fit is over."
        self.last_saved_path = self._saver.last_path or self.last_saved_path
        if is_over and self._saver.policy.loads_best and self.best_path:
            self.last_saved_path = self.best_path

    def after_cancel_fit(self):
        "Finish writing before the loggers look for the file, which they do in `after_fit`."
        self._saver.wait_for_write()
        self._note_paths(is_over=True)

    def after_fit(self):
        "Load the best model, or save the last one."
        saver = self._saver
        if self._is_finished or not running_fit(self.learn).trained and not self._continues:
            return
        self.new_best = False
        if self.at_end:
            name = None if saver.store.fields else self.fname  # without the number of an epoch
            saver.save(self._write, Verdict(self.epoch, None, False), now=True, met=False, name=name)
        else:
            saver.wait_for_write()
        self._note_paths(is_over=True)
        if saver.policy.loads_best:
            self._load_best()

    def _write(self, verdict: Verdict, now: bool, name: str | None = None):
        "On rank 0: write what there is now, or begin to."
        made = snapshot(self.learn, self._columns(), self._row, verdict, self.monitor, self.with_opt)
        return self._saver.write_on_main(made, now, name)

    def _load_best(self):
        opt = (load_optimizer, check_optimizer) if self.with_opt else ()
        self._saver.load_best(self.learn.model, *(partial(f, self.learn, self.best_path) for f in opt))

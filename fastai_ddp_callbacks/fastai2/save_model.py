"fastai 2: the callback that saves the best model and loads it at the end, on all ranks."

from __future__ import annotations
import math, os
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from fastai.callback.tracker import SaveModelCallback
from fastai.torch_core import to_device

from ..distributed import barrier, propagate_failure, run_on_main, print_on_main, world_size
from ..distributed.progress import with_progress
from ..errors import CheckpointError, CheckpointWriteError, MismatchedCheckpointError
from ..training.loading import load_everywhere
from ..checkpoint.safety import refuse_unsafe
from ..checkpoint.store import Saved, Store, check_name, delete
from .fit import Fit, running_fit
from .tracker import DDPTrackerCallback
from ..checkpoint.state import model_state, to_builtin, size_of
from ..checkpoint.background import Writer

__all__ = ['DDPSaveModelCallback']


def _several(cb):
    "Whether the number of the epoch is added to a name."
    return bool(cb.every_epoch) or isinstance(cb, DDPSaveModelCallback) and (cb._rhythm > 0 or (cb.keep_best or 1) > 1)


def _targets(cb):
    "The files that a callback writes, as far as they can be told before."
    name = str(cb.fname)
    one = '{' in name or not _several(cb)
    return {
        os.path.normpath(o)
        for o in (
            name if one or cb.at_end else None,
            None if one else f'{name}_{{epoch}}',
            getattr(cb, 'last', None),
        )
        if o
    }


def _real(o):
    "A metric as a number; None if it is none."
    if getattr(o, 'ndim', None) == 0:
        o = o.item()
    return float(o) if isinstance(o, (bool, int, float)) else None


class _Due(NamedTuple):
    "A checkpoint that rank 0 is asked for."

    epoch: int
    value: float | None
    best: bool


class DDPSaveModelCallback(DDPTrackerCallback, SaveModelCallback):
    """A `SaveModelCallback` for which rank 0 saves while the others wait, and all ranks load the best at the end.

    `last_saved_path`, `best`, `best_path` and `best_paths` are the same on every rank and stay on this object after `fit`.
    With `background=True` the paths name what is durable, known one save later or at the end of the last epoch; a save
    waits for the one before it, so that none is dropped, and a failed one is raised on all ranks at the next epoch's end.
    Only what this callback has saved is loaded or deleted: in the same fit, or in an earlier one that `best` comes from
    (`reset_on_fit=False`). `CheckpointInUseError` on every rank, before the first batch, if another run that still lives
    saves under the same name; a warning if the disk looks too small."""

    name, _store, _over, _value, _row, _met = (
        'save_model',
        None,
        None,
        None,
        {},
        False,
    )  # of the epoch: the agreed value, and rank 0's of all columns

    def __init__(
        self,
        monitor: str = 'valid_loss',  # value (usually loss or metric) being monitored.
        comp: Callable
        | None = None,  # numpy comparison operator; np.less if monitor is loss, np.greater if monitor is metric.
        min_delta: float = 0.0,  # minimum delta between the last monitor value and the best monitor value.
        fname: str = 'model',  # model name to be used when saving model; may have fields, as 'model-{epoch}-{accuracy:.3f}'.
        every_epoch: bool
        | int = False,  # if true, save model after every epoch (or every so many); else save only when model is better than existing best.
        at_end: bool = False,  # if true, save model when training ends; else load best model if there is only one saved model.
        with_opt: bool = False,  # if true, save optimizer state (if any available) when saving model.
        reset_on_fit: bool = True,  # before model fitting, reset value being monitored to -infinity (if monitor is metric) or +infinity (if monitor is loss).
        reduce: str = 'mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'.
        keep_best: int
        | None = None,  # keep the so many best models of the fit, each under the number of its epoch or the name that `fname` makes; load the best at the end.
        keep_last: int
        | None = None,  # keep the so many newest models too; unless `every_epoch` tells otherwise, every epoch is saved then.
        last: str
        | None = None,  # another name that the newest model always has, as 'last'; with it, every epoch is saved.
        on_error: str = 'raise',  # when rank 0 cannot write: 'raise' on all ranks, or 'warn', go on training and try again at the next improvement.
        background: bool = False,  # write while training goes on, from a copy of the state in the memory of rank 0. The last save is waited for.
    ):
        if every_epoch and at_end:
            raise ValueError('DDPSaveModelCallback: every_epoch and at_end cannot both be set. Use two callbacks.')
        if on_error not in ('raise', 'warn'):
            raise ValueError(f"DDPSaveModelCallback(on_error={on_error!r}): choose 'raise' or 'warn'.")
        if not isinstance(every_epoch, int) or every_epoch < 0:
            raise ValueError(
                f'DDPSaveModelCallback(every_epoch={every_epoch!r}): True, False or a number of epochs is needed.'
            )
        if not fname or last is not None and not isinstance(last, str):
            raise ValueError(f'DDPSaveModelCallback(fname={fname!r}, last={last!r}): names of files are needed.')
        for k, v in dict(keep_best=keep_best, keep_last=keep_last).items():
            if v is not None and (not isinstance(v, int) or v < 1):
                raise ValueError(f'DDPSaveModelCallback({k}={v!r}): a number of files from 1 on is needed.')
        super().__init__(
            monitor,
            comp,
            min_delta,
            reset_on_fit,
            reduce,
            fname=fname,
            every_epoch=every_epoch,
            at_end=at_end,
            with_opt=with_opt,
        )
        self.keep_best, self.keep_last, self.last, self.on_error, self.background = (
            keep_best,
            keep_last,
            last,
            on_error,
            background,
        )
        self._writer, self._due = Writer(), []  # what rank 0 writes; `_Due`, what all ranks await the outcome of

    # What is asked for. Stock's `every_epoch` alone keeps everything, follows no value and loads nothing.
    @property
    def _rhythm(self):
        return int(self.every_epoch) or int(bool(self.keep_last or self.last))

    @property
    def _follows(self):
        return not self.every_epoch or bool(self.keep_best or self.keep_last)

    @property
    def best_paths(self) -> list:
        return [Path(o.path) for o in self._store.ranked()] if self._store else []

    @property
    def best_path(self) -> Path | None:
        return Path(self._store.best.path) if self._store and self._store.best else None

    def begin(self, fit: Fit) -> None:
        over, self._over = self._over, None
        self._resumed = self._resumed or over
        self._continues = bool(self._resumed)
        self._loads = not over  # a fit that was found finished has its best weights already
        super().begin(fit)

    def _start(self, resumed):
        earlier = self._store
        super()._start(resumed)
        twins = [
            o
            for o in self.learn.cbs
            if isinstance(o, SaveModelCallback) and o is not self and _targets(o) & _targets(self)
        ]
        with propagate_failure(f'{self.name}.begin'):
            if twins:
                raise ValueError(f'Two callbacks save to {self.fname!r}: give each an fname (and a `last`) of its own.')
            if self._store is None:
                self._make_store()  # `best` was set by hand, or comes from an interrupted fit
        goes_on = earlier is not None and self._store is earlier
        files, best = run_on_main(self._prepare, (goes_on, resumed))
        self._due = []
        if goes_on:  # rank 0 knows what is on disk, however the earlier fit has ended
            self._store.files, self._store.best = files, best
            if not resumed:
                self.best = best.value if best else self._worst()
        if not resumed:
            return
        self.best, warning = self._store.resume(resumed, files, self._better, self._worst())
        if warning:
            print_on_main(warning, warn=True)

    def end(self, fit: Fit) -> None:
        "Give the name back."
        if not self._store:
            return
        self._writer.join()  # before another run may have the name
        if self._writer.error:
            print_on_main(f'After the fit had failed: {self._writer.error}', warn=True)
        self._store.release()

    def state_dict(self) -> dict:
        if not self._store:
            return super().state_dict()  # before the first epoch
        return dict(
            super().state_dict(),
            **self._store.state(),
            last_saved=self._store.name_of(self.last_saved_path) if self.last_saved_path else None,
        )

    def load_state_dict(self, state: dict):
        super().load_state_dict(state)
        self._over = None
        if 'run' not in state:
            self._resumed = None
        elif state.get('finished'):
            self._over = state
        if 'run' in state:
            self.last_saved_path = (
                (self.learn.path / self.learn.model_dir / state['last_saved']).absolute()
                if state['last_saved']
                else None
            )

    def _prepare(self, goes_on, resumed):
        if self._writer.busy:  # an earlier fit has ended by an exception
            writer, self._writer = self._writer, Writer()
            try:
                saved = writer.wait()
            except CheckpointError as e:
                print_on_main(str(e), warn=True)
            else:
                for o in self._store.add(saved, self._due[0].best) if goes_on else ():
                    delete(o)
        state = model_state(self.learn.model)
        refuse_unsafe(state, self._store.folder / f'{self.fname}.pth')
        try:
            self._store.prepare(
                size_of(state) * (3 if self.with_opt else 1), -(-self.learn.n_epoch // (self._rhythm or 1))
            )
        except CheckpointWriteError as e:
            if self.on_error == 'raise':
                raise
            print_on_main(str(e), warn=True)
        return (self._store.found_whole(resumed), None) if resumed else (self._store.files, self._store.best)

    def _forget(self):
        super()._forget()
        if self._store:
            self._store.release()
        self._make_store()

    def _make_store(self):
        selective = self.keep_best or self.keep_last or (self.last or '{' in str(self.fname)) and not self.every_epoch
        fields = {k: 0.5 for k in sum(self._columns(), [])} | {'epoch': 0, 'iteration': 0}
        with propagate_failure(f'{self.name}.begin'):
            check_name(self.fname, fields)
        self._store = Store(
            self.learn.path / self.learn.model_dir,
            self.fname,
            self._lower_is_better(),
            self.keep_best or (1 if selective else None),
            self.keep_last,
            self.last,
            several=_several(self),
        )

    def after_epoch(self):
        "Save if the agreed value is the best so far, or among those to keep, or if a save is due after this epoch."
        fit = running_fit(self.learn)
        if not fit.trained:
            return
        due = 'train' in fit.completed and self._rhythm > 0 and self.epoch % self._rhythm == 0
        self._row, self._value, self._met = self._own_values(), None, False
        agrees = self._follows and (due or bool(self.keep_best) or not self.every_epoch)
        if self._due:
            self._hear(agrees)
        if agrees:
            super().after_epoch()
        else:
            self.new_best = False
        if self.new_best:
            print_on_main(f'Better model found at epoch {self.epoch} with {self.monitor} value: {self.best}.')
        among = (
            self._value is not None
            and (self.keep_best or 1) > 1
            and self._store.wants(self.epoch, self._value, [o.value for o in self._due])
        )
        last = self.epoch == self.n_epoch - 1
        if due or self.new_best or among:
            self._save(now=last or not self.background)
        elif last:
            self._settle()

    def _decide(self, val):
        super()._decide(val)
        self._value = float(val) if math.isfinite(val) else None

    def after_cancel_fit(self):
        self._met = False
        self._settle()  # before the loggers look for the file, which they do in `after_fit`

    def after_fit(self):
        "Load the best model, or save the last one."
        if not running_fit(self.learn).trained and not (self._continues and self._loads):
            return
        self.new_best, self._value, self._met = False, None, False
        if self.at_end:
            self._save(self.fname if not self._store.fields else None)
        else:
            self._settle()
        if not self.at_end and (self.keep_best or not self.every_epoch):
            self._load_best()
        self._store.release()
        self._writer = Writer()  # without the memory of this one

    # -- saving. All ranks know what is due; rank 0 tells the outcome, at once or in a later rendezvous

    def _save(self, name=None, now=True):
        "Rank 0 writes, and all ranks go on when that is done and know what was written; or it begins to write (`now=False`)."
        self._due.append(_Due(self.epoch, self._value, self.new_best))
        self._on_main(self._write, name, now)

    def _settle(self):
        "Wait for what is being written."
        if self._due:
            self._on_main(self._finished)

    def _on_main(self, f, *args):
        if self._store.selective and not self._met:
            barrier(f'before {self.name} deletes')  # nobody reads then
        self._note(run_on_main(f, args))

    def _hear(self, agrees):
        "Of what is being written: it may have failed since. The other ranks hear of it where they meet, and nowhere else in time."
        if self.on_error == 'warn':
            self._on_main(self._finished, True)  # all ranks must know what `best` is
        elif agrees:
            with propagate_failure(f'{self.name}.after_epoch'):
                self._writer.check()

    def _note(self, outcomes):
        "Keep the list of files, `best` and `last_saved_path` in step with the disk."
        for o in outcomes:
            due = self._due.pop(0)
            if isinstance(o, Saved):
                self._store.add(o, due.best)
                self.last_saved_path = Path(o.path)
            else:
                print_on_main(
                    f"Epoch {due.epoch}: {o} Training goes on without this checkpoint (on_error='warn').", warn=True
                )
                if due.best and self.best == due.value:  # the next better one is an improvement on what is on disk
                    self.best, self.new_best = self._store.best.value if self._store.best else self._worst(), False

    def _write(self, name, now):
        outcomes = self._finished()
        fields, state = self._fields(), model_state(self.learn.model)
        if self.with_opt and self.learn.opt is not None:
            state = {'model': state, 'opt': to_builtin(self.learn.opt.state_dict())}
        meta = dict(
            epoch=self.epoch,
            iteration=self.train_iter,
            monitor=self.monitor,
            value=self._value,
            world_size=world_size(),
            fastai=version('fastai'),
            metrics={
                k: v
                for k, v in list(fields.items())[:100]
                if isinstance(v, float) and math.isfinite(v) and len(k) < 200
            },
        )  # they must fit in 65 kB
        path = (
            self._store.place(fields, self._store.replaced(self.epoch, self._value))
            if name is None
            else self._store.folder / f'{name}.pth'
        )
        write = self._store.begin(path, meta)
        if now:
            save = partial(with_progress, f'saving {path.name}', write, state)
            return [*outcomes, self._outcome(save, self._due[-1])]
        self._writer.start(write, state)
        return outcomes

    def _finished(self, if_done=False):
        "The outcome of what is being written, when it is done; none if nothing is, or with `if_done` if it is not done."
        return (
            [self._outcome(self._writer.wait, self._due[0])]
            if self._writer.busy and (self._writer.done or not if_done)
            else []
        )

    def _outcome(self, written, due):
        "The `Saved`, after which others may go; or why there is none."
        try:
            saved = written()
        except CheckpointWriteError as e:
            if self.on_error == 'raise':
                raise
            return str(e)
        for o in self._store.add(saved, due.best):
            delete(o)
        return saved

    def _fields(self):
        "What a file name may tell: rank 0's values, and the agreed one."
        columns = dict.fromkeys(sum(self._columns(), []))
        for k, v in self._row.items():
            columns[k] = _real(v)
        if self._value is not None:
            columns[self.monitor] = self._value
        return {**columns, 'epoch': self.epoch, 'iteration': self.train_iter}

    def _load_best(self):
        best = self._store.best
        if best is None:
            return print_on_main(
                f'No {"best " if self._store.files else ""}model was saved during this fit, as {self.monitor} never improved (or no save succeeded): '
                'the weights stay as training left them, and a file of an earlier run is not loaded.',
                warn=True,
            )
        load_everywhere(
            self.learn.model,
            best.path,
            best.checksum,
            self._load_opt if self.with_opt else None,
            self._opt_fits if self.with_opt else None,
        )

    def _load_opt(self, rest):
        self.learn.opt.load_state_dict(to_device(rest['opt'], next(self.learn.model.parameters()).device))

    def _opt_fits(self, rest):
        opt = self.learn.opt
        if (len(rest['opt']['hypers']), len(rest['opt']['state'])) != (
            len(opt.param_lists),
            sum(map(len, opt.param_lists)),
        ):
            raise MismatchedCheckpointError(
                f'{self.best_path}: its optimizer state does not fit this optimizer.', self.best_path
            )

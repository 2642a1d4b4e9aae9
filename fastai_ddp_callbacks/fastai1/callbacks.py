"""fastai 1: the tracker callbacks with one value and one decision for all ranks, and a DDP context for any device.

`fit`, `lr_find` and `validate` all call `on_train_begin`. Which of them it was shows when the first epoch begins, so
that is where our callbacks start; in the others they stay inert."""

from __future__ import annotations
import math, sys, time
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import fastprogress.fastprogress, numpy as np, torch
from fastai.callbacks.tracker import (
    EarlyStoppingCallback,
    ReduceLROnPlateauCallback,
    SaveModelCallback,
    TerminateOnNaNCallback,
    TrackerCallback,
)
from fastai.basic_train import LearnerCallback
from fastai.core import camel2snake
from fastai.distributed import DistributedTrainer, TextClasDataBunch
from torch.nn.parallel import DistributedDataParallel

from ..distributed.batch_flag import BatchFlag
from ..distributed.propagate import report_failure
from ..distributed.progress import with_progress
from ..checkpoint.file import read_metadata
from ..distributed import agree, rank, propagate_failure, run_on_main, print_on_main, world_size
from ..training.process_group import process_group
from ..training.loading import load_everywhere
from ..checkpoint.store import Store
from ..timeline import straggler_summary
from ..distributed.reductions import NUMERIC
from ..checkpoint.state import model_state, to_builtin, size_of

__all__ = [
    'DDPTrackerCallback',
    'DDPSaveModelCallback',
    'DDPEarlyStoppingCallback',
    'DDPReduceLROnPlateauCallback',
    'DDPReduceLROnPlateau',
    'DDPTerminateOnNaNCallback',
    'ddp_ctx',
]


def _is_fit(pbar):
    "`validate` has no progress bar, and the learning rate finder marks the one of its mock training."
    return pbar is not None and not getattr(pbar, 'clean_on_interrupt', False)


def _handled():
    "What tells one exception that is being handled from another, or from none."
    return id(sys.exc_info()[1])


def _failed(exception, handled):
    "Whether training ends by an exception, of which the other ranks are then told. It goes its own way: `fit` raises it."
    # `fit` passes on no `KeyboardInterrupt`; but that is being handled now, and was not when training began
    error = exception or (sys.exc_info()[1] if _handled() != handled else None)
    if not error:
        return False
    cause = report_failure(error)
    if cause is not None:
        raise cause from error  # a network error on a rank that was left alone
    return True


class DDPTrackerCallback(TrackerCallback):
    "A `TrackerCallback` that follows one value, agreed upon by all ranks, so that they all decide alike."

    def __init__(
        self,
        learn,  # the `Learner`
        monitor='valid_loss',  # name of the column that is followed
        mode='auto',  # 'min' or 'max': what is better; 'auto' goes by the name
        reduce='mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'
        **kwargs,  # for the stock class
    ):
        if reduce not in NUMERIC:
            raise ValueError(
                f'{type(self).__name__}(reduce={reduce!r}): choose one of {", ".join(map(repr, NUMERIC))}.'
            )
        super().__init__(learn, monitor=monitor, mode=mode, **kwargs)
        self.reduce, self._training, self._before, self._resumed = reduce, False, None, None
        self.exclude += ['opt']  # `learn.purge()` and `learn.export()` pickle the rest

    @property
    def cb_name(self):
        "The stock name: `learn.save_model_callback`, ..."
        return camel2snake(type(self).__name__.removeprefix('DDP'))

    def on_train_begin(self, pbar=None, **kwargs):
        if pbar is not None:
            self._training, self._before = False, _handled()  # `validate` may be called in the midst of a fit

    def on_epoch_begin(self, pbar=None, **kwargs):
        "Prepare the monitored value, once per fit."
        if self._training or not _is_fit(pbar):
            return
        self._check_monitor()
        super().on_train_begin(pbar=pbar, **kwargs)
        self._begin(**kwargs)
        if self._resumed:
            self._resume(self._resumed)
        self._training, self._resumed = True, None

    def state_dict(self) -> dict:
        "What a fit that is interrupted needs to go on: plain values."
        return dict(monitor=self.monitor, best=float(self.best), wait=getattr(self, 'wait', None))

    def load_state_dict(
        self,
        state: dict,  # as `state_dict` gave it, in a fit that was interrupted
    ):
        "Go on from there in the fit that begins. `ValueError` if another column was followed."
        self.check_state(state)
        self._resumed, self.best = state, state['best']

    def check_state(self, state):
        "`ValueError` if another column was followed; nothing is changed."
        if state['monitor'] != self.monitor:
            raise ValueError(
                f"{type(self).__name__}(monitor={self.monitor!r}): the fit to go on with followed {state['monitor']!r}."
            )

    def _resume(self, state):
        self.best = state['best']
        if state['wait'] is not None:
            self.wait = state['wait']

    def _check_monitor(self):
        names = self._columns()
        if self.monitor not in names:
            raise ValueError(
                f'{type(self).__name__}(monitor={self.monitor!r}): no such column. The Recorder has {", ".join(names)}.'
            )

    def on_epoch_end(self, epoch, pbar=None, **kwargs):
        "Agree on the value, and decide."
        if self._training and _is_fit(pbar):
            return self._decide(epoch)

    def on_train_end(self, exception=False, **kwargs):
        trained, self._training, self._resumed = self._training, False, None
        if not _failed(exception, self._before) and trained:
            self._finish()

    def _begin(self, **kwargs):
        "What is to be done before the first epoch."

    def _decide(self, epoch):
        "What the value of the epoch leads to; the same on all ranks. As an event, gives what fastai is to change."

    def _finish(self):
        "What is to be done when training has ended well."

    def get_monitor_value(self):
        "The value of all ranks after this epoch, None if there is none. Trackers of the same column share one collective."
        n = len(self.learn.recorder.nb_batches)
        agreed, key = vars(self.learn.recorder).setdefault('agreed', {}), (n, self.monitor, self.reduce)
        if key not in agreed:
            agreed[key] = agree(self._own_value(), self.reduce, f'{self.monitor} of epoch {n - 1}')
        return agreed[key]

    def _columns(self):
        return self.learn.recorder.names[1 : len(self.learn.recorder.names) - bool(self.learn.recorder.add_time)]

    def _own_value(self):
        "This rank's value of the epoch, None if it has none."
        rec = self.learn.recorder
        loss, val, metrics = (o[-1] if o else None for o in (rec.losses, rec.val_losses, rec.metrics))
        if rec.no_val:
            values = [loss, *(metrics or [])]
        elif val is None:
            values = [loss]  # metrics would be those of an earlier epoch
        else:
            values = [loss, val, *(metrics or [])]
        return dict(zip(self._columns(), values)).get(self.monitor)

    def _is_best(self, val, min_delta=0):
        return val is not None and math.isfinite(val) and bool(self.operator(val - min_delta, self.best))


class _Patient(DDPTrackerCallback):
    "Counts the epochs without improvement, and acts after more than `patience` of them."

    def _decide(self, epoch):
        val = self.get_monitor_value()
        if val is None:
            return
        if self._is_best(val, self.min_delta):
            self.best, self.wait = val, 0
        else:
            self.wait += 1
            if self.wait > self.patience:
                return self._act(epoch)


class DDPEarlyStoppingCallback(_Patient, EarlyStoppingCallback):
    "An `EarlyStoppingCallback` that stops all ranks after the same epoch."

    def __init__(
        self,
        learn,  # the `Learner`
        monitor='valid_loss',  # name of the column that is followed
        mode='auto',  # 'min' or 'max': what is better; 'auto' goes by the name
        min_delta=0,  # by how much a value must be better to count
        patience=0,  # how many epochs without a better value are put up with
        reduce='mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'
    ):
        # a pickled one comes back with the sign that the stock class has given it
        super().__init__(learn, monitor, mode, reduce, min_delta=abs(min_delta), patience=patience)

    def _act(self, epoch):
        print_on_main(f'Epoch {epoch}: early stopping')
        return {'stop_training': True}


class DDPReduceLROnPlateauCallback(_Patient, ReduceLROnPlateauCallback):
    "A `ReduceLROnPlateauCallback` that keeps the learning rates of all ranks equal."

    def __init__(
        self,
        learn,  # the `Learner`
        monitor='valid_loss',  # name of the column that is followed
        mode='auto',  # 'min' or 'max': what is better; 'auto' goes by the name
        patience=0,  # how many epochs without a better value are put up with
        factor=0.2,  # what the learning rate is multiplied by
        min_delta=0,  # by how much a value must be better to count
        min_lr=0.001,  # learning rates up to this one are not reduced
        reduce='mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'
    ):
        super().__init__(
            learn, monitor, mode, reduce, patience=patience, factor=factor, min_delta=abs(min_delta), min_lr=min_lr
        )

    def _act(self, epoch):
        if self.opt.lr <= self.min_lr:
            return
        self.opt.lr *= self.factor
        self.wait = 0
        print_on_main(f'Epoch {epoch}: reducing lr to {self.opt.lr}')


DDPReduceLROnPlateau = DDPReduceLROnPlateauCallback  # as it is called with fastai 2


class DDPSaveModelCallback(DDPTrackerCallback, SaveModelCallback):
    """A `SaveModelCallback` for which rank 0 saves while the others wait, and all ranks load the best at the end.

    `last_saved_path` and `best` are the same on every rank. Only what this fit has saved is loaded at its end."""

    def __init__(
        self,
        learn,  # the `Learner`
        monitor='valid_loss',  # name of the column that is followed
        mode='auto',  # 'min' or 'max': what is better; 'auto' goes by the name
        every='improvement',  # 'improvement': save the best, load it at the end; 'epoch': save after every epoch, load nothing
        name='bestmodel',  # name of the file, in `learn.path/learn.model_dir`
        reduce='mean',  # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'
    ):
        super().__init__(learn, monitor, mode, reduce, every=every, name=name)
        self.last_saved_path = self._store = None

    def _check_monitor(self):
        if self.every == 'improvement':
            super()._check_monitor()

    def _begin(self, n_epochs, **kwargs):
        self._store = Store(self._folder(), self.name, lower=self.operator is np.less, several=self.every == 'epoch')
        self._found = run_on_main(self._prepare, (n_epochs,))

    def _prepare(self, n_epochs):
        self._store.prepare(3 * size_of(self.learn.model.state_dict()), n_epochs)  # with the optimizer's state
        return self._store.found_whole(self._resumed) if self._resumed else []

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
        if 'run' not in state:
            self._resumed = None
        elif state['last_saved']:
            self.last_saved_path = self._folder() / state['last_saved']

    def _folder(self):
        return (self.learn.path / self.learn.model_dir).absolute()

    def _resume(self, state):
        super()._resume(state)
        worst = float('inf') if self.operator is np.less else -float('inf')
        self.best, warning = self._store.resume(state, self._found, self.operator, worst)
        if warning:
            print_on_main(warning, warn=True)

    def on_train_end(self, exception=False, **kwargs):
        try:
            super().on_train_end(exception=exception, **kwargs)
        finally:
            if self._store:
                self._store.release()

    def jump_to_epoch(self, epoch):
        "Load what was saved after the epoch before, if rank 0 finds it."
        if not _is_fit(self.learn.recorder.pbar) or self._resumed or self._training:
            return  # it goes on by itself
        name = f'{self.name}_{epoch - 1}'
        found = run_on_main(self._find, (name,))
        if found is None:
            return print_on_main(f'Model {name} not found.')
        load_everywhere(self.learn.model, *found, self._load_opt)
        print_on_main(f'Loaded {name}')

    def _decide(self, epoch):
        if self.every == 'epoch':
            self._save(epoch)
        elif self._is_best(val := self.get_monitor_value()):
            print_on_main(f'Better model found at epoch {epoch} with {self.monitor} value: {val}.')
            self.best = val
            self._save(epoch, float(val))

    def _finish(self):
        if self.every == 'epoch':
            return
        best = self._store.best
        if best is None:
            return print_on_main(
                f'No model was saved during this fit, as {self.monitor} never improved: the weights stay as training left them, '
                'and a file of an earlier run is not loaded.',
                warn=True,
            )
        load_everywhere(self.learn.model, best.path, best.checksum, self._load_opt)

    def _find(self, name):
        path = self._folder() / f'{name}.pth'
        return (str(path), (read_metadata(path) or {}).get('checksum')) if path.is_file() else None

    def _save(self, epoch, value=None):
        "Rank 0 writes; all ranks go on when that is done, and know what was written."
        saved = run_on_main(self._write, (epoch, value))
        self._store.add(saved, best=value is not None)
        self.last_saved_path = Path(saved.path)

    def _write(self, epoch, value):
        opt = to_builtin(
            self.learn.opt.state_dict()
        )  # `learn.load` of fastai 1 leaves it to torch, which refuses numpy's numbers since 2.6
        meta = dict(epoch=epoch, monitor=self.monitor, value=value, world_size=world_size(), fastai=version('fastai'))
        path = self._store.place(dict(epoch=epoch))
        state = {'model': model_state(self.learn.model), 'opt': opt}
        return with_progress(f'saving {path.name}', self._store.begin(path, meta), state)

    def _load_opt(self, rest):
        try:
            self.learn.opt.load_state_dict(rest['opt'])  # which puts each tensor where its parameter is
        except ValueError as e:  # as after unfreezing
            print_on_main(f'The saved optimizer state does not fit this optimizer and was left out: {e}', warn=True)


class DDPTerminateOnNaNCallback(TerminateOnNaNCallback):
    """A `TerminateOnNaNCallback` that stops all ranks at the same batch, whichever of them had the NaN loss.

    A NaN loss on one rank makes the gradients of all ranks NaN, and the weights with them; but not every rank's loss in the
    same batch, and with a skipped step or a loss without gradient none at all. So the ranks tell each other: in the
    background, heard one batch later. In one process, and then only, training stops at the batch itself. Validation goes
    through to its end, as metrics may have a collective in each of its batches."""

    def __init__(self):
        super().__init__()
        self._before = self._flag = None

    def on_train_begin(self, pbar=None, **kwargs):
        if pbar is not None:
            self.stop, self._nan, self._before, self._flag = False, False, _handled(), BatchFlag('NaN loss')

    def on_batch_end(self, last_loss, epoch, num_batch, train=True, pbar=None, **kwargs):
        if not _is_fit(pbar):
            return
        nan = bool(torch.isnan(last_loss).any())
        if not train:
            self._nan = self._nan or nan
        elif self._heard(self._flag.exchange(nan), f'Epoch/Batch ({epoch}/{num_batch})'):
            return {'stop_epoch': True, 'stop_training': True, 'skip_validate': True}

    def on_epoch_end(self, epoch, pbar=None, **kwargs):
        "Hear of the last batch, and of validation."
        if not _is_fit(pbar) or self.stop:
            return
        if self._heard(self._flag.exchange(self._nan) or self._flag.read(), f'End of epoch {epoch}'):
            return {'stop_training': True}

    def on_train_end(self, exception=False, **kwargs):
        _failed(exception, self._before)

    def _heard(self, ranks, when):
        self.stop = bool(ranks)
        where = f' on rank {", ".join(map(str, ranks))}' if world_size() > 1 else ''
        if ranks:
            print_on_main(f'{when}: Invalid loss{where}, terminating training.')
        return self.stop


# -- the context


class _Watch(LearnerCallback):
    "Tells who kept the others waiting in a fit that ends well."

    cb_name, _order, _begun = 'ddp_watch', 200, None  # when all others have come to their end

    def on_train_begin(self, pbar=None, **kwargs):
        if _is_fit(pbar):
            self._begun = time.time_ns()

    def on_train_end(self, exception=False, **kwargs):
        line = straggler_summary(self._begun, time.time_ns()) if self._begun and not exception else None
        if line:
            print_on_main(line)
        self._begun = None


class _DDPTrainer(DistributedTrainer):
    "A `DistributedTrainer` for any device, which leaves `validate` alone and can be undone when a fit has raised."

    cb_name = 'distributed_trainer'

    def __init__(self, learn, **kwargs):
        super().__init__(learn)
        self.kwargs, self.before = kwargs, None

    def on_train_begin(self, pbar=None, **kwargs):
        if pbar is None:
            return  # `validate` has no end that would undo it
        data, device = self.learn.data, next(self.learn.model.parameters()).device
        self.learn.model = DistributedDataParallel(
            self.learn.model, device_ids=None if device.type == 'cpu' else [device.index], **self.kwargs
        )
        self.before = data.train_dl, data.valid_dl
        shuffle = getattr(data.train_dl, 'init_kwargs', {}).get('shuffle', True)
        _, data.train_dl, self.train_sampler = self._change_dl(
            data.train_dl, shuffle or isinstance(data, TextClasDataBunch)
        )
        if data.valid_dl is not None:
            _, data.valid_dl, self.valid_sampler = self._change_dl(data.valid_dl, shuffle)
        self.learn.recorder.silent = self.learn.recorder.silent or rank() != 0

    def on_epoch_begin(self, **kwargs):
        if self.before is not None:
            super().on_epoch_begin(**kwargs)

    def on_epoch_end(self, pbar=None, **kwargs):
        "`lr_find` ends in the same epoch on all ranks, though each judges by its own loss."
        if pbar is not None and not _is_fit(pbar):
            self.learn.lr_finder.stop = agree(bool(self.learn.lr_finder.stop), 'any', 'end of lr_find')

    def on_train_end(self, **kwargs):
        if isinstance(self.learn.model, DistributedDataParallel):
            self.learn.model = self.learn.model.module
        if self.before is not None:
            (self.learn.data.train_dl, self.learn.data.valid_dl), self.before = self.before, None


@contextmanager
def ddp_ctx(
    learn,  # the `Learner` to train; its data tell whether on GPUs (each rank on its own) or on the CPU
    **kwargs,  # for `DistributedDataParallel`
):
    """Train with DistributedDataParallel, as after `learn.to_distributed(gpu)`; also on the CPU with gloo, and with one rank.

    Uses the default process group, or makes it where a launcher has set the stage. Whatever is raised inside is told to
    the other ranks, and the learner is restored: model, data loaders and callbacks."""
    with process_group(learn.data.device), propagate_failure():
        if world_size() == 1 or any(isinstance(o, _DDPTrainer) for o in learn.callbacks):
            yield learn
        else:
            with _distributed(learn, kwargs):
                yield learn


@contextmanager
def _distributed(learn, kwargs):
    trainer, bars = _DDPTrainer(learn, **kwargs), fastprogress.fastprogress
    no_bar, bars.NO_BAR = bars.NO_BAR, rank() != 0 or bars.NO_BAR
    learn.callbacks += [trainer, _Watch(learn)]
    try:
        yield
    finally:
        trainer.on_train_end()
        bars.NO_BAR, learn.callbacks[:] = (
            no_bar,
            [o for o in learn.callbacks if not isinstance(o, (_DDPTrainer, _Watch))],
        )
        del learn.distributed_trainer, learn.ddp_watch

"fastai 2: the callback that saves the best model and loads it at the end, on all ranks."
from __future__ import annotations
from pathlib import Path

import numpy as np
from fastai.callback.tracker import SaveModelCallback

from .checkpoint import load_model_state, model_state, own, plain, read_checkpoint, write_checkpoint
from .distributed import barrier, reports_failure, run_on_main, say, together
from .tracker import DDPTrackerCallback

__all__ = ['DDPSaveModelCallback']


class DDPSaveModelCallback(DDPTrackerCallback, SaveModelCallback):
    """A `SaveModelCallback` for which rank 0 saves while the others wait, and all ranks load the best at the end.

    `last_saved_path` and `best` are the same on every rank and stay on this object after `fit`. Only what this callback
    has saved is loaded: in the same fit, or in an earlier one that `best` comes from (`reset_on_fit=False`)."""
    name = 'save_model'

    def __init__(self,
        monitor='valid_loss', # value (usually loss or metric) being monitored.
        comp=None, # numpy comparison operator; np.less if monitor is loss, np.greater if monitor is metric.
        min_delta=0., # minimum delta between the last monitor value and the best monitor value.
        fname='model', # model name to be used when saving model.
        every_epoch=False, # if true, save model after every epoch (or every so many); else save only when model is better than existing best.
        at_end=False, # if true, save model when training ends; else load best model if there is only one saved model.
        with_opt=False, # if true, save optimizer state (if any available) when saving model.
        reset_on_fit=True, # before model fitting, reset value being monitored to -infinity (if monitor is metric) or +infinity (if monitor is loss).
        reduce='mean' # how the values of the ranks become one: 'mean', 'main' (rank 0's), 'min', 'max'.
    ):
        if every_epoch and at_end: raise ValueError('DDPSaveModelCallback: every_epoch and at_end cannot both be set. Use two callbacks.')
        super().__init__(monitor, comp, min_delta, reset_on_fit, reduce, fname=fname, every_epoch=every_epoch, at_end=at_end, with_opt=with_opt)
        self._best = None # path and checksum of the file that `best` belongs to

    def _start(self):
        super()._start()
        twins = [o for o in self.learn.cbs if isinstance(o, SaveModelCallback) and o is not self and (o.fname, bool(o.every_epoch)) == (self.fname, bool(self.every_epoch))]
        with reports_failure(f'{self.name}.before_train'):
            if twins: raise ValueError(f'Two callbacks save to {self.fname!r}: give each an fname of its own.')

    def _forget(self):
        super()._forget()
        self._best = None

    def after_epoch(self):
        "Save if the agreed value is the best so far, or if a save is due after this epoch."
        if not self.every_epoch: return super().after_epoch()
        if self._trained and self.epoch%self.every_epoch == 0: self._save(f'{self.fname}_{self.epoch}')
        self._trained = False

    def _decide(self, val):
        super()._decide(val)
        if self.new_best:
            say(f'Better model found at epoch {self.epoch} with {self.monitor} value: {self.best}.')
            self._best = self._save(self.fname)

    def after_fit(self):
        "Load the best model, or save the last one."
        trained = self._training
        super().after_fit()
        if not trained: return
        if self.at_end: self._save(self.fname)
        elif not self.every_epoch: self._load_best()

    def _save(self, name):
        "Rank 0 writes; all ranks go on when that is done, and know what was written."
        saved = run_on_main(self._write, (name,))
        self.last_saved_path = Path(saved['path'])
        return saved

    def _write(self, name):
        path = (self.learn.path/self.learn.model_dir/f'{name}.pth').absolute()
        state = model_state(self.learn.model)
        if self.with_opt and self.learn.opt is not None: state = {'model':state, 'opt':plain(self.learn.opt.state_dict())}
        meta = write_checkpoint(state, path, dict(epoch=self.epoch, iteration=self.train_iter, monitor=self.monitor,
                                                  value=float(self.best) if np.isfinite(self.best) else None))
        return dict(path=str(path), checksum=meta['checksum'])

    def _load_best(self):
        if self._best is None:
            say(f'No model was saved during this fit, as {self.monitor} never improved: the weights stay as training left them, '
                'and a file of an earlier run is not loaded.', warn=True)
            return
        path = self._best['path']
        barrier(f'before loading {path}') # rank 0 has written; all ranks are here
        with together(f'load {path}'): self._read(path) # and nobody goes on, perhaps to write or delete, before all have read

    def _read(self, path):
        state,_ = read_checkpoint(path, checksum=self._best['checksum'])
        with_opt = set(state) == {'model', 'opt'}
        load_model_state(self.learn.model, state['model'] if with_opt else state, path)
        if with_opt and self.with_opt: self.learn.opt.load_state_dict(own(state['opt'], next(self.learn.model.parameters()).device))

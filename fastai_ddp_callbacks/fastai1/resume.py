"fastai 1: a fit that was interrupted is resumed after the last epoch that it has saved."

from __future__ import annotations
from importlib.metadata import version
from typing import Any

import torch
from fastai.basic_train import Learner, LearnerCallback

from ..checkpoint.state import model_state, size_of, to_builtin
from ..distributed import all_gather, all_or_none, print_on_main, rank, run_on_main, world_size
from ..training.random_state import random_state, restore_random
from ..training.earlier_fits import EarlierFits
from ..training.resume_arguments import check_name, check_resume, check_whole_number
from ..training.resume_files import ResumeFiles, callback_keys, is_stateful, load, progress
from .fit import FitCallback
from .fit_plan import check_plan, fit_plan, has_schedule
from .tracker import DDPTrackerCallback

__all__ = ['DDPResumeCallback']

_HISTORY = ('losses', 'lrs', 'moms', 'val_losses', 'metrics', 'nb_batches')  # of the Recorder


class DDPResumeCallback(FitCallback, LearnerCallback):
    """Saves all that a fit needs to be resumed, after each epoch, and resumes it when the script is run again.

    On the CPU, with as many ranks and loaders without workers, the weights at the end are the same to the bit. The
    Recorder's history is whole, and rank 0's; its table and the smoothed training loss begin at the epoch of the
    resumption. The learner numbers its fits, so that each has files of its own. `ValueError` if the files belong to
    another kind of fit; `CheckpointError` if there are none and `resume='must'`."""

    _order = 90  # after all that is to be saved has seen the epoch
    _files: Any = None  # the `ResumeFiles` of the fit
    _plan: dict = {}
    _earlier: Any = None  # the `EarlierFits` of the learner
    _is_finished = False  # whether the fit was found finished
    _is_cut = False  # whether it was stopped inside an epoch

    def __init__(
        self,
        learn: Learner,  # the `Learner`
        every_epoch: int = 1,  # save after so many epochs
        keep: int = 2,  # how many of the newest to keep
        name: str = 'resume',  # first part of the files' names, in `learn.path/learn.model_dir`
        resume: str = 'auto',  # 'auto': if there is something to resume; 'must': fail if not; 'never': from scratch
    ):
        who = type(self).__name__
        check_resume(who, resume)
        check_whole_number(who, 'every_epoch', every_epoch)
        check_whole_number(who, 'keep', keep)
        check_name(who, 'name', name)
        super().__init__(learn)
        self.every_epoch = every_epoch
        self.keep = keep
        self.name = name
        self.resume = resume
        self.exclude += ['_files', '_earlier', '_plan']

    # -- the beginning of a fit

    def on_train_begin(self, pbar=None, n_epochs=0, **kwargs):
        "Look for a file to resume from. Gives the epoch and the iteration at which the fit is to begin."
        if not self._hears(pbar):
            return
        fit: Any = self._fit
        self._is_finished = self._is_cut = False
        self._earlier = EarlierFits.of(self.learn, self.name)
        self._files = ResumeFiles(self.learn.path / self.learn.model_dir, self._earlier.name(self.name), self.keep)
        fit.callback(self._release)
        self._plan = fit_plan(self.learn.opt, fit.callbacks)
        size = size_of([self.learn.model.state_dict(), self.learn.opt.state_dict()])
        scheduled = has_schedule(fit.callbacks)
        found = run_on_main(self._files.find, (size, n_epochs, scheduled, self.resume, self._earlier))
        if found:
            return self._restore(fit, *found)

    def _restore(self, fit, path, checksum, meta):
        kept = load(self.learn.model, path, checksum, lambda rest: self._check_plan(fit, path, rest['training']))
        state = kept['training']
        self._is_finished = meta['finished']
        with all_or_none(f'resume from {path}'):
            self._restore_rest(fit, state, kept['opt'])
        is_over = self._is_finished or state['stopped'] or meta['epoch'] >= fit.n_epochs
        print_on_main(
            f'{path}: resuming after {progress(meta)}' + (', with nothing left to train.' if is_over else '.')
        )
        if world_size() != len(state['ranks']):
            print_on_main(
                f'{path} was saved by {len(state["ranks"])} ranks and is resumed by {world_size()}: the result will '
                'differ from an uninterrupted run.',
                warn=True,
            )
        # from epoch 0 no schedule jumps: a finished fit has the hyperparameters of its best epoch
        epoch = 0 if self._is_finished else meta['epoch']
        if is_over:  # a bar with nothing to come would still give one epoch
            fit.pbar.main_bar.gen = []
            fit.pbar.main_bar.total = epoch
        return {'epoch': epoch, 'iteration': meta['iteration']}

    def _restore_rest(self, fit, state, opt):
        "What is neither the model nor common to all fits."
        self.learn.opt.load_state_dict(opt)
        self.learn.opt.lr = self.learn.opt.read_val('lr')
        for name in _HISTORY:
            setattr(fit.recorder, name, list(state['recorder'][name]))
        for key, cb in self._stateful(fit):
            if key not in state['callbacks']:
                continue
            own = state['callbacks'][key]
            is_tracker = isinstance(cb, DDPTrackerCallback)
            cb.load_state_dict(dict(own, finished=True) if is_tracker and self._is_finished else own)
        if rank() < len(state['ranks']):
            restore_random(state['ranks'][rank()])

    def _check_plan(self, fit, path, state):
        "`ValueError` if it is not the state of a fit of this kind; nothing is changed yet."
        check_plan(path, state.get('plan', {}), self._plan, world_size() == len(state['ranks']))
        for key, cb in self._stateful(fit):
            if isinstance(cb, DDPTrackerCallback) and key in state['callbacks']:
                cb.check_state(state['callbacks'][key])

    # -- epochs

    def on_epoch_end(self, epoch, iteration, pbar=None, stop_epoch=False, stop_training=False, **kwargs):
        "Save, if a save is due after this epoch."
        if not self._hears(pbar):
            return
        self._is_cut = bool(stop_epoch and stop_training)  # as for a loss that is NaN
        if not self._is_cut and (epoch + 1) % self.every_epoch == 0:
            self._save(epoch + 1, iteration, stopped=stop_training)

    def on_train_end(self, epoch, iteration, exception=False, pbar=None, **kwargs):
        "Save that the fit is finished, if it is."
        if not self._hears(pbar) or self._fit.error(exception):
            return
        if self._is_cut:
            return print_on_main(
                f'{type(self).__name__}: stopped inside epoch {epoch - 1}. Run again, the fit is resumed from what was '
                'saved before it.'
            )
        if not self._is_finished:
            self._save(epoch, iteration, finished=True)
        self._earlier.and_this(self.learn, self.name, self._files.store.run, self._fit.n_epochs, self._is_finished)

    def _release(self):
        self._files.store.release()
        self._files = None

    def _save(self, epoch, iteration, finished=False, stopped=False):
        fit: Any = self._fit
        state = dict(
            recorder={name: _plain(getattr(fit.recorder, name, [])) for name in _HISTORY},
            stopped=bool(stopped),
            plan=self._plan,
            callbacks={key: to_builtin(cb.state_dict()) for key, cb in self._stateful(fit)},
            ranks=all_gather(random_state(), 'random states'),
        )
        meta = dict(epoch=epoch, iteration=iteration, finished=finished, n_epoch=fit.n_epochs)
        run_on_main(self._write, (state, meta))

    def _write(self, training, meta):
        meta = dict(meta, batch=0, n_iter=0, after=self._earlier.last, fastai=version('fastai'))
        write = self._files.next(meta)
        opt = to_builtin(self.learn.opt.state_dict())
        saved = write({'model': model_state(self.learn.model), 'opt': opt, 'training': training})
        self._files.keep_newest(saved)

    def _stateful(self, fit):
        "The callbacks of the fit that have a state to save, by class and number."
        return callback_keys(filter(is_stateful, fit.callbacks))


def _plain(history):
    "A list of the Recorder as plain values."
    return to_builtin([value.tolist() if isinstance(value, torch.Tensor) else value for value in history])

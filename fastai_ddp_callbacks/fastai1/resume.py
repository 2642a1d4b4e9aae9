"fastai 1: a fit that was killed goes on after the last epoch that it has saved."

from __future__ import annotations
import sys
from importlib.metadata import version
from numbers import Integral

import numpy as np, torch
from fastai.basic_train import LearnerCallback
from fastai.callback import CallbackHandler
from fastai.callbacks.general_sched import GeneralScheduler
from fastai.callbacks.one_cycle import OneCycleScheduler

from ..distributed import all_gather, rank, run_on_main, print_on_main, all_or_none, world_size
from .callbacks import DDPTrackerCallback, _handled, _is_fit
from ..training.random_state import random_state, restore_random
from ..training.resume_files import EarlierFits, ResumeFiles, load, callback_keys, is_stateful, progress
from ..checkpoint.state import model_state, to_builtin, size_of

__all__ = ['DDPResumeCallback']

_HISTORY = 'losses', 'lrs', 'moms', 'val_losses', 'metrics', 'nb_batches'  # of the Recorder
_LENGTHS = 'lengths of phases'  # in batches, so that they may differ with the number of ranks


class DDPResumeCallback(LearnerCallback):
    """Saves all that a fit needs to go on after each epoch, and goes on by itself when the fit that was killed is started again.

    On the CPU, with as many ranks and loaders without workers, the weights at the end are then the same to the bit. The table
    on the screen begins where it goes on, the smoothed training loss begins anew, and the Recorder's history is
    whole, and rank 0's. The learner numbers its fits, so that each has files of its own, with one callback or a new one for each.
    Errors are those of the callback for fastai 2; there is nothing here for the middle of an epoch, nor for signals."""

    _order = 90  # after all that is to be saved has seen the epoch

    def __init__(
        self,
        learn,  # the `Learner`
        every_epoch=1,  # save after so many epochs
        keep=2,  # how many of the newest to keep
        name='resume',  # first part of the files' names, in `learn.path/learn.model_dir`
        resume='auto',  # 'auto': go on if there is something to go on with; 'must': and fail if not; 'never': start anew
    ):
        if resume not in ('auto', 'must', 'never'):
            raise ValueError(f"DDPResumeCallback(resume={resume!r}): choose 'auto', 'must' or 'never'.")
        for k, v in dict(every_epoch=every_epoch, keep=keep).items():
            if not isinstance(v, Integral) or v < 1:
                raise ValueError(f'DDPResumeCallback({k}={v!r}): a whole number above 0 is needed.')
        if not name or set('{}') & set(str(name)):
            raise ValueError(f'DDPResumeCallback(name={name!r}): a name without braces is needed.')
        super().__init__(learn)
        self.every_epoch, self.keep, self.name, self.resume, self._files, self._callbacks = (
            every_epoch,
            keep,
            name,
            resume,
            None,
            [],
        )

    def on_train_begin(self, pbar=None, n_epochs=0, **kwargs):
        "Go on, if there is something to go on with."
        if not _is_fit(pbar):
            return
        self._before, self._n_epochs, self._finished, self._cut, self._callbacks = (
            _handled(),
            n_epochs,
            False,
            False,
            _callbacks_of_fit(),
        )
        self._earlier = EarlierFits.of(self.learn, self.name)  # the learner counts, as each fit may have a new callback
        self._files = ResumeFiles(self.learn.path / self.learn.model_dir, self._earlier.name(self.name), self.keep)
        size = size_of([self.learn.model.state_dict(), self.learn.opt.state_dict()])
        scheduled = any(isinstance(o, (OneCycleScheduler, GeneralScheduler)) for o in self._callbacks)
        self._plan = _plan(self.learn.opt, self._callbacks)
        try:
            found = run_on_main(self._files.find, (size, n_epochs, scheduled, self.resume, self._earlier))
            if found:
                return self._go_on(pbar, *found)
        except BaseException:  # no other event tells that this fit is over
            self._leave()
            raise

    def _go_on(self, pbar, path, checksum, meta):
        kept = load(self.learn.model, path, checksum, lambda rest: self._check_kind(path, rest['training']))
        state, self._finished = kept['training'], meta['finished']
        with all_or_none(f'resume from {path}'):
            self.learn.opt.load_state_dict(kept['opt'])
            self.learn.opt.lr = self.learn.opt.read_val('lr')
            for k in _HISTORY:
                setattr(self.learn.recorder, k, list(state['recorder'][k]))
            for k, cb in self._offering():
                if k in state['callbacks']:
                    cb.load_state_dict(state['callbacks'][k])
            if rank() < len(state['ranks']):
                restore_random(state['ranks'][rank()])
        over = self._finished or state['stopped'] or meta['epoch'] >= self._n_epochs
        print_on_main(f'{path}: going on after {progress(meta)}' + (', with nothing left to train.' if over else '.'))
        if world_size() != len(state['ranks']):
            print_on_main(
                f'{path} was saved by {len(state["ranks"])} ranks, and goes on with {world_size()}: not as a fit that was not interrupted.',
                warn=True,
            )
        epoch = (
            0 if self._finished else meta['epoch']
        )  # from 0 no schedule jumps: at the end the hyperparameters are those of the best epoch
        if over:
            pbar.main_bar.gen, pbar.main_bar.total = [], epoch  # a bar with nothing to come would still give one epoch
        if over and not self._finished:  # it was killed before its end, to which trackers come that have begun
            for cb in self._callbacks:
                if isinstance(cb, DDPTrackerCallback):
                    cb.on_epoch_begin(pbar=pbar, n_epochs=self._n_epochs)
        return {'epoch': epoch, 'iteration': meta['iteration']}

    def _check_kind(self, path, state):
        "`ValueError` if it is not the state of a fit of this kind; nothing is changed yet."
        was, now = state.get('plan', {}), self._plan
        differ = [
            k
            for k in {**was, **now}
            if was.get(k) != now.get(k) and (k != _LENGTHS or world_size() == len(state['ranks']))
        ]
        if differ:
            raise ValueError(
                f'{path} is of a fit of another kind: '
                + '; '.join(f'{k} was {was.get(k, "none")} and is {now.get(k, "none")}' for k in differ[:3])
                + ". Give this fit another name, or resume='never' to start from scratch."
            )
        for k, cb in self._offering():
            if isinstance(cb, DDPTrackerCallback) and k in state['callbacks']:
                cb.check_state(state['callbacks'][k])

    def on_epoch_end(self, epoch, iteration, pbar=None, stop_epoch=False, stop_training=False, **kwargs):
        if not self._files or not _is_fit(pbar):
            return
        self._cut = bool(stop_epoch and stop_training)  # in the midst of the epoch, as for a loss that is NaN
        if not self._cut and (epoch + 1) % self.every_epoch == 0:
            self._save(epoch + 1, iteration, stopped=stop_training)

    def on_train_end(self, epoch, iteration, exception=False, **kwargs):
        "Remember that the fit has come to its end, if it has."
        if not self._files:
            return
        try:
            if exception or _handled() != self._before:
                return
            if self._cut:
                return print_on_main(
                    f'{type(self).__name__}: stopped in the midst of epoch {epoch - 1}. Started again, the fit goes on from what was saved before.'
                )
            if not self._finished:
                self._save(epoch, iteration, finished=True)
            self._earlier.and_this(self.learn, self.name, self._files.store.run, self._n_epochs, self._finished)
        finally:
            self._leave()

    def _leave(self):
        self._files.store.release()
        self._files, self._callbacks = None, []

    def _save(self, epoch, iteration, finished=False, stopped=False):
        recorder = {
            k: to_builtin(
                [o.tolist() if isinstance(o, torch.Tensor) else o for o in getattr(self.learn.recorder, k, [])]
            )
            for k in _HISTORY
        }
        state = dict(
            recorder=recorder,
            stopped=bool(stopped),
            plan=self._plan,
            callbacks={k: to_builtin(cb.state_dict()) for k, cb in self._offering()},
            ranks=all_gather(random_state(), 'random states'),
        )
        run_on_main(self._write, (state, epoch, iteration, finished))

    def _write(self, training, epoch, iteration, finished):
        write = self._files.next(
            dict(
                epoch=epoch,
                batch=0,
                n_iter=0,
                n_epoch=self._n_epochs,
                iteration=iteration,
                finished=finished,
                after=self._earlier.last,
                fastai=version('fastai'),
            )
        )
        self._files.keep_newest(
            write(
                {
                    'model': model_state(self.learn.model),
                    'opt': to_builtin(self.learn.opt.state_dict()),
                    'training': training,
                }
            )
        )

    def _offering(self):
        "Callbacks that say what they need to go on, by class and number."
        return callback_keys(filter(is_stateful, self._callbacks))


def _callbacks_of_fit():
    "Those of the fit whose event this is. The learner knows the newest of each class only, also if that is of an earlier fit."
    f = sys._getframe()
    while f.f_code is not CallbackHandler.__call__.__code__:
        f = f.f_back
    return list(f.f_locals['self'].callbacks)


def _plan(opt, callbacks) -> dict:
    "What makes two fits of one kind, in words: the optimizer, its hyperparameters when a fit begins, and where each schedule will have them."
    groups, cycles = opt.opt.param_groups, [o for o in callbacks if isinstance(o, OneCycleScheduler)]
    phases = [p for o in callbacks if isinstance(o, GeneralScheduler) for p in o.phases]
    scheduled = {k for p in phases for k in p.scheds} | (
        {'lr', 'mom'} if cycles else set()
    )  # of which an interrupted fit leaves some value behind
    plan = {
        'optimizer': type(opt.opt).__name__,
        'parameters by group': [sum(p.numel() for p in g['params']) for g in groups],
        'trained parameters': [sum(p.numel() for p in g['params'] if p.requires_grad) for g in groups],
        'true_wd': opt.true_wd,
        'bn_wd': opt.bn_wd,
    }
    for k, v in [('wd', opt._wd), *((k, [dict(_hypers(g)).get(k) for g in groups]) for k, _ in _hypers(groups[0]))]:
        if k not in scheduled:
            plan[k] = v[0] if all(o == v[0] for o in v) else v
    for o in cycles:
        plan['one-cycle schedule'] = ', '.join(
            f'{k}={to_builtin(getattr(o, k))}' for k in ('lr_max', 'moms', 'div_factor', 'pct_start', 'final_div')
        )
    if phases:
        plan['phases'], plan[_LENGTHS] = (
            [
                {k: [_rounded(s.func(s.start, s.end, i / 8)) for i in range(9)] for k, s in p.scheds.items()}
                for p in phases
            ],
            [p.length for p in phases],
        )
    return {k: str(to_builtin(v)) for k, v in plan.items()}


def _hypers(group):
    "Those of a group of parameters, by fastai's names. It holds weight decay itself."
    for k, v in group.items():
        if k == 'betas':
            yield from zip(('mom', 'beta'), v)
        elif k not in ('params', 'weight_decay'):
            yield {'momentum': 'mom', 'alpha': 'beta'}.get(k, k), v


def _rounded(v):
    return [f'{o:.6g}' for o in np.ravel(v)]  # the last bits are each machine's own

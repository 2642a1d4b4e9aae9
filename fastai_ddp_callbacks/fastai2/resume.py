"fastai 2: a fit that was killed goes on where its last whole checkpoint was."

from __future__ import annotations
import time
from functools import partial
from importlib.metadata import version

import torch
from fastai.callback.schedule import ParamScheduler
from fastai.torch_core import to_device
from torch.nn.parallel import DistributedDataParallel

from ..distributed import all_gather, rank, run_on_main, print_on_main, all_or_none, world_size
from ..errors import CheckpointError, Preempted
from ..training.preemption import SignalWatch
from ..training.resume_files import EarlierFits, ResumeFiles, load, progress
from .fit import FitCallback, running_fit
from .rest_of_epoch import Stage, train_on_rest
from .loader_state import own_state, restore_own
from .resume_state import check_kind, number, plan, restore_shared, shared_state, sizes
from ..checkpoint.state import model_state, to_builtin, size_of
from ..checkpoint.background import Writer

__all__ = ['DDPResumeCallback']

_LOOK, _BATCHES = (
    1.0,
    50,
)  # seconds, or batches, between the moments at which all ranks tell each other whether to save or to leave
_ended = set()  # runs whose fits have come to their ends in this process


class DDPResumeCallback(FitCallback):
    """Saves all that a fit needs to go on, and goes on by itself when the fit that was killed is started again.

    On the CPU, with as many ranks, the end is then the same to the bit. SIGTERM, SIGUSR1 or Ctrl-C on any rank: all ranks
    save after the same batch, within about a second (50 batches, if they have become slower since) and the time of a save,
    and leave by `Preempted` (a `SystemExit`); in the midst of validation, after it; where nothing is left to save, at the
    end of the fit. Signals that are ignored stay so. A fit that has come to its end is not trained again: its weights are
    loaded. `CheckpointError` on all ranks if there is nothing whole and `resume='must'`; `ValueError` if what is there
    belongs to a fit of another kind, if the optimizer trains what is not the model's own, or if a fit has two of these
    callbacks. One object numbers its fits, so that `fine_tune` makes two; the second starts anew, with a warning, where
    the first was trained anew or longer since, and 'must' does not hold for fits after one that was trained in this
    process. In the midst of an epoch, gradients that are accumulated over batches are not saved, nor is what a model keeps
    beside its state dict, nor the average of a training metric up to there; loaders with workers that draw random numbers
    begin them anew."""

    order, run_valid = 90, False  # after all that is to be saved has seen the epoch

    def __init__(
        self,
        every_epoch: int | None = 1,  # save after so many epochs; None: only as told by what follows.
        every_batches: int | None = None,  # save after so many batches too.
        every_minutes: float | None = None,  # save when so many minutes have passed on rank 0's clock, too.
        keep: int = 2,  # how many of the newest to keep.
        fname: str = 'resume',  # first part of the files' names, in `learn.path/learn.model_dir`.
        resume: str = 'auto',  # 'auto': go on if there is something to go on with; 'must': and fail if not; 'never': start anew.
        background: bool = False,  # write while training goes on, from a copy of the state in the memory of rank 0.
        exit_status: int = 0,  # with which the process ends after a signal.
    ):
        if resume not in ('auto', 'must', 'never'):
            raise ValueError(f"DDPResumeCallback(resume={resume!r}): choose 'auto', 'must' or 'never'.")
        for k, v in dict(
            every_epoch=every_epoch, every_batches=every_batches, every_minutes=every_minutes, keep=keep
        ).items():
            if v is not None and v <= 0 or v is None and k == 'keep':
                raise ValueError(f'DDPResumeCallback({k}={v!r}): a number above 0 is needed.')
        if not fname or set('{}') & set(str(fname)):
            raise ValueError(f'DDPResumeCallback(fname={fname!r}): a name without braces is needed.')
        self.every_epoch, self.every_batches, self.every_minutes, self.keep = (
            every_epoch,
            every_batches,
            every_minutes,
            keep,
        )
        self.fname, self.resume, self.background, self.exit_status = fname, resume, background, exit_status
        self._before, self._active, self._trained, self._files, self._writer, self._asked = (
            EarlierFits(),
            False,
            False,
            None,
            Writer(),
            SignalWatch(),
        )

    def __getstate__(self):
        return dict(vars(self), _active=False, _state=None)  # a copy is in no fit

    # -- the beginning of a fit

    def before_fit(self):
        fit = running_fit(self.learn)
        fit.callback(self._leave)
        with all_or_none('DDPResumeCallback: whether it can save this fit'):
            self._check_fit()
        self._active, self._finished, self._warm, self._cut, self._trained = True, False, False, False, False
        self._rows, self._stages, self._state, self._checked = [], [], None, None
        self._check_at, self._saved_at = 1, time.monotonic()
        self._before = max(
            EarlierFits.of(self.learn, self.fname), self._before, key=lambda o: o.fits
        )  # another callback may have seen the fit before
        self._files = ResumeFiles(self.learn.path / self.learn.model_dir, self._before.name(self.fname), self.keep)
        self._kind = plan(self.learn)
        found = run_on_main(self._find)
        if found:
            self._go_on(fit, *found)
        self._asked = SignalWatch()
        self._asked.watch()

    def _check_fit(self):
        several = sum(isinstance(o, DDPResumeCallback) for o in self.learn.cbs)
        if several > 1:
            raise ValueError(
                f'DDPResumeCallback: {several} in one fit. Give it one, which may save by epochs, batches and minutes.'
            )
        own, trained = (
            {id(o) for o in self.learn.model.parameters()},
            [o for group in getattr(self.learn.opt, 'param_lists', ()) for o in group],
        )
        others = sum(id(o) not in own for o in trained)
        if others:  # copies are made before the saved weights are loaded, and would undo that
            raise ValueError(
                f"DDPResumeCallback: the optimizer trains {others} tensors that are not the model's own, which are not saved. Copies in another precision "
                '(NonNativeMixedPrecision)? MixedPrecision needs none. A loss that has weights? Make it a part of the model.'
            )

    def _find(self):
        try:
            self._writer.wait()  # what an earlier fit, which has raised, had under way
        except CheckpointError as e:
            print_on_main(f'In the fit before: {e}', warn=True)
        size = size_of([self.learn.model.state_dict(), self.learn.opt.state_dict()])
        return self._files.find(
            size,
            self.learn.n_epoch,
            any(isinstance(o, ParamScheduler) for o in self.learn.cbs),
            self.resume,
            self._before,
        )

    def _go_on(self, fit, path, checksum, meta):
        "Bring everything back to where it was."

        def fits(rest):
            check_kind(self.learn, rest['opt'], rest['training'], self._kind)

        kept = load(self.learn.model, path, checksum, fits)
        state = self._state = kept['training']
        self._opt = kept['opt']
        with all_or_none(f'resume from {path}'):
            self.learn.opt.load_state_dict(to_device(kept['opt'], next(self.learn.model.parameters()).device))
            restore_shared(self.learn, state, meta['finished'])
            self._finished, self._rows = meta['finished'], state['rows']
            fit.first_epoch = self.learn.n_epoch if meta['finished'] else state['epoch']
            self._stages = [Stage(*o) for o in state['stages']]
        bar = getattr(getattr(self.learn, 'progress', None), 'mbar', None)
        if bar:
            bar.update(0)  # its beginning, which only epoch 0 would be
        for row in self._rows:
            self.learn.logger(row)
        if not self._stages:
            self._bring_back_random_states()
        then, now = state['data'], sizes(self.learn)
        if self._finished:
            other = (
                ''
                if then == now
                else f' It had {then} samples and samples per batch, and this one has {now}: if this is another fit, it is not trained.'
            )
            if self._files.store.run in _ended:
                other += ' It is the fit of another learner of this process: this one is not trained.'  # rank 0 knows, and tells
            return print_on_main(
                f"{path}: this fit has come to its end before. Nothing is trained, its weights are loaded.{other} To train, give it another fname, or resume='never'.",
                warn=bool(other),
            )
        print_on_main(f'Going on after {progress(meta)}, with {path}.')
        if world_size() != len(state['ranks']):
            print_on_main(
                f'{path} was saved by {len(state["ranks"])} ranks, and goes on with {world_size()}: batches and random numbers will not be those of a fit that was '
                'not interrupted.',
                warn=True,
            )
        if then != now:
            print_on_main(
                f'{path} was saved with {then} samples and samples per batch, and goes on with {now}: not as a fit that was not interrupted.',
                warn=True,
            )
        self._warm = (
            world_size() > 2
            and isinstance(self.learn.model, DistributedDataParallel)
            and not next(self.learn.model.parameters()).is_cuda
        )

    def _bring_back_random_states(self):
        "This rank's own, as far as there was such a rank."
        if rank() < len(self._state['ranks']):
            restore_own(self.learn, self._state['ranks'][rank()])

    # -- in the fit

    def before_epoch(self):
        vars(self.learn).pop('all_batches', None)  # of an epoch that was cancelled
        self._trained, self._rest = False, self._stages and self.epoch == running_fit(self.learn).first_epoch
        if self._rest:
            self.learn.all_batches = partial(
                train_on_rest, self.learn, list(self._stages), self._state['order'], self._bring_back_random_states
            )
        else:
            self._stages = []

    def before_train(self):
        if self._rest:
            self.learn.opt.load_state_dict(
                to_device(self._opt, next(self.model.parameters()).device)
            )  # over what callbacks did again when this epoch began again
        if self._rest:
            self.learn.pct_train, self._order = self._state['pct_train'], self._state['order']
        else:
            self._order = own_state(self.learn)
        self._begin = None  # of what this process trains in this epoch

    def before_batch(self):
        if self._warm:
            self._warm_up()
        self._warm = False

    def _warm_up(self):
        """Let DDP see a batch before the first one. After that it lays gradients out in the order in which they come, and three
        numbers or more that are added in another order may differ in the last bit."""
        buffers, states = [o.clone() for o in self.model.buffers()], own_state(self.learn)
        self.loss_func(self.model(*self.xb), *self.yb).backward()
        self.opt.zero_grad()
        with torch.no_grad():
            for o, before in zip(self.model.buffers(), buffers):
                o.copy_(before)
        restore_own(self.learn, states)

    def after_batch(self):
        if self._begin is None:
            self._begin = self.iter
        n = self.train_iter
        if world_size() == 1:
            leave, due = bool(self._asked.by), self._late()
        elif n >= self._check_at:
            leave, due = self._look(n)
        else:
            leave = due = False
        follows = self.iter + 1 == self.n_iter and self._epoch_due()  # a save at the end of the epoch
        if leave or (due or self.every_batches and n % self.every_batches == 0) and not follows:
            self._save(self.epoch, self.iter + 1)
        if leave:
            self._go()

    def _late(self):
        return self.every_minutes is not None and time.monotonic() - self._saved_at >= 60 * self.every_minutes

    def _look(self, n):
        "All ranks meet and tell: whether one is to leave; whether rank 0 wants to save, and in how many batches to meet again."
        now, (before, then) = time.monotonic(), self._checked or (n, 0)
        batches, self._checked = max(1, min(int(_LOOK * (n - before) / max(now - then, 1e-6)), _BATCHES)), (n, now)
        with all_or_none('resume: whether to save or to leave') as ranks:
            ranks.value = bool(self._asked.by) | self._late() << 1 | batches << 2
        main = ranks.values[0]
        self._check_at = n + (main >> 2)
        return any(o & 1 for o in ranks.values), bool(main & 2)

    def after_train(self):
        self._trained = True
        if self._rest:
            del self.learn.all_batches
        self._rest, self._stages, self._state = False, [], None

    def after_epoch(self):
        if not self._trained:
            return
        self._rows.append([number(o) for o in self.recorder.log])
        if self._epoch_due() and self._save(self.epoch + 1, 0):
            self._go()

    def _epoch_due(self):
        return bool(self.every_epoch) and (self.epoch + 1) % self.every_epoch == 0

    def after_cancel_fit(self):
        "Early stopping comes at the end of an epoch. Whoever stops in the midst of one (a loss that is NaN) has not come to the end of the fit."
        self._cut = not self._trained

    def after_fit(self):
        "Save what the fit came to, and remember that it has."
        if len(self._rows) < len(self.recorder.values):
            self._rows.append([number(o) for o in self.recorder.log])  # early stopping came first
        if self._cut:
            print_on_main(
                f'{type(self).__name__}: stopped in the midst of epoch {self.epoch}. Started again, the fit goes on from what was saved before.'
            )
        if not self._finished and not self._cut:
            self._save(self.n_epoch, 0, finished=True)
        with all_or_none('resume: whether to leave') as ranks:
            ranks.value = bool(self._asked.by)  # the save may have taken its time
        if not self._cut:
            self._before = self._before.and_this(
                self.learn, self.fname, self._files.store.run, self.n_epoch, self._finished
            )
            _ended.add(self._files.store.run)
        self._leave()
        if any(ranks.values):
            self._go()

    # -- saving and leaving

    def _save(self, epoch, batch, finished=False) -> bool:
        "Whether any rank has been told to leave."
        told = all_gather((bool(self._asked.by), own_state(self.learn)), 'random states')
        stages = (
            [*map(list, self._stages), [world_size(), getattr(self.dl, 'bs', None) or 1, batch - self._begin]]
            if batch
            else []
        )
        state = dict(
            shared_state(self.learn),
            plan=self._kind,
            epoch=epoch,
            rows=self._rows,
            order=self._order if batch else None,
            stages=stages,
            ranks=[o for _, o in told],
        )
        run_on_main(self._write, (state, epoch, batch, finished))
        self._saved_at = time.monotonic()
        return any(o for o, _ in told)

    def _write(self, training, epoch, batch, finished):
        self._settle()
        write = self._files.next(
            dict(
                epoch=epoch,
                batch=batch,
                n_iter=vars(self.learn).get('n_iter', 0),
                n_epoch=self.n_epoch,
                iteration=self.train_iter,
                finished=finished,
                after=self._before.last,
                fastai=version('fastai'),
            )
        )
        state = {
            'model': model_state(self.learn.model),
            'opt': to_builtin(self.learn.opt.state_dict()),
            'training': training,
        }
        savers = [vars(cb)['_saver'] for cb in self.learn.cbs if vars(cb).get('_saver')]
        others = [thread for saver in savers for thread in saver.writer.under_way]

        def write_last(state):  # killed in between, the fit would go on after an epoch whose best was never written
            for o in others:
                o.join()
            return write(state)

        if self.background and not finished:
            self._writer.start(write_last, state)
        else:
            self._files.keep_newest(write_last(state))

    def _settle(self):
        if self._writer.busy:
            self._files.keep_newest(self._writer.wait())

    def _go(self):
        run_on_main(self._settle)
        raise Preempted(self.exit_status)

    def _leave(self):
        "What a fit leaves behind on the learner, and elsewhere."
        if not self._active:
            return
        self._active, self._state = False, None
        vars(self.learn).pop('all_batches', None)
        self._writer.join()  # its handler of SIGTERM stands over ours
        self._asked.release()
        if self._files:
            self._files.store.release()

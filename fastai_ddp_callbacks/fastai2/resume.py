"fastai 2: a fit that was killed is resumed from its last whole checkpoint."

from __future__ import annotations
from typing import NoReturn

from fastai.basics import store_attr

from ..distributed import agree, all_or_none, print_on_main, run_on_main
from ..errors import Preempted
from ..training.earlier_fits import EarlierFits
from ..training.resume_arguments import check_arguments
from ..training.resume_files import ResumeFiles
from ..training.save_schedule import SaveSchedule
from .fit import FitCallback, running_fit
from .fit_signature import fit_signature
from .history import CSVTables, recorded
from .loader_state import own_state
from .resume_restoring import check_fit, find, restore
from .resume_saving import save, wait_for_write
from .resumed_fit import Epoch, ResumableFit

__all__ = ['DDPResumeCallback']

_CUT = 'DDPResumeCallback: stopped within epoch {}. Started again, the fit is resumed from what was saved before.'


class DDPResumeCallback(FitCallback):
    """Saves all that a fit needs to be resumed, and resumes it when a fit that was killed is started again.

    On SIGTERM, SIGUSR1 or Ctrl-C on any rank all ranks save and exit by `Preempted`. `CheckpointError` on all ranks if
    there is nothing whole and `resume='must'`; `ValueError` if what is there belongs to a different fit. See
    `docs/resuming.md`."""

    order, run_valid = 90, False  # after all that is to be saved has seen the epoch
    _current: ResumableFit | None = None  # the fit that is running
    _earlier = EarlierFits()  # that this callback has seen the end of

    def __init__(
        self,
        every_epoch: int | None = 1,  # save after so many epochs; None: only as the following arguments say.
        every_batches: int | None = None,  # save after so many batches too.
        every_minutes: float | None = None,  # save when so many minutes have passed on rank 0's clock, too.
        keep: int = 2,  # how many of the newest to keep.
        fname: str = 'resume',  # first part of the files' names, in `learn.path/learn.model_dir`.
        resume: str = 'auto',  # 'auto': resume if possible; 'must': and fail if not; 'never': start from scratch.
        background: bool = False,  # write while training continues, from a copy of the state in rank 0's memory.
        exit_status: int = 0,  # exit status after a signal.
    ):
        every = every_epoch, every_batches, every_minutes
        check_arguments('DDPResumeCallback', resume, fname, exit_status, keep, *every)
        store_attr('every_epoch,every_batches,every_minutes,keep,fname,resume,background,exit_status')

    def __getstate__(self):
        return dict(vars(self), _current=None)  # a copy is in no fit

    # -- the beginning of a fit

    def before_fit(self):
        "Reserve the name, and resume what was interrupted: here, so that trackers begin with what they get back."
        learn, fit = self.learn, running_fit(self.learn)
        with all_or_none('DDPResumeCallback: whether it can save this fit'):
            several = sum(isinstance(cb, DDPResumeCallback) for cb in learn.cbs)
            check_fit(learn, 'DDPResumeCallback', several)
        # another callback of this name may have seen the fit before
        self._earlier = max(EarlierFits.of(learn, self.fname), self._earlier, key=lambda earlier: earlier.fits)
        files = ResumeFiles(learn.path / learn.model_dir, self._earlier.name(self.fname), self.keep)
        schedule = SaveSchedule(self.every_batches, self.every_minutes)
        current = ResumableFit(learn, fit, files, self._earlier, fit_signature(learn), schedule, CSVTables(learn))
        self._current = current
        fit.callback(self._release)
        found = run_on_main(find, (current, self.resume))
        if found:
            restore(current, found)
        fit.starts_over = not found and self.resume != 'never'
        fit.enter_context(current.watch)

    # -- in the fit

    def before_epoch(self):
        "Train only the rest of an epoch that was interrupted."
        current = self._current
        current.epoch = Epoch()
        vars(self.learn).pop('all_batches', None)  # of an epoch that was cancelled
        if current.resumed and self.epoch != current.fit.first_epoch:
            current.resumed = None
        if current.stages:
            current.resumed.replace_all_batches()

    def before_train(self):
        "Note the random states from which the order of samples follows."
        current = self._current
        if not current.stages:
            current.epoch.order = own_state(self.learn)
            return
        current.resumed.restart_epoch()
        current.epoch.order = current.resumed.state['order']

    def before_batch(self):
        current = self._current
        if current.epoch.first_batch is None:
            current.epoch.first_batch = self.iter
            if current.resumed:
                current.resumed.before_first_batch()
            if not current.stages:
                current.resumed = None  # nothing more is needed of the file

    def after_batch(self):
        "Save if it is due, and exit if a signal has asked for it."
        current = self._current
        decision = current.schedule.decide(self.train_iter, bool(current.watch.by))
        epoch_ends = self.iter + 1 == self.n_iter and self._is_epoch_due()  # which is saved in a moment
        if decision.exit or decision.save and not epoch_ends:
            self._save(self.epoch, self.iter + 1)
        if decision.exit:
            self._exit_preempted()

    def after_train(self):
        current = self._current
        current.epoch.is_trained = True
        current.resumed = None
        vars(self.learn).pop('all_batches', None)

    def after_epoch(self):
        current = self._current
        if not current.epoch.is_trained:
            return
        current.rows.append([recorded(value) for value in self.recorder.log])
        if self._is_epoch_due() and self._save(self.epoch + 1):
            self._exit_preempted()

    def _is_epoch_due(self):
        return bool(self.every_epoch) and (self.epoch + 1) % self.every_epoch == 0

    # -- the end of a fit

    def after_cancel_fit(self):
        """Early stopping finishes a fit at the end of an epoch. Whoever stops it within an epoch, as for a loss that is
        NaN, leaves it unfinished."""
        self._current.was_cut = not self._current.epoch.is_trained

    def after_fit(self):
        "Save the end of the fit, and remember that it is finished."
        current = self._current
        if len(current.rows) < len(self.recorder.values):
            current.rows.append([recorded(value) for value in self.recorder.log])  # early stopping came first
        if current.was_cut:
            print_on_main(_CUT.format(self.epoch))
            run_on_main(wait_for_write, (current,))  # all ranks leave the fit together, and know if that has failed
        elif not current.was_finished:
            self._save(self.n_epoch, finished=True)
        # the save may have taken its time
        exits = agree(bool(current.watch.by), 'any', 'resume: whether a signal has asked to exit')
        if not current.was_cut:
            run, epochs = current.files.store.run, len(current.rows)
            self._earlier = self._earlier.and_this(self.learn, self.fname, run, epochs, current.was_finished)
        if exits:
            self._exit_preempted()

    def _save(self, epoch, batch=0, finished=False):
        "Whether a signal has asked any rank to exit."
        return save(self._current, epoch, batch, finished, self.background)

    def _exit_preempted(self) -> NoReturn:
        run_on_main(wait_for_write, (self._current,))
        raise Preempted(self.exit_status)

    def _release(self):
        "Give back what the fit has taken, however it has ended."
        current = self._current
        self._current = None
        vars(current.learn).pop('all_batches', None)
        current.writer.join()
        if current.writer.error:
            print_on_main(f'After the fit had failed: {current.writer.error}', warn=True)
        current.files.store.release()

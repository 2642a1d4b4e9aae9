"Resuming where several things come together: two writers, several fits, signals at odd moments, and fits that cannot go on."
import os, signal, time

import pytest
from fastai.basics import Callback, CancelFitException

from fastai_ddp_callbacks import DDPSaveModelCallback, RankFailedError, ddp_ctx
from fastai_ddp_callbacks.resume import DDPResumeCallback
from learners import Records, digest
from ranks import run, values
from resuming import Ends, Signals, files, killed, learner, left, resumes, start
from test_resume import quiet, same # noqa: F401 (`quiet` is a fixture)


# -- with a saver that writes in the background

class Slow(Callback):
    "The saver's write in the background takes a moment in that epoch."
    order = 50
    def __init__(self, at): self.at = at
    def before_fit(self):
        written = self.save_model._writer._run
        def slow(*args):
            if self.learn.epoch == self.at: time.sleep(1)
            written(*args)
        self.save_model._writer._run = slow

class DiesWith(Callback):
    "Killed at the end of that epoch, as soon as a file is there."
    order = 95
    def __init__(self, at, name): self.at,self.file = at,name
    def after_epoch(self):
        if self.epoch != self.at: return
        end = time.monotonic()+20
        while not (self.path/'models'/self.file).exists() and time.monotonic() < end: time.sleep(.01)
        os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize('world_size,background', [(1, False), (1, True), (2, False), (2, True)])
def test_a_file_to_go_on_from_is_there_no_sooner_than_the_best_that_it_tells_of(tmp_path, world_size, background):
    make = lambda: (DDPSaveModelCallback(background=True), Records([3., 1., 2., 2.]))
    killed(start(world_size, tmp_path/'killed', *make(), Slow(1), DiesWith(1, f'resume_{16//world_size}.pth'), background=background))
    assert 'model.pth' in files(tmp_path/'killed')
    same(start(world_size, tmp_path/'killed', *make()), start(world_size, tmp_path/'quiet', *make()))


# -- told to leave when there is nothing more to save

@pytest.mark.parametrize('world_size', [1, 2])
def test_told_to_leave_while_a_finished_fit_is_loaded_all_leave(tmp_path, world_size):
    values(start(world_size, tmp_path, n=2))
    left(start(world_size, tmp_path, Signals(signal.SIGTERM, 1, 'end', ranks=[world_size-1]), n=2))

class Stops(Ends):
    "Ends the fit in the midst of an epoch, before the batch is over for others."
    order = 85
    def _end(self): raise CancelFitException()

@pytest.mark.parametrize('world_size', [1, 2])
def test_told_to_leave_in_the_batch_in_which_a_fit_is_stopped_all_leave_and_it_can_go_on(tmp_path, quiet, world_size):
    left(start(world_size, tmp_path, Signals(signal.SIGTERM, 1, 1, ranks=[world_size-1]), Stops(1, 1)))
    same(start(world_size, tmp_path), quiet(world_size))

class SignalsInTheLastSave(Callback):
    "Told to leave while what the fit came to is written."
    order = 80
    def after_fit(self):
        cb = next(o for o in self.learn.cbs if isinstance(o, DDPResumeCallback))
        written = cb._write
        def write(*args):
            written(*args)
            signal.raise_signal(signal.SIGTERM)
        cb._write = write

@pytest.mark.parametrize('world_size', [1, 2])
def test_told_to_leave_while_the_end_of_a_fit_is_written_all_leave(tmp_path, world_size):
    left(start(world_size, tmp_path, SignalsInTheLastSave(), n=2))
    assert resumes(tmp_path)[-1].endswith('_finished.pth')


# -- several callbacks, several fits

@pytest.mark.parametrize('world_size,names', [(1, ('slow', 'quick')), (2, ('resume', 'resume')), (1, None)])
def test_a_second_one_in_a_fit_is_refused_before_anything_is_changed(tmp_path, world_size, names):
    def scenario():
        learn = learner(tmp_path)
        before,weights = set(vars(learn)),digest(learn.model)
        cbs = [DDPResumeCallback(fname=o) for o in names] if names else [DDPResumeCallback()]*2 # one that is on the learner, and given once more
        with ddp_ctx(learn):
            with pytest.raises((ValueError, RankFailedError), match='DDPResumeCallback: 2 in one fit'): learn.fit(2, 0.1, cbs=cbs)
            assert digest(learn.model) == weights and not list(tmp_path.rglob('*.*')) and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            learn.remove_cbs(list(learn.cbs.filter(lambda o: isinstance(o, DDPResumeCallback))))
            learn.fit(1, 0.1, cbs=DDPResumeCallback())
        return set(vars(learn)) - before
    for o in values(run(scenario, world_size)): assert not o & {'_with_events', 'all_batches'}

"Resuming where several things come together: two writers, several fits, signals at odd moments, and fits that cannot go on."
import os, signal, time

import pytest
from fastai.basics import Callback

from fastai_ddp_callbacks import DDPSaveModelCallback
from learners import Records
from resuming import files, killed, start
from test_resume import same


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

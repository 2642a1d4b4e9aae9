"One line more, and a script that uses fastai's names has our callbacks."

import subprocess, sys

import fastai.callback.tracker as stock

import fastai_ddp_callbacks as ours
from fastai_ddp_callbacks import patch, rank, read_metadata
from ranks import run, values

SCRIPT = '''
from fastai.basics import *
from fastai.callback.all import *
from fastai.test_utils import synth_learner

from fastai_ddp_callbacks.patch import *
from fastai_ddp_callbacks import ddp_ctx

set_seed(1)
learn = synth_learner(n_trn=2, path=path, cuda=False)
trackers = [SaveModelCallback(fname='mine'), EarlyStoppingCallback(patience=2), ReduceLROnPlateau(patience=1)]
with ddp_ctx(learn):
    learn.fit(5, 1e-3, cbs=[Records(losses), *trackers, TerminateOnNaNCallback()])
'''


def test_a_script_with_the_stock_names_takes_one_decision_on_two_ranks(tmp_path):
    def scenario():
        from learners import Records, digest

        found = dict(
            path=tmp_path, Records=Records, losses=[[1.0, 5.0, 5.0, 5.0, 5.0], [5.0, 1.0, 4.0, 4.0, 4.0]][rank()]
        )  # in the mean 3, 3, 4.5: the first is best
        exec(SCRIPT, found)
        return len(found['learn'].recorder.values), digest(found['learn'].model), found['learn'].opt.hypers[-1]['lr']

    a, b = values(run(scenario, 2))
    assert a == b and a[0] == 3 and a[2] < 1e-3
    assert read_metadata(tmp_path / 'models' / 'mine.pth')['epoch'] == 0


def test_the_line_brings_exactly_the_names_of_fastais_trackers():
    assert sorted(patch.__all__) == sorted(stock.__all__)
    for o in patch.__all__:
        assert getattr(patch, o) is getattr(ours, f'DDP{o}') and issubclass(getattr(patch, o), getattr(stock, o))


def test_neither_a_plain_import_nor_the_line_changes_anything_in_fastai():
    code = '''
import sys, fastai.callback.tracker as t
before = vars(t).copy()
import fastai_ddp_callbacks
assert 'fastai_ddp_callbacks.patch' not in sys.modules
from fastai_ddp_callbacks.patch import *
assert SaveModelCallback is fastai_ddp_callbacks.DDPSaveModelCallback
assert all(vars(t)[k] is v for k,v in before.items())
'''
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

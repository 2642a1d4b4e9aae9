"fastai 1: one line more, and a script that uses its names has our callbacks."

import fastai.callbacks.tracker as stock

import fastai_ddp_callbacks as ours
from fastai_ddp_callbacks import patch, read_metadata
from learners1 import digest, fit, learner
from ranks import run, values


def test_the_line_brings_the_names_of_fastai_1():
    assert set(patch.__all__) == {
        'TrackerCallback',
        'SaveModelCallback',
        'EarlyStoppingCallback',
        'TerminateOnNaNCallback',
        'ReduceLROnPlateauCallback',
    }
    for o in patch.__all__:
        assert getattr(patch, o) is getattr(ours, f'DDP{o}') and issubclass(getattr(patch, o), getattr(stock, o))


def test_a_script_with_the_stock_names_takes_one_decision_on_two_ranks(tmp_path):
    def scenario():
        found = {}
        exec('from fastai.callbacks import *\nfrom fastai_ddp_callbacks.patch import *', found)
        learn = learner(tmp_path)
        fit(
            learn,
            found['EarlyStoppingCallback'](learn, patience=1),
            found['SaveModelCallback'](learn, name='mine'),
            n=5,
            values={0: [1.0, 5.0, 5.0, 5.0, 5.0], 1: [5.0, 1.0, 4.0, 4.0, 4.0]},
        )
        return len(learn.recorder.val_losses), digest(learn.model[0])

    a, b = values(run(scenario, 2))
    assert a == b and a[0] == 3
    assert read_metadata(tmp_path / 'models' / 'mine.pth')['epoch'] == 0

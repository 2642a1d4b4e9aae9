"The saver in fits that follow each other, with optimizers of torch, and together with other callbacks that save."

import os, pickle, signal, subprocess, sys
from functools import partial
from pathlib import Path

import numpy as np, pytest, torch
from fastai.basics import Callback, OptimWrapper
from fastai.callback.tracker import SaveModelCallback

from fastai_ddp_callbacks import (
    DDPEarlyStoppingCallback,
    DDPReduceLROnPlateau,
    DDPResumeCallback,
    DDPSaveModelCallback,
    DDPTrackerCallback,
    ddp_ctx,
    read_checkpoint,
    read_metadata,
)
from learners import Records, digest, learner
from ranks import run, values

OPTIMIZERS = ['SGD', 'Adam', 'AdamW', 'Adagrad', 'RMSprop', 'NAdam', 'Adafactor', 'Rprop', 'ASGD']


def fit(learn, numbers, *cbs):
    learn.fit(len(numbers), 0.01, cbs=[*cbs, Records(numbers)])


# -- fits one after the other


def test_a_fit_that_never_improves_has_no_path_of_the_one_before(tmp_path):
    cb = DDPSaveModelCallback()
    fit(learner(tmp_path), [2.0], cb)
    assert cb.last_saved_path.name == 'model.pth'
    with pytest.warns(UserWarning, match='No model was saved'):
        fit(learner(tmp_path), [float('nan')], cb)
    assert cb.last_saved_path is None


@pytest.mark.parametrize('change', ['path', 'model_dir', 'fname'])
def test_a_second_fit_that_saves_elsewhere_leaves_the_files_of_the_first(tmp_path, change):
    cb = DDPSaveModelCallback(keep_best=2, reset_on_fit=False)
    fit(learner(tmp_path / 'a'), [3.0, 2.0], cb)
    before = {o: o.read_bytes() for o in (tmp_path / 'a').rglob('*.pth')}
    second = learner(tmp_path / ('b' if change == 'path' else 'a'))
    if change == 'model_dir':
        second.model_dir = 'others'
    if change == 'fname':
        cb.fname = 'other'
    fit(second, [2.5, 1.0], cb)
    assert cb.best == 1.0
    assert {o: o.read_bytes() for o in before} == before
    assert len(cb.best_paths) == 2 and cb.best_path not in before


def test_the_best_is_remembered_where_nothing_better_is_saved_elsewhere(tmp_path):
    cb = DDPSaveModelCallback(reset_on_fit=False)
    fit(learner(tmp_path / 'a'), [2.0], cb)
    fit(learner(tmp_path / 'b'), [3.0], cb)
    assert cb.best == 2.0
    assert not list((tmp_path / 'b').rglob('*.pth'))


def test_after_each_of_several_fits_a_warning_is_shown(tmp_path, recwarn):
    import warnings

    warnings.simplefilter('default')
    for _ in range(3):
        fit(learner(tmp_path), [float('nan')], DDPSaveModelCallback())
    assert len([o for o in recwarn if 'No model was saved' in str(o.message)]) == 3


def test_warnings_point_at_the_line_that_calls_fit(tmp_path):
    with pytest.warns(UserWarning, match='No model was saved') as seen:
        learner(tmp_path).fit(1, 0.01, cbs=[DDPSaveModelCallback(), Records([float('nan')])])
    assert [o.filename for o in seen if 'No model' in str(o.message)] == [__file__]


# -- what loggers take


def test_at_the_end_the_last_path_is_that_of_the_best_model(tmp_path):
    seen = []

    class Logger(Callback):
        order = 51

        def after_fit(self):
            seen.append(self.save_model.last_saved_path)

    cb = DDPSaveModelCallback(keep_best=1, keep_last=2)
    fit(learner(tmp_path), [3.0, 1.0, 2.0, 4.0], cb, Logger())
    assert seen == [cb.best_path]
    assert read_metadata(seen[0])['value'] == 1.0


class WandbCallback(Callback):
    "What fastai's own does about models."

    order = 51

    def after_create(self):
        if not hasattr(self, 'save_model'):
            self.learn.add_cb(SaveModelCallback())

    def after_fit(self):
        self.uploaded = self.save_model.last_saved_path


@pytest.mark.parametrize('world_size', [1, 2])
def test_the_saver_that_wandb_has_added_gives_way_to_ours(tmp_path, world_size):
    def scenario():
        wandb, cb = WandbCallback(), DDPSaveModelCallback()
        learn = learner(tmp_path, cbs=wandb)
        added = learn.save_model  # stock's
        with ddp_ctx(learn):
            fit(learn, [3.0, 1.0, 2.0], cb)
        return wandb.uploaded == cb.best_path, added.run, added.last_saved_path, digest(learn.model)

    results = values(run(scenario, world_size))
    assert all(o[:3] == (True, True, None) for o in results)
    assert len({o[3] for o in results}) == 1


def test_two_savers_of_one_file_are_refused_with_both_names(tmp_path):
    with pytest.raises(ValueError, match="SaveModelCallback and DDPSaveModelCallback both save to 'model'"):
        fit(learner(tmp_path, cbs=SaveModelCallback()), [1.0], DDPSaveModelCallback())


# -- optimizers of torch


@pytest.mark.parametrize('name,world_size', [*((name, 1) for name in OPTIMIZERS), ('AdamW', 2)])
def test_the_state_of_any_optimizer_of_torch_is_saved_and_loaded(tmp_path, name, world_size):
    def scenario():
        learn = learner(tmp_path)
        learn.opt_func = partial(OptimWrapper, opt=getattr(torch.optim, name))
        cb = DDPSaveModelCallback(with_opt=True)
        with ddp_ctx(learn):
            fit(learn, [2.0, 1.0, 3.0], cb)
        saved = read_checkpoint(cb.best_path)[0]
        same = all(torch.equal(v, learn.model.state_dict()[k]) for k, v in saved['model'].items())
        return same, str(saved['opt']) == str(learn.opt.state_dict())

    assert set(values(run(scenario, world_size))) == {(True, True)}


def test_the_learning_rate_of_an_optimizer_of_torch_is_reduced(tmp_path):
    learn = learner(tmp_path)
    learn.opt_func = partial(OptimWrapper, opt=torch.optim.SGD)
    fit(learn, [1.0, 2.0, 3.0], DDPReduceLROnPlateau(patience=1, factor=10))
    assert learn.opt.hypers[-1]['lr'] == pytest.approx(1e-4)


# -- resumed


def test_resumed_with_at_end_the_best_value_is_that_of_the_uninterrupted_fit(tmp_path):
    class Dies(Callback):
        order = 95

        def before_epoch(self):
            if self.epoch == 2:
                raise KeyError('killed')

    def saver():
        return DDPSaveModelCallback(at_end=True)

    with pytest.raises(KeyError):
        fit(learner(tmp_path), [3.0, 1.0, 2.0, 4.0], saver(), DDPResumeCallback(), Dies())
    cb = saver()
    fit(learner(tmp_path), [3.0, 1.0, 2.0, 4.0], cb, DDPResumeCallback())
    assert cb.best == 1.0


@pytest.mark.parametrize('world_size', [1, 2])
def test_what_a_run_saved_before_it_could_be_resumed_is_replaced_when_it_is_started_again(tmp_path, world_size):
    class Dies(Callback):
        order = DDPSaveModelCallback.order + 1  # after the model is saved, and before all that resuming needs

        def after_epoch(self):
            os.kill(os.getpid(), signal.SIGKILL)

    def scenario(*cbs):
        learn, cb = learner(tmp_path), DDPSaveModelCallback(keep_best=1, keep_last=1)
        with ddp_ctx(learn):
            fit(learn, [3.0, 1.0, 2.0], cb, DDPResumeCallback(), *cbs)
        return [o.name for o in cb.best_paths]

    assert {o.exitcode for o in run(scenario, world_size, Dies())} <= {-signal.SIGKILL, 0, 1}
    assert [o.name for o in (tmp_path / 'models').glob('model*')] == ['model_0.pth']
    assert values(run(scenario, world_size)) == [['model_1.pth', 'model_2.pth']] * world_size
    assert sorted(o.name for o in (tmp_path / 'models').glob('model*')) == ['model_1.pth', 'model_2.pth']


# -- arguments


@pytest.mark.parametrize('patience,error', [(-1, ValueError), (1.5, TypeError), ('2', TypeError), (None, TypeError)])
@pytest.mark.parametrize('cls', [DDPEarlyStoppingCallback, DDPReduceLROnPlateau])
def test_a_patience_that_is_no_number_of_epochs_is_refused(cls, patience, error):
    with pytest.raises(error, match=rf'{cls.__name__}\(patience='):
        cls(patience=patience)


@pytest.mark.parametrize('min_delta,error', [('x', TypeError), (None, TypeError), (float('nan'), ValueError)])
def test_a_min_delta_that_is_no_number_is_refused(min_delta, error):
    with pytest.raises(error, match=r'DDPSaveModelCallback\(min_delta='):
        DDPSaveModelCallback(min_delta=min_delta)


@pytest.mark.parametrize(
    'arguments,error',
    [
        (dict(fname=3), TypeError),
        (dict(fname=''), ValueError),
        (dict(last=3), TypeError),
        (dict(keep_last=True), ValueError),
        (dict(every_epoch='2'), ValueError),
    ],
    ids=str,
)
def test_names_and_numbers_that_make_no_sense_are_refused(arguments, error):
    with pytest.raises(error, match=rf'DDPSaveModelCallback\({list(arguments)[0]}='):
        DDPSaveModelCallback(**arguments)


@pytest.mark.parametrize('monitor,guessed', [('accuracy', False), ('f1_score', False), ('mape', True), ('smape', True)])
def test_what_is_better_is_guessed_only_where_the_name_leaves_no_doubt(tmp_path, monitor, guessed, recwarn):
    def metric(preds, targets):
        return (preds - targets).abs().mean()

    metric.__name__ = monitor
    learner(tmp_path, metrics=metric).fit(1, 0.01, cbs=DDPTrackerCallback(monitor))
    assert any('is taken to be better' in str(o.message) for o in recwarn) == guessed


# -- pickled


def test_pickled_with_its_learner_it_loads_where_the_package_is_missing(tmp_path):
    cbs = [DDPSaveModelCallback(keep_best=2), DDPEarlyStoppingCallback(patience=5), DDPResumeCallback()]
    learn = learner(tmp_path, cbs=cbs)
    fit(learn, [2.0, 1.0])
    (tmp_path / 'learner.pkl').write_bytes(pickle.dumps(learn))
    code = (
        "import sys, pickle; sys.modules['fastai_ddp_callbacks'] = None\n"
        f'learn = pickle.load(open({str(tmp_path / "learner.pkl")!r}, "rb"))\n'
        'print(type(learn.save_model).__module__, learn.save_model.best, learn.early_stopping.wait)'
    )
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ['fastai.callback.tracker', '1.0', '0'], done.stderr


def test_pickled_alone_it_stays_what_it_is():
    cb = pickle.loads(pickle.dumps(DDPSaveModelCallback('accuracy', comp=np.greater, keep_last=2)))
    assert (type(cb), cb.monitor, cb.keep_last, cb.policy.keep_last) == (DDPSaveModelCallback, 'accuracy', 2, 2)


def test_the_files_of_a_folder_with_a_dot_in_its_name(tmp_path):
    cb = DDPSaveModelCallback(fname='v1.0/model')
    fit(learner(tmp_path), [1.0], cb)
    assert cb.best_path == Path(tmp_path, 'models', 'v1.0', 'model.pth')

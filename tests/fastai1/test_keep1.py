"fastai 1: what is kept, under which names, and how it is written. Each on two ranks."

import os, time, warnings
from pathlib import Path

import pytest, torch

from fastai_ddp_callbacks import DDPReduceLROnPlateau, DDPResumeCallback, DDPSaveModelCallback, rank, read_metadata
from learners1 import Hook, digest, fit, learner, mae
from ranks import run, values

VALUES = [3.0, 1.0, 2.0, 4.0]


def files(path):
    return sorted(file.name for file in path.glob('models/*') if not file.name.startswith('.'))


def fit_on_two_ranks(path, given=VALUES, **kwargs):
    "(best, best_path, best_paths, last_saved_path, weights) of each rank."

    def scenario():
        learn = learner(path, metrics=[mae])
        saver = DDPSaveModelCallback(learn, **kwargs)
        fit(learn, saver, n=len(given), values=given)
        return saver.best, saver.best_path, saver.best_paths, saver.last_saved_path, digest(learn.model)

    zero, one = values(run(scenario, 2))
    assert zero == one
    return zero


@pytest.mark.parametrize('background', [False, True])
def test_the_best_few_are_kept_and_the_best_is_loaded(tmp_path, background):
    best, path, paths, last, weights = fit_on_two_ranks(tmp_path, keep_best=2, background=background)
    models = tmp_path / 'models'
    assert files(tmp_path) == ['bestmodel_1.pth', 'bestmodel_2.pth']
    assert (best, path) == (1.0, models / 'bestmodel_1.pth')
    assert paths == [models / 'bestmodel_1.pth', models / 'bestmodel_2.pth']
    assert last == path
    assert digest(learner(tmp_path).load('bestmodel_1').model) == weights


@pytest.mark.parametrize('background', [False, True])
def test_the_newest_few_are_kept_beside_the_best(tmp_path, background):
    fit_on_two_ranks(tmp_path, given=[1.0, 2.0, 3.0, 4.0], keep_last=2, background=background)
    assert files(tmp_path) == ['bestmodel_0.pth', 'bestmodel_2.pth', 'bestmodel_3.pth']


@pytest.mark.parametrize('background', [False, True])
def test_every_epoch_is_saved_and_of_all_some_are_kept(tmp_path, background):
    _, path, *_ = fit_on_two_ranks(tmp_path, every='epoch', keep_best=1, keep_last=1, background=background)
    assert files(tmp_path) == ['bestmodel_1.pth', 'bestmodel_3.pth']
    assert path == tmp_path / 'models/bestmodel_1.pth'


@pytest.mark.parametrize('background', [False, True])
def test_the_newest_has_a_second_name(tmp_path, background):
    fit_on_two_ranks(tmp_path, last='last', background=background)
    assert 'last.pth' in files(tmp_path)
    assert read_metadata(tmp_path / 'models/last.pth')['epoch'] == 3


@pytest.mark.parametrize('background', [False, True])
def test_a_name_may_have_fields(tmp_path, background):
    _, path, *_ = fit_on_two_ranks(tmp_path, name='m-{epoch}-{valid_loss:.1f}-{iteration}', background=background)
    assert path == tmp_path / 'models/m-1-1.0-6.pth'
    assert files(tmp_path) == ['m-1-1.0-6.pth']


def test_a_field_that_is_no_column_is_refused_before_training(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        batches = []
        try:
            fit(
                learn,
                DDPSaveModelCallback(learn, name='m-{epok}'),
                Hook(learn, 'batch_end', lambda **_: batches.append(1)),
            )
        except Exception as error:
            return 'epok' in str(error), batches

    assert values(run(scenario, 2)) == [(True, [])] * 2


@pytest.mark.parametrize('background', [False, True])
def test_a_rank_0_that_cannot_write_warns_and_training_continues(tmp_path, background):
    def scenario():
        learn = learner(tmp_path)

        def break_disk(epoch, **_):
            saver._saver.store.folder = Path('/proc/nowhere') if epoch == 1 else tmp_path / 'models'

        saver = DDPSaveModelCallback(learn, on_error='warn', background=background)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            fit(learn, saver, Hook(learn, 'epoch_begin', break_disk), n=3, values=[3.0, 1.0, 2.0])
        texts = [str(warning.message) for warning in seen]
        return saver.best, saver.best_path, sum('continues without' in text for text in texts)

    path = tmp_path / 'models/bestmodel.pth'
    assert values(run(scenario, 2)) == [(2.0, path, 1), (2.0, path, 0)]


def test_training_does_not_wait_for_a_slow_disk_in_the_background(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        saver = DDPSaveModelCallback(learn, background=True)
        order = []

        def slow(begin):
            def begun(path, meta):
                write = begin(path, meta)

                def late(state, progress=None):
                    time.sleep(1)
                    order.append('written')
                    return write(state, progress)

                return late

            return begun

        def watch(epoch, **_):
            if epoch == 0:
                saver._saver.store.begin = slow(saver._saver.store.begin)
            order.append(epoch)

        fit(learn, saver, Hook(learn, 'epoch_begin', watch), n=2, values=[1.0, 2.0])
        return order

    assert values(run(scenario, 2)) == [[0, 1, 'written'], [0, 1]]


def test_the_best_reaches_a_rank_that_does_not_see_the_disk(tmp_path):
    def scenario():
        learn = learner(tmp_path / str(rank()), metrics=[mae])
        fit(learn, DDPSaveModelCallback(learn, keep_best=2), values=[1.0, 2.0, 3.0])
        momentum = [float(state['momentum_buffer'].sum()) for state in learn.opt.state_dict()['state'].values()]
        return digest(learn.model), momentum, files(learn.path)

    zero, one = values(run(scenario, 2))
    assert zero[:2] == one[:2]
    assert (zero[2], one[2]) == (['bestmodel_0.pth', 'bestmodel_1.pth'], [])


@pytest.mark.parametrize('background', [False, True])
def test_a_resumed_fit_keeps_what_an_uninterrupted_one_keeps(tmp_path, background):
    def scenario(path, kill=None):
        learn = learner(path, metrics=[mae])
        saver = DDPSaveModelCallback(
            learn, name='m-{epoch}', keep_best=2, keep_last=1, last='last', background=background
        )

        def die(epoch, **_):
            if epoch == kill:
                os._exit(9)

        fit(
            learn,
            saver,
            DDPResumeCallback(learn),
            Hook(learn, 'epoch_begin', die),
            n=5,
            values=[3.0, 1.0, 2.0, 4.0, 5.0],
        )
        return saver.best, [path.name for path in saver.best_paths], digest(learn.model)

    quiet = values(run(scenario, 2, tmp_path / 'quiet'))
    assert [result.exitcode for result in run(scenario, 2, tmp_path / 'killed', 3)] == [9, 9]
    assert values(run(scenario, 2, tmp_path / 'killed')) == quiet
    kept = [name for name in files(tmp_path / 'killed') if not name.startswith('resume')]
    assert kept == ['last.pth', 'm-1.pth', 'm-2.pth', 'm-4.pth']


def test_a_second_fit_that_never_improves_has_saved_nothing(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        saver = DDPSaveModelCallback(learn)
        fit(learn, saver, values=[1.0, 2.0, 3.0])
        first = saver.last_saved_path
        fit(learn, saver, values=[float('nan')] * 3)
        return first, saver.last_saved_path, saver.best_path

    assert values(run(scenario, 2)) == [(tmp_path / 'models/bestmodel.pth', None, None)] * 2


def test_two_callbacks_that_save_to_one_file_are_refused(tmp_path):
    learn = learner(tmp_path)
    savers = [DDPSaveModelCallback(learn), DDPSaveModelCallback(learn, monitor='train_loss')]
    with pytest.raises(ValueError, match="Two callbacks save to 'bestmodel'"):
        learn.fit(1, 0.1, callbacks=savers)


@pytest.mark.parametrize(
    'wrong,error,told',
    [
        (dict(name=''), ValueError, "name=''"),
        (dict(name=3), TypeError, 'name=3'),
        (dict(keep_best=0), ValueError, 'keep_best=0'),
        (dict(keep_last=True), ValueError, 'keep_last=True'),
        (dict(last=1), TypeError, 'last=1'),
        (dict(on_error='ignore'), ValueError, "on_error='ignore'"),
        (dict(monitor=None), TypeError, 'monitor=None'),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_the_constructor(tmp_path, wrong, error, told):
    learn = learner(tmp_path)
    with pytest.raises(error, match=told):
        DDPSaveModelCallback(learn, **wrong)
    assert not hasattr(learn, 'save_model_callback')


def test_nothing_is_left_on_the_learner_and_the_name_is_free_after_a_fit_that_raised(tmp_path):
    def scenario():
        learn = learner(tmp_path)

        def boom(**_):
            raise ValueError('boom')

        for event in ('train_begin', 'batch_end', 'train_end'):
            saver = DDPSaveModelCallback(learn)
            resume = DDPResumeCallback(learn)
            before = set(vars(learn)) | {'opt', 'recorder'}
            try:
                fit(learn, saver, resume, Hook(learn, event, boom, late=event == 'train_begin'), n=1)
            except ValueError:
                pass
            left = set(vars(learn)) - before - {'hook'}
            locks = [file.name for file in tmp_path.glob('models/.*lock*')]
            if left or locks or '_fit' in vars(saver) or '_fit' in vars(resume):
                return event, left, locks
        return type(learn.model).__name__, 'dl' in vars(learn.data)

    assert values(run(scenario, 2)) == [('Sequential', False)] * 2


def test_that_nothing_was_saved_is_reported_after_every_fit(tmp_path):
    learn = learner(tmp_path)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('default')
        for _ in range(3):
            fit(learn, DDPSaveModelCallback(learn), n=1, values=[float('nan')])
    assert sum('No model was saved' in str(warning.message) for warning in seen) == 3


@pytest.mark.parametrize('opt', ['SGD', 'Adam', 'AdamW', 'RMSprop', 'Adagrad', 'NAdam', 'Adadelta', 'Rprop'])
def test_any_optimizer_of_torch_is_saved_and_loaded_and_its_learning_rate_is_reduced(tmp_path, opt):
    learn = learner(tmp_path)
    learn.opt_func = getattr(torch.optim, opt)
    states = []
    plateau = DDPReduceLROnPlateau(learn, factor=0.1)
    rates = []

    def note(epoch, **_):
        rates.append(learn.opt.lr)
        states.append(_sum(learn.opt.state_dict()['state']))

    fit(learn, DDPSaveModelCallback(learn), plateau, Hook(learn, 'epoch_end', note, late=True), n=2, values=[1.0, 2.0])
    assert _sum(learn.opt.state_dict()['state']) == states[0]
    assert rates == pytest.approx([0.1, 0.01])


def _sum(state):
    if isinstance(state, dict):
        return sum(map(_sum, state.values()))
    return float(state.sum()) if isinstance(state, torch.Tensor) else 0.0

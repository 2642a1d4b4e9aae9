"The main job: rank 0 saves between barriers, every rank loads the best."

import os, time, warnings
from pathlib import Path

import numpy as np, pytest, torch
from fastai.basics import Callback, CancelEpochException, CancelValidException, Datasets, Learner, load_learner, nn
from fastai.callback.schedule import lr_find  # noqa: F401 (patches Learner)
from fastai.callback.tracker import SaveModelCallback

from fastai_ddp_callbacks import (
    DDPSaveModelCallback,
    DDPTrackerCallback,
    ddp_ctx,
    rank,
    read_metadata,
    verify_checkpoint,
)
from fastai_ddp_callbacks.training import loading
from learners import OF_A_FIT, OF_AN_EPOCH, Observed, Records, Trace, digest, learner
from ranks import run, values

BEST_LAST = [3.0, 2.0, 1.0]


def fit(learn, cb, n=3, records=BEST_LAST, cbs=()):
    with ddp_ctx(learn):
        learn.fit(n, 0.1, cbs=[cb, *cbs, *([Records(records)] if records else [])])
    return cb


# -- writing and reading


def test_no_rank_loads_before_a_slow_rank_0_has_saved(tmp_path):
    def scenario():
        learn, cb = learner(tmp_path), Observed(slow={'write': 1.0})
        fit(learn, cb, 1, [1.0])
        return cb.when('write'), cb.when('wants to read'), digest(learn.model)

    (writes, _, first), *others = values(run(scenario, 3))
    saved = torch.load(tmp_path / 'models/model.pth', weights_only=True)
    for w, reads, weights in others:
        assert not w and reads[0] > writes[0]
        assert weights == first
    plain = learner(tmp_path)
    plain.model.load_state_dict(saved)
    assert digest(plain.model) == first


def test_one_write_per_improvement_and_all_on_rank_0(tmp_path):
    def scenario():
        cb = fit(learner(tmp_path), Observed(), 5, [5.0, 6.0, 4.0, 4.0, 3.0])
        return len(cb.when('write')), cb.best

    assert values(run(scenario, 3)) == [(3, 3.0), (0, 3.0), (0, 3.0)]


def test_a_slow_reader_gets_the_bytes_of_its_own_fit(tmp_path):
    def scenario():
        learn, cb = learner(tmp_path), Observed(slow={'read': 1.0}, slow_rank=1)
        fit(learn, cb, 2)
        after_first = digest(learn.model)
        fit(learn, cb, 2)  # rank 0 writes the same file as soon as it can
        return after_first, digest(learn.model)

    a, b = values(run(scenario, 2))
    assert a == b and a[0] != a[1]


def test_at_end_the_file_is_there_for_every_rank_when_fit_returns(tmp_path):
    def scenario():
        cb = fit(learner(tmp_path), Observed(at_end=True, slow={'write': 1.0}))
        return cb.last_saved_path.exists(), len(cb.when('write'))

    assert values(run(scenario, 2)) == [(True, 4), (True, 0)]  # three improvements, and the end


def test_every_rank_knows_one_absolute_path_from_whatever_folder_it_runs_in(tmp_path):
    def scenario():
        os.chdir(tmp_path if rank() == 0 else '/')
        learn = learner('.')
        cb = fit(learn, DDPSaveModelCallback())
        return cb.last_saved_path, cb.last_saved_path.exists(), cb.best

    assert values(run(scenario, 2)) == [(tmp_path / 'models/model.pth', True, 1.0)] * 2


def test_the_optimizer_is_saved_and_loaded_with_opt(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        fit(learn, DDPSaveModelCallback(with_opt=True), records=[1.0, 2.0, 3.0])
        return [float(o['grad_avg'].sum()) for o in learn.opt.state_dict()['state']], digest(learn.model)

    a, b = values(run(scenario, 2))
    assert a == b
    state = torch.load(tmp_path / 'models/model.pth', weights_only=True)
    assert [float(o['grad_avg'].sum()) for o in state['opt']['state']] == a[0]
    plain = learner(tmp_path)
    plain.create_opt()
    plain.load('model', with_opt=True)
    assert digest(plain.model) == a[1]


def test_stock_fastai_loads_the_file_and_finds_plain_names_in_it(tmp_path):
    values(run(lambda: str(fit(learner(tmp_path), DDPSaveModelCallback()).last_saved_path), 2))
    learn = learner(tmp_path).load('model')
    assert set(torch.load(tmp_path / 'models/model.pth', weights_only=True)) == set(learn.model.state_dict())
    meta = verify_checkpoint(tmp_path / 'models/model.pth')
    assert (meta['epoch'], meta['monitor'], meta['value']) == (2, 'valid_loss', 1.0)


def test_every_epoch_saves_each_due_epoch_under_its_number(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        cb = fit(learn, DDPSaveModelCallback(every_epoch=2, fname='m'), 5, None)
        return cb.last_saved_path

    assert values(run(scenario, 2)) == [tmp_path / 'models/m_4.pth'] * 2
    assert sorted(o.name for o in (tmp_path / 'models').iterdir()) == ['m_0.pth', 'm_2.pth', 'm_4.pth']


# -- decisions


def test_a_value_that_only_rank_0_has_decides_for_all(tmp_path):
    def scenario():
        cb = fit(learner(tmp_path), Observed(), 3, {0: [2.0, 1.0, 3.0], 1: [None] * 3})
        return cb.best, len(cb.when('read'))

    assert values(run(scenario, 2)) == [(1.0, 1)] * 2


@pytest.mark.parametrize('reduce,best,writes', [('mean', 4.0, 1), ('main', 1.0, 3), ('min', 1.0, 3), ('max', 7.0, 1)])
def test_the_values_of_the_ranks_become_one(tmp_path, reduce, best, writes):
    def scenario():
        cb = fit(
            learner(tmp_path),
            Observed(reduce=reduce),
            3,
            {0: [3.0, 2.0, 1.0], 1: [5.0, 8.0, 9.0] if reduce in ('mean', 'max') else [3.1, 2.1, 1.1]},
        )
        return cb.best, len(cb.when('write'))

    best = {'mean': 4.0, 'main': 1.0, 'min': 1.0, 'max': 5.0}[reduce]
    assert values(run(scenario, 2)) == [(best, writes), (best, 0)]


def test_what_no_epoch_of_this_fit_has_saved_is_not_loaded(tmp_path):
    (tmp_path / 'models').mkdir()
    stale = learner(tmp_path)
    torch.nn.init.constant_(next(stale.model.parameters()), 77.0)
    torch.save(stale.model.state_dict(), tmp_path / 'models/model.pth')

    def scenario():
        learn = learner(tmp_path)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            cb = fit(learn, DDPSaveModelCallback(), 2, [float('nan')] * 2)
        said = [str(o.message) for o in seen if 'No model was saved' in str(o.message)]
        return float(next(learn.model.parameters())) != 77.0, len(said), cb.last_saved_path

    assert values(run(scenario, 2)) == [(True, 1, None), (True, 0, None)]


@pytest.mark.parametrize(
    'given,monitor,best,epochs',
    [
        ([float('nan'), 0.5, 0.6], 'valid_loss', 0.5, 2),
        ([0.5, float('nan'), 0.4], 'valid_loss', 0.4, 3),
        ([float('nan'), 0.5, 0.4], 'train_loss', 0.4, 3),
        ([-float('inf'), 0.5, 0.4], 'valid_loss', 0.4, 3),
    ],
)
def test_nan_and_infinity_are_never_best(tmp_path, given, monitor, best, epochs):
    learn, cb = learner(tmp_path), DDPSaveModelCallback(monitor=monitor)
    learn.fit(3, 0.1, cbs=[cb, Records(given, monitor)])
    assert cb.best == best
    assert read_metadata(cb.last_saved_path)['epoch'] == epochs - 1
    learn.fit(3, 0.1, cbs=[cb2 := DDPSaveModelCallback(monitor=monitor, comp=np.greater), Records(given, monitor)])
    assert cb2.best == max(o for o in given if np.isfinite(o))


def test_the_collectives_are_equal_on_all_ranks_and_two_per_saved_epoch_one_per_other_none_per_batch(tmp_path):
    class Marks(Callback):
        order = 100

        def __init__(self, calls):
            self.calls = calls

        def after_batch(self):
            self.calls.append('batch')

        def after_epoch(self):
            self.calls.append('epoch')

    def scenario():
        learn = learner(tmp_path)
        with Trace() as t:
            fit(
                learn,
                DDPSaveModelCallback(),
                4,
                {0: [3.0, 4.0, 2.0, 5.0], 1: [3.5, 4.0, 2.0, 5.0], 2: [3.0, 4.0, 2.0, 6.0]},
                [Marks(t.calls)],
            )
        return ' '.join(t.calls)

    a, b, c = values(run(scenario, 3))
    assert a == b == c
    epochs = [o.split() for o in a.split('epoch')]
    assert [len([x for x in o if x != 'batch']) for o in epochs] == [
        1 + 2 + OF_A_FIT + OF_AN_EPOCH,
        1 + OF_AN_EPOCH,
        2 + OF_AN_EPOCH,
        1 + OF_AN_EPOCH,
        2,
    ]  # one of ours before the first batch; the last two: end of fit
    for o in epochs[:-1]:
        assert (
            o[o.index('batch') :][:3] == ['batch', 'alltoall_base', 'batch']
            and 'batch' not in o[o.index('batch') + 3 :]
        )  # the order of validation


# -- what cannot work says so


def test_an_unknown_metric_is_refused_on_every_rank_before_training(tmp_path):
    def scenario():
        learn, trained = learner(tmp_path), []

        class Batches(Callback):
            def after_batch(self):
                trained.append(1)

        try:
            fit(learn, DDPSaveModelCallback(monitor='accuracy'), cbs=[Batches()])
        except ValueError as e:
            return str(e), len(trained), type(learn.model).__name__

    for message, trained, model in values(run(scenario, 2)):
        assert (
            "monitor='accuracy'" in message
            and 'train_loss, valid_loss' in message
            and not trained
            and model == 'RegModel'
        )


@pytest.mark.parametrize(
    'arguments,message',
    [
        (dict(every_epoch=True, at_end=True), 'every_epoch and at_end'),
        (dict(reduce='median'), "'mean', 'main', 'min', 'max'"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DDPSaveModelCallback(**arguments)


def test_a_rank_that_cannot_write_makes_all_ranks_raise_at_once(tmp_path):
    def scenario():
        class Full(DDPSaveModelCallback):
            def _write(self, *args):
                self._saver.store.folder = Path('/proc/nowhere')
                return super()._write(*args)

        learn, start = learner(tmp_path), time.monotonic()
        try:
            fit(learn, Full())
        except Exception as e:
            error = e
        took = time.monotonic() - start
        time.sleep(0.5)  # the failed process lives on
        return type(error).__name__, str(error), took, type(learn.model).__name__

    main, other = values(run(scenario, 2))
    assert main[0] == 'CheckpointWriteError' and '/proc/nowhere' in main[1]
    assert (
        other[0] == 'RankFailedError'
        and 'rank 0' in other[1]
        and '/proc/nowhere' in other[1]
        and 'No such file' in other[1]
    )
    assert main[2] < 5 and other[2] < 5 and main[3] == other[3] == 'RegModel'


def test_a_damaged_file_seen_by_one_rank_makes_all_ranks_raise(tmp_path):
    def scenario():
        read = loading.read_checkpoint

        def damaged(path, **kwargs):
            if rank() == 1:
                data = bytearray(Path(path).read_bytes())
                data[1000] ^= 1
                path = Path(path).with_name('seen_by_1.pth')
                path.write_bytes(data)
            return read(path, **kwargs)

        loading.read_checkpoint = damaged
        try:
            fit(learner(tmp_path), DDPSaveModelCallback())
        except Exception as e:
            return type(e).__name__, str(e)

    zero, one = values(run(scenario, 2))
    assert one[0] == 'CorruptCheckpointError' and 'seen_by_1.pth' in one[1]
    assert zero[0] == 'RankFailedError' and 'rank 1' in zero[1] and 'seen_by_1.pth' in zero[1]


def test_a_file_overwritten_by_somebody_else_is_not_taken_for_the_best(tmp_path):
    learn, cb = learner(tmp_path), DDPSaveModelCallback()

    class Intruder(Callback):
        order = 90

        def after_epoch(self):
            if self.epoch == 2:
                self.learn.save('model')

    with pytest.raises(Exception, match='not the file that this run saved'):
        learn.fit(3, 0.1, cbs=[cb, Intruder(), Records(BEST_LAST)])


# -- one process, and fastai's other parts


def test_one_process_does_what_stock_does(tmp_path, capsys):
    given = [3.0, 1.0, 2.0]
    results = []
    for cls in (SaveModelCallback, DDPSaveModelCallback):
        learn, cb = learner(tmp_path / cls.__name__), cls()
        learn.fit(3, 0.1, cbs=[cb, Records(given)])
        said = [o for o in capsys.readouterr().out.splitlines() if 'Better' in o]
        results.append(
            (
                digest(learn.model),
                cb.best,
                cb.last_saved_path.relative_to(tmp_path / cls.__name__),
                said,
                isinstance(cb, SaveModelCallback),
            )
        )
    assert results[0] == results[1]


def test_the_learner_and_the_loggers_find_it_under_the_stock_names(tmp_path):
    learn = learner(tmp_path, cbs=[DDPSaveModelCallback(fname='x'), DDPTrackerCallback()])
    assert learn.save_model.fname == 'x' and learn.tracker.monitor == 'valid_loss'
    learn.remove_cb(learn.save_model)
    assert not hasattr(learn, 'save_model')


@pytest.mark.parametrize('world_size', [1, 2])
def test_lr_find_validate_and_get_preds_are_left_alone(tmp_path, world_size):
    def scenario():
        learn = learner(tmp_path, cbs=DDPSaveModelCallback(fname='inert'))
        with Trace() as t:
            learn.validate()
            learn.get_preds()
            if world_size == 1:
                learn.lr_find(show_plot=False, num_it=5)
        assert not (tmp_path / 'models/inert.pth').exists()
        learn.fit(1, 0.1)
        best, weights = learn.save_model.best, digest(learn.model)
        torch.nn.init.constant_(next(learn.model.parameters()), 5.0)
        learn.validate()  # neither loads the best again, nor forgets it
        return t.calls, best == learn.save_model.best, weights != digest(learn.model)

    for calls, same, kept in values(run(scenario, world_size)):
        assert not calls and same and kept


def test_a_learner_that_holds_it_can_be_exported(tmp_path):
    dls = Datasets(
        range(40),
        [lambda o: torch.tensor([float(o)]), lambda o: torch.tensor([2.0 * o])],
        splits=[range(30), range(30, 40)],
    ).dataloaders(bs=5, num_workers=0)
    learn = Learner(dls, nn.Linear(1, 1), nn.MSELoss(), path=tmp_path, cbs=DDPSaveModelCallback())
    learn.fit(1)
    learn.export('learner.pkl')
    loaded = load_learner(tmp_path / 'learner.pkl')
    assert loaded.save_model.best == learn.save_model.best and digest(loaded.model) == digest(learn.model)


@pytest.mark.parametrize('variables', [dict(RANK='1'), dict(WORLD_SIZE='2'), dict(RANK='1', WORLD_SIZE='2')])
@pytest.mark.parametrize('inside', [True, False])
def test_a_stray_environment_is_not_believed(tmp_path, monkeypatch, variables, inside):
    for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
        monkeypatch.delenv(k, raising=False)
    for k, v in variables.items():
        monkeypatch.setenv(k, v)
    learn, cb = learner(tmp_path), DDPSaveModelCallback()
    with pytest.warns(UserWarning, match='no process group') as seen:
        if inside:
            fit(learn, cb)
        else:
            learn.fit(3, 0.1, cbs=[cb, Records(BEST_LAST)])
    assert len([o for o in seen if 'no process group' in str(o.message)]) == 1
    assert cb.last_saved_path.exists() and all(os.environ[k] == v for k, v in variables.items())


def test_two_fits_follow_reset_on_fit(tmp_path):
    def two(**kwargs):
        learn, cb = learner(tmp_path), DDPSaveModelCallback(**kwargs)
        learn.fit(2, 0.1, cbs=[cb, Records([2.0, 1.0])])
        first = digest(learn.model)
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            learn.fit(2, 0.1, cbs=[cb, Records([5.0, 4.0])])
        return first == digest(learn.model), cb.best

    assert two(reset_on_fit=True) == (False, 4.0)  # the best of the second fit
    assert two(reset_on_fit=False) == (True, 1.0)  # the best of both


def test_a_skipped_or_cancelled_epoch_writes_and_decides_nothing(tmp_path):
    class Cancel(Callback):
        def before_train(self):
            if self.epoch == 1:
                raise CancelEpochException

        def before_validate(self):
            if self.epoch == 2:
                raise CancelValidException

    learn, cb, every = learner(tmp_path), DDPSaveModelCallback(), DDPSaveModelCallback(every_epoch=True, fname='e')
    learn.fit(4, 0.1, cbs=[cb, Cancel()])
    assert read_metadata(cb.last_saved_path)['epoch'] in (0, 3) and cb.best < 1e9
    learn.fit(4, 0.1, cbs=[every], start_epoch=2)
    assert sorted(o.name for o in (tmp_path / 'models').glob('e_*')) == ['e_2.pth', 'e_3.pth']

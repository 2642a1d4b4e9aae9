"fastai 1: rank 0 saves between barriers, every rank loads the best, and whoever fails says so."

import os, time, warnings
from pathlib import Path

import pytest, torch
from fastai.callbacks.tracker import SaveModelCallback, TrackerCallback

from fastai_ddp_callbacks import DDPSaveModelCallback, DDPTrackerCallback, rank, read_metadata, verify_checkpoint
from fastai_ddp_callbacks import fastai1
from fastai_ddp_callbacks.training import saving, tracking
from learners1 import Hook, Observed, Records, digest, fit, learner, mae
from ranks import run, values

NAN = float('nan')


# -- writing and reading


def test_no_rank_loads_before_a_slow_rank_0_has_saved_in_the_last_epoch(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        cb = Observed(learn, slow={'write': 1.0})
        fit(learn, cb, values=[NAN, NAN, 1.0])
        return cb.when('write'), cb.when('wants to read'), digest(learn.model)

    (writes, _, first), *others = values(run(scenario, 3))
    for w, reads, weights in others:
        assert not w and reads[0] > writes[0]
        assert weights == first
    assert digest(learner(tmp_path).load('bestmodel').model) == first


def test_one_write_per_improvement_and_all_on_rank_0(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        cb = Observed(learn)
        fit(learn, cb, n=5, values=[5.0, 6.0, 4.0, 4.0, 3.0])
        return len(cb.when('write')), len(cb.when('read')), cb.best, cb.last_saved_path

    file = tmp_path / 'models/bestmodel.pth'
    assert values(run(scenario, 3)) == [(3, 1, 3.0, file), (0, 1, 3.0, file), (0, 1, 3.0, file)]


def test_a_slow_reader_gets_its_bytes_though_rank_0_goes_on_to_delete_the_file_and_to_fit_again(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        cb = Observed(learn, slow={'read': 1.0}, slow_rank=1)
        fit(learn, cb, n=2)
        if rank() == 0:
            cb.last_saved_path.unlink()
        after_first = digest(learn.model)
        fit(learn, cb, n=2)
        return after_first, digest(learn.model)

    a, b = values(run(scenario, 2))
    assert a == b and a[0] != a[1]


def test_after_every_epoch_the_file_is_there_for_every_rank(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        cb = Observed(learn, every='epoch', monitor='no such column', name='m', slow={'write': 0.5})
        seen = []
        fit(
            learn,
            cb,
            Hook(
                learn,
                'epoch_end',
                lambda epoch, **_: seen.append((tmp_path / f'models/m_{epoch}.pth').exists()),
                late=True,
            ),
            n=2,
        )
        return seen, len(cb.when('write')), len(cb.when('read')), cb.last_saved_path

    file = tmp_path / 'models/m_1.pth'
    assert values(run(scenario, 2)) == [([True, True], 2, 0, file), ([True, True], 0, 0, file)]


def test_the_best_epoch_is_what_all_ranks_end_with_and_what_stock_fastai_loads(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        seen = []
        note = Hook(learn, 'epoch_end', lambda **_: seen.append(digest(learn.model.module)), late=True)
        fit(learn, DDPSaveModelCallback(learn), note, values=[2.0, 1.0, 3.0])
        momentum = [float(o['momentum_buffer'].sum()) for o in learn.opt.state_dict()['state'].values()]
        return seen[1], digest(learn.model), momentum

    (best, end, momentum), (_, other_end, other_momentum) = values(run(scenario, 2))
    assert end == best == other_end and momentum == other_momentum
    meta = verify_checkpoint(tmp_path / 'models/bestmodel.pth')
    assert (meta['epoch'], meta['monitor'], meta['value']) == (1, 'valid_loss', 1.0)
    stock = learner(tmp_path)
    stock.create_opt(0.1)
    stock.load('bestmodel', with_opt=True)
    assert (
        digest(stock.model) == best
        and [float(o['momentum_buffer'].sum()) for o in stock.opt.state_dict()['state'].values()] == momentum
    )


def test_stock_fastai_loads_what_it_could_not_have_saved_for_this_torch_itself(tmp_path):
    learn = learner(tmp_path)
    learn.fit(1, slice(0.1), callbacks=[DDPSaveModelCallback(learn)])  # the learning rate is a scalar of numpy
    state = torch.load(tmp_path / 'models/bestmodel.pth', weights_only=True)
    assert set(state) == {'model', 'opt'} and state['opt']['param_groups'][0]['lr'] == 0.1
    assert learner(tmp_path).load('bestmodel').opt.opt.param_groups[0]['lr'] == 0.1


def test_a_file_of_an_earlier_run_is_not_loaded_when_nothing_improves(tmp_path):
    stale = learner(tmp_path)
    torch.nn.init.constant_(stale.model[0].weight, 77.0)
    stale.save('bestmodel', with_opt=False)

    def scenario():
        learn = learner(tmp_path)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            cb = DDPSaveModelCallback(learn)
            fit(learn, cb, n=2, values=[NAN, float('-inf')])
        said = [o for o in seen if 'No model was saved' in str(o.message)]
        return float(learn.model[0].weight[0, 0]) != 77.0, len(said), cb.last_saved_path

    assert values(run(scenario, 2)) == [(True, 1, None), (True, 0, None)]


def test_a_file_overwritten_by_somebody_else_is_not_taken_for_the_best(tmp_path):
    learn = learner(tmp_path)
    with pytest.raises(Exception, match='not the file that this run saved'):
        fit(
            learn, DDPSaveModelCallback(learn), Hook(learn, 'epoch_end', lambda **_: learn.save('bestmodel'), late=True)
        )


# -- resuming at an epoch


def test_jump_to_epoch_loads_on_all_ranks_what_rank_0_finds(tmp_path):
    def scenario():
        learn = learner(tmp_path / str(rank()))  # rank 1 has no such file in its own folder
        if rank() == 0:
            learn.save('m_0', with_opt=False)
        saved = digest(learn.model)
        torch.nn.init.constant_(learn.model[0].weight, 5.0)
        seen = []
        cb = DDPSaveModelCallback(learn, every='epoch', name='m')
        note = Hook(learn, 'epoch_begin', lambda epoch, **_: seen.append((epoch, digest(learn.model))))
        learn.fit_one_cycle(3, 0.1, start_epoch=1, callbacks=[cb, note])
        return seen[0] == (1, saved), [o for o, _ in seen], cb.last_saved_path.name

    assert values(run(scenario, 2)) == [(True, [1, 2], 'm_2.pth')] * 2


def test_jump_to_epoch_says_so_once_if_rank_0_finds_nothing(tmp_path):
    def scenario():
        learn = learner(tmp_path / str(rank()))
        if rank() == 1:
            learn.save('bestmodel_0'), os.environ.update(RANK='0'), learn.save('bestmodel_0')
        learn.fit_one_cycle(2, 0.1, start_epoch=1, callbacks=[DDPSaveModelCallback(learn)])
        return (learn.path / 'models/bestmodel_0.pth').exists()

    a, b = run(scenario, 2)
    assert values([a, b]) == [False, True]
    assert a.output.count('bestmodel_0 not found') == 1 and 'bestmodel_0' not in b.output


# -- whoever fails says so


def test_a_rank_0_that_cannot_write_makes_all_ranks_raise_at_once(tmp_path):
    def scenario():
        class Full(DDPSaveModelCallback):
            def _write(self, *args):
                self._saver.store.folder = Path('/proc/nowhere')
                return super()._write(*args)

        learn, start = learner(tmp_path), time.monotonic()
        try:
            fit(learn, Full(learn))
        except Exception as e:
            error = e
        took = time.monotonic() - start
        time.sleep(0.5)  # the failed process lives on
        return type(error).__name__, str(error), took, type(learn.model).__name__

    main, other = values(run(scenario, 2))
    assert main[0] == 'CheckpointWriteError' and '/proc/nowhere/bestmodel.pth' in main[1]
    assert (
        other[0] == 'RankFailedError'
        and 'rank 0' in other[1]
        and '/proc/nowhere/bestmodel.pth' in other[1]
        and 'No such file' in other[1]
    )
    assert main[2] < 5 and other[2] < 5 and main[3] == other[3] == 'Sequential'


@pytest.mark.parametrize('error', [ValueError, KeyboardInterrupt])
def test_training_that_ends_by_an_error_on_one_rank_neither_waits_nor_loads_nor_hides_it(tmp_path, error):
    def scenario():
        learn = learner(tmp_path)
        cb = Observed(learn)

        def boom(epoch, **_):
            if rank() == 1 and epoch == 1:
                raise error('boom on one')

        start, ended = time.monotonic(), []
        late = Hook(learn, 'train_end', lambda **_: ended.append(len(learn.callbacks)), late=True)
        try:
            fit(learn, cb, Hook(learn, 'batch_begin', boom), late)
        except BaseException as e:
            return (
                type(e).__name__,
                str(e),
                time.monotonic() - start,
                len(cb.when('read')),
                len(ended),
                type(learn.model).__name__,
            )

    zero, one = values(run(scenario, 2))
    assert one[:2] == (error.__name__, 'boom on one') and one[2] < 5 and one[3:] == (0, 1, 'Sequential')
    assert (
        zero[0] == 'RankFailedError'
        and 'rank 1 failed' in zero[1]
        and f'{error.__name__}: boom on one' in zero[1]
        and zero[3] == 0
    )


def test_a_rank_that_waits_for_the_decision_of_an_epoch_hears_of_the_failure_of_another(tmp_path):
    def scenario():
        learn = learner(tmp_path)

        def boom(epoch, **_):
            if rank() == 1:
                raise ValueError('boom on one')

        start = time.monotonic()
        try:
            fit(learn, DDPSaveModelCallback(learn), Hook(learn, 'epoch_end', boom))
        except Exception as e:
            error, took = e, time.monotonic() - start
        time.sleep(2)  # the failed process lives on
        return type(error).__name__, str(error), took

    zero, one = values(run(scenario, 2))
    assert one[:2] == ('ValueError', 'boom on one')
    assert zero[0] == 'RankFailedError' and 'boom on one' in zero[1] and zero[2] < 5


def test_a_fit_that_is_called_while_an_exception_is_handled_still_loads_the_best(tmp_path):
    learn = learner(tmp_path)
    cb = Observed(learn)
    try:
        raise RuntimeError('out of memory')
    except RuntimeError:
        fit(learn, cb, values=[1.0, 2.0, 3.0])
    assert len(cb.when('read')) == 1 and digest(learn.model) == digest(learner(tmp_path).load('bestmodel').model)


def test_an_unknown_column_is_refused_on_every_rank_before_training(tmp_path):
    def scenario():
        learn, batches = learner(tmp_path, metrics=[mae]), []
        try:
            fit(
                learn,
                DDPSaveModelCallback(learn, monitor='accuracy'),
                Hook(learn, 'batch_begin', lambda **_: batches.append(1)),
            )
        except ValueError as e:
            return str(e), len(batches), type(learn.model).__name__

    for message, batches, model in values(run(scenario, 2)):
        assert (
            "monitor='accuracy'" in message
            and 'train_loss, valid_loss, mae' in message
            and not batches
            and model == 'Sequential'
        )


def test_an_unknown_reduction_is_refused(tmp_path):
    with pytest.raises(ValueError, match="reduce='median'.*'mean', 'main', 'min', 'max'"):
        DDPSaveModelCallback(learner(tmp_path), reduce='median')


# -- one process, and fastai's other parts


def test_one_process_does_what_stock_does(tmp_path, capsys):
    results = []
    for cls in (SaveModelCallback, DDPSaveModelCallback):
        learn = learner(tmp_path / cls.__name__)
        cb = cls(learn)
        learn.fit(3, 0.1, callbacks=[cb, Records(learn, [3.0, 1.0, 2.0])])
        said = [o for o in capsys.readouterr().out.splitlines() if 'Better' in o]
        results.append((digest(learn.model), cb.best, said, sorted(o.name for o in (learn.path / 'models').iterdir())))
    assert results[0] == results[1]


def test_the_learner_finds_the_callbacks_under_the_stock_names(tmp_path):
    learn = learner(tmp_path)
    cb = DDPSaveModelCallback(learn, name='x')
    assert learn.save_model_callback is cb and isinstance(cb, SaveModelCallback) and isinstance(cb, DDPTrackerCallback)
    cb = DDPTrackerCallback(learn)
    assert learn.tracker_callback is cb and isinstance(cb, TrackerCallback)
    cb = fastai1.DDPEarlyStoppingCallback(learn)
    assert learn.early_stopping_callback is cb
    cb = fastai1.DDPReduceLROnPlateau(learn)
    assert learn.reduce_lr_on_plateau_callback is cb
    assert 'reduce: mean' in repr(cb)


def test_all_four_ways_to_attach_a_callback(tmp_path):
    for way in range(4):
        learn = learner(tmp_path / str(way), **({'callback_fns': DDPSaveModelCallback} if way == 0 else {}))
        if way == 1:
            learn.callback_fns.append(DDPSaveModelCallback)
        if way == 2:
            learn.callbacks.append(DDPSaveModelCallback(learn))
        learn.fit(1, 0.1, callbacks=[DDPSaveModelCallback(learn)] if way == 3 else None)
        assert read_metadata(learn.save_model_callback.last_saved_path)['epoch'] == 0


@pytest.mark.parametrize('world_size', [1, 2])
def test_lr_find_validate_and_get_preds_are_left_alone(tmp_path, world_size):
    def scenario():
        learn = learner(tmp_path)
        learn.callbacks += [
            DDPSaveModelCallback(learn, name='inert'),
            fastai1.DDPEarlyStoppingCallback(learn, monitor='no such column'),
            fastai1.DDPReduceLROnPlateau(learn),
            fastai1.DDPTerminateOnNaNCallback(),
        ]
        before, calls = digest(learn.model), []
        tracking.agree = saving.run_on_main = saving.barrier = lambda *_: calls.append(1)
        learn.lr_find(num_it=6)
        learn.validate()
        learn.get_preds()
        return calls, (tmp_path / 'models/inert.pth').exists(), before == digest(learn.model)

    assert values(run(scenario, world_size)) == [([], False, True)] * world_size


def test_validate_neither_forgets_the_best_nor_loads_it_and_may_be_called_in_the_midst_of_a_fit(tmp_path):
    learn = learner(tmp_path)
    learn.callbacks.append(DDPSaveModelCallback(learn))
    learn.fit(2, 0.1, callbacks=[Hook(learn, 'epoch_end', lambda **_: learn.validate() and None)])
    best = learn.save_model_callback.best
    torch.nn.init.constant_(learn.model[0].weight, 5.0)
    weights = digest(learn.model)
    learn.validate()
    assert learn.save_model_callback.best == best < 1e9 and digest(learn.model) == weights


def test_purge_and_export_keep_the_callbacks(tmp_path, monkeypatch):
    monkeypatch.setenv('TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD', '1')  # fastai 1 itself pickles code here
    learn = learner(tmp_path)
    learn.callbacks += [
        DDPSaveModelCallback(learn, name='x', reduce='max'),
        fastai1.DDPEarlyStoppingCallback(learn, min_delta=0.5, patience=7),
        fastai1.DDPReduceLROnPlateau(learn, factor=0.3),
        fastai1.DDPTerminateOnNaNCallback(),
    ]
    for _ in range(2):  # as constructed, and after a fit
        learn.purge()
        save, early, plateau, _ = learn.callbacks
        assert (save.name, save.reduce, early.min_delta, early.patience, plateau.factor) == ('x', 'max', -0.5, 7, 0.3)
        assert learn.save_model_callback is save
        learn.create_opt(0.1)
        fit(learn, n=2)
    assert save.last_saved_path.exists()
    learn.data.valid_ds.get_state = lambda **_: {}  # the data set of these tests is none of fastai's
    learn.export('learner.pkl')
    state = torch.load(tmp_path / 'learner.pkl', weights_only=False)['cb_state']
    assert state[DDPSaveModelCallback]['name'] == 'x' and 'opt' not in state[fastai1.DDPReduceLROnPlateau]

"A fit that was killed, told to leave, or had come to its end, and is started again."

import os, signal, threading, time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np, pytest, torch
from fastai.basics import Callback, DataLoaders, Learner, Metric, OptimWrapper, SGD, nn, set_seed
from fastai.callback.schedule import lr_find  # noqa: F401 (patches Learner)
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, SaveModelCallback

from fastai_ddp_callbacks import (
    DDPEarlyStoppingCallback,
    DDPReduceLROnPlateau,
    DDPSaveModelCallback,
    DDPStopCallback,
    DDPTerminateOnNaNCallback,
    DDPTrackerCallback,
    RankFailedError,
    ddp_ctx,
    rank,
    read_metadata,
    verify_checkpoint,
)
from fastai_ddp_callbacks.checkpoint import background
from fastai_ddp_callbacks.training import resume_files
from fastai_ddp_callbacks.fastai2.resume import DDPResumeCallback
from learners import Records, Trace, digest
from ranks import run, values
from resuming import (
    SIGNALS,
    Cancels,
    Clock,
    Counts,
    Dies,
    DiesAfter,
    Net,
    Raises,
    Seen,
    Signals,
    files,
    halves,
    killed,
    learner,
    left,
    outcome,
    refused,
    resumes,
    seen,
    same,
    start,
    train,
)


def saver():
    return DDPSaveModelCallback(), Counts()


# -- between epochs


@pytest.mark.parametrize(
    'world_size,fit',
    [(1, 'fit_one_cycle'), (1, 'fit_flat_cos'), (2, 'fit_one_cycle'), (2, 'fit'), (3, 'fit_one_cycle')],
)
def test_a_fit_killed_after_an_epoch_ends_as_if_nothing_had_happened(tmp_path, quiet, world_size, fit):
    killed(start(world_size, tmp_path, *saver(), Dies(1), fit=fit))
    same(start(world_size, tmp_path, *saver(), fit=fit), quiet(world_size, saver, fit=fit))
    assert files(tmp_path)[0] == 'model.pth' and len(resumes(tmp_path)) == 2 and len(files(tmp_path)) == 3


def test_the_ranks_random_numbers_go_on_and_differ_from_each_other(tmp_path, quiet):
    killed(start(2, tmp_path, Dies(0)))
    a, b = values(start(2, tmp_path))
    assert a['draw'] != b['draw'] and [a['draw'], b['draw']] == [o['draw'] for o in values(quiet(2))]


def test_data_loaders_with_workers(tmp_path):
    def fit(path, *cbs, **kwargs):
        learn = learner(path, num_workers=2, n=20)
        learn.fit_one_cycle(3, 0.1, cbs=[DDPResumeCallback(**kwargs), Seen(), *cbs])
        return outcome(learn)

    expected = fit(tmp_path / 'quiet')
    with pytest.raises(KeyError):
        fit(tmp_path / 'epoch', Raises(0))
    assert fit(tmp_path / 'epoch') == expected
    with pytest.raises(KeyError):
        fit(tmp_path / 'batch', Raises(1, 2), every_batches=1)
    got = fit(tmp_path / 'batch', every_batches=1)
    assert seen(tmp_path / 'batch', 1) == list(range(20)) and len(got['losses']) == len(expected['losses'])


def test_an_optimizer_of_torch(tmp_path):
    def scenario(path, *cbs):
        learn = learner(path, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
        learn.fit_one_cycle(3, 0.1, cbs=[DDPResumeCallback(), *cbs])
        return outcome(learn)

    expected = run(scenario, 1, tmp_path / 'a')
    killed(run(scenario, 1, tmp_path / 'b', Dies(1)))
    assert values(run(scenario, 1, tmp_path / 'b')) == values(expected)


@pytest.mark.parametrize('cb', [DDPEarlyStoppingCallback, EarlyStoppingCallback])
def test_patience_goes_on_where_it_was(tmp_path, cb):
    make = lambda: (cb(patience=3), Records([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    killed(start(2 if cb is DDPEarlyStoppingCallback else 1, tmp_path, *make(), Dies(2), n=6))
    for o in values(start(2 if cb is DDPEarlyStoppingCallback else 1, tmp_path, *make(), n=6)):
        assert len(o['values']) == 4 and o['state'][0] == dict(best=1.0, wait=3)


@pytest.mark.parametrize('cb', [DDPReduceLROnPlateau, ReduceLROnPlateau])
def test_a_learning_rate_that_was_reduced_stays_so_and_is_reduced_again(tmp_path, cb):
    make = lambda: (cb(patience=2), Records([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    killed(start(1, tmp_path, *make(), Dies(3), n=6, fit='fit'))
    (o,) = values(start(1, tmp_path, *make(), n=6, fit='fit'))
    assert o['lrs'][::8] == pytest.approx([0.1, 0.1, 0.1, 0.01, 0.01, 0.001])


def test_stock_savers_and_trackers_go_on_too(tmp_path, quiet):
    make = lambda: (
        SaveModelCallback(fname='stock'),
        DDPTrackerCallback('train_loss'),
        DDPEarlyStoppingCallback(patience=9),
        DDPReduceLROnPlateau('train_loss', patience=9),
    )
    killed(start(1, tmp_path, *make(), Dies(1)))
    same(start(1, tmp_path, *make()), quiet(1, make))


@pytest.mark.parametrize(
    'kwargs',
    [
        dict(keep_best=2, keep_last=1, last='last'),
        dict(fname='m-{epoch}', keep_best=1),
        dict(every_epoch=1),
        dict(every_epoch=1, background=True),
        dict(with_opt=True, reset_on_fit=False),
    ],
    ids=str,
)
def test_the_saver_s_files_are_those_of_an_uninterrupted_run(tmp_path, kwargs):
    make = lambda: (DDPSaveModelCallback(**kwargs), Records([3.0, 2.0, 4.0, 1.0, 5.0]))
    expected = start(1, tmp_path / 'quiet', *make(), n=5)
    killed(start(1, tmp_path / 'killed', *make(), Dies(2, 3), n=5))  # epoch 2 is trained twice
    same(start(1, tmp_path / 'killed', *make(), n=5), expected)
    assert files(tmp_path / 'killed') == files(tmp_path / 'quiet')
    for o in files(tmp_path / 'killed'):
        verify_checkpoint(tmp_path / 'killed/models' / o)


def test_a_worse_epoch_after_the_restart_leaves_the_best_file_alone_and_that_of_other_runs_too(tmp_path):
    make = lambda: (DDPSaveModelCallback(keep_best=1, keep_last=1), Records([1.0, 2.0, 3.0, 4.0]))
    other = learner(tmp_path)
    other.fit(9, 0.1, cbs=[DDPSaveModelCallback(fname='model_8'), DDPSaveModelCallback(fname='other', keep_last=1)])
    before = {o: (tmp_path / 'models' / o).read_bytes() for o in files(tmp_path)}
    killed(start(2, tmp_path, *make(), Dies(1)))
    best = (tmp_path / 'models/model_0.pth').read_bytes()
    values(start(2, tmp_path, *make()))
    assert (tmp_path / 'models/model_0.pth').read_bytes() == best
    assert {o: (tmp_path / 'models' / o).read_bytes() for o in before} == before
    assert [o for o in files(tmp_path) if o not in before and 'resume' not in o] == ['model_0.pth', 'model_3.pth']


def test_a_best_file_that_is_gone_is_a_warning(tmp_path):
    killed(start(2, tmp_path, *saver(), Dies(1)))
    (tmp_path / 'models/model.pth').unlink()
    a, _ = values(start(2, tmp_path, *saver()))
    assert any('is no longer there' in o for o in a['warnings']) and 'model.pth' in files(tmp_path)


def test_metrics_that_are_no_numbers_do_not_disturb(tmp_path):
    class PerClass(Metric):
        name, value = 'per_class', torch.ones(2)

        def reset(self):
            pass

        def accumulate(self, learn):
            pass

    def scenario(*cbs):
        learn = learner(tmp_path, metrics=PerClass())
        learn.fit(2, 0.1, cbs=[DDPResumeCallback(), *cbs])
        return len(learn.recorder.values)

    killed(run(scenario, 1, Dies(0)))
    assert values(run(scenario, 1)) == [2]


def test_data_loaders_of_torch(tmp_path):
    def scenario(path, *cbs):
        set_seed(1)
        data = torch.utils.data.TensorDataset(torch.rand(12, 2), torch.rand(12, 1))
        dls = DataLoaders(
            torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),
            torch.utils.data.DataLoader(data, batch_size=4),
        )
        learn = Learner(dls, Net(), nn.MSELoss(), path=Path(path))
        learn.fit(3, 0.1, cbs=[DDPResumeCallback(), *cbs])
        return outcome(learn)

    expected = run(scenario, 1, tmp_path / 'a')
    killed(run(scenario, 1, tmp_path / 'b', Dies(1)))
    assert values(run(scenario, 1, tmp_path / 'b')) == values(expected)


# -- in the middle of an epoch


@pytest.mark.parametrize('world_size', [1, 2, 3])
def test_a_fit_killed_twice_in_one_epoch_sees_each_sample_once_and_ends_as_if_nothing_had_happened(
    tmp_path, quiet, world_size
):
    make = lambda: (*saver(), Seen())
    killed(start(world_size, tmp_path, *make(), Dies(1, 0), every_batches=1))
    killed(start(world_size, tmp_path, *make(), DiesAfter(1), every_batches=1))
    same(start(world_size, tmp_path, *make(), every_batches=1), quiet(world_size, make))
    trained = seen(tmp_path, 1)
    assert set(trained) == set(range(38)) and len(trained) == 38 + -38 % world_size


def test_written_in_the_background_with_last_batches_dropped(tmp_path):
    kwargs = dict(every_batches=2, every_epoch=None, background=True, data=dict(drop_last=True))
    killed(start(2, tmp_path, Dies(2, 1), **kwargs))  # of 3 batches
    same(start(2, tmp_path, **kwargs), start(2, tmp_path / 'quiet', **kwargs))


def test_saved_at_the_last_batch_of_an_epoch(tmp_path, quiet):
    for world_size in (1, 2):
        path = tmp_path / f'{world_size}'
        killed(start(world_size, path, Dies(1, 7 if world_size == 1 else 3), every_batches=1, every_epoch=None))
        same(start(world_size, path, every_batches=1, every_epoch=None), quiet(world_size))


@pytest.mark.parametrize('sizes', [(2, 1), (1, 2), (3, 2), (3, 1, 2)], ids=str)
def test_with_other_ranks_each_sample_of_the_epoch_is_still_seen_once(tmp_path, sizes):
    kwargs = dict(every_batches=1, n=3, data=dict(n=37, bs=3, model=dict(norm=nn.LayerNorm)))
    for size in sizes[:-1]:
        killed(start(size, tmp_path, Seen(), Dies(1, 1) if size == sizes[0] else DiesAfter(1), **kwargs))
    first, *_ = values(start(sizes[-1], tmp_path, Seen(), **kwargs))
    assert any(f'is resumed by {sizes[-1]}' in o for o in first['warnings'])
    for epoch in (1, 2):  # only what makes the last ranks even is repeated
        assert set(seen(tmp_path, epoch)) == set(range(37)) and len(seen(tmp_path, epoch)) - 37 < sizes[-1]


def test_an_order_that_comes_out_of_numpy_goes_on_too(tmp_path):
    def scenario(path, *cbs):
        learn = learner(path)
        learn.dls.train.shuffle_fn = lambda idxs: np.random.permutation(
            len(idxs)
        ).tolist()  # as the loaders for text do
        learn.fit(2, 0.1, cbs=[DDPResumeCallback(every_batches=1), Seen(), *cbs])
        return outcome(learn)

    expected = run(scenario, 1, tmp_path / 'a')
    killed(run(scenario, 1, tmp_path / 'b', Dies(1, 3)))
    assert values(run(scenario, 1, tmp_path / 'b')) == values(expected)
    assert seen(tmp_path / 'b', 1) == list(range(38))


def test_a_loader_s_own_order_is_kept_for_the_epochs_that_follow(tmp_path):
    def scenario(*cbs):
        learn = learner(tmp_path)
        learn.dls.train.get_idxs = lambda: list(range(0, 36, 2))
        learn.fit(3, 0.1, cbs=[DDPResumeCallback(every_batches=1), Seen(), *cbs])

    killed(run(scenario, 1, Dies(1, 1)))
    values(run(scenario, 1))
    assert seen(tmp_path, 1) == seen(tmp_path, 2) == list(range(0, 36, 2))


def test_an_epoch_that_is_cancelled_after_the_restart_does_not_shorten_the_next(tmp_path):
    killed(start(1, tmp_path, Seen(), Dies(1, 2), every_batches=1))

    def scenario():
        learn = learner(tmp_path)
        learn.fit_one_cycle(4, 0.1, cbs=[DDPResumeCallback(every_batches=1), Seen(), Cancels(1, 5)])

    values(run(scenario, 1))
    assert seen(tmp_path, 2) == seen(tmp_path, 3) == list(range(38))


# -- when it saves


def test_rank_0_s_clock_tells_when_to_save(tmp_path):
    results = start(2, tmp_path, Clock(60, 6000), n=3, every_epoch=None, every_minutes=3)  # of 4 batches
    a, b = values(results)
    assert a['saves'] == b['saves'] == [(0, 3), (1, 2), (2, 1), (2, 4), (3, 0)]


def test_the_ranks_meet_about_once_a_second_and_never_in_between(tmp_path):
    def scenario():
        met = []

        class Meetings(Callback):
            order = 99

            def after_batch(self):
                if self.training:
                    met.append(len(trace.calls))

        learn = learner(tmp_path, n=320, bs=4)
        with ddp_ctx(learn), Trace() as trace:
            learn.fit(1, 0.1, cbs=[Clock(0.125, 9), DDPResumeCallback(), Meetings()])
        return [i + 1 for i, (a, b) in enumerate(zip([met[0], *met], met)) if b > a]

    assert values(run(scenario, 2)) == [[2, 10, 18, 26, 34]] * 2


def test_one_rank_meets_nobody(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        with Trace() as trace, ddp_ctx(learn):
            learn.fit(2, 0.1, cbs=DDPResumeCallback(every_batches=1))
        return trace.calls

    assert values(run(scenario, 1)) == [[]]


# -- told to leave


@pytest.mark.parametrize(
    'world_size,number,ranks',
    [(1, signal.SIGTERM, None), (1, signal.SIGINT, None), (2, signal.SIGUSR1, [1]), (3, signal.SIGTERM, None)],
)
def test_a_signal_on_any_rank_has_all_save_once_and_leave(tmp_path, quiet, world_size, number, ranks):
    results = left(start(world_size, tmp_path, *saver(), Signals(number, 1, 1, ranks=ranks), look=0))
    assert [
        (m['epoch'], m['batch'], m['sequence'])
        for m in map(read_metadata, sorted((tmp_path / 'models').glob('resume*'), key=os.path.getmtime))
    ][-1] == (1, 2, 2)
    assert '.resume_{iteration}{end}.lock' not in files(tmp_path)
    if number == signal.SIGINT:
        assert results[0].output.count('Once more to stop at once') == 1
    same(start(world_size, tmp_path, *saver()), quiet(world_size, saver))


def test_the_exit_status_is_as_chosen(tmp_path):
    left(start(2, tmp_path, Signals(signal.SIGTERM, 0, 1, ranks=[0]), look=0, exit_status=75), 75)


def test_with_callbacks_that_have_messages_of_their_own_under_way(tmp_path):
    left(
        start(
            2,
            tmp_path,
            DDPStopCallback(),
            DDPTerminateOnNaNCallback(),
            DDPSaveModelCallback(background=True),
            Signals(signal.SIGTERM, 1, 1, ranks=[1]),
            look=0,
            background=True,
        )
    )


@pytest.mark.parametrize('world_size,epoch', [(2, 1), (1, 3), (2, 3)])
def test_a_signal_in_validation_ends_the_fit_after_it(tmp_path, quiet, epoch, world_size):
    make = lambda: (DDPSaveModelCallback(), Records([3.0, 1.0, 2.0, 2.0]))
    left(start(world_size, tmp_path, *make(), Signals(signal.SIGTERM, epoch, 'validation', ranks=[world_size - 1])))
    same(start(world_size, tmp_path, *make()), start(world_size, tmp_path / 'quiet', *make()))


@pytest.mark.parametrize('world_size', [1, 2])
def test_a_signal_after_the_last_epoch_has_all_leave_when_the_fit_is_saved(tmp_path, quiet, world_size):
    left(start(world_size, tmp_path, *saver(), Signals(signal.SIGTERM, 3, 'end', ranks=[world_size - 1])))
    assert resumes(tmp_path)[-1].endswith('_finished.pth')
    same(start(world_size, tmp_path, *saver()), quiet(world_size, saver))


def test_ctrl_c_twice_stops_at_once_and_saves_nothing(tmp_path):
    (one,) = start(1, tmp_path, Signals(signal.SIGINT, 1, 1, times=2))
    assert isinstance(one.error, KeyboardInterrupt) and resumes(tmp_path) == ['resume_8.pth']
    zero, one = start(2, tmp_path / '2', Signals(signal.SIGINT, 1, 1, times=2, ranks=[1]))
    assert (
        isinstance(one.error, KeyboardInterrupt)
        and 'rank 1 failed' in str(zero.error)
        and 'KeyboardInterrupt' in str(zero.error)
    )


def test_handlers_of_others_are_called_and_get_their_place_back(tmp_path):
    def scenario(*cbs):
        heard = []

        def mine(number, frame):
            heard.append(number)

        for o in SIGNALS:
            signal.signal(o, mine)
        learn, error = learner(tmp_path), None
        try:
            learn.fit(2, 0.1, cbs=[DDPResumeCallback(), *cbs])
        except BaseException as e:
            error = type(e).__name__
        return (
            heard,
            error,
            [signal.getsignal(o) is mine for o in SIGNALS],
            [o for o in vars(learn) if o in ('_with_events', 'all_batches')],
            files(tmp_path),
        )

    assert values(run(scenario, 1, Signals(signal.SIGUSR1, 0, 1))) == [
        ([signal.SIGUSR1], 'Preempted', [True] * 3, [], ['resume_2.pth'])
    ]
    assert values(run(scenario, 1)) == [([], None, [True] * 3, [], ['resume_16.pth', 'resume_16_finished.pth'])]


@pytest.mark.parametrize(
    'world_size,attached,context',
    [(1, False, nullcontext), (1, True, nullcontext), (2, False, ddp_ctx), (2, True, ddp_ctx)],
)
def test_a_fit_that_raises_leaves_nothing_behind_and_can_be_made_again(tmp_path, quiet, world_size, attached, context):
    def scenario():
        learn, cb = learner(tmp_path), DDPResumeCallback(every_batches=1)
        before = [signal.getsignal(o) for o in SIGNALS], set(vars(learn))
        if attached:
            learn.add_cb(cb)

        def fit(*cbs):
            with context(learn):
                learn.fit_one_cycle(4, 0.1, cbs=[*cbs] if attached else [cb, *cbs])

        error = KeyError, RankFailedError  # or the other rank's, if that is known first
        with pytest.raises(error):
            fit(Raises(0))
        set_seed(7)
        with pytest.raises(error):
            fit(Raises(1, 2))
        clean = (
            [signal.getsignal(o) for o in SIGNALS] == before[0],
            [o for o in vars(learn) if o == 'all_batches' or o == '_with_events' and not attached],
            [o for o in files(tmp_path) if 'lock' in o],
        )
        fit()
        return clean, outcome(learn)

    for (clean, o), expected in zip(values(run(scenario, world_size)), values(quiet(world_size))):
        assert clean == (True, [], [])
        assert {k: o[k] for k in ('weights', 'losses', 'values', 'draw')} == {
            k: expected[k] for k in ('weights', 'losses', 'values', 'draw')
        }


def test_a_fit_that_raises_while_the_saver_writes_in_the_background_leaves_sigterm_its_meaning(tmp_path):
    def scenario():
        sv = DDPSaveModelCallback(background=True)
        written = background._Job._run

        def slow(*args):
            time.sleep(0.5)
            written(*args)

        background._Job._run = slow
        try:
            learner(tmp_path).fit(2, 0.1, cbs=[DDPResumeCallback(), sv, Raises(0)])
        except KeyError:
            pass
        signal.raise_signal(signal.SIGTERM)

    (one,) = run(scenario, 1)
    assert one.exitcode == -signal.SIGTERM and verify_checkpoint(tmp_path / 'models/model.pth')


def test_a_fit_in_a_thread_works_without_handlers(tmp_path, quiet):
    def scenario():
        before, res = [signal.getsignal(o) for o in SIGNALS], []

        def fit():
            learn = learner(tmp_path)
            learn.fit_one_cycle(4, 0.1, cbs=DDPResumeCallback())
            res.append(digest(learn.model))

        t = threading.Thread(target=fit)
        t.start()
        same = [signal.getsignal(o) for o in SIGNALS] == before
        t.join()
        return same, res[0]

    assert values(run(scenario, 1)) == [(True, values(quiet(1))[0]['weights'])]


# -- at the end, and other fits


@pytest.mark.parametrize('world_size,stop', [(1, False), (2, True)])
def test_a_fit_that_has_come_to_its_end_is_not_trained_again_and_gives_its_best_weights(tmp_path, world_size, stop):
    make = lambda: (
        DDPSaveModelCallback(),
        Records([3.0, 1.0, 2.0, 2.0]),
        DDPEarlyStoppingCallback(patience=2 if stop else 9),
        Seen(),
    )
    first = start(world_size, tmp_path, *make(), n=5 if stop else 4)
    trained = {o: o.read_text() for o in tmp_path.glob('seen*')}
    again = start(world_size, tmp_path, *make(), n=5 if stop else 4)
    assert trained == {o: o.read_text() for o in tmp_path.glob('seen*')}
    same(again, first, but=['state'])
    assert len(values(again)[0]['values']) == 4 and values(again)[0]['state'][0] == dict(best=1.0)


def test_killed_after_the_last_epoch_it_loads_the_best_when_started_again(tmp_path):
    make = lambda: (DDPSaveModelCallback(), Records([3.0, 1.0, 2.0, 2.0]))
    killed(start(2, tmp_path, *make(), Dies(3)))
    same(start(2, tmp_path, *make()), start(2, tmp_path / 'quiet', *make()))


def test_killed_after_the_last_epoch_it_saves_the_end_when_started_again(tmp_path):
    killed(start(1, tmp_path, DDPSaveModelCallback(at_end=True), Dies(3)))
    expected = start(1, tmp_path / 'quiet', DDPSaveModelCallback(at_end=True))
    same(start(1, tmp_path, DDPSaveModelCallback(at_end=True)), expected)
    assert digest(learner(tmp_path).load('model').model) == values(expected)[0]['weights']


def test_killed_between_its_last_save_and_the_deletion_after_it_the_next_start_deletes(tmp_path):
    def dying():
        delete = resume_files.delete
        resume_files.delete = lambda saved, disk: (
            os.kill(os.getpid(), signal.SIGKILL) if 'resume_32_finished.pth' in files(tmp_path) else delete(saved, disk)
        )
        train(tmp_path)

    killed(run(dying, 1))
    assert len(resumes(tmp_path)) == 3
    values(start(1, tmp_path))
    assert resumes(tmp_path) == ['resume_32.pth', 'resume_32_finished.pth']


def test_more_epochs_of_a_plain_fit_go_on_after_its_end(tmp_path, quiet):
    values(start(2, tmp_path, n=2, fit='fit'))
    same(start(2, tmp_path, n=4, fit='fit'), quiet(2, fit='fit'))


def test_another_fit_under_the_same_name_is_refused_on_all_ranks_before_training(tmp_path):
    values(start(2, tmp_path / 'a', *saver(), n=3))
    killed(start(2, tmp_path / 'b', *saver(), Dies(1), n=3))

    def other(path, n=3, monitor='valid_loss', **kwargs):
        def scenario():
            learn = learner(path, **kwargs)
            before = digest(learn.model)
            try:
                with ddp_ctx(learn):
                    learn.fit_one_cycle(
                        n, 0.1, cbs=[DDPResumeCallback(), DDPSaveModelCallback(monitor), Counts(), Seen()]
                    )
            finally:
                assert digest(learn.model) == before, 'the weights have changed'

        return refused(run(scenario, 2))

    for path in (tmp_path / 'a', tmp_path / 'b'):
        for kwargs, text in [
            (dict(n=2), 'is to have 2'),
            (dict(n=5), 'another schedule'),
            (dict(model=dict(n_hidden=9)), 'another model'),
            (dict(monitor='train_loss'), "followed 'valid_loss'"),
            (dict(splitter=halves), 'optimizer'),
            (dict(opt_func=SGD), 'optimizer'),
        ]:
            kind, told = other(path, **kwargs)
            assert kind == 'ValueError' and text in told, (path.name, kwargs, kind, told)
        assert not list(path.glob('seen*'))


def test_must_and_never(tmp_path, quiet):
    kind, text = refused(start(2, tmp_path, resume='must'))
    assert kind == 'CheckpointError' and 'no whole' in text
    killed(start(2, tmp_path, Dies(1)))
    same(start(2, tmp_path, resume='must'), quiet(2))
    same(start(2, tmp_path, resume='never'), quiet(2))  # from the beginning
    with pytest.raises(ValueError, match="'auto', 'must' or 'never'"):
        DDPResumeCallback(resume='maybe')
    for kwargs in (dict(every_epoch=0), dict(every_batches=-1), dict(every_minutes=0), dict(keep=0), dict(keep=None)):
        with pytest.raises(ValueError, match='above 0'):
            DDPResumeCallback(**kwargs)


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize('damage', [_truncate, _flip])
def test_when_the_newest_is_damaged_the_one_before_it_goes_on_with_a_warning(tmp_path, quiet, damage):
    killed(start(2, tmp_path, *saver(), Dies(2)))
    damage(tmp_path / 'models/resume_12.pth')
    results = start(2, tmp_path, *saver())
    same(results, quiet(2, saver))
    assert any(
        'resume_12.pth' in o and 'Resuming from what was saved before it' in o for o in values(results)[0]['warnings']
    )
    again = start(2, tmp_path, *saver())
    assert not any('Resuming from what was saved before it' in o for o in values(again)[0]['warnings'])
    assert len(resumes(tmp_path)) == 2 + (damage is _truncate)  # nobody can tell whose it is any more


def test_when_all_are_damaged_it_starts_anew_with_a_warning_or_fails_if_it_must_go_on(tmp_path, quiet):
    killed(start(2, tmp_path, Dies(2)))
    for o in (tmp_path / 'models').glob('resume*'):
        _flip(o)
    kind, text = refused(start(2, tmp_path, resume='must'))
    assert kind == 'CheckpointError' and 'no whole' in text
    results = start(2, tmp_path)
    same(results, quiet(2))
    assert sum('corrupt' in o for o in values(results)[0]['warnings']) == 2


# -- fastai's other parts


def test_start_epoch_skips_epochs_and_no_callback_minds(tmp_path):
    def scenario():
        learn, sv, stop = learner(tmp_path), DDPSaveModelCallback(every_epoch=1), DDPEarlyStoppingCallback(patience=1)
        cbs = [
            DDPResumeCallback(),
            sv,
            stop,
            DDPReduceLROnPlateau(),
            DDPTrackerCallback('train_loss'),
            DDPTerminateOnNaNCallback(),
            DDPStopCallback(),
            Seen(),
            Records([1.0, 1.0, 3.0, 2.0]),
        ]
        with ddp_ctx(learn):
            learn.fit(4, 0.1, start_epoch=2, cbs=cbs)
        return stop.best

    assert values(run(scenario, 2)) == [2.0] * 2
    assert [o.name for o in sorted(tmp_path.glob('seen*'))] == ['seen-2', 'seen-3']
    assert [o for o in files(tmp_path) if o.startswith('model')] == ['model_2.pth', 'model_3.pth']


@pytest.mark.parametrize('fit,epoch,batch', [(0, 0, 2), (1, 0, 0), (1, 1, None)])
def test_both_fits_of_fine_tune_go_on(tmp_path, fit, epoch, batch):
    def scenario(path, *cbs):
        learn, cb = learner(path, splitter=halves), DDPResumeCallback(every_batches=2)
        with ddp_ctx(learn):
            learn.fine_tune(2, 0.1, freeze_epochs=1, cbs=[cb, DDPSaveModelCallback(), *cbs])
        return outcome(learn)

    expected = run(scenario, 2, tmp_path / 'quiet')
    killed(run(scenario, 2, tmp_path / 'killed', Dies(epoch, batch, fit=fit)))
    assert values(run(scenario, 2, tmp_path / 'killed')) == values(expected)


def test_in_lr_find_validate_get_preds_and_export_it_takes_no_part(tmp_path):
    def scenario():
        learn = learner(tmp_path, cbs=DDPResumeCallback())
        with ddp_ctx(learn):
            learn.lr_find(num_it=20, show_plot=False)
            learn.validate()
            learn.get_preds()
        nothing = not (tmp_path / 'models').exists() or not resumes(tmp_path)
        with ddp_ctx(learn):
            learn.fit(1, 0.1)
        learn.export()
        learn.validate()
        return nothing, [signal.getsignal(o) for o in SIGNALS] == [
            signal.SIG_DFL,
            signal.SIG_DFL,
            signal.default_int_handler,
        ]

    assert values(run(scenario, 2)) == [(True, True)] * 2
    assert (tmp_path / 'export.pkl').exists() and len(files(tmp_path)) == 2


def test_validating_within_a_fit_does_not_count_as_its_end(tmp_path):
    class Validates(Callback):
        order = 70

        def after_train(self):
            if self.epoch == 0:
                self.learn.validate()

    def scenario(*cbs):
        learn = learner(tmp_path)
        learn.fit(3, 0.1, cbs=[DDPResumeCallback(), Validates(), *cbs])

    killed(run(scenario, 1, Dies(1)))
    assert resumes(tmp_path) and not [o for o in resumes(tmp_path) if 'finished' in o]


@pytest.mark.parametrize('world_size', [1, 2])
def test_attached_to_the_learner_it_works_as_well(tmp_path, quiet, world_size):
    def scenario(*cbs):
        learn = learner(tmp_path, cbs=DDPResumeCallback())
        with ddp_ctx(learn):
            learn.fit_one_cycle(4, 0.1, cbs=[*cbs])
        return digest(learn.model)

    killed(run(scenario, world_size, Dies(1)))
    assert values(run(scenario, world_size)) == [o['weights'] for o in values(quiet(world_size))]


def test_every_file_is_loaded_safely_and_no_more_than_told_are_kept(tmp_path):
    for _ in range(2):
        killed(start(2, tmp_path, *saver(), DiesAfter(5), every_batches=1, keep=3))
    assert len(resumes(tmp_path)) <= 4
    values(start(2, tmp_path, *saver(), every_batches=1, keep=3))
    assert len(resumes(tmp_path)) <= 3 and 'resume_16_finished.pth' in resumes(tmp_path)
    for o in resumes(tmp_path):
        assert set(torch.load(tmp_path / 'models' / o, weights_only=True)) == {'model', 'opt', 'training'}


def test_ranks_with_disks_of_their_own_go_on_with_what_rank_0_has(tmp_path, quiet):
    def scenario(*cbs):
        return (
            train(tmp_path / f'disk{rank()}', *saver(), Dies(1, 1), every_batches=1)
            if cbs
            else train(tmp_path / f'disk{rank()}', *saver(), every_batches=1)
        )

    killed(run(scenario, 2, 'dies'))
    same(run(scenario, 2), quiet(2, saver))
    assert not list((tmp_path / 'disk1').rglob('*.pth'))


def test_loaders_of_torch_itself_go_on_too(tmp_path):
    def scenario(folder, dies):
        class Die(Callback):
            order = 95

            def after_batch(self):
                if dies and self.training and (self.epoch, self.iter) == (1, 3):
                    os._exit(9)

        set_seed(1)
        x = torch.randn(40, 1)
        loaders = [
            torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), 4, shuffle=o) for o in (True, False)
        ]
        learn = Learner(
            DataLoaders(*loaders),
            nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.2), nn.Linear(4, 1)),
            nn.MSELoss(),
            path=folder,
        )
        learn.fit(3, 0.1, cbs=[DDPResumeCallback(every_batches=1), Die()])
        return digest(learn.model), len(learn.recorder.losses)

    quiet = values(run(scenario, 1, tmp_path / 'quiet', False))
    assert run(scenario, 1, tmp_path / 'killed', True)[0].exitcode == 9
    assert values(run(scenario, 1, tmp_path / 'killed', False)) == quiet

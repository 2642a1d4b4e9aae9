"""ddp_ctx: DistributedDataParallel on any device and with any number of ranks, and a learner that is as it was
afterwards."""

import os, time

import pytest, torch, torch.distributed as dist
from fastai.basics import Callback, DataLoaders, Learner, nn
from fastai.distributed import DistributedDL, DistributedTrainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from fastai.data.load import DataLoader

from fastai_ddp_callbacks import DDPSaveModelCallback, barrier, ddp_ctx, rank, run_on_main
from learners import digest, learner
from ranks import report, run, values


class Look(Callback):
    "Notes what the learner is while it trains."

    def before_train(self):
        self.seen = [
            isinstance(self.learn.model, DistributedDataParallel),
            isinstance(self.learn.dl, DistributedDL),
            hasattr(self.learn, 'progress'),
            os.environ.get('RANK'),
            os.environ.get('WORLD_SIZE'),
        ]


def state(learn):
    return (
        type(learn.model).__name__,
        type(learn.dls.train).__name__,
        hasattr(learn, 'progress'),
        learn.logger is print,
        learn._grab_cbs(DistributedTrainer),
    )


def test_inside_the_learner_is_distributed_and_afterwards_it_is_as_before(tmp_path):
    def scenario():
        learn, look = learner(tmp_path), Look()
        before = state(learn)
        with ddp_ctx(learn):
            learn.fit(2, 0.1, cbs=look)
        return look.seen, before == state(learn), digest(learn.model)

    a, b = values(run(scenario, 2))
    assert a[0] == [True, True, True, '0', '2'] and b[0] == [True, True, False, '1', '2']
    assert a[1] and b[1] and a[2] == b[2]


def test_the_learner_is_restored_when_fit_raises_and_can_be_fitted_again(tmp_path):
    def scenario():
        class Boom(Callback):
            def after_batch(self):
                raise ValueError('boom')

        learn = learner(tmp_path)
        before = state(learn)
        try:
            with ddp_ctx(learn):
                learn.fit(1, 0.1, cbs=Boom())
        except ValueError as e:
            error = str(e)
        restored = state(learn) == before
        with ddp_ctx(learn):
            learn.fit(1, 0.1)
        return error, restored, state(learn) == before, digest(learn.model)

    a, b = values(run(scenario, 2))
    assert 'boom' in a[0] and 'boom' in b[0] and a[1:3] == b[1:3] == (True, True) and a[3] == b[3]


def test_one_rank_trains_as_without_the_context(tmp_path):
    def scenario(inside):
        learn, look = learner(tmp_path), Look()
        if inside:
            with ddp_ctx(learn):
                learn.fit(2, 0.1, cbs=look)
        else:
            learn.fit(2, 0.1, cbs=look)
        return look.seen[:3], digest(learn.model)

    assert (
        values(run(scenario, 1, True)) == values(run(scenario, 1, False)) == values(run(scenario, 1, True, group=False))
    )


def test_an_error_on_one_rank_is_told_to_those_that_wait_for_it(tmp_path):
    def scenario():
        class Boom(Callback):
            order = -50

            def before_batch(self):
                if rank() == 1:
                    raise ValueError('boom on one')
                barrier('a callback of mine')

        learn = learner(tmp_path)
        start = time.monotonic()
        try:
            with ddp_ctx(learn):
                learn.fit(1, 0.1, cbs=Boom())
        except Exception as e:
            error, took = e, time.monotonic() - start
        time.sleep(2)  # the failed process lives on
        return type(error).__name__, str(error), took

    zero, one = values(run(scenario, 2))
    assert one[0] == 'ValueError' and 'boom on one' in one[1]
    assert zero[0] == 'RankFailedError' and 'rank 1' in zero[1] and 'boom on one' in zero[1] and zero[2] < 10


def test_a_rank_left_alone_in_a_collective_of_torch_names_the_rank_that_failed(tmp_path):
    def scenario():
        class Boom(Callback):
            def after_backward(self):
                if rank() == 1:
                    raise ValueError('boom on one')

        learn = learner(tmp_path)
        try:
            with ddp_ctx(learn):
                learn.fit(3, 0.1, cbs=Boom())
        except Exception as e:
            return type(e).__name__, str(e)

    zero, one = values(run(scenario, 2))
    assert one[0] == 'ValueError' and zero[0] == 'RankFailedError' and 'boom on one' in zero[1]


def test_the_group_is_made_where_a_launcher_has_set_the_stage(tmp_path):
    def scenario():
        assert not dist.is_initialized()
        learn, look = learner(tmp_path), Look()
        with ddp_ctx(learn):
            learn.fit(1, 0.1, cbs=look)
        return look.seen[0], dist.get_world_size(), dist.get_backend()

    assert values(run(scenario, 2, group=False)) == [(True, 2, 'gloo')] * 2


def test_ranks_are_those_of_the_group_where_no_launcher_has_set_the_environment(tmp_path):
    def scenario():
        learn, look, cb = learner(tmp_path), Look(), DDPSaveModelCallback()
        with ddp_ctx(learn):
            learn.fit(1, 0.1, cbs=[look, cb])
        return look.seen, [os.environ.get(o) for o in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')], cb.best

    a, b = values(run(scenario, 2, env=lambda r: dict(RANK=None, WORLD_SIZE=None, LOCAL_RANK=None)))
    assert a[0] == [True, True, True, '0', '2'] and b[0] == [True, True, False, '1', '2']
    assert a[1] == b[1] == [None] * 3 and a[2] == b[2]


@pytest.mark.parametrize('sync_bn', [True, False])
def test_batch_norm_and_an_uneven_data_set(tmp_path, sync_bn):
    def scenario():
        torch.manual_seed(0)
        x = torch.randn(45, 4)
        dls = DataLoaders(
            *(
                DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), bs=8, shuffle=o, num_workers=0)
                for o in (True, False)
            ),
            device='cpu',
        )
        learn = Learner(
            dls, nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), nn.MSELoss(), path=tmp_path
        )
        cb = DDPSaveModelCallback()
        with ddp_ctx(learn, sync_bn=sync_bn):
            learn.fit(2, 0.01, cbs=cb)
        return cb.best, digest(learn.model)

    a, b, c = values(run(scenario, 3))
    assert a == b == c


# -- ranks that differ


def test_data_of_another_size_on_one_rank_is_named_on_all_ranks_before_the_first_batch(tmp_path):
    def scenario():
        x = torch.randn(40 + 8 * rank(), 4)
        dls = DataLoaders.from_dsets(*[TensorDataset(x, x[:, :1])] * 2, bs=8, num_workers=0, device='cpu')
        with ddp_ctx(Learner(dls, nn.Linear(4, 1), nn.MSELoss(), path=tmp_path)) as learn:
            learn.fit(1)

    for o in run(scenario, 3):
        assert isinstance(o.error, ValueError), report([o])
        assert 'rank 0: training: 40 samples in batches of 8' in str(o.error)
        assert 'rank 2: training: 56 samples in batches of 8' in str(o.error)


@pytest.mark.parametrize('kind', [dict, tuple])
def test_a_loss_of_another_type_on_one_rank_is_reported_to_the_others(tmp_path, kind):
    def scenario():
        learn = learner(tmp_path)
        loss = learn.loss_func
        learn.loss_func = lambda pred, y: kind() if rank() else loss(pred, y)
        with ddp_ctx(learn):
            learn.fit(1, 0.1)

    zero, one = run(scenario, 2)
    assert isinstance(one.error, AttributeError) and kind.__name__ in str(one.error)
    assert type(zero.error).__name__ == 'RankFailedError' and zero.error.rank == 1, report([zero])
    assert kind.__name__ in str(zero.error)


def test_a_rank_that_cancels_its_fit_alone_is_named_by_the_one_that_goes_on(tmp_path):
    def scenario():
        from fastai.basics import CancelFitException  # made at run time: another class if it came with this function

        class Cancel(Callback):
            def before_batch(self):
                if rank() == 1 and self.training and self.epoch == 1:
                    raise CancelFitException()

        learn = learner(tmp_path)
        with ddp_ctx(learn):
            learn.fit(3, 0.1, cbs=Cancel())

    zero, one = run(scenario, 2)
    assert one.ok and type(zero.error).__name__ == 'RankFailedError', report([zero, one])
    assert 'rank 1 cancelled its fit in epoch 1' in str(zero.error)


def test_without_shared_buffers_a_warning_says_what_the_stated_value_is_worth(tmp_path):
    def scenario():
        from accelerate import DistributedDataParallelKwargs

        learn = learner(tmp_path)
        learn.model = nn.Sequential(learn.model, nn.BatchNorm1d(1))
        with ddp_ctx(learn, kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)]):
            learn.fit(1, 0.1)

    results = run(scenario, 2)
    values(results)
    assert ['With broadcast_buffers=False' in o.output for o in results] == [True, False]


# -- loaders of torch


def torch_learner(path, **kwargs):
    import torch.utils.data as torch_data

    torch.manual_seed(0)
    x = torch.randn(20, 4)
    loaders = [torch_data.DataLoader(TensorDataset(x, x[:, :1]), batch_size=4, **kwargs) for _ in range(2)]
    return Learner(DataLoaders(*loaders), nn.Linear(4, 1), nn.MSELoss(), path=path)


@pytest.mark.parametrize('n', [1, 2])
def test_plain_loaders_of_torch_are_divided(tmp_path, n):
    def scenario():
        learn = torch_learner(tmp_path)
        with ddp_ctx(learn):
            learn.fit(1, 0.0)
        return float(learn.recorder.values[-1][1])

    one = values(run(scenario, 1))[0]
    assert values(run(scenario, n)) == [pytest.approx(one)] * n


def test_what_would_be_lost_of_a_loader_of_torch_is_named(tmp_path):
    def scenario():
        with ddp_ctx(torch_learner(tmp_path, collate_fn=list)) as learn:
            barrier('both are here')
            learn.fit(1)

    for o in run(scenario, 2):
        assert isinstance(o.error, TypeError) and 'collate_fn would be lost' in str(o.error), report([o])


def test_the_time_limit_of_a_group_made_here_can_be_given(tmp_path):
    def scenario():
        with ddp_ctx(learner(tmp_path), timeout=77):
            return dist.group.WORLD._get_backend(torch.device('cpu')).options._timeout.total_seconds()

    assert values(run(scenario, 2, group=False)) == [77, 77]


@pytest.mark.parametrize('call', ['fit', 'validate'])
def test_what_needs_all_ranks_is_refused_on_one_of_them(tmp_path, call):
    def scenario():
        with ddp_ctx(learner(tmp_path)) as learn:
            run_on_main(lambda: learn.fit(1) if call == 'fit' else learn.validate())

    for o in run(scenario, 2):
        assert f'learn.{call} is inside run_on_main' in str(o.error), report([o])

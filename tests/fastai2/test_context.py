"""ddp_ctx: DistributedDataParallel on any device and with any number of ranks, and a learner that is as it was
afterwards."""

import os, time

import pytest, torch, torch.distributed as dist
from fastai.basics import Callback, DataLoaders, Learner, nn
from fastai.distributed import DistributedDL, DistributedTrainer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from fastai.data.load import DataLoader

from fastai_ddp_callbacks import DDPSaveModelCallback, barrier, ddp_ctx, rank
from learners import digest, learner
from ranks import run, values


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

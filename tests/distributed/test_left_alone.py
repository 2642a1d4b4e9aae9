"A rank that stands alone in a collective of torch: it says which rank is gone, and which one is elsewhere."

import os, signal, time

import pytest, torch, torch.distributed as dist
from fastai.basics import Callback

from fastai_ddp_callbacks import (
    BarrierMismatchError,
    DDPStopCallback,
    DDPTerminateOnNaNCallback,
    RankFailedError,
    barrier,
    ddp_ctx,
    propagate_failure,
    rank,
)
from learners import learner
from ranks import report, run


def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def stay():
    "Live on, as rank 0 keeps the store in which the others look, however slow they are."
    time.sleep(8)


@pytest.mark.parametrize('met', [False, True], ids=['before any rendezvous', 'after one'])
@pytest.mark.parametrize('victim', [0, 1])
def test_a_rank_that_is_killed_in_a_collective_of_torch_is_named_on_all_others(met, victim):
    def scenario():
        with propagate_failure():
            if met:
                barrier('start')
            dist.barrier()
            if rank() == victim:
                die()
            dist.all_reduce(torch.ones(1))

    def scenario_of_rank():
        try:
            scenario()
        finally:
            if rank() == 0:
                stay()

    results = run(scenario_of_rank, 3)
    for other in results[:victim] + results[victim + 1 :]:
        if victim == 0 and not isinstance(other.error, RankFailedError):
            assert 'gloo' in str(other.error)  # the store went with rank 0, before anything could be learned from it
            continue
        assert isinstance(other.error, RankFailedError), report(results)
        assert other.error.rank == victim
        assert f'rank {victim} died (its process is gone' in str(other.error)


def test_a_rank_that_is_killed_in_a_batch_is_named(tmp_path):
    def scenario():
        class Victim(Callback):
            def after_pred(self):
                if rank() == 1 and self.training and self.epoch == 1:
                    die()

        learn = learner(tmp_path)
        with ddp_ctx(learn):
            learn.fit(3, 0.1, cbs=Victim())

    zero, one = results = run(scenario, 2)
    assert one.exitcode == -signal.SIGKILL
    assert isinstance(zero.error, RankFailedError), report(results)
    assert 'rank 1 died' in str(zero.error)


def test_who_waits_for_a_rank_that_stands_in_a_collective_of_torch_is_named_with_the_place():
    def scenario():
        with propagate_failure():
            barrier('start')
            if rank() == 0:
                barrier('elsewhere')
            dist.all_reduce(torch.ones(1))

    results = run(scenario, 3, group_timeout=3)
    for r in (1, 2):
        assert isinstance(results[r].error, (BarrierMismatchError, RankFailedError)), report(results)
        assert "rank 0: barrier('elsewhere') at" in str(results[r].error)
        assert 'in a collective of torch, which failed' in str(results[r].error)
    assert isinstance(results[0].error, RankFailedError)
    assert 'BarrierMismatchError' in str(results[0].error)


def test_a_network_error_of_ranks_that_all_live_and_wait_nowhere_stays_what_it_is():
    def scenario():
        with propagate_failure():
            if rank() == 0:
                time.sleep(6)
            else:
                dist.all_reduce(torch.ones(1))

    zero, one = results = run(scenario, 2, group_timeout=2)
    assert type(one.error).__name__ == 'DistBackendError' or type(one.error) is RuntimeError, report(results)
    assert zero.error is None


@pytest.mark.parametrize('make', [DDPTerminateOnNaNCallback, DDPStopCallback])
def test_a_stop_callback_that_one_rank_lacks_is_named_on_all_before_the_first_batch(tmp_path, make):
    def scenario():
        learn = learner(tmp_path)
        with ddp_ctx(learn):
            learn.fit(2, 0.1, cbs=[make()] if rank() == 0 else [])

    results = run(scenario, 2, group_timeout=10)
    for one in results:
        assert isinstance(one.error, (BarrierMismatchError, RankFailedError)), report(results)
        assert 'The ranks are at different places' in str(one.error)
        assert f"rank 0: agree('flag {make.name}'" in str(one.error)

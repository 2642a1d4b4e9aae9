"Ranks that die, come late, or act from several threads when it is least convenient."

import os, signal, threading, time

import pytest, torch, torch.distributed as dist
from fastai.basics import Callback, TensorBase

from fastai_ddp_callbacks import (
    BarrierTimeoutError,
    DDPSaveModelCallback,
    DDPStopCallback,
    RankFailedError,
    agree,
    barrier,
    ddp_ctx,
    is_local_main_process,
    no_collectives,
    rank,
    run_once_per_node,
)
from fastai_ddp_callbacks.distributed.batch_flag import BatchFlag
from learners import Records, digest, learner
from ranks import report, run, values


def _dies(*args):
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs(*args):
    time.sleep(30)


@pytest.mark.parametrize('flag', [False, True])
def test_a_rank_killed_while_the_group_is_made_is_named(flag):
    def scenario():
        if flag:
            agree(1)
        if rank() == 1:
            dist.ProcessGroupGloo = _dies
        BatchFlag('x').exchange(False) if flag else barrier('x')

    zero, one, two = run(scenario, 3, timeout=25)
    assert one.exitcode == -signal.SIGKILL
    for o in (zero, two):
        assert isinstance(o.error, RankFailedError) and 'rank 1 died' in str(o.error), report([zero, one, two])


def test_ctrl_c_gets_through_while_the_group_is_made():
    def scenario():
        if rank() == 1:
            dist.ProcessGroupGloo = _hangs
        else:
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        try:
            barrier('x', timeout=25)
        except BaseException as e:
            return type(e).__name__, time.monotonic() - start < 10

    zero, one = values(run(scenario, 2, timeout=40))
    assert zero == ('KeyboardInterrupt', True) and one == ('RankFailedError', True)


def test_after_a_late_arrival_the_ranks_count_alike():
    def scenario():
        barrier('warm')
        if rank() == 1:
            time.sleep(1)
        try:
            barrier('x', timeout=0.5)
        except BarrierTimeoutError as e:
            first = e.missing
        time.sleep(1)
        barrier('again')
        assert BatchFlag('t').exchange(False) == []
        if rank() == 2:
            time.sleep(2.5)
        try:
            barrier('y', timeout=1)
        except BarrierTimeoutError as e:
            if rank() != 2:
                time.sleep(3)  # the store is with rank 0
            return first, e.missing

    assert values(run(scenario, 3)) == [([1], [2])] * 3


def test_the_job_s_store_gone_before_the_first_rendezvous_is_said():
    def scenario():
        if rank() == 0:
            time.sleep(0.5)
            os._exit(3)
        time.sleep(1.5)
        agree(1)

    _, one, two = run(scenario, 3)
    for o in (one, two):
        assert isinstance(o.error, RankFailedError) and "store does not answer" in str(o.error)


def test_a_rank_may_leave_as_soon_as_all_have_met():
    def scenario():
        barrier('first')
        if rank() == 1:
            time.sleep(1)
        barrier('last')
        if rank() == 0:
            os._exit(0)  # with the store
        return 'done'

    for _ in range(4):
        assert run(scenario, 2)[1].value == 'done'


def test_the_first_use_from_two_threads_of_a_rank():
    def scenario():
        if rank() == 0:
            threading.Thread(target=is_local_main_process).start()
        barrier('x', timeout=8)
        return True

    for _ in range(4):
        assert values(run(scenario, 2)) == [True, True]


def test_an_exception_without_a_text():
    def scenario():
        class Mute(Exception):
            def __str__(self):
                raise AttributeError('no text')

        from fastai_ddp_callbacks import run_on_main

        def f():
            raise Mute()

        try:
            run_on_main(f)
        except Exception as e:
            return type(e).__name__

    assert values(run(scenario, 2)) == ['Mute', 'RankFailedError']


@pytest.mark.parametrize('local', ['2', '1', '²', ''])
def test_a_local_rank_that_makes_no_sense_is_not_believed(local):
    def scenario():
        return run_once_per_node(lambda: f'from {rank()}')

    assert values(run(scenario, 4, env=lambda r: dict(LOCAL_RANK=local))) == ['from 0'] * 4


def test_blocks_that_end_out_of_order_leave_nothing_behind():
    def generator():
        with no_collectives():
            yield

    a = generator()
    next(a)
    with no_collectives():
        a.close()
    barrier('fine')


# -- fits


class Boom(Callback):
    def after_epoch(self):
        raise ValueError('boom')


def test_a_fit_after_one_that_raised_in_the_same_context(tmp_path):
    def scenario():
        learn, cb = learner(tmp_path), DDPSaveModelCallback()
        with ddp_ctx(learn):
            try:
                learn.fit(1, 0.1, cbs=Boom())
            except ValueError:
                plain = type(learn.model).__name__
            learn.validate()
            with ddp_ctx(learn):
                learn.fit(2, 0.1, cbs=cb)
        return (
            plain,
            digest(learn.model),
            cb.best,
            type(learn.recorder.loss).__name__,
            type(learn.dls.train).__name__,
            '_with_events' in vars(learn),
        )

    a, b = values(run(scenario, 2))
    assert a == b and a[0] == 'RegModel' and a[3:] == ('AvgLoss', 'TfmdDL', False)


def test_a_stop_asked_for_in_the_last_batch_is_of_this_fit(tmp_path):
    def scenario():
        class Late(Callback):
            order = -20

            def after_batch(self):
                if not self.training and self.epoch == 1 and rank() == 1:
                    self.learn.ddp_stop.ask('late')

        learn, stop = learner(tmp_path), DDPStopCallback()
        with ddp_ctx(learn):
            learn.fit(2, 0.1, cbs=[stop, Late()])
        reason = stop.reason
        with ddp_ctx(learn):
            learn.fit(3, 0.1, cbs=stop)
        return reason, stop.reason, len(learn.recorder.values)

    assert values(run(scenario, 2)) == [('late', None, 3)] * 2


def test_tensors_of_any_class_are_saved_and_what_cannot_be_read_safely_is_refused_at_once(tmp_path):
    learn = learner(tmp_path)
    learn.model.register_buffer('w', TensorBase(torch.ones(2)))
    learn.fit(2, 0.1, cbs=DDPSaveModelCallback(with_opt=True))
    type(learn.model).get_extra_state = lambda self: threading.Lock()
    try:
        with pytest.raises(Exception, match='_extra_state.* is a lock'):
            learn.fit(2, 0.1, cbs=[DDPSaveModelCallback(), Records([1.0, 2.0])])
    finally:
        del type(learn.model).get_extra_state


def test_two_savers_of_one_name_are_refused_before_training(tmp_path):
    learn = learner(tmp_path)
    with pytest.raises(ValueError, match="DDPSaveModelCallback and DDPSaveModelCallback both save to 'model'"):
        learn.fit(1, cbs=[DDPSaveModelCallback(), DDPSaveModelCallback('train_loss')])

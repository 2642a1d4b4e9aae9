"All ranks leave at the same batch."

import pytest, torch
from fastai.basics import Callback
from fastai.callback.schedule import lr_find  # noqa: F401 (patches Learner)
from fastai.callback.tracker import TerminateOnNaNCallback

from fastai_ddp_callbacks import (
    DDPSaveModelCallback,
    DDPStopCallback,
    DDPTerminateOnNaNCallback,
    barrier,
    ddp_ctx,
    rank,
)
from learners import OF_A_FIT, OF_AN_EPOCH, Records, Trace, digest, learner
from ranks import report, run, values


class Count(Callback):
    "How many training batches were begun."

    n = 0

    def before_batch(self):
        self.n += self.training


class BadLoss(Callback):
    order = -20

    def __init__(self, batch, bad, on):
        self.batch, self.bad, self.on = batch, bad, on

    def after_loss(self):
        if self.training and self.train_iter == self.batch and rank() == self.on:
            self.learn.loss = self.learn.loss * 0 + self.bad


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
@pytest.mark.parametrize('world_size,batches', [(1, 4), (2, 5), (3, 5)])
def test_a_bad_loss_on_one_rank_stops_all_ranks_at_the_same_batch(tmp_path, bad, world_size, batches):
    def scenario():
        learn, count = learner(tmp_path), Count()
        with ddp_ctx(learn):
            learn.fit(10, 1e-3, cbs=[DDPTerminateOnNaNCallback(), BadLoss(3, bad, world_size - 1), count])
        barrier('all are here')
        return count.n

    results = run(scenario, world_size)
    # in several ranks an epoch has 1 batch of training and 1 of validation, and the answer comes with the next one,
    # whichever it is
    assert values(results) == [batches - (world_size > 1)] * world_size
    assert ('loss is NaN or infinite' + (f' on rank {world_size - 1}' if world_size > 1 else '')) in results[0].output
    assert all('loss is NaN' not in o.output for o in results[1:])


def test_a_bad_loss_in_the_last_batch_of_all_leaves_nothing_under_way(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        for _ in range(2):
            with ddp_ctx(learn):
                learn.fit(
                    2, 1e-3, cbs=[DDPTerminateOnNaNCallback(), BadLoss(1, float('nan'), 1), DDPSaveModelCallback()]
                )
        barrier('all are here')

    values(run(scenario, 2))


def test_one_collective_per_batch_and_none_of_them_waited_for_in_its_batch(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        with Trace() as t:
            with ddp_ctx(learn):
                learn.fit(5, 1e-3, cbs=DDPTerminateOnNaNCallback())
        return len(t.calls)

    assert (
        values(run(scenario, 2)) == [10 + 1 + OF_A_FIT + 5 * OF_AN_EPOCH] * 2
    )  # and one to begin with: the flag begins anew


@pytest.mark.parametrize('world_size', [1, 2, 3])
def test_a_stop_asked_for_on_one_rank_is_made_by_all_and_the_best_is_loaded(tmp_path, world_size):
    def scenario():
        class Ask(Callback):
            order = 55

            def after_epoch(self):
                if self.epoch == 2 and rank() == world_size - 1:
                    self.learn.ddp_stop.ask('the disk is nearly full')

        learn, count, stop, save = learner(tmp_path), Count(), DDPStopCallback(), DDPSaveModelCallback()
        with ddp_ctx(learn):
            learn.fit(9, 1e-3, cbs=[Ask(), count, stop, save, Records([5.0, 4.0, 3.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0])])
        return learn.epoch, count.n, stop.reason, save.best, digest(learn.model)

    results = run(scenario, world_size)
    assert len(set(values(results))) == 1
    epoch, _, reason, best, _ = results[0].value
    assert (
        epoch == 3 and reason == 'the disk is nearly full' and best == 3.0
    )  # the save that was due after epoch 2 is made
    assert f'as rank {world_size - 1} asked for: the disk is nearly full' in results[0].output


def test_a_rank_that_fails_between_two_batches_is_named_by_those_that_wait_for_its_answer(tmp_path):
    def scenario():
        class Boom(Callback):
            order = -30

            def before_batch(self):
                if rank() == 1 and self.training and self.train_iter == 2:
                    raise ValueError('boom')

        learn = learner(tmp_path)
        with ddp_ctx(learn):
            learn.fit(9, 1e-3, cbs=[Boom(), DDPTerminateOnNaNCallback(), DDPStopCallback()])

    zero, one = run(scenario, 2)
    assert type(one.error).__name__ == 'ValueError' and not zero.hung
    assert type(zero.error).__name__ == 'RankFailedError' and 'boom' in str(zero.error), report([zero, one])


def test_one_process_stops_at_the_batch_where_stock_stops(tmp_path):
    def batches(cls):
        learn, count = learner(tmp_path), Count()
        learn.fit(5, 1e-3, cbs=[cls(), BadLoss(3, float('nan'), 0), count])
        return count.n

    assert batches(TerminateOnNaNCallback) == batches(DDPTerminateOnNaNCallback) == 4


def test_lr_find_gives_every_rank_its_weights_back_and_the_same_suggestion(tmp_path):
    def scenario():
        learn = learner(tmp_path, cbs=[DDPSaveModelCallback(), DDPTerminateOnNaNCallback()])
        with ddp_ctx(learn):
            learn.fit(1, 1e-2)
            before = digest(learn.model)
            with Trace() as t:
                found = learn.lr_find(num_it=20, show_plot=False)
        return (
            before == digest(learn.model),
            float(found.valley),
            len(t.calls),
            sorted(o.name for o in (tmp_path / 'models').iterdir()),
        )

    a, b = values(run(scenario, 2))
    # the order of each epoch's training, and averages of validations that are cancelled before they begin
    assert a == b and a[0] and a[2] == OF_A_FIT + 11 * 2 and a[3] == ['model.pth']


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize('bad', [float('nan'), float('inf'), 1.0])
def test_a_loss_of_any_precision_is_looked_at_as_stock_does(tmp_path, dtype, bad):
    class Lossy(BadLoss):
        def after_loss(self):
            super().after_loss()
            self.learn.loss = self.learn.loss.to(dtype)

    class Float(Callback):
        def after_batch(self):
            self.learn.loss = self.learn.loss.float()  # the Recorder has no other

    def batches(cls):
        learn, count = learner(tmp_path), Count()
        learn.fit(2, 1e-3, cbs=[cls(), Lossy(3, bad, 0), Float(), count])
        return count.n

    assert batches(TerminateOnNaNCallback) == batches(DDPTerminateOnNaNCallback)

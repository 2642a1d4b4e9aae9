"A metric is what one process would compute, whatever the number of ranks."

import time

import pytest, torch
from fastai.basics import Callback, DataLoaders, Learner, Metric, nn
from fastai.data.load import DataLoader
from fastai.metrics import F1Score, accuracy
from torch.utils.data import TensorDataset

from fastai_ddp_callbacks.distributed.lookout import Lookout
from fastai_ddp_callbacks import ddp_ctx, rank
from learners import Trace
from ranks import report, run, values


def _learner(tmp_path, n, n_valid, train_metrics=False):
    torch.manual_seed(0)
    x = torch.randn(n, 4)
    v = torch.randn(n_valid, 4)
    label = lambda o: (o.sum(1) + o[:, 0] * o[:, 1] > 0.1).long()
    dls = DataLoaders(
        DataLoader(TensorDataset(x, label(x)), bs=8, num_workers=0),
        DataLoader(TensorDataset(v, label(v)), bs=8, num_workers=0),
        device='cpu',
    )

    def half_right(p, t):
        return float((p.argmax(1) == t).float().mean()) / 2  # a plain number

    learn = Learner(
        dls, nn.Linear(4, 2), nn.CrossEntropyLoss(), lr=0.0, path=tmp_path, metrics=[accuracy, half_right, F1Score()]
    )
    learn.recorder.train_metrics = train_metrics
    return learn


@pytest.mark.parametrize('n_valid', [1, 2, 7, 45, 46, 48])
def test_averages_do_not_depend_on_the_number_of_ranks(tmp_path, n_valid):
    def scenario():
        learn = _learner(tmp_path, 50, n_valid)
        with ddp_ctx(learn):
            learn.fit(2, 0.0)
        return (
            list(learn.recorder.values[-1][1:]),
            [float(o.value) for o in learn.metrics[:2]],
            type(learn.recorder.loss).__name__,
            [type(o).__name__ for o in learn.metrics],
        )

    one = values(run(scenario, 1))[0]
    for n in (2, 3, 4):
        for got in values(run(scenario, n)):
            assert [got[0], got[1]] == [pytest.approx(o, rel=1e-6) for o in one[:2]] and got[2:] == one[2:]


def test_metrics_of_training_too(tmp_path):
    def scenario():
        learn = _learner(tmp_path, 45, 10, train_metrics=True)
        with ddp_ctx(learn):
            learn.fit(1, 0.0)
        return [float(o) for o in learn.recorder.values[-1][1:]], list(learn.recorder.metric_names)

    one = values(run(scenario, 1))[0]
    for got in values(run(scenario, 3)):
        assert got[1] == one[1] and got[0] == pytest.approx(one[0], rel=1e-6)


def test_a_rank_that_validates_slowly_is_seen_where_the_averages_are_gathered(tmp_path):
    def scenario():
        class Slow(Callback):
            def after_batch(self):
                if rank() == 1 and not self.training:
                    time.sleep(1.5)

        learn = _learner(tmp_path, 50, 10)
        learn.metrics = learn.metrics[:2]  # F1 gathers by itself, batch by batch
        with ddp_ctx(learn):
            learn.fit(1, 0.0, cbs=Slow())
        return learn.ddp_timeline()

    results = run(scenario, 2)
    table = values(results)[0]
    assert (
        table.name.iloc[-1] == "all_gather('averages of epoch 0')"
        and table.straggler.iloc[-1] == 1
        and table['rank 0'].iloc[-1] > 1
    )
    assert (
        'rank 1 cost the other 1.' in results[0].output
        and "mostly at all_gather('averages of an epoch')" in results[0].output
    )


@pytest.mark.parametrize('metrics', [{0: 2, 1: 1}, {0: 1, 1: 0}, {0: 0, 1: 2}])
def test_metrics_that_only_one_rank_has_are_named_on_all_ranks(tmp_path, metrics):
    names = ['accuracy', 'half_right']

    def scenario():
        learn = _learner(tmp_path, 50, 10)
        learn.metrics = learn.metrics[: metrics[rank()]]
        with ddp_ctx(learn):
            learn.fit(1, 0.0)

    for o in run(scenario, 2):
        assert isinstance(o.error, ValueError), report([o])
        for r, n in metrics.items():
            assert f'  rank {r}: {", ".join(["loss", *names[:n]])}\n' in str(o.error)


@pytest.mark.parametrize('event', ['before_train', 'before_validate'])
def test_a_rank_that_begins_an_epoch_or_its_validation_late_is_seen_where_the_order_is_shared(tmp_path, event):
    def scenario():
        slow = Callback()
        setattr(slow, event, lambda: time.sleep(1.5 * rank()))
        learn = _learner(tmp_path, 50, 10)
        learn.metrics = learn.metrics[:2]
        with ddp_ctx(learn):
            learn.fit(1, 0.0, cbs=slow)
        return learn.ddp_timeline()

    results = run(scenario, 2)
    table = values(results)[0]
    assert [o.split(', ')[0] for o in table.name] == [
        "all_gather('sizes of the data')",
        "broadcast('order of training samples in epoch 0'",
        "broadcast('order of validation samples in epoch 0'",
        "all_gather('averages of epoch 0')",
    ]
    assert list(table.index[table['rank 0'] > 1]) == [1 + (event == 'before_validate')]
    assert 'rank 1 cost the other 1.' in results[0].output


def test_a_rank_that_is_slow_to_leave_the_rendezvous_sees_for_itself_that_metrics_differ(tmp_path):
    def scenario():
        if rank() == 0:
            look = Lookout.check_for_failure
            Lookout.check_for_failure = lambda self, wait: (time.sleep(0.2), look(self, wait))[1]

        class Late(Callback):
            def after_batch(self):
                time.sleep(0.1 * rank() * (not self.training))

        learn = _learner(tmp_path, 50, 10)
        learn.metrics = learn.metrics[: rank()]
        with ddp_ctx(learn):
            learn.fit(1, 0.0, cbs=Late())

    for o in run(scenario, 2):
        assert isinstance(o.error, ValueError), report([o])


def test_a_plain_validation_outside_a_fit_and_a_metric_that_is_no_average_work(tmp_path):
    class Samples(Metric):
        def reset(self):
            self.n = 0

        def accumulate(self, learn):
            self.n += len(learn.yb[0])

        @property
        def value(self):
            return self.n

    def scenario():
        learn = _learner(tmp_path, 50, 10)
        learn.metrics = [*learn.metrics, Samples()]
        with ddp_ctx(learn), Trace() as t:
            return [float(o) for o in learn.validate()], t.calls.count('alltoall_base')

    (a, n), (b, m) = values(run(scenario, 2))
    assert a == b and a[-1] == 5 and n == m == 2  # the order, the averages

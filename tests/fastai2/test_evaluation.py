"Predictions, results and metrics in `ddp_ctx`: as in one process, inside and outside of a fit, on any rank."

import copy, io, pickle

import pytest, torch
from fastai.basics import (
    Callback,
    CrossEntropyLossFlat,
    DataLoaders,
    Learner,
    accuracy,
    load_learner,
)
from fastai.basics import nn, set_seed
from fastai.callback.core import FetchPredsCallback
from fastai.data.load import DataLoader
from fastai.distributed import DistributedTrainer
from fastai.interpret import Interpretation
from fastai.metrics import CorpusBLEUMetric, Dice, DiceMulti, JaccardCoeff, Perplexity
from hypothesis import given, settings, strategies as st
from torch.utils.data import TensorDataset

from fastai_ddp_callbacks import DDPError, DDPSaveModelCallback, ddp_ctx, rank
from fastai_ddp_callbacks.fastai2.loaders import stretches
from learners import Trace
from ranks import report, run, values


def a_learner(path, n=30, n_valid=13, metrics=(), cbs=(), norm=True, **kwargs):
    "Points of two classes; with `norm`, a model with buffers, which differ by the number of ranks once it is trained."
    set_seed(3)
    x = torch.randn(n + n_valid, 4)
    y = (x.sum(1) > 0).long()
    sets = TensorDataset(x[:n], y[:n]), TensorDataset(x[n:], y[n:])
    dls = DataLoaders.from_dsets(*sets, bs=4, num_workers=0, device='cpu')
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU(), nn.Linear(8, 2))
    return Learner(dls, model, CrossEntropyLossFlat(), path=path, metrics=list(metrics), cbs=cbs, **kwargs)


def predicted(learn, i=1):
    "What the model says of a whole data set, in order, and the targets."
    model = getattr(learn.model, 'module', learn.model)
    was = model.training
    x, y = learn.dls.loaders[i].dataset.tensors
    with torch.no_grad():
        res = model.eval()(x).softmax(1)
    model.train(was)
    return res, y


def right(learn, preds, i=1):
    expected, y = predicted(learn, i)
    return len(preds[0]) == len(y) and torch.allclose(preds[0], expected, atol=1e-6) and torch.equal(preds[1], y)


# -- how samples are divided


@settings(max_examples=200, derandomize=True)
@given(n=st.integers(0, 200), bs=st.integers(1, 9), size=st.integers(1, 5))
def test_every_sample_counts_once_in_its_order_and_ranks_have_as_many_batches(n, bs, size):
    seen = []
    for stretch in stretches(n, bs, size):
        assert len(stretch.begins) == size and all(1 <= count <= bs for count in stretch.counts)
        for begin, count, counts in zip(*stretch):
            seen += range(begin, begin + count) if counts else []
    assert seen == list(range(n))


# -- predictions in a fit

EVENTS = ['before_epoch', 'before_train', 'after_batch', 'after_train', 'after_validate', 'after_epoch']


@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('order', [-50, 5, 51])
def test_predictions_from_any_event_of_a_fit_are_those_of_the_whole_set_in_order(tmp_path, event, order):
    def scenario():
        found = []

        def ask():
            if hasattr(cb.learn, 'gather_preds'):
                return  # an event of the predictions themselves
            if event != 'after_batch' or cb.learn.training and cb.learn.iter == 1:
                training = cb.learn.model.training
                found.append(right(cb.learn, cb.learn.get_preds()))
                cb.learn.model.train(training)

        cb = Callback()
        cb.order = order
        setattr(cb, event, ask)
        learn = a_learner(tmp_path)
        with ddp_ctx(learn):
            learn.fit(2, 1e-2, cbs=cb)
        return found

    for got in values(run(scenario, 2)):
        assert len(got) >= 2 and all(got)


@pytest.mark.parametrize('n', [1, 2, 3])
def test_the_callback_that_fetches_predictions_has_them_on_all_ranks(tmp_path, n):
    def scenario():
        learn, fetch = a_learner(tmp_path), FetchPredsCallback()
        with ddp_ctx(learn):
            learn.fit(2, 1e-2, cbs=fetch)
        return right(learn, fetch.preds), [float(o) for o in learn.recorder.values[-1]]

    got = values(run(scenario, n))
    assert all(o == got[0] and o[0] for o in got)


def test_a_callback_that_fetches_predictions_on_rank_0_alone_keeps_nobody_waiting(tmp_path):
    def scenario():
        learn, fetch = a_learner(tmp_path), FetchPredsCallback()
        with ddp_ctx(learn):
            learn.fit(2, 1e-2, cbs=[] if rank() else [fetch])
        return rank() > 0 or right(learn, fetch.preds), [float(o) for o in learn.recorder.values[-1]]

    a, b = values(run(scenario, 2))
    assert a == b and a[0]


def test_values_of_a_fit_are_the_same_with_predictions_in_it(tmp_path):
    def scenario(cbs):
        learn = a_learner(tmp_path, metrics=[accuracy])
        with ddp_ctx(learn):
            learn.fit(2, 1e-2, cbs=cbs)
        return [[float(o) for o in row] for row in learn.recorder.values]

    without = values(run(scenario, 2, []))
    assert values(run(scenario, 2, [FetchPredsCallback()])) == without


# -- outside of a fit


@pytest.mark.parametrize('n_valid', [1, 2, 3, 13, 24, 29])
@pytest.mark.parametrize('size', [2, 3])
def test_outside_of_a_fit_predictions_have_every_sample_once_and_in_order(tmp_path, n_valid, size):
    def scenario():
        learn = a_learner(tmp_path, n_valid=n_valid)
        with ddp_ctx(learn):
            learn.fit(1, 1e-2)
            plain = learn.get_preds()
            _, _, _, losses = learn.get_preds(with_input=True, with_loss=True)
            train = learn.get_preds(ds_idx=0)
            shuffled = learn.get_preds(dl=learn.dls.valid.new(shuffle=True))
        res, y = predicted(learn)
        right_losses = torch.allclose(losses, nn.functional.nll_loss(res.log(), y, reduction='none'), atol=1e-5)
        return right(learn, plain), right(learn, train, 0), right(learn, shuffled), right_losses

    assert values(run(scenario, size)) == [(True, True, True, True)] * size


def test_an_interpretation_is_that_of_one_process(tmp_path):
    def scenario():
        learn = a_learner(tmp_path, norm=False)
        with ddp_ctx(learn):
            learn.fit(1, 0.0)
            interpretation = Interpretation.from_learner(learn)
        return interpretation.top_losses(5)[1].tolist()

    one = values(run(scenario, 1))[0]
    assert values(run(scenario, 2)) == [one] * 2


def digits(path):
    from test_fastai_parts import digits

    return digits(path, [DDPSaveModelCallback()])


@pytest.mark.parametrize('alone', [True, False])
def test_a_sample_is_predicted_and_results_are_shown_on_rank_0_alone_or_on_all(tmp_path, alone):
    def scenario():
        learn = digits(tmp_path)
        with ddp_ctx(learn):
            learn.fit(1, 1e-2)
            label = None
            if not (alone and rank()):
                with Trace() as t:
                    label = learn.predict(3)[0]
                    learn.show_results(max_n=2)
                assert not t.calls
            learn.fit(1, 1e-2)
        return label

    a, b = values(run(scenario, 2, env=lambda r: dict(MPLBACKEND='Agg')))
    assert a in map(str, range(10)) and b == (None if alone else a)


@pytest.mark.parametrize('alone', [True, False])
def test_a_learner_that_is_exported_inside_is_an_ordinary_one_where_it_is_loaded(tmp_path, alone):
    def scenario():
        learn = digits(tmp_path)
        with ddp_ctx(learn):
            learn.fit(1, 1e-2)
            if not (alone and rank()):
                learn.export('learner.pkl')
            learn.fit(1, 1e-2)

    values(run(scenario, 2))
    loaded = load_learner(tmp_path / 'learner.pkl')
    assert not [o for o in loaded.cbs if isinstance(o, DistributedTrainer)] and loaded.model(
        torch.zeros(1, 1, 8, 8)
    ).shape == (1, 10)


def test_a_rank_that_asks_alone_for_predictions_of_a_whole_set_is_named(tmp_path):
    def scenario():
        learn = a_learner(tmp_path)
        with ddp_ctx(learn):
            if rank() == 0:
                learn.get_preds()
            else:
                learn.fit(1)

    for o in run(scenario, 2):
        assert isinstance(o.error, DDPError) and 'order of samples in get_preds' in str(o.error), report([o])
        assert 'sizes of the data' in str(o.error)


# -- copies


@pytest.mark.parametrize('within', [True, False])
def test_a_learner_can_be_copied_and_pickled_before_and_after_a_fit(tmp_path, within):
    def scenario():
        learn = a_learner(tmp_path)

        def copies():
            copy.deepcopy(learn)
            copy.copy(learn)
            return pickle.loads(pickle.dumps(learn.dls)) is not None

        done = [copies()]
        with ddp_ctx(learn):
            if within:
                done.append(copies())
            learn.fit(1, 1e-2)
            if within:
                done.append(copies())
        done.append(copies())
        twin = copy.deepcopy(learn)
        with ddp_ctx(twin):
            twin.fit(1, 1e-2)
        return done, 'it' in vars(learn.dls.train), io.BytesIO(pickle.dumps(learn.model)).tell()

    for done, left_over, _ in values(run(scenario, 2)):
        assert all(done) and not left_over


# -- metrics


def test_metrics_that_add_up_counts_are_those_of_one_process(tmp_path):
    class RootMean(Perplexity):
        name = 'root'

        @property
        def value(self):
            return (self.total / self.count) ** 0.5

    def scenario():
        learn = a_learner(
            tmp_path, n_valid=29, norm=False, metrics=[Dice(), JaccardCoeff(), DiceMulti(), Perplexity(), RootMean()]
        )
        with ddp_ctx(learn):
            learn.fit(1, 0.0)
            again = learn.validate()
        return [float(o) for o in learn.recorder.values[-1][1:]], [float(o) for o in again]

    one = values(run(scenario, 1))[0]
    for size in 2, 3:
        for got in values(run(scenario, size)):
            assert got[0] == pytest.approx(one[0], rel=1e-5) and got[1] == pytest.approx(one[1], rel=1e-5)


def test_bleu_is_that_of_one_process(tmp_path):
    def scenario():
        set_seed(1)
        y = torch.randint(0, 5, (21, 9))
        dls = DataLoaders.from_dsets(*[TensorDataset(y, y)] * 2, bs=4, num_workers=0, device='cpu')
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
        learn = Learner(dls, model, CrossEntropyLossFlat(), path=tmp_path, metrics=CorpusBLEUMetric(vocab_sz=5))
        with ddp_ctx(learn):
            return float(learn.validate()[1])

    one = values(run(scenario, 1))[0]
    assert values(run(scenario, 2)) == [pytest.approx(one)] * 2


class Graphs:
    "Each index is a batch of its own, with any number of rows."

    def __init__(self, n):
        g = torch.Generator().manual_seed(1)
        self.sizes = [3 + i % 4 for i in range(n)]
        self.items = [(torch.randn(k, 4, generator=g), torch.randn(k, 1, generator=g)) for k in self.sizes]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


@pytest.mark.parametrize('size', [2, 3])
def test_batches_without_one_row_per_index_count_in_full(tmp_path, size):
    def scenario():
        set_seed(1)
        dls = DataLoaders(*[DataLoader(Graphs(11), bs=None, num_workers=0) for _ in range(2)], device='cpu')
        learn = Learner(dls, nn.Linear(4, 1), nn.MSELoss(), path=tmp_path)
        with ddp_ctx(learn):
            return float(learn.validate()[0])

    one = values(run(scenario, 1))[0]
    assert values(run(scenario, size)) == [pytest.approx(one, rel=1e-6)] * size


def test_a_loss_that_reads_the_inputs_and_outputs_that_cannot_be_cut_are_counted_as_they_are(tmp_path):
    def scenario():
        learn = a_learner(tmp_path, n_valid=15, norm=False)

        class OfTheInputs(nn.Module):
            calls = 0

            def forward(self, pred, y):
                self.calls += 1
                assert len(learn.xb[0]) == len(pred[0]['scores'])
                return nn.functional.cross_entropy(pred[0]['scores'], y) + learn.xb[0].mean()

        class Detects(nn.Module):
            def __init__(self, model):
                super().__init__()
                self.model = model

            def forward(self, x):
                return [dict(scores=self.model(x))]

        learn.model, learn.loss_func = Detects(learn.model), OfTheInputs()
        with ddp_ctx(learn):
            learn.fit(1, 0.0)
        return float(learn.recorder.values[-1][1])

    one = values(run(scenario, 1))[0]
    assert values(run(scenario, 2)) == [pytest.approx(one, rel=1e-6)] * 2


def test_a_metric_that_gives_several_numbers_is_averaged_too(tmp_path):
    def by_class(pred, y):
        return torch.stack([(y == c).float().mean() for c in range(2)])

    def scenario():
        learn = a_learner(tmp_path, metrics=[by_class])
        with ddp_ctx(learn):
            return learn.validate()[1].tolist()

    one = values(run(scenario, 1))[0]
    for got in values(run(scenario, 2)):
        assert got == pytest.approx(one)


def test_a_validation_set_whose_last_part_is_dropped_is_the_same_as_in_one_process(tmp_path):
    def scenario():
        learn = a_learner(tmp_path, n_valid=15)
        learn.dls.loaders[1] = learn.dls.valid.new(drop_last=True)
        with ddp_ctx(learn):
            return float(learn.validate()[0])

    one = values(run(scenario, 1))[0]
    assert values(run(scenario, 3)) == [pytest.approx(one, rel=1e-6)] * 3

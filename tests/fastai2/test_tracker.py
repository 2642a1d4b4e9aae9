"One decision for all ranks: the tracker family."

import math, random, warnings

import numpy as np, pytest, torch
import fastai.basics as fb
from fastai.basics import Callback, TensorBase
from fastai.callback.tracker import EarlyStoppingCallback, ReduceLROnPlateau, TrackerCallback

from fastai_ddp_callbacks import (
    DDPEarlyStoppingCallback,
    DDPReduceLROnPlateau,
    DDPSaveModelCallback,
    DDPTerminateOnNaNCallback,
    DDPTrackerCallback,
    ddp_ctx,
)
from learners import OF_A_FIT, OF_AN_EPOCH, Records, Trace, digest, learner
from ranks import run, values


class History(Callback):
    "What the trackers hold after each epoch, and the learning rate."

    order = 99

    def __init__(self, *trackers):
        self.trackers, self.epochs = trackers, []

    def after_epoch(self):
        self.epochs.append(
            (*((o.best, o.new_best, getattr(o, 'wait', None)) for o in self.trackers), self.opt.hypers[-1]['lr'])
        )

    def after_cancel_fit(self):
        self.epochs.append('stopped')


def fit(learn, given, *cbs, n=None, column='valid_loss', lr=0.1):
    history = History(*(o for o in cbs if isinstance(o, TrackerCallback)))
    with ddp_ctx(learn):
        learn.fit(
            n or len(given[0] if isinstance(given, dict) else given), lr, cbs=[Records(given, column), *cbs, history]
        )
    return history.epochs


class Validates(Callback):
    "Calls `validate` at an event of epoch 1."

    order, busy = 70, False

    def __init__(self, event):
        setattr(self, event, self.validate)

    def validate(self):
        if self.epoch != 1 or self.busy:
            return
        self.busy = True
        self.learn.validate()
        self.busy = False


# -- all ranks alike


def test_all_ranks_stop_after_the_same_epoch_though_one_always_improves(tmp_path):
    def scenario():
        return fit(
            learner(tmp_path),
            {0: [1.0, 2.0, 3.0, 4.0], 1: [4.0, 3.0, 2.0, 1.0]},
            DDPEarlyStoppingCallback(patience=1, reduce='main'),
        )

    a, b = values(run(scenario, 2))
    assert (
        a == b and a[-1] == 'stopped' and len(a) == 1 + 1
    )  # stopped in the second epoch, before this history takes note


def test_all_ranks_reduce_the_learning_rate_alike(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        return fit(
            learn, {0: [1.0, 2.0, 3.0, 4.0], 1: [4.0, 3.0, 2.0, 1.0]}, DDPReduceLROnPlateau(patience=2, factor=10)
        ), digest(learn.model)

    a, b = values(run(scenario, 2))
    assert a == b and [o[-1] for o in a[0]] == pytest.approx([0.1, 0.1, 0.01, 0.01])  # the mean never improves on 2.5


@pytest.mark.parametrize('reduce', ['mean', 'main', 'min', 'max'])
def test_patience_counts_epochs_whatever_the_world_size(tmp_path, reduce):
    given = [3.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    def scenario():
        return fit(
            learner(tmp_path),
            given,
            DDPReduceLROnPlateau(patience=2, reduce=reduce),
            DDPEarlyStoppingCallback(patience=3, reduce=reduce),
        )

    one, two, four = (values(run(scenario, n)) for n in (1, 2, 4))
    assert all(o == one[0] for o in one + two + four) and one[0][-1] == 'stopped'


def test_three_trackers_of_one_column_cost_one_collective(tmp_path):
    class Marks(Callback):
        order = 100

        def __init__(self, calls):
            self.calls = calls

        def after_epoch(self):
            self.calls.append('epoch')

    def scenario(*more):
        with Trace() as t:
            fit(
                learner(tmp_path),
                {0: [1.0, 2.0, 3.0], 1: [2.0, 3.0, 4.0]},
                DDPTrackerCallback(),
                DDPReduceLROnPlateau(patience=2),
                DDPEarlyStoppingCallback(patience=9),
                Marks(t.calls),
                *more,
            )
        return ' '.join(t.calls).split('epoch')

    a, b = values(run(scenario, 2))
    assert a == b and [len(o.split()) - OF_AN_EPOCH for o in a[:-1]] == [OF_A_FIT + 1, 1, 1] and not a[-1]
    a, b = values(run(scenario, 2, DDPTrackerCallback('train_loss')))
    assert a == b and [len(o.split()) - OF_AN_EPOCH for o in a[:-1]] == [OF_A_FIT + 2, 2, 2] and not a[-1]


def test_one_line_of_message_on_rank_0_only(tmp_path):
    def scenario():
        fit(
            learner(tmp_path),
            [1.0, 2.0, 3.0],
            DDPSaveModelCallback(),
            DDPReduceLROnPlateau(patience=1),
            DDPEarlyStoppingCallback(patience=2),
        )

    zero, one = run(scenario, 2)
    assert zero.ok and one.ok
    said = [o for o in zero.output.splitlines() if any(p in o for p in ('Better', 'reducing', 'early stopping'))]
    assert [o.strip() for o in said] == [
        'Better model found at epoch 0 with valid_loss value: 1.0.',
        'Epoch 1: reducing lr to 0.01',
        'Epoch 2: reducing lr to 0.001',
        'No improvement since epoch 0: early stopping',
    ]
    assert not any(p in one.output for p in ('Better', 'reducing', 'early stopping', 'train_loss'))


def _reference(epochs, comp, min_delta, patience, reduce):
    "What a tracker should hold after each epoch: (best, new best, wait), until it stops."
    best, wait, held = math.inf if comp is np.less else -math.inf, 0, []
    for ranks in epochs:
        have = [float(o) for o in ranks if o is not None]
        if reduce == 'main':
            val = None if ranks[0] is None else float(ranks[0])
        elif not have:
            val = None
        elif any(math.isnan(o) for o in have):
            val = math.nan
        else:
            val = {'mean': lambda o: o[0] if len(set(o)) == 1 else math.fsum(o) / len(o), 'min': min, 'max': max}[
                reduce
            ](have)
        better = (
            val is not None
            and math.isfinite(val)
            and (val < best - min_delta if comp is np.less else val > best + min_delta)
        )
        if better:
            best, wait = val, 0
        elif val is not None:
            wait += 1
        held.append((best, better, wait))
        if val is not None and not better and wait >= patience:
            return held
    return held


@pytest.mark.parametrize('world_size', [1, 2, 3, 4])
def test_random_metrics_lead_all_ranks_where_a_plain_reference_goes(tmp_path, world_size):
    draw = random.Random(world_size)

    def value():
        return draw.choice(
            [
                None,
                math.nan,
                math.inf,
                1.0,
                2.0,
                2.0,
                3.0,
                np.float32(2.5),
                torch.tensor(1.5),
                TensorBase(0.5),
                4,
                draw.random() * 4,
            ]
        )

    cases = [
        dict(
            epochs=[[value() for _ in range(world_size)] for _ in range(8)],
            comp=draw.choice([np.less, np.greater]),
            min_delta=draw.choice([0.0, 0.5]),
            patience=draw.choice([1, 2, 3]),
            reduce=draw.choice(['mean', 'main', 'min', 'max']),
        )
        for _ in range(12)
    ]

    def scenario():
        held = []
        for case in cases:
            epochs, rest = case['epochs'], {k: v for k, v in case.items() if k != 'epochs'}
            cb = DDPEarlyStoppingCallback(**rest)
            log = fit(learner(tmp_path), {r: [o[r] for o in epochs] for r in range(world_size)}, cb)
            held.append([o[0] for o in log if o != 'stopped'] + [(cb.best, cb.new_best, cb.wait)] * ('stopped' in log))
        return held

    for ranks in values(run(scenario, world_size, timeout=100)):
        for case, got in zip(cases, ranks):
            want = _reference(**case)
            assert got == want, case


# -- values


@pytest.mark.parametrize(
    'given,comp,best',
    [
        ([math.nan, 0.5, 0.6], np.less, 0.5),
        ([0.5, math.nan, 0.4], np.less, 0.4),
        ([math.nan, 0.5, 0.6], np.greater, 0.6),
        ([0.5, math.nan, 0.4], np.greater, 0.5),
        ([math.inf, 1.0, -math.inf], np.greater, 1.0),
        ([0.5, math.nan, 0.4], lambda a, b: not a >= b, 0.4),
    ],
)
def test_nan_and_infinity_are_never_best(tmp_path, given, comp, best):
    cb = DDPTrackerCallback(comp=comp)
    if comp not in (np.less, np.greater):
        cb.best, cb.reset_on_fit = math.inf, False
    fit(learner(tmp_path), given, cb)
    assert cb.best == best


def test_an_epoch_without_a_value_decides_nothing(tmp_path):
    class Cancel(Callback):
        order = -20

        def before_epoch(self):
            if self.epoch == 1:
                raise fb.CancelEpochException

        def before_validate(self):
            if self.epoch == 2:
                raise fb.CancelValidException

        def before_batch(self):
            if self.epoch == 3 and self.training:
                raise fb.CancelEpochException

    def scenario():
        learn, stop = learner(tmp_path), DDPEarlyStoppingCallback(patience=1)
        history = History(stop)
        with ddp_ctx(learn):
            learn.fit(5, 0.05, cbs=[Cancel(), stop, history])
        return history.epochs

    a, b = values(run(scenario, 2))
    assert a == b and [o[0][2] for o in a] == [0] * 5 and [o[0][1] for o in a] == [True, False, False, False, True]


@pytest.mark.parametrize('train_metrics', [True, False])
def test_the_column_is_found_by_its_name_in_every_epoch(tmp_path, train_metrics):
    class NoTraining(Callback):
        def before_train(self):
            if self.epoch == 1:
                raise fb.CancelTrainException

    def mae(p, t):
        return (p - t).abs().mean()

    learn = learner(tmp_path, metrics=mae)
    learn.recorder.train_metrics = train_metrics
    seen = []

    class Spy(DDPTrackerCallback):
        def _decide(self, verdict):
            seen.append(
                (verdict.value, float(self.recorder.metrics[0].value))
            )  # the metric holds what it had in validation

    learn.fit(3, 0.01, cbs=[Spy('valid_mae' if train_metrics else 'mae', comp=np.less), NoTraining()])
    assert len(seen) == 3 and all(a == pytest.approx(b) for a, b in seen)


@pytest.mark.parametrize('world_size', [1, 2])
def test_validating_after_an_epoch_is_no_new_fit(tmp_path, world_size):
    def scenario(*cbs):
        learn, saver, tracker = (
            learner(tmp_path / str(len(cbs))),
            DDPSaveModelCallback(),
            DDPEarlyStoppingCallback(patience=3),
        )
        epochs = fit(learn, [3.0, 1.0, 2.0, 4.0, 5.0, 6.0], saver, tracker, DDPTerminateOnNaNCallback(), *cbs)
        return (
            list(dict.fromkeys(epochs)),
            saver.best_path.name,
            digest(learn.model),
        )  # `validate` has the end of an epoch too

    assert values(run(lambda: scenario(Validates('after_epoch')), world_size)) == values(run(scenario, world_size))


def test_start_epoch_skips_epochs_in_silence_with_every_tracker(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        cbs = [
            DDPTrackerCallback(),
            DDPSaveModelCallback(),
            DDPReduceLROnPlateau(),
            DDPEarlyStoppingCallback(),
            DDPTerminateOnNaNCallback(),
        ]
        with ddp_ctx(learn):
            learn.fit(4, 0.01, cbs=cbs, start_epoch=2)
        return [getattr(o, 'best', None) for o in cbs]

    a, b = values(run(scenario, 2))
    assert a == b and math.isfinite(a[0])


def test_a_guess_about_what_is_better_is_announced_once(tmp_path):
    def rmse(p, t):
        return ((p - t) ** 2).mean()

    def accuracy(p, t):
        return 1.0

    learn, cb = learner(tmp_path, metrics=[rmse, accuracy]), DDPTrackerCallback('rmse')
    with pytest.warns(UserWarning, match='higher rmse is taken to be better'):
        learn.fit(1, cbs=cb)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        learn.fit(1, cbs=[cb])
        learn.fit(
            1,
            cbs=[
                DDPTrackerCallback('rmse', comp=np.less),
                DDPTrackerCallback('accuracy'),
                DDPTrackerCallback('train_loss'),
            ],
        )


def test_min_delta_and_reset_on_fit(tmp_path):
    cb = DDPTrackerCallback(min_delta=0.5)
    fit(learner(tmp_path), [3.0, 2.6, 2.4], cb)
    assert cb.best == 2.4
    keep, reset = DDPTrackerCallback(reset_on_fit=False), DDPTrackerCallback()
    fit(learner(tmp_path), [1.0], keep, reset)
    fit(learner(tmp_path), [2.0], keep, reset)
    assert (keep.best, reset.best) == (1.0, 2.0)


# -- as in stock, in one process


@pytest.mark.parametrize(
    'stock,ours,kwargs',
    [
        (TrackerCallback, DDPTrackerCallback, {}),
        (TrackerCallback, DDPTrackerCallback, dict(comp=np.greater)),
        (TrackerCallback, DDPTrackerCallback, dict(min_delta=0.15)),
        (TrackerCallback, DDPTrackerCallback, dict(monitor='train_loss')),
        (EarlyStoppingCallback, DDPEarlyStoppingCallback, dict(patience=2)),
        (EarlyStoppingCallback, DDPEarlyStoppingCallback, dict(min_delta=0.1, comp=np.greater)),
        (ReduceLROnPlateau, DDPReduceLROnPlateau, dict(patience=2)),
        (ReduceLROnPlateau, DDPReduceLROnPlateau, dict(min_delta=0.1, min_lr=0.03, factor=2.0)),
    ],
)
@pytest.mark.parametrize(
    'given', [[0.5, 0.4, 0.45, 0.44, 0.4, 0.3], [0.1, 0.2, 0.3, 0.25, 0.1, 0.05], [2.0, 2.0, 2.0, 2.0, 2.0, 2.0]]
)
def test_one_process_goes_as_stock(tmp_path, capsys, stock, ours, kwargs, given):
    logs = []
    for cls in (stock, ours):
        cb = cls(**kwargs)
        log = fit(learner(tmp_path), given, cb, column=kwargs.get('monitor', 'valid_loss'))
        logs.append(
            (
                log,
                [o for o in capsys.readouterr().out.splitlines() if 'lr' in o or 'early' in o],
                cb.name,
                cb.order,
                isinstance(cb, stock),
            )
        )
    assert logs[0] == logs[1]

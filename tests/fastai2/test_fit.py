"Our callbacks hear of the fit and of nothing else: whatever is evaluated during a fit, it goes on as if nobody had."

import copy, random

import pytest, torch
from fastai.basics import Callback, Metric, nn
from fastai.callback.core import CancelFitException, FetchPredsCallback

from fastai_ddp_callbacks import (
    DDPEarlyStoppingCallback,
    DDPReduceLROnPlateau,
    DDPResumeCallback,
    DDPSaveModelCallback,
    DDPTerminateOnNaNCallback,
    ddp_ctx,
)
from fastai_ddp_callbacks.fastai2.fit import running_fit
from learners import Records, digest, learner
from ranks import run, values

EVENTS = [
    'before_fit',
    'before_epoch',
    'before_train',
    'before_batch',
    'after_batch',
    'after_train',
    'before_validate',
    'after_validate',
    'after_epoch',
]
CALLS = {
    'validate': lambda learn: learn.validate(),
    'get_preds': lambda learn: learn.get_preds(),
    'get_preds inner': lambda learn: learn.get_preds(inner=True),
    'loss of the training set': lambda learn: learn.validate(ds_idx=0),
}


class Calls(Callback):
    "Calls something once, in one event of epoch 1."

    def __init__(self, call, event, order):
        self.call, self.order, self.done, self.at = call, order, False, 0 if event == 'before_fit' else 1
        setattr(self, event, self._now)

    def _now(self):
        if not self.done and vars(self.learn).get('epoch', 0) == self.at:
            self.done = True
            CALLS[self.call](self.learn)


class Dropout(nn.Module):
    "A line with dropout: it learns something else where random numbers or the mode of the model differ."

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1)), nn.Dropout(0.2)

    def forward(self, x):
        return self.drop(x * self.a + self.b)


def mae(preds, targets):
    return (preds - targets).abs().mean()


def fitted(folder, *cbs, ctx=False, values_of='valid_loss'):
    "A fit with the whole family; gives all that must not depend on evaluations during it."
    folder.mkdir(exist_ok=True)
    learn = learner(folder, model=Dropout(), metrics=mae)
    random.seed(3), torch.manual_seed(3)
    saver, stop, plateau = (
        DDPSaveModelCallback(keep_last=3),
        DDPEarlyStoppingCallback(patience=3),
        DDPReduceLROnPlateau(patience=2),
    )
    resume = DDPResumeCallback()
    given = Records([3.0, 1.0, 2.0, 4.0, 5.0], values_of)

    def train():
        learn.fit(5, 0.05, cbs=[saver, stop, plateau, resume, DDPTerminateOnNaNCallback(), given, *cbs])

    if ctx:
        with ddp_ctx(learn):
            train()
    else:
        train()
    assert not {'_with_events', '_call_one', '_do_epoch_validate'} & set(vars(learn)) and running_fit(learn) is None
    return dict(
        weights=digest(learn.model),
        best=(saver.best, saver.best_path.name),
        files=sorted(o.name for o in (folder / 'models').glob('*.pth')),
        patience=(stop.wait, plateau.wait, learn.opt.hypers[-1]['lr']),
        rows=[list(map(float, row)) for row in learn.recorder.values],
        counters=(learn.epoch, learn.train_iter, len(learn.recorder.losses), learn.recorder.iters),
    )


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp('undisturbed') / 'fit')


@pytest.mark.parametrize('order', [-20, 51, 100])
@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('call', CALLS)
def test_an_evaluation_in_any_event_at_any_order_changes_nothing(tmp_path, undisturbed, call, event, order):
    if call == 'get_preds inner' and event == 'before_fit':
        event = 'before_epoch'  # stock needs a Recorder that has begun
    assert fitted(tmp_path / 'fit', Calls(call, event, order)) == undisturbed


@pytest.mark.parametrize('event,world_size', [('before_fit', 2), ('after_batch', 2), ('after_epoch', 3)])
def test_ranks_that_evaluate_during_a_fit_end_as_without(tmp_path, event, world_size):
    def scenario():
        return (
            fitted(tmp_path / 'quiet', ctx=True),
            fitted(tmp_path / 'disturbed', Calls('validate', event, 51), ctx=True),
        )

    for quiet, disturbed in values(run(scenario, world_size)):
        assert quiet == disturbed


def test_predictions_are_fetched_after_each_validation(tmp_path, undisturbed):
    fetch = FetchPredsCallback()
    assert fitted(tmp_path / 'fit', fetch) == undisturbed
    assert len(fetch.preds[0]) == 32


def test_a_metric_that_is_adding_up_is_not_disturbed(tmp_path):
    class Sum(Metric):
        def reset(self):
            self.total = 0.0

        def accumulate(self, learn):
            self.total += float(learn.yb[0].sum())

        @property
        def value(self):
            return self.total

    def rows(*cbs):
        learn = learner(tmp_path, metrics=Sum())
        learn.fit(2, 0.01, cbs=[DDPSaveModelCallback(), *cbs])
        return learn.recorder.values

    class Within(Callback):
        def after_batch(self):
            if not self.training and self.iter == 0 and self.epoch == 1 and running_fit(self.learn):
                learn = self.learn
                learn.remove_cb(self)
                learn.validate()

    assert rows(Within()) == rows()


def test_tta_does_not_move_the_best_epoch(tmp_path):
    class Augments(Callback):
        order = 51

        def after_epoch(self):
            if self.epoch == 1:
                self.learn.tta(n=1)

    class NoSplit:
        "What `tta` asks of a data set."

        def set_split_idx(self, _):
            from contextlib import nullcontext

            return nullcontext()

    learn = learner(tmp_path)
    for dl in learn.dls.loaders:
        dl.dataset.set_split_idx = NoSplit().set_split_idx
    saver, stop = DDPSaveModelCallback(), DDPEarlyStoppingCallback(patience=2)
    learn.fit(3, 0.01, cbs=[saver, stop, Augments(), Records([3.0, 1.0, 2.0])])
    assert saver.best == 1.0
    assert stop.wait == 1
    assert len(learn.recorder.values) == 3


@pytest.mark.parametrize('exception', [KeyError, KeyboardInterrupt])
def test_after_a_fit_that_raised_the_learner_and_the_environment_are_as_before(tmp_path, monkeypatch, exception):
    monkeypatch.setenv('RANK', '0'), monkeypatch.setenv('WORLD_SIZE', '1')

    class Fails(Callback):
        def after_batch(self):
            raise exception('boom')

    import os

    learn, stock = learner(tmp_path), learner(tmp_path)
    for one, cbs in (learn, [DDPSaveModelCallback(), Fails()]), (stock, [Fails()]):
        with pytest.raises(exception):
            one.fit(1, 0.01, cbs=cbs)
    assert set(vars(learn)) == set(vars(stock))
    assert (os.environ['RANK'], os.environ['WORLD_SIZE']) == ('0', '1')
    assert [o.name for o in (tmp_path / 'models').iterdir()] == []


def test_an_evaluation_whose_beginning_raised_does_not_deafen_the_callbacks(tmp_path):
    class Broken(Callback):
        def before_fit(self):
            raise KeyError('boom')

    class Tries(Callback):
        def after_epoch(self):
            if self.epoch == 0:
                with pytest.raises(KeyError):
                    self.learn.validate(cbs=Broken())

    saver = DDPSaveModelCallback()
    learner(tmp_path).fit(3, 0.01, cbs=[saver, Tries(), Records([3.0, 2.0, 1.0])])
    assert saver.best == 1.0


def test_copies_of_a_learner_in_a_fit_train_on_their_own(tmp_path):
    copies = []

    class Copies(Callback):
        def after_epoch(self):
            copies.append(copy.deepcopy(self.learn))

    learn = learner(tmp_path, cbs=DDPSaveModelCallback())
    learn.fit(1, 0.01, cbs=Copies())
    (other,) = copies
    other.remove_cb(Copies)
    other.fit(2, 0.01)
    assert running_fit(other) is None
    assert other.save_model.best_path.exists() and other.save_model is not learn.save_model


def test_stopping_early_is_no_failure(tmp_path):
    class Stops(Callback):
        def after_batch(self):
            raise CancelFitException()

    class Ends(DDPSaveModelCallback):
        def end(self, fit):
            failed.append(fit.failed)
            super().end(fit)

    failed = []
    learner(tmp_path).fit(1, 0.01, cbs=[Ends(), Stops()])
    assert failed == [False]

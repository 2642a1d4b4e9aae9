"fastai 1: one value, one decision, the same epoch and the same batch on all ranks."

import pytest, torch

from fastai_ddp_callbacks import rank, read_metadata
from fastai_ddp_callbacks.fastai1 import (
    DDPEarlyStoppingCallback,
    DDPReduceLROnPlateau,
    DDPSaveModelCallback,
    DDPTerminateOnNaNCallback,
)
from fastai.callbacks.tracker import EarlyStoppingCallback, ReduceLROnPlateauCallback, TerminateOnNaNCallback
from fastai_ddp_callbacks.training import tracking
from learners1 import Hook, Observed, Records, digest, fit, learner, mae
from ranks import run, values

NAN, INF = float('nan'), float('inf')
ONE_ALWAYS_IMPROVES = {0: [1.0, 2.0, 3.0, 4.0, 5.0], 1: [5.0, 4.9, 4.8, 4.7, 4.6]}


def test_all_ranks_stop_in_the_same_epoch_when_one_of_them_always_improves(tmp_path):
    def scenario():
        learn, epochs = learner(tmp_path), []
        fit(
            learn,
            DDPEarlyStoppingCallback(learn, patience=1),
            Hook(learn, 'epoch_begin', lambda epoch, **_: epochs.append(epoch)),
            n=5,
            values=ONE_ALWAYS_IMPROVES,
        )
        return epochs, digest_without_statistics(learn)

    a, b = run(scenario, 2)
    assert values([a, b])[0] == values([a, b])[1] and a.value[0] == [0, 1, 2]
    assert a.output.count('early stopping') == 1 and 'early stopping' not in b.output


def digest_without_statistics(learn):
    return digest(torch.nn.ParameterList(learn.model.parameters()))


def test_all_ranks_keep_the_same_learning_rate_and_weights(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        lrs = []
        fit(
            learn,
            DDPReduceLROnPlateau(learn, factor=0.1, min_lr=2e-4),
            Hook(learn, 'epoch_end', lambda **_: lrs.append(learn.opt.lr), late=True),
            n=5,
            values=ONE_ALWAYS_IMPROVES,
        )
        return lrs, digest_without_statistics(learn)

    a, b = values(run(scenario, 2))
    assert a == b and a[0] == pytest.approx([0.1, 0.01, 1e-3, 1e-4, 1e-4])


def test_a_value_that_only_rank_0_has_decides_for_all(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        cb = Observed(learn)
        fit(learn, cb, values={0: [2.0, 1.0, 3.0], 1: [None] * 3})
        return cb.best, len(cb.when('read'))

    assert values(run(scenario, 2)) == [(1.0, 1)] * 2


@pytest.mark.parametrize('reduce,best', [('mean', 3.0), ('main', 1.0), ('min', 1.0), ('max', 5.0)])
def test_the_values_of_the_ranks_become_one(tmp_path, reduce, best):
    def scenario():
        learn = learner(tmp_path)
        cb = DDPSaveModelCallback(learn, reduce=reduce)
        fit(learn, cb, n=1, values={0: [1.0], 1: [5.0]})
        return cb.best

    assert values(run(scenario, 2)) == [best] * 2


@pytest.mark.parametrize(
    'given,mode,best,epoch',
    [
        ([NAN, 0.5, 0.6], 'min', 0.5, 1),
        ([0.5, NAN, 0.4], 'min', 0.4, 2),
        ([-INF, 0.5, 0.4], 'min', 0.4, 2),
        ([NAN, 0.5, 0.6], 'max', 0.6, 2),
        ([0.5, NAN, 0.4], 'max', 0.5, 0),
        ([INF, 0.5, 0.4], 'max', 0.5, 1),
    ],
)
def test_nan_and_infinity_are_never_best(tmp_path, given, mode, best, epoch):
    learn = learner(tmp_path)
    cb = DDPSaveModelCallback(learn, mode=mode)
    fit(learn, cb, values=given)
    assert cb.best == best and read_metadata(cb.last_saved_path)['epoch'] == epoch


def test_trackers_of_one_column_share_one_agreement_per_epoch(tmp_path):
    def scenario():
        learn, names, agree = learner(tmp_path, metrics=[mae]), [], tracking.agree
        tracking.agree = lambda value, how, name: names.append(name) or agree(value, how, name)
        plateau = DDPReduceLROnPlateau(learn, monitor='mae', mode='min')
        fit(learn, DDPSaveModelCallback(learn), DDPEarlyStoppingCallback(learn, patience=9), plateau, n=2)
        return names

    assert (
        values(run(scenario, 2))
        == [['valid_loss of epoch 0', 'mae of epoch 0', 'valid_loss of epoch 1', 'mae of epoch 1']] * 2
    )


@pytest.mark.parametrize('add_time', [True, False])
def test_every_column_can_be_followed(tmp_path, add_time):
    for monitor in ('train_loss', 'valid_loss', 'mae', 'second'):

        def second(out, y):
            return mae(out, y) + 1

        learn = learner(tmp_path, metrics=[mae, second], add_time=add_time)
        cb = DDPSaveModelCallback(learn, monitor=monitor, mode='min')
        learn.fit(1, 0.1, callbacks=[cb])
        rec = learn.recorder
        assert cb.best == float(
            dict(
                train_loss=rec.losses[-1], valid_loss=rec.val_losses[0], mae=rec.metrics[0][0], second=rec.metrics[0][1]
            )[monitor]
        )


def test_an_epoch_without_validation_decides_nothing(tmp_path):
    learn = learner(tmp_path, metrics=[mae])
    cb, early, seen = DDPSaveModelCallback(learn, monitor='mae', mode='min'), DDPEarlyStoppingCallback(learn), []

    def skip(epoch, **_):
        return {'skip_validate': epoch == 1}

    note = Hook(learn, 'epoch_end', lambda **_: seen.append(cb.get_monitor_value()), late=True)
    learn.fit(3, 0.1, callbacks=[cb, early, Hook(learn, 'epoch_begin', skip), note])
    assert seen[1] is None and None not in (seen[0], seen[2]) and cb.best == min(seen[0], seen[2])


def test_one_process_decides_as_stock_does(tmp_path):
    given = [3.0, 2.95, 2.9, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]

    def history(early, plateau):
        learn, lrs = learner(tmp_path), []
        trackers = [early(learn, min_delta=0.2, patience=3), plateau(learn, factor=0.5, min_delta=0.01, patience=1)]
        note = Hook(learn, 'epoch_end', lambda **_: lrs.append(learn.opt.lr), late=True)
        learn.fit(len(given), 1.0, callbacks=[*trackers, Records(learn, given), note])
        return lrs

    ours = history(DDPEarlyStoppingCallback, DDPReduceLROnPlateau)
    assert ours == history(EarlyStoppingCallback, ReduceLROnPlateauCallback) and len(ours) == 8 and ours[-1] == 0.25


# -- NaN


def batches(learn, *callbacks, **kwargs):
    "Fit, and give the (epoch, batch) pairs after which this rank went on; negative batches are of validation."
    seen = []

    def note(epoch, num_batch, train, **_):
        seen.append((epoch, num_batch if train else -1))

    fit(learn, *callbacks, Hook(learn, 'batch_end', note, late=True), **kwargs)
    return seen


def nan_at(learn, epoch, batch, on_rank, train=True, real=True):
    "Makes the loss NaN: with its gradients, or only for those who look at it afterwards."

    def poison(last_loss, train, **state):
        if rank() == on_rank and state['epoch'] == epoch and state['num_batch'] == batch and train == want:
            return {'last_loss': last_loss * NAN}

    want = train
    return Hook(learn, 'backward_begin' if real else 'batch_end', poison)


@pytest.mark.parametrize('real', [True, False])
def test_all_ranks_stop_at_the_same_batch_when_the_loss_is_nan_on_one_of_them(tmp_path, real):
    def scenario():
        learn = learner(tmp_path, bs=2)
        cb = DDPTerminateOnNaNCallback()
        seen = batches(learn, cb, DDPSaveModelCallback(learn), nan_at(learn, 1, 2, on_rank=1, real=real), n=3)
        return seen[-1], len(seen), cb.stop, digest_without_statistics(learn)

    a, b, c = run(scenario, 3)
    assert (
        values([a, b, c]) == [a.value] * 3 and a.value[0] == (1, 3) and a.value[2]
    )  # one batch later, and no validation
    assert (
        a.output.count('Epoch/Batch (1/3): Invalid loss on rank 1, terminating training.') == 1
        and 'Invalid' not in b.output + c.output
    )


@pytest.mark.parametrize('batch,train', [(2, True), (3, False)])
def test_a_nan_in_the_last_batch_or_in_validation_ends_training_with_the_epoch(tmp_path, batch, train):
    def scenario():
        learn = learner(tmp_path)  # three batches per epoch and rank
        seen = batches(
            learn, DDPTerminateOnNaNCallback(), nan_at(learn, 1, batch, on_rank=1, train=train, real=False), n=3
        )
        return seen

    a, b = run(scenario, 2)
    assert values([a, b]) == [[(e, b) for e in (0, 1) for b in (0, 1, 2, -1, -1, -1)]] * 2
    assert a.output.count('End of epoch 1: Invalid loss on rank 1, terminating training.') == 1


def test_one_process_stops_at_the_batch_itself_as_stock_does(tmp_path):
    results = []
    for cls in (TerminateOnNaNCallback, DDPTerminateOnNaNCallback):
        learn = learner(tmp_path)
        results.append(batches(learn, cls(), nan_at(learn, 0, 3, on_rank=0)))
    assert results[0] == results[1] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_the_callback_serves_one_fit_after_the_other_also_after_one_that_failed(tmp_path):
    def scenario():
        learn, cb = learner(tmp_path), DDPTerminateOnNaNCallback()

        def boom(epoch, **_):
            if rank() == 1:
                raise ValueError('boom on one')  # with the answer of the last batch still to come

        ends = [batches(learn, cb, n=1)[-1]]
        for _ in range(2):
            try:
                batches(learn, cb, Hook(learn, 'epoch_end', boom), n=1)
            except Exception as e:
                ends.append(type(e).__name__)
            ends.append(batches(learn, cb, n=1)[-1])
        ends.append(batches(learn, cb, nan_at(learn, 0, 0, on_rank=0), n=2)[-1])
        return ends

    end = (0, -1)
    assert values(run(scenario, 2)) == [[end, o, end, o, end, (0, 1)] for o in ('RankFailedError', 'ValueError')]

"fastai 1: validation in which each sample counts once, and evaluations that callbacks call during a fit."

import pytest, torch
from fastai import basic_train
from fastai.basics import DataBunch, DataLoader, Learner, TensorDataset, nn

from fastai_ddp_callbacks import (
    BarrierMismatchError,
    DDPEarlyStoppingCallback,
    DDPReduceLROnPlateau,
    DDPSaveModelCallback,
    DDPTerminateOnNaNCallback,
    ddp_ctx,
    rank,
)
from learners1 import Hook, digest, fit, learner, mae
from ranks import run, values


def uneven(path, n_valid, bs):
    torch.manual_seed(1)
    x = torch.randn(24 + n_valid, 1) * 5
    y = x**2
    loaders = [
        DataLoader(TensorDataset(x[part], y[part]), bs, shuffle=not i, num_workers=0)
        for i, part in enumerate((slice(0, 24), slice(24, None)))
    ]
    data = DataBunch(*loaders, path=path, device=torch.device('cpu'))
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return Learner(data, model, loss_func=nn.MSELoss(), metrics=[mae])


@pytest.mark.parametrize('world_size,n_valid,bs', [(2, 37, 4), (3, 37, 4), (2, 37, 6), (3, 37, 12), (2, 1, 4)])
def test_what_is_stated_is_what_the_file_gives_on_all_samples(tmp_path, world_size, n_valid, bs):
    def scenario():
        learn = uneven(tmp_path, n_valid, bs)
        saver = DDPSaveModelCallback(learn)
        fit(learn, saver, n=1)
        # the file has rank 0's statistics, which validation has used on all ranks
        loss, stated_mae = learn.recorder.val_losses[-1], float(learn.recorder.metrics[-1][0])
        learn.model.eval()
        x, y = learn.data.valid_ds.tensors
        with torch.no_grad():
            predicted = learn.model(x)
        return saver.best, loss, float(nn.functional.mse_loss(predicted, y)), stated_mae, float(mae(predicted, y))

    for best, loss, again, stated_mae, mae_again in values(run(scenario, world_size)):
        assert best == loss == pytest.approx(again, rel=1e-5)
        assert stated_mae == pytest.approx(mae_again, rel=1e-5)


@pytest.mark.parametrize('world_size', [1, 2])
@pytest.mark.parametrize('event', ['epoch_begin', 'epoch_end'])
@pytest.mark.parametrize('late', [False, True])
def test_predictions_during_a_fit_are_those_of_the_whole_set_and_change_no_decision(tmp_path, world_size, event, late):
    def scenario(asks):
        learn = learner(tmp_path / str(asks), metrics=[mae])
        sizes = []
        callbacks = [
            DDPSaveModelCallback(learn),
            DDPEarlyStoppingCallback(learn, patience=2),
            DDPReduceLROnPlateau(learn, patience=1),
            DDPTerminateOnNaNCallback(),
        ]

        def ask(**_):
            torch_state = torch.get_rng_state()
            predictions, targets = learn.get_preds()
            assert torch.equal(targets, learn.data.valid_ds.tensors[1])
            sizes.append(len(predictions))
            learn.model.train(event == 'epoch_begin')  # stock leaves it in the mode of an evaluation
            torch.set_rng_state(torch_state)

        if asks:
            callbacks.append(Hook(learn, event, ask, late=late))
        fit(learn, *callbacks, n=3, lr=0.01)
        recorder = learn.recorder
        return callbacks[0].best, list(map(float, recorder.val_losses)), digest(learn.model), sizes

    quiet = values(run(scenario, world_size, False))
    asked = values(run(scenario, world_size, True))
    assert [value[:3] for value in asked] == [value[:3] for value in quiet]
    assert [value[3] for value in asked] == [[24] * 3] * world_size


def test_a_callback_that_one_rank_lacks_is_a_mismatch_that_is_named(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        callbacks = [DDPSaveModelCallback(learn), DDPTerminateOnNaNCallback()] if rank() == 0 else []
        try:
            fit(learn, *callbacks, n=1)
        except BarrierMismatchError as error:
            return 'DDPSaveModelCallback, DDPTerminateOnNaNCallback' in str(error)

    assert values(run(scenario, 2)) == [True, True]


@pytest.mark.parametrize('patience', [-1, 1.5, '2', None])
def test_a_patience_that_makes_no_sense_is_refused_by_its_name(tmp_path, patience):
    learn = learner(tmp_path)
    for cls in (DDPEarlyStoppingCallback, DDPReduceLROnPlateau):
        with pytest.raises((TypeError, ValueError), match=f'{cls.__name__}.*patience='):
            cls(learn, patience=patience)
        with pytest.raises(TypeError, match='min_delta='):
            cls(learn, min_delta='x')


def test_a_name_that_does_not_say_what_is_better_gives_a_warning(tmp_path):
    learn = learner(tmp_path, metrics=[mae])
    with pytest.warns(UserWarning, match="higher mae is taken to be better. Pass mode='min'"):
        learn.fit(1, 0.1, callbacks=[DDPSaveModelCallback(learn, monitor='mae')])


def test_a_fit_within_a_fit_and_lr_find_change_nothing_for_our_callbacks(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        saver = DDPSaveModelCallback(learn)
        learn.callbacks.append(saver)

        def search(epoch, **_):
            if epoch == 1:
                learn.lr_find(num_it=4)

        with ddp_ctx(learn):
            learn.fit(2, 0.1, callbacks=[Hook(learn, 'epoch_begin', search)])
        return saver.best, len(learn.recorder.val_losses), type(learn.model).__name__

    zero, one = values(run(scenario, 2))
    assert zero == one and zero[1:] == (2, 'Sequential')


def test_a_loop_of_which_our_callbacks_do_not_know_is_refused(tmp_path):
    learn = learner(tmp_path)
    learn.create_opt(0.1)
    loop = basic_train.fit.__wrapped__  # as it is imported by name before this package is
    for callback in (DDPSaveModelCallback(learn), DDPTerminateOnNaNCallback()):
        with pytest.raises(RuntimeError, match='before that function is imported by name'):
            loop(1, learn, callbacks=[basic_train.Recorder(learn), callback])


@pytest.mark.parametrize('world_size', [1, 2])
def test_a_validation_during_a_fit_changes_no_decision(tmp_path, world_size):
    def scenario(asks):
        learn = learner(tmp_path / str(asks), metrics=[mae])
        learn.callbacks.append(DDPSaveModelCallback(learn, keep_best=2))

        def ask(**_):
            before = torch.get_rng_state()
            learn.validate()
            torch.set_rng_state(before)

        fit(learn, *([Hook(learn, 'epoch_end', ask)] if asks else []), lr=0.01)
        saver = learn.save_model_callback
        return saver.best, [path.name for path in saver.best_paths], digest(learn.model)

    assert values(run(scenario, world_size, True)) == values(run(scenario, world_size, False))


def test_a_learner_can_be_exported_and_our_callbacks_know_their_arguments_during_a_fit(tmp_path):
    learn = learner(tmp_path)
    learn.callbacks += [DDPSaveModelCallback(learn, name='x'), DDPTerminateOnNaNCallback()]
    learn.data.valid_ds.get_state = lambda **_: {}  # the data set of these tests is none of fastai's

    def export(**_):
        learn.export('learner.pkl')

    fit(learn, Hook(learn, 'epoch_end', export), n=1)
    state = torch.load(tmp_path / 'learner.pkl', weights_only=False)['cb_state']
    assert state[DDPSaveModelCallback]['name'] == 'x'
    assert not [name for own in state.values() for name in own if name in ('_fit', '_saver', '_flag')]

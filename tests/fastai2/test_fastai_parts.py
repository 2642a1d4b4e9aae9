"fastai's other parts, and the loggers, with our callbacks attached, on two ranks."

import csv

import pytest, torch
from fastai.basics import (
    Callback,
    Categorize,
    CrossEntropyLossFlat,
    DataLoaders,
    Datasets,
    Learner,
    TensorImageBW,
    accuracy,
    load_learner,
    nn,
    params,
    set_seed,
    tensor,
    trainable_params,
)
from fastai.callback.all import CSVLogger, GradientAccumulation, MixUp, SaveModelCallback, ShowGraphCallback
from fastai.callback.schedule import fine_tune, fit_flat_cos, fit_one_cycle, lr_find  # noqa: F401 (patch Learner)
from torch.utils.data import TensorDataset

from fastai_ddp_callbacks import (
    DDPEarlyStoppingCallback,
    DDPReduceLROnPlateau,
    DDPSaveModelCallback,
    DDPStopCallback,
    DDPTerminateOnNaNCallback,
    ddp_ctx,
    rank,
)
from learners import Trace, digest
from ranks import run, values

ALL = (DDPSaveModelCallback, DDPReduceLROnPlateau, DDPTerminateOnNaNCallback, DDPStopCallback)


def digits(path, cbs=(), splitter=trainable_params, metrics=None):
    "A small classifier of handwritten digits, in two layers that can be frozen apart."
    from sklearn.datasets import load_digits

    set_seed(1)
    data = load_digits()
    x, y = tensor(data.images).float()[:200, None] / 16, tensor(data.target)[:200]
    items = list(zip(x, y))
    dls = Datasets(
        range(200),
        [lambda i: TensorImageBW(items[i][0]), [lambda i: int(items[i][1]), Categorize(vocab=list(range(10)))]],
        splits=[range(150), range(150, 200)],
    ).dataloaders(bs=25, num_workers=0, device='cpu')
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()), nn.Linear(288, 10)
    )
    return Learner(
        dls, model, CrossEntropyLossFlat(), metrics=metrics or accuracy, path=path, cbs=cbs, splitter=splitter
    )


def halves(model):
    return [params(model[0]), params(model[1])]


def _plain(learn, path):
    learn.fit_one_cycle(2, 1e-2)


def _fp16(learn, path):
    learn.to_fp16().fit(2, 1e-2)


def _accumulation(learn, path):
    learn.fit(2, 1e-2, cbs=GradientAccumulation(50))


def _mixup(learn, path):
    learn.fit(2, 1e-2, cbs=MixUp())


def _no_logging(learn, path):
    with learn.no_logging(), learn.no_bar():
        learn.fit(2, 1e-2)


def _fine_tune(learn, path):
    learn.freeze()
    learn.fine_tune(1, 1e-2, freeze_epochs=2)


def _unfreezing(learn, path):
    learn.freeze()
    learn.fit(1, 1e-2)
    learn.unfreeze()
    learn.fit_one_cycle(1, slice(1e-3, 1e-2))


def _two_fits_and_flat(learn, path):
    learn.fit_flat_cos(1, 1e-2)
    learn.fit(2, 1e-2, start_epoch=1)


def _removed(learn, path):
    learn.fit(1, 1e-2)
    learn.remove_cb(DDPReduceLROnPlateau)
    learn.remove_cb(learn.terminate_on_na_n)
    learn.fit(1, 1e-2, cbs=DDPEarlyStoppingCallback())


def _lr_find_between(learn, path):
    learn.fit(1, 1e-2)
    learn.lr_find(num_it=8, show_plot=False)
    learn.fit(1, 1e-2)


@pytest.mark.parametrize(
    'train',
    [
        _plain,
        _fp16,
        _accumulation,
        _mixup,
        _no_logging,
        _fine_tune,
        _unfreezing,
        _two_fits_and_flat,
        _removed,
        _lr_find_between,
    ],
)
def test_training_of_this_kind_ends_with_equal_ranks_that_hold_the_best(tmp_path, train):
    def scenario():
        learn = digits(tmp_path, [o() for o in ALL], halves)
        with ddp_ctx(learn):
            train(learn, tmp_path)
        best = learn.save_model.best
        return digest(learn.model), best, learn.save_model.last_saved_path

    a, b = values(run(scenario, 2))
    assert a == b and a[1] < 10
    saved = torch.load(a[2], weights_only=True)
    learn = digits(tmp_path)
    learn.model.load_state_dict(saved)
    assert digest(learn.model) == a[0]


def test_predictions_results_and_export_after_training(tmp_path):
    def scenario():
        learn = digits(tmp_path, [o() for o in ALL])
        with ddp_ctx(learn):
            learn.fit(1, 1e-2)
        with Trace() as t:
            with ddp_ctx(learn):
                preds, targs = learn.get_preds()
                loss = learn.validate()
                learn.show_results(max_n=4)
        learn.export('learner.pkl')
        return len(preds), len(targs), [float(o) for o in loss], len(t.calls)

    a, b = values(run(scenario, 2, env=lambda r: dict(MPLBACKEND='Agg')))
    assert a == b and a[:2] == (50, 50) and a[3] == 1 + 2  # the order, and the averages of `validate`
    loaded = load_learner(tmp_path / 'learner.pkl')
    assert len(loaded.save_model.last_saved_path.name) and loaded.model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_without_a_validation_set_what_needs_none_works(tmp_path):
    def scenario():
        set_seed(1)
        x = torch.randn(40, 3)
        dls = DataLoaders.from_dsets(
            TensorDataset(x, x.sum(1, keepdim=True)), TensorDataset(x[:0], x[:0, :1]), bs=5, num_workers=0, device='cpu'
        )
        learn = Learner(dls, nn.Linear(3, 1), nn.MSELoss(), path=tmp_path)
        by_loss, by_epoch, by_valid = (
            DDPSaveModelCallback('train_loss', fname='t'),
            DDPSaveModelCallback(every_epoch=True, fname='e'),
            DDPSaveModelCallback(fname='v'),
        )
        for cb in (by_loss, by_epoch, by_valid):
            with ddp_ctx(learn):
                learn.fit(2, 1e-2, cbs=cb)
        return by_loss.best < 100, by_epoch.last_saved_path.name, by_valid.last_saved_path

    assert values(run(scenario, 2)) == [(True, 'e_1.pth', None)] * 2


# -- loggers


def test_the_csv_logger_writes_each_epoch_once_from_rank_0(tmp_path):
    def scenario():
        learn = digits(tmp_path, DDPSaveModelCallback())
        with ddp_ctx(learn):
            learn.fit(3, 1e-2, cbs=CSVLogger(fname=f'history{rank()}.csv'))
            learn.fit(1, 1e-2, cbs=CSVLogger(fname=f'history{rank()}.csv', append=True))

    values(run(scenario, 2))
    rows = list(csv.reader(open(tmp_path / 'history0.csv')))
    assert [o[0] for o in rows] == ['epoch', '0', '1', '2', 'epoch', '0']  # a header for each fit, as in one process
    assert not (tmp_path / 'history1.csv').exists()


def test_a_logger_of_rank_0_runs_on_all_ranks_again_after_a_fit_that_raised(tmp_path):
    def scenario():
        class Boom(Callback):
            def after_batch(self):
                raise ValueError('boom')

        learn, log = digits(tmp_path), CSVLogger(fname=f'history{rank()}.csv')
        try:
            with ddp_ctx(learn):
                learn.fit(1, 1e-2, cbs=[log, Boom()])
        except ValueError:
            return log.run

    assert values(run(scenario, 2)) == [True, True]


def test_the_graph_of_losses_is_drawn_on_rank_0(tmp_path):
    def scenario():
        learn = digits(tmp_path, DDPSaveModelCallback())
        with ddp_ctx(learn):
            graph = ShowGraphCallback()
            learn.fit(2, 1e-2, cbs=graph)
        return len(getattr(graph, 'nb_batches', []))

    assert values(run(scenario, 2)) == [2, 0]


@pytest.mark.parametrize('defaults', [True, False])
def test_tensorboard_gets_real_events_once(tmp_path, defaults):
    def scenario():
        from fastai.callback.tensorboard import TensorBoardCallback

        more = {} if defaults else dict(trace_model=False, log_preds=False)
        learn = digits(tmp_path, [DDPSaveModelCallback(), DDPStopCallback()])
        with ddp_ctx(learn):
            learn.fit(2, 1e-2, cbs=TensorBoardCallback(tmp_path / 'tb', **more))

    values(run(scenario, 2))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = list((tmp_path / 'tb').rglob('events*'))
    assert len(files) == 1
    events = EventAccumulator(str(files[0])).Reload()
    assert len(events.Scalars('valid_loss')) == 2 and bool(events.Tags()['graph']) == defaults
    # by batch, and by epoch; stock notes a batch more for the predictions that it logs
    assert len(events.Scalars('train_loss')) == 2 * 3 + 2 + 2 * defaults


def test_wandb_logs_predictions_with_its_defaults(tmp_path):
    def scenario():
        import fastai.callback.wandb as fw, wandb

        fw._format_config = lambda config: (
            None
        )  # fails on plain numbers with the fastcore of today, whatever the callbacks
        wandb.init(mode='offline' if rank() == 0 else 'disabled', dir=str(tmp_path), project='digits')
        logged, log = [], wandb.log
        fw.wandb.log = lambda data, **kwargs: (logged.extend(data), log(data, **kwargs))
        learn = digits(tmp_path, DDPSaveModelCallback())
        with ddp_ctx(learn):
            learn.fit(2, 1e-2, cbs=fw.WandbCallback())
        wandb.finish()
        return logged.count('Prediction_Samples')

    env = dict(WANDB_SILENT='true', WANDB_DIR=str(tmp_path), HOME=str(tmp_path))
    assert values(run(scenario, 2, env=lambda r: env)) == [1, 0]


def test_wandb_uploads_the_model_that_was_saved(tmp_path):
    def scenario():
        import fastai.callback.wandb as fw, wandb

        fw._format_config = lambda config: (
            None
        )  # it fails on plain numbers with the fastcore of today, whatever the callbacks
        uploaded, log_model = [], fw.log_model
        fw.log_model = lambda path, **kwargs: (uploaded.append(str(path)), log_model(path, **kwargs))
        wandb.init(mode='offline' if rank() == 0 else 'disabled', dir=str(tmp_path), project='digits')
        learn = digits(
            tmp_path, [DDPSaveModelCallback(monitor='accuracy'), fw.WandbCallback(log_preds=False, log_model=True)]
        )
        with ddp_ctx(learn):
            learn.fit(2, 1e-2)
        wandb.finish()
        return (
            str(learn.save_model.last_saved_path),
            type(learn.save_model).__name__,
            len(learn._grab_cbs(SaveModelCallback)),
            uploaded,
        )

    a, b = values(
        run(scenario, 2, env=lambda r: dict(WANDB_SILENT='true', WANDB_DIR=str(tmp_path), HOME=str(tmp_path)))
    )
    assert a[:3] == b[:3] and a[1:3] == ('DDPSaveModelCallback', 1)
    assert a[3] == [a[0]] and b[3] == [] and len(list(tmp_path.rglob('run-*.wandb'))) == 1

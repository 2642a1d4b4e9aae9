"Resuming in the presence of other callbacks, loaders, optimizers and models, and fits that end in unusual ways."

import csv, errno, os, time, warnings
from functools import partial
from pathlib import Path

import numpy as np, pytest, torch
from fastai.basics import Callback, DataLoaders, Learner, Metric, OptimWrapper, nn, set_seed
from fastai.callback.progress import CSVLogger
from fastai.callback.tracker import EarlyStoppingCallback
from fastai.callback.training import GradientAccumulation

from fastai_ddp_callbacks import (
    DDPEarlyStoppingCallback,
    DDPResumeCallback,
    DDPSaveModelCallback,
    DDPStopCallback,
    ddp_ctx,
    rank,
    read_metadata,
)
from fastai_ddp_callbacks.checkpoint import background
from learners import Records, digest
from ranks import run, values
from resuming import (
    Dies,
    DiesAfter,
    Net,
    Raises,
    files,
    halves,
    killed,
    learner,
    outcome,
    refused,
    resumes,
    same,
    start,
)


# -- callbacks that evaluate


class Evaluates(Callback):
    "Evaluates within the fit."

    def __init__(self, how, order):
        self.how, self.order = how, order

    def after_epoch(self):
        getattr(self.learn, self.how)()


@pytest.mark.parametrize('how,order,world_size', [('validate', 51, 2), ('validate', 80, 1), ('get_preds', 80, 2)])
def test_a_callback_that_evaluates_changes_nothing_about_resuming(tmp_path, how, order, world_size):
    killed(start(world_size, tmp_path / 'killed', Evaluates(how, order), Dies(2)))
    again = start(world_size, tmp_path / 'killed', Evaluates(how, order))
    quiet = start(world_size, tmp_path / 'quiet', Evaluates(how, order))
    assert [(value['weights'], value['values']) for value in values(again)] == [
        (value['weights'], value['values']) for value in values(quiet)
    ]
    assert resumes(tmp_path / 'killed') == resumes(tmp_path / 'quiet')
    assert not [name for name in files(tmp_path / 'killed') if 'lock' in name]


# -- files of the saver


def test_killed_at_any_batch_with_saves_in_the_background_the_same_files_stay(tmp_path):
    def fit(path, *cbs):
        saver = DDPSaveModelCallback(fname='m-{epoch}-{valid_loss:.2f}', keep_best=2, background=True)
        records = Records([6.0, 5.0, 4.0, 3.0])
        (result,) = run(partial(_fit_with_slow_disk, path, saver, records, *cbs), 1)
        return result

    quiet = values([fit(tmp_path / 'quiet')])[0]
    for batches in (9, 10, 17, 18, 25):
        path = tmp_path / f'after-{batches}'
        killed([fit(path, DiesAfter(batches))])
        assert values([fit(path)])[0] == quiet, batches


def _fit_with_slow_disk(path, saver, *cbs):
    fsync = os.fsync
    os.fsync = lambda fd: (time.sleep(0.02), fsync(fd))
    learner(path).fit(4, 0.1, cbs=[DDPResumeCallback(every_batches=1, keep=1), saver, *cbs])
    return [name for name in files(path) if name.startswith('m')], [best.name for best in saver.best_paths]


@pytest.mark.parametrize('world_size', [1, 2])
def test_the_best_of_a_saver_that_saves_at_the_end_is_known_after_resuming(tmp_path, world_size):
    def fit(path, *cbs):
        saver = DDPSaveModelCallback(at_end=True)
        with ddp_ctx(learn := learner(path)):
            learn.fit(4, 0.1, cbs=[DDPResumeCallback(), saver, Records([3.0, 1.0, 2.0, 4.0]), *cbs])
        return saver.best

    killed(run(partial(fit, tmp_path, Dies(2)), world_size))
    assert values(run(partial(fit, tmp_path), world_size)) == [1.0] * world_size


def test_a_saver_of_two_fits_keeps_the_newest_of_both_after_resuming_the_second(tmp_path):
    def fits(path, *cbs):
        learn, saver = learner(path), DDPSaveModelCallback(reset_on_fit=False, keep_last=2)
        for records in ([5.0, 4.0, 3.0], [7.0, 8.0, 9.0]):
            learn.fit(3, 0.1, cbs=[saver, DDPResumeCallback(), Records(records), *cbs])
        return {
            name: (meta['epoch'], meta['value'])
            for name in files(path)
            if name.startswith('model') and (meta := read_metadata(Path(path) / 'models' / name))
        }

    killed(run(partial(fits, tmp_path / 'killed', Dies(0, fit=1)), 1))
    assert values(run(partial(fits, tmp_path / 'killed'), 1)) == values(run(partial(fits, tmp_path / 'quiet'), 1))


# -- what is trained


class Unfreezes(Callback):
    "Trains all parameters from some epoch on."

    def __init__(self, by_itself):
        self.by_itself = by_itself

    def before_epoch(self):
        if self.epoch != 2:
            return
        if self.by_itself:
            for parameter in self.model.parameters():
                parameter.requires_grad_(True)
        else:
            self.learn.unfreeze()


@pytest.mark.parametrize('by_itself', [True, False])
@pytest.mark.parametrize('epoch', [1, 2, 3])
def test_a_callback_that_unfreezes_on_its_way(tmp_path, by_itself, epoch):
    def fit(path, *cbs):
        learn = learner(path, splitter=halves)
        learn.freeze()
        learn.fit(5, 0.1, cbs=[DDPResumeCallback(), Unfreezes(by_itself), *cbs])
        return outcome(learn)

    killed(run(partial(fit, tmp_path / 'killed', Dies(epoch)), 1))
    same(run(partial(fit, tmp_path / 'killed'), 1), run(partial(fit, tmp_path / 'quiet'), 1))


class AddsGroup(Callback):
    "Gives a parameter group of its own to a layer in the midst of a fit."

    def before_epoch(self):
        if self.epoch == 1:
            group = self.opt.opt.param_groups[0]
            last = group['params'].pop()
            self.opt.opt.add_param_group(dict(params=[last], lr=0.01))


@pytest.mark.parametrize('world_size', [1, 2])
def test_a_parameter_group_that_was_added_on_the_way_is_refused_before_anything_is_changed(tmp_path, world_size):
    def fit(*cbs):
        learn = learner(tmp_path, opt_func=partial(OptimWrapper, opt=torch.optim.SGD))
        before = digest(learn.model)
        try:
            with ddp_ctx(learn):
                learn.fit(3, 0.1, cbs=[DDPResumeCallback(), AddsGroup(), *cbs])
        finally:
            assert digest(learn.model) == before or not cbs == (), 'the weights have changed'

    killed(run(partial(fit, Dies(1)), world_size))
    kind, text = refused(run(fit, world_size))
    assert kind == 'ValueError' and 'another optimizer or other parameter groups' in text


class Grows(nn.Module):
    "Has a buffer that gets its shape in training."

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.register_buffer('scale', torch.ones(1))

    def forward(self, x):
        if self.training:
            self.scale = torch.full((6,), float(self.scale[0]) + 1)
        return self.net(x)

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.scale = torch.empty_like(state_dict[f'{prefix}scale'])
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_that_loads_by_itself_judges_whether_a_state_fits(tmp_path):
    def fit(path, *cbs):
        learn = learner(path)
        learn.model = Grows()
        set_seed(5)
        for parameter in learn.model.parameters():
            nn.init.uniform_(parameter)
        learn.fit(3, 0.1, cbs=[DDPResumeCallback(), *cbs])
        return digest(learn.model), learn.model.scale.tolist()

    killed(run(partial(fit, tmp_path / 'killed', Dies(1)), 1))
    assert values(run(partial(fit, tmp_path / 'killed'), 1)) == values(run(partial(fit, tmp_path / 'quiet'), 1))


def test_a_model_that_is_sharded_over_ranks_is_refused_before_the_first_batch(tmp_path):
    def scenario():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor

        learn = learner(tmp_path)
        mesh = init_device_mesh('cpu', (2,))
        head = learn.model.head
        head.weight = nn.Parameter(distribute_tensor(head.weight.data, mesh, [Shard(1)]))
        learn.fit(1, 0.1, cbs=DDPResumeCallback())

    kind, text = refused(run(scenario, 2))
    assert 'sharded' in text and 'DDPResumeCallback' in text and not (tmp_path / 'models').exists()


# -- stopped within an epoch, while a file is written


class AsksAt(Callback):
    "Asks for a stop within epoch 1."

    def after_batch(self):
        if (self.epoch, self.training, self.iter) == (1, True, 1) and rank() == 0:
            self.learn.ddp_stop.ask('enough')


def test_all_ranks_leave_a_fit_that_is_stopped_within_an_epoch_when_the_file_is_whole(tmp_path):
    def scenario():
        replace = os.replace
        os.replace = lambda *args: (time.sleep(1), replace(*args))
        with ddp_ctx(learn := learner(tmp_path)):
            cbs = [DDPResumeCallback(every_batches=1, background=True), DDPStopCallback(), AsksAt()]
            learn.fit(3, 0.1, cbs=cbs)
            return resumes(tmp_path), [name for name in os.listdir(tmp_path / 'models') if 'tmp' in name]

    first, second = values(run(scenario, 2))
    assert first == second and first[0] and not first[1]


@pytest.mark.parametrize('world_size', [1, 2])
def test_a_full_disk_at_that_write_raises_on_all_ranks(tmp_path, world_size):
    def scenario():
        write = background._Job._run

        def full(job, write_state, *args):
            def fails(state):
                replace = os.replace
                os.replace = _raise_full
                try:
                    return write_state(state)
                finally:
                    os.replace = replace

            write(job, fails if stops.fails else write_state, *args)

        class Fails(AsksAt):
            fails = False

            def after_batch(self):
                self.fails = self.epoch == 1
                super().after_batch()

        background._Job._run, stops = full, Fails()
        with ddp_ctx(learn := learner(tmp_path)):
            learn.fit(3, 0.1, cbs=[DDPResumeCallback(every_batches=5, background=True), DDPStopCallback(), stops])

    kind, text = refused(run(scenario, world_size))
    assert kind == 'CheckpointWriteError' and 'No space left' in text


def _raise_full(*_):
    raise OSError(errno.ENOSPC, 'No space left on device')


# -- what stays in memory


def test_nothing_of_the_file_is_held_when_a_fit_has_been_resumed_and_the_export_is_of_the_size_of_the_model(tmp_path):
    def fit(*cbs):
        learn = learner(tmp_path, model=dict(n_hidden=50_000))
        resume = DDPResumeCallback(background=True)
        learn.fit(3, 0.1, cbs=[resume, *cbs])
        learn.add_cb(resume)
        learn.export('model.pkl')
        size = sum(tensor.nbytes for tensor in learn.model.state_dict().values())
        return (tmp_path / 'model.pkl').stat().st_size / size, resume._current

    killed(run(partial(fit, Dies(1)), 1))
    ((ratio, current),) = values(run(fit, 1))
    assert ratio < 1.5 and current is None


@pytest.mark.parametrize('world_size', [1, 2])
def test_a_fit_leaves_no_attribute_on_the_learner(tmp_path, world_size):
    def scenario():
        learn = learner(tmp_path)
        with ddp_ctx(learn):
            before = set(vars(learn))
            learn.fit(1, 0.1, cbs=DDPResumeCallback())
            stock = learner(tmp_path / 'stock')
            with ddp_ctx(stock):
                stock.fit(1, 0.1)
                return set(vars(learn)) - before - set(vars(stock))

    assert values(run(scenario, world_size)) == [set()] * world_size


# -- data loaders


def language_model(path, epochs, *cbs):
    from fastai.text.data import LMDataLoader

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(20, 4)
            self.head = nn.Linear(4, 20)

        def forward(self, x):
            return self.head(self.embedding(x))

    set_seed(3)
    texts = [(torch.randint(0, 20, (5 + 7 * i % 23,)),) for i in range(12)]
    lens = [len(text) for (text,) in texts]
    loaders = [LMDataLoader(texts, lens=lens, bs=2, seq_len=4, shuffle=shuffle) for shuffle in (True, False)]
    loss = lambda pred, y: nn.functional.cross_entropy(pred.flatten(0, 1).as_subclass(torch.Tensor), y.flatten())
    learn = Learner(DataLoaders(*loaders), Model(), loss, path=Path(path))
    with ddp_ctx(learn):
        learn.fit(epochs, 0.1, cbs=[DDPResumeCallback(every_batches=3), *cbs])
    return digest(learn.model), [float(loss) for loss in learn.recorder.losses]


@pytest.mark.parametrize('world_size,end', [(1, Dies(1)), (1, Dies(1, 4)), (2, Dies(1)), (2, Dies(1, 3))])
def test_a_language_model_keeps_the_order_of_its_texts(tmp_path, world_size, end):
    killed(run(partial(language_model, tmp_path / 'killed', 4), world_size, end))
    again = values(run(partial(language_model, tmp_path / 'killed', 4), world_size))
    assert again == values(run(partial(language_model, tmp_path / 'quiet', 4), world_size))


def with_generator(path, own_sampler, *cbs):
    from torch.utils.data import DataLoader, RandomSampler, TensorDataset

    set_seed(3)
    x = torch.arange(48.0)[:, None]
    data, generator = TensorDataset(x, x / 25), torch.Generator().manual_seed(7)
    if own_sampler:
        train = DataLoader(data, batch_size=4, sampler=RandomSampler(data, generator=generator))
    else:
        train = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    seen = []

    class Sees(Callback):
        def after_batch(self):
            if self.training:
                seen.append(self.xb[0].flatten().tolist())

    learn = Learner(DataLoaders(train, DataLoader(data, batch_size=4)), Net(), nn.MSELoss(), path=Path(path))
    learn.fit(3, 0.1, cbs=[DDPResumeCallback(every_batches=1), Sees(), *cbs])
    return digest(learn.model), seen


@pytest.mark.parametrize('own_sampler', [False, True])
@pytest.mark.parametrize('end,batches', [(Dies(0), 12), (Dies(1, 4), 17)])
def test_the_generators_of_torch_s_loaders_continue(tmp_path, own_sampler, end, batches):
    ((weights, seen),) = values(run(partial(with_generator, tmp_path / 'quiet', own_sampler), 1))
    killed(run(partial(with_generator, tmp_path / 'killed', own_sampler), 1, end))
    ((again, rest),) = values(run(partial(with_generator, tmp_path / 'killed', own_sampler), 1))
    assert again == weights
    assert rest == seen[batches:]


# -- callbacks with a state


@pytest.mark.parametrize('world_size', [1, 2, 3])
@pytest.mark.parametrize('end', [Dies(1), Dies(1, 1)])
def test_accumulated_gradients_are_saved(tmp_path, world_size, end):
    make = lambda: GradientAccumulation(12)
    fit = partial(start, world_size, fit='fit', every_batches=1)
    killed(fit(tmp_path / 'killed', make(), end))
    again, quiet = fit(tmp_path / 'killed', make()), fit(tmp_path / 'quiet', make())
    same(again, quiet)


def test_a_stock_callback_whose_state_is_not_saved_is_named_once(tmp_path):
    from fastai.vision.gan import FixedGANSwitcher

    class Switcher(FixedGANSwitcher):
        run_after = None

        def after_batch(self):
            pass

    def scenario():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            learner(tmp_path).fit(2, 0.1, cbs=[DDPResumeCallback(), Switcher()])
        return [str(warning.message) for warning in caught if 'is not saved' in str(warning.message)]

    ((text,),) = values(run(scenario, 1))
    assert 'the state of Switcher is not saved' in text


@pytest.mark.parametrize(
    'stop,world_size', [(DDPEarlyStoppingCallback, 1), (DDPEarlyStoppingCallback, 2), (EarlyStoppingCallback, 1)]
)
def test_a_fit_that_early_stopping_ended_can_go_on_with_more_patience(tmp_path, stop, world_size):
    records = [3.0, 1.0, 2.0, 2.0, 2.0, 0.5]
    fit = partial(start, world_size, fit='fit', n=6)
    ended = values(fit(tmp_path / 'ended', stop(patience=2), Records(records)))
    assert len(ended[0]['values']) == 4
    assert len(values(fit(tmp_path / 'ended', stop(patience=2), Records(records)))[0]['values']) == 4
    again = fit(tmp_path / 'ended', stop(patience=5), Records(records))
    same(again, fit(tmp_path / 'quiet', stop(patience=5), Records(records)))


# -- tables


def rows_of(path):
    with open(path / 'history.csv') as file:
        return [row[:-1] for row in csv.reader(file)]  # without the time


@pytest.mark.parametrize('append', [True, False])
@pytest.mark.parametrize('world_size', [1, 2])
def test_a_csv_file_has_the_header_and_each_row_once(tmp_path, append, world_size):
    fit = partial(start, world_size, fit='fit')
    make = lambda: CSVLogger(append=append)
    for path in (tmp_path / 'killed', tmp_path / 'quiet'):
        path.mkdir()
        (path / 'history.csv').write_text('epoch,of an earlier fit,time\n0,1,2\n')
    killed(fit(tmp_path / 'killed', make(), Dies(1, 2)))
    values(fit(tmp_path / 'killed', make()))
    values(fit(tmp_path / 'quiet', make()))
    assert rows_of(tmp_path / 'killed') == rows_of(tmp_path / 'quiet')
    assert len(rows_of(tmp_path / 'quiet')) == (7 if append else 5)


def test_rows_that_another_fit_has_appended_to_a_csv_file_since_stay(tmp_path):
    fit = partial(start, 1, tmp_path, CSVLogger(append=True), fit='fit')
    killed(fit(Dies(1)))
    values(fit(n=1, fname='other'))
    other = rows_of(tmp_path)
    values(fit())
    assert rows_of(tmp_path)[: len(other)] == other


class Odd(Metric):
    "A metric of any kind."

    def __init__(self, name, make):
        self._name, self.make = name, make

    def reset(self):
        pass

    def accumulate(self, learn):
        pass

    @property
    def value(self):
        return self.make()

    @property
    def name(self):
        return self._name


def test_metrics_that_are_no_numbers_keep_their_values(tmp_path):
    def fit(*cbs):
        odd = [
            Odd('vector', lambda: torch.tensor([1.0, 2.0])),
            Odd('array', lambda: np.array([[1, 2], [3, 4]])),
            Odd('dict', lambda: {'a': 1.5, 'b': torch.tensor([2])}),
            Odd('text', lambda: 'good'),
        ]
        learn = learner(tmp_path, metrics=odd)
        saver = DDPSaveModelCallback(fname='m-{text}-{epoch}', every_epoch=True)
        learn.fit(3, 0.1, cbs=[DDPResumeCallback(), saver, *cbs])
        rows = [row[2:] for row in learn.recorder.values]
        return [(v.tolist(), a.tolist(), d['a'], int(d['b']), t, type(a).__name__) for v, a, d, t in rows], files(
            tmp_path
        )

    killed(run(partial(fit, Dies(1)), 1))
    ((rows, names),) = values(run(fit, 1))
    assert rows == [([1.0, 2.0], [[1, 2], [3, 4]], 1.5, 2, 'good', 'ndarray')] * 3
    assert [name for name in names if name.startswith('m-')] == [f'm-good-{epoch}.pth' for epoch in range(3)]


# -- arguments


@pytest.mark.parametrize(
    'argument,value,error',
    [
        ('every_epoch', 0, ValueError),
        ('every_epoch', True, TypeError),
        ('every_batches', -1, ValueError),
        ('every_batches', 1.5, ValueError),
        ('every_batches', '3', TypeError),
        ('every_minutes', '3', TypeError),
        ('every_minutes', float('nan'), ValueError),
        ('every_minutes', float('inf'), ValueError),
        ('every_minutes', -1, ValueError),
        ('keep', 1.5, ValueError),
        ('keep', True, TypeError),
        ('keep', None, ValueError),
        ('resume', True, ValueError),
        ('resume', ['auto'], ValueError),
        ('exit_status', 'x', TypeError),
        ('exit_status', 300, ValueError),
        ('exit_status', True, TypeError),
        ('fname', 3, TypeError),
        ('fname', None, TypeError),
        ('fname', '', ValueError),
        ('fname', '{epoch}', ValueError),
    ],
)
def test_an_argument_that_makes_no_sense_is_named_by_the_constructor(argument, value, error):
    with pytest.raises(error, match=rf'DDPResumeCallback\({argument}='):
        DDPResumeCallback(**{argument: value})


def test_numbers_of_numpy_and_paths_are_arguments_too():
    DDPResumeCallback(np.int64(1), np.int32(2), np.float32(0.5), keep=np.int64(1), fname=Path('resume'))


# -- several fits


@pytest.mark.parametrize('world_size', [1, 2])
def test_folds_that_share_a_name_are_refused(tmp_path, world_size):
    def scenario(folds):
        for _ in range(folds):
            with ddp_ctx(learn := learner(tmp_path)):
                learn.fit(1, 0.1, cbs=DDPResumeCallback())

    kind, text = refused(run(partial(scenario, 2), world_size))
    assert kind == 'ValueError' and 'another learner, which has ended in this process' in text
    values(run(partial(scenario, 1), world_size))  # in another process it is loaded


def test_a_warning_about_resuming_is_shown_each_time(tmp_path):
    def scenario():
        with warnings.catch_warnings(record=True) as caught:
            for _ in range(3):
                learn = learner(tmp_path, n=30)
                with pytest.raises(KeyError):
                    learn.fit(3, 0.1, cbs=[DDPResumeCallback(), Raises(2, 0)])
        return [str(warning.message) for warning in caught if 'is resumed with' in str(warning.message)]

    killed(start(1, tmp_path, Dies(1), n=3, fit='fit'))
    (texts,) = values(run(scenario, 1))
    assert len(texts) == 3

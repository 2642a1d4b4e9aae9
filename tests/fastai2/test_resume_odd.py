"""Resuming where several things come together: two writers, several fits, signals at odd moments, and fits that
cannot go on."""

import os, signal, time, warnings
from functools import partial

import pytest, torch
from fastai.basics import Callback, CancelFitException, DataLoader, DataLoaders, Learner, nn, set_seed

from fastai_ddp_callbacks import DDPSaveModelCallback, RankFailedError, ddp_ctx
from fastai_ddp_callbacks.fastai2 import resume_saving
from fastai_ddp_callbacks.fastai2.resume import DDPResumeCallback
from learners import Records, digest
from ranks import run, values
from resuming import (
    SIGNALS,
    Dies,
    Ends,
    Raises,
    Signals,
    files,
    halves,
    killed,
    learner,
    left,
    outcome,
    refused,
    resumes,
    same,
    start,
)


# -- with a saver that writes in the background


class Slow(Callback):
    "The saver's write in the background takes a moment in that epoch."

    order = 50

    def __init__(self, at):
        self.at = at

    def before_epoch(self):
        if self.epoch != self.at:
            return
        writer = self.save_model._saver.writer
        start = writer.start

        def start_slow(write, state):
            def slow(copy):
                time.sleep(1)
                return write(copy)

            del writer.start
            start(slow, state)

        writer.start = start_slow


class DiesWith(Callback):
    "Killed at the end of that epoch, as soon as a file is there."

    order = 95

    def __init__(self, at, name):
        self.at, self.file = at, name

    def after_epoch(self):
        if self.epoch != self.at:
            return
        end = time.monotonic() + 20
        while not (self.path / 'models' / self.file).exists() and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize('world_size,background', [(1, False), (1, True), (2, False), (2, True)])
def test_a_file_to_go_on_from_is_there_no_sooner_than_the_best_that_it_tells_of(tmp_path, world_size, background):
    make = lambda: (DDPSaveModelCallback(background=True), Records([3.0, 1.0, 2.0, 2.0]))
    killed(
        start(
            world_size,
            tmp_path / 'killed',
            *make(),
            Slow(1),
            DiesWith(1, f'resume_{16 // world_size}.pth'),
            background=background,
        )
    )
    assert 'model.pth' in files(tmp_path / 'killed')
    same(start(world_size, tmp_path / 'killed', *make()), start(world_size, tmp_path / 'quiet', *make()))


# -- told to leave when there is nothing more to save


@pytest.mark.parametrize('world_size', [1, 2])
def test_told_to_leave_while_a_finished_fit_is_loaded_all_leave(tmp_path, world_size):
    values(start(world_size, tmp_path, n=2))
    left(start(world_size, tmp_path, Signals(signal.SIGTERM, 1, 'end', ranks=[world_size - 1]), n=2))


class Stops(Ends):
    "Ends the fit in the midst of an epoch, before the batch is over for others."

    order = 85

    def _end(self):
        raise CancelFitException()


@pytest.mark.parametrize('world_size', [1, 2])
def test_told_to_leave_in_the_batch_in_which_a_fit_is_stopped_all_leave_and_it_can_go_on(tmp_path, quiet, world_size):
    left(start(world_size, tmp_path, Signals(signal.SIGTERM, 1, 1, ranks=[world_size - 1]), Stops(1, 1)))
    same(start(world_size, tmp_path), quiet(world_size))


class SignalsInTheLastSave(Callback):
    "Told to leave while what the fit came to is written."

    order = 80

    def after_fit(self):
        written = resume_saving._write

        def write(*args):
            written(*args)
            signal.raise_signal(signal.SIGTERM)

        resume_saving._write = write


@pytest.mark.parametrize('world_size', [1, 2])
def test_told_to_leave_while_the_end_of_a_fit_is_written_all_leave(tmp_path, world_size):
    left(start(world_size, tmp_path, SignalsInTheLastSave(), n=2))
    assert resumes(tmp_path)[-1].endswith('_finished.pth')


# -- several callbacks, several fits


@pytest.mark.parametrize('world_size,names', [(1, ('slow', 'quick')), (2, ('resume', 'resume')), (1, None)])
def test_a_second_one_in_a_fit_is_refused_before_anything_is_changed(tmp_path, world_size, names):
    def scenario():
        learn = learner(tmp_path)
        before, weights = set(vars(learn)), digest(learn.model)
        cbs = (
            [DDPResumeCallback(fname=o) for o in names] if names else [DDPResumeCallback()] * 2
        )  # one that is on the learner, and given once more
        with ddp_ctx(learn):
            with pytest.raises((ValueError, RankFailedError), match='DDPResumeCallback: 2 in one fit'):
                learn.fit(2, 0.1, cbs=cbs)
            assert (
                digest(learn.model) == weights
                and not list(tmp_path.rglob('*.*'))
                and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            )
            learn.remove_cbs(list(learn.cbs.filter(lambda o: isinstance(o, DDPResumeCallback))))
            learn.fit(1, 0.1, cbs=DDPResumeCallback())
        return set(vars(learn)) - before

    for o in values(run(scenario, world_size)):
        assert not o & {'_with_events', 'all_batches'}


def twice(path, *cbs, n=2, samples=38, resume='auto'):
    "Two fits of one learner, and what both came to."
    learn, cb, weights = learner(path, n=samples, splitter=halves), DDPResumeCallback(resume=resume), []
    with warnings.catch_warnings(record=True) as told, ddp_ctx(learn):
        warnings.simplefilter('always')
        for o in (n, 2):
            learn.fit(o, 0.1, cbs=[cb, *cbs])
            weights.append(digest(learn.model))
    return (
        weights,
        len(learn.recorder.values),
        [str(o.message) for o in told if 'starting from scratch' in str(o.message)],
    )


@pytest.mark.parametrize('world_size', [1, 2])
@pytest.mark.parametrize('change', [dict(samples=30), dict(n=3)], ids=str)
def test_when_the_first_of_two_fits_is_trained_anew_or_longer_so_is_the_second(tmp_path, world_size, change):
    def start(*cbs, path=tmp_path / 'again', **kwargs):
        return run(partial(twice, **kwargs), world_size, path, *cbs)

    values(start())
    if 'samples' in change:
        for o in (tmp_path / 'again/models').glob('resume_*'):
            o.unlink()
    expected, *_ = values(start(path=tmp_path / 'quiet', **change))
    killed(start(Dies(0, fit=1), **change))
    anew, *_ = values(start(**change))
    assert anew == expected  # what is left of the old fit is not mistaken for the new one
    again, *_ = values(start(**change))
    assert again == expected


def test_the_second_of_two_fits_tells_that_it_starts_anew(tmp_path):
    values(run(twice, 1, tmp_path))
    ((_, _, told),) = values(run(partial(twice, n=3), 1, tmp_path))
    assert len(told) == 1 and 'resume-2_*.pth' in told[0] and 'followed a different first fit' in told[0]


@pytest.mark.parametrize('fit', [0, 1])
def test_must_holds_for_the_fit_that_was_killed_and_not_for_those_after_it(tmp_path, fit):
    expected = values(run(twice, 1, tmp_path / 'quiet'))
    killed(run(twice, 1, tmp_path / 'killed', Dies(0, fit=fit)))
    assert values(run(partial(twice, resume='must'), 1, tmp_path / 'killed')) == expected
    kind, text = refused(run(partial(twice, resume='must'), 1, tmp_path / 'new'))
    assert kind == 'CheckpointError' and 'no whole' in text


# -- fits that cannot go on


class Masters(Callback):
    "Has the optimizer train copies of the weights, and copies them back, as training in half precision does."

    order = 10

    def before_fit(self):
        self.own = self.opt.param_lists
        copies = [[p.detach().clone().requires_grad_() for p in o] for o in self.own]
        for a, b in zip(sum(self.own, []), sum(copies, [])):
            self.opt.state[b] = self.opt.state.pop(a, {})
        self.opt.param_lists = copies

    def before_step(self):
        for a, b in self._pairs():
            b.grad = a.grad

    def after_step(self):
        for a, b in self._pairs():
            a.data.copy_(b)

    def after_fit(self):
        self.opt.param_lists = self.own

    def _pairs(self):
        return zip(sum(map(list, self.own), []), sum(map(list, self.opt.param_lists), []))


class TrainedLoss(nn.Module):
    "A loss with a weight of its own."

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, pred, target):
        return self.weight * nn.functional.mse_loss(pred, target)


@pytest.mark.parametrize('world_size,masters', [(1, True), (2, True), (1, False)])
def test_a_fit_whose_optimizer_trains_what_is_not_the_model_s_is_refused_when_it_begins(tmp_path, world_size, masters):
    def scenario():
        loss = TrainedLoss()
        learn = learner(
            tmp_path, n=20, splitter=lambda m: [list(m.parameters()), [] if masters else list(loss.parameters())]
        )
        if not masters:
            learn.loss_func = loss
        with ddp_ctx(learn):
            learn.fit(2, 0.1, cbs=[DDPResumeCallback(), *([Masters()] if masters else [])])

    kind, text = refused(run(scenario, world_size))
    assert kind == 'ValueError' and "that are not the model's own" in text and not (tmp_path / 'models').exists()


@pytest.mark.parametrize('world_size', [1, 2])
def test_what_went_wrong_with_a_background_write_of_a_fit_that_raised_is_a_warning(tmp_path, world_size):
    class Full(Callback):
        "The disk is full for the second save of epoch 1, and the fit raises right after that."

        order = 95

        def after_batch(self):
            if (self.epoch, self.training, self.iter) == (1, True, 0):
                self.resume._current.writer.join()
                os.replace = self._full
            if (self.epoch, self.training, self.iter) == (1, True, 1):
                raise KeyError('boom')

        def _full(self, *args):
            raise OSError(28, 'No space left on device')

    def scenario():
        learn, cb, full, replace = (
            learner(tmp_path),
            DDPResumeCallback(background=True, every_batches=1),
            Full(),
            os.replace,
        )
        full.resume = cb
        with warnings.catch_warnings(record=True) as told, ddp_ctx(learn):
            warnings.simplefilter('always')
            with pytest.raises(KeyError):
                learn.fit(3, 0.1, cbs=[cb, full])
        os.replace = replace
        with ddp_ctx(learn):
            learn.fit(3, 0.1, cbs=cb)
        return len(learn.recorder.values), [str(o.message) for o in told if 'No space left' in str(o.message)]

    (n, told), *others = values(run(scenario, world_size))
    assert n == 3 and len(told) == 1 and 'After the fit had failed' in told[0] and all(o == (3, []) for o in others)


# -- found, but for another fit


def fit(path, *cbs, data={}, n=2, fit='fit', **kwargs):
    "What a fit came to, and the warnings about resuming in it."
    learn = learner(path, **data)
    with warnings.catch_warnings(record=True) as told, ddp_ctx(learn):
        warnings.simplefilter('always')
        getattr(learn, fit)(n, 0.1, cbs=[DDPResumeCallback(**kwargs), *cbs])
    return outcome(learn), [str(o.message) for o in told if 'resume' in str(o.message)]


@pytest.mark.parametrize('world_size', [1, 2])
def test_a_finished_fit_of_other_data_is_a_warning_that_says_what_to_do(tmp_path, world_size):
    (first, _), *_ = values(run(fit, world_size, tmp_path))
    (again, told), *_ = values(run(partial(fit, data=dict(n=30)), world_size, tmp_path))
    assert again['weights'] == first['weights'] and len(told) == 1
    for o in ('[38, 5]', '[30, 5]', 'not trained', 'another fname', "resume='never'"):
        assert o in told[0]
    results = run(fit, world_size, tmp_path)
    assert values(results)[0][1] == [] and 'another fname' in results[0].output


@pytest.mark.parametrize('kind', ['fit', 'fit_one_cycle'])
def test_a_fit_of_no_epochs_goes_on_to_some(tmp_path, kind):
    ((nothing, _),) = values(run(partial(fit, n=0, fit=kind), 1, tmp_path / 'a'))
    assert values(run(partial(fit, n=0, fit=kind), 1, tmp_path / 'a'))[0][0] == nothing
    got = run(partial(fit, n=3, fit=kind, resume='must'), 1, tmp_path / 'a')
    assert values(got) == values(run(partial(fit, n=3, fit=kind), 1, tmp_path / 'b')) and 'Resuming' in got[0].output
    kind, text = refused(run(partial(fit, n=2, fit=kind), 1, tmp_path / 'a'))
    assert kind == 'ValueError' and 'of 3 epochs' in text


def test_fine_tune_gets_epochs_for_its_first_fit_which_had_none(tmp_path):
    def scenario(path, epochs):
        learn = learner(path, splitter=halves)
        with ddp_ctx(learn):
            learn.fine_tune(2, 0.1, freeze_epochs=epochs, cbs=DDPResumeCallback())
        return outcome(learn)

    values(run(scenario, 1, tmp_path / 'a', 0))
    assert values(run(scenario, 1, tmp_path / 'a', 1)) == values(run(scenario, 1, tmp_path / 'b', 1))


@pytest.mark.parametrize('name', ['', 'res{x}', 'res{', 'res}', '{epoch}'])
def test_a_name_of_which_no_files_can_be_made_is_refused_at_once(name):
    with pytest.raises(ValueError, match='without braces'):
        DDPResumeCallback(fname=name)


def test_a_fit_that_fails_before_its_files_have_a_name_leaves_nothing_behind(tmp_path):
    def scenario():
        learn, cb = learner(tmp_path), DDPResumeCallback()
        cb.fname = 'res{'
        with pytest.raises(ValueError, match='before_fit'):
            learn.fit(1, 0.1, cbs=cb)
        learn.fit(1, 0.1)
        return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    assert values(run(scenario, 1)) == [True]


# -- small things


@pytest.mark.parametrize('world_size', [1, 2])
def test_links_to_nowhere_folders_and_empty_files_are_passed_over(tmp_path, quiet, world_size):
    killed(start(world_size, tmp_path, Dies(1)))
    (tmp_path / 'models/resume_99.pth').symlink_to('nowhere.pth')
    (tmp_path / 'models/resume_98.pth').mkdir()
    (tmp_path / 'models/resume_97.pth').touch()
    same(start(world_size, tmp_path), quiet(world_size))


@pytest.mark.parametrize('number', SIGNALS)
def test_signals_that_are_ignored_stay_ignored(tmp_path, number):
    def scenario():
        signal.signal(number, signal.SIG_IGN)
        learn = learner(tmp_path)
        learn.fit(2, 0.1, cbs=[DDPResumeCallback(), Signals(number, 1, 1), Signals(number, 1, 'end')])
        return len(learn.recorder.values), signal.getsignal(number) == signal.SIG_IGN

    assert values(run(scenario, 1)) == [(2, True)]


@pytest.mark.parametrize('world_size', [1, 2])
def test_a_loader_whose_samples_are_batches_goes_on_in_the_midst_of_an_epoch(tmp_path, world_size):
    def scenario(path, *cbs):
        set_seed(1)
        data = [(torch.rand(4, 2), torch.rand(4, 1)) for _ in range(6)]
        learn = Learner(
            DataLoaders(DataLoader(data, bs=None, shuffle=True), DataLoader(data, bs=None)),
            nn.Linear(2, 1),
            nn.MSELoss(),
            path=path,
        )
        with ddp_ctx(learn):
            learn.fit(3, 0.1, cbs=[DDPResumeCallback(every_batches=1), *cbs])
        return outcome(learn)

    expected = values(run(scenario, world_size, tmp_path / 'quiet'))
    killed(run(scenario, world_size, tmp_path / 'killed', Dies(1, 1)))
    assert values(run(scenario, world_size, tmp_path / 'killed')) == expected


@pytest.mark.parametrize('world_size,first', [(1, True), (2, True), (1, False)])
def test_a_fit_that_trained_other_parameters_is_refused(tmp_path, world_size, first):
    def scenario(frozen, *cbs):
        learn = learner(tmp_path, splitter=halves)
        if frozen:
            learn.freeze()
        before = digest(learn.model)
        try:
            with ddp_ctx(learn):
                learn.fit(3, 0.1, cbs=[DDPResumeCallback(), *cbs])
        finally:
            assert digest(learn.model) == before

    killed(run(scenario, world_size, first, Dies(1)))
    kind, text = refused(run(scenario, world_size, not first))
    assert kind == 'ValueError' and 'freeze' in text


class Unfreezes(Callback):
    "All layers are trained from epoch 1 on."

    def before_epoch(self):
        if self.epoch == 1:
            self.learn.unfreeze()


def test_a_fit_that_unfreezes_on_its_way_goes_on_also_in_the_process_in_which_it_raised(tmp_path):
    def scenario(path, *cbs):
        learn = learner(path, splitter=halves)
        learn.freeze()
        with ddp_ctx(learn):
            try:
                learn.fit(3, 0.1, cbs=[DDPResumeCallback(), Unfreezes(), *cbs])
            except KeyError:
                learn.fit(3, 0.1, cbs=[DDPResumeCallback(), Unfreezes()])
        return outcome(learn)

    expected = values(run(scenario, 1, tmp_path / 'quiet'))
    killed(run(scenario, 1, tmp_path / 'killed', Dies(1)))
    assert values(run(scenario, 1, tmp_path / 'killed')) == expected
    assert values(run(scenario, 1, tmp_path / 'raised', Raises(1))) == expected


# -- callbacks with a state of their own


def test_callbacks_get_their_state_back_in_the_order_of_the_fit(tmp_path):
    "Each may meet the other ranks there, whose sets have another order: every process has hashes of its own."

    def scenario(n):
        given = []

        def load_state_dict(self, state):
            given.append(type(self).__name__)

        cbs = [
            type(f'Kept{c}', (Callback,), dict(order=i, state_dict=lambda self: {}, load_state_dict=load_state_dict))()
            for i, c in enumerate('QWERTZUIOP')
        ]
        with ddp_ctx(learn := learner(tmp_path)):
            learn.fit(n, 0.1, cbs=[DDPResumeCallback(), *cbs])
        return given, [type(o).__name__ for o in cbs]

    values(run(scenario, 1, 1))
    ((given, expected),) = values(run(scenario, 1, 2))
    assert given == expected

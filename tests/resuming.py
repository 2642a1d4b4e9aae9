"""Fits that are killed and started again: a learner with all kinds of randomness, ways to end early, and what a fit
came to."""

from __future__ import annotations
import os, random, signal, warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np, torch
from fastai.basics import Callback, CancelEpochException, Datasets, Learner, Transform, nn, set_seed
from fastai.callback.schedule import fine_tune, fit_flat_cos, fit_one_cycle  # noqa: F401 (they patch Learner)

from fastai_ddp_callbacks import ddp_ctx, rank
from fastai_ddp_callbacks.fastai2 import resume
from fastai_ddp_callbacks.training import save_schedule
from fastai_ddp_callbacks.errors import Preempted, RankFailedError
from learners import digest
from ranks import report, run, values

SIGNALS = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT


# -- what is trained


class Augment(Transform):
    "Adds noise to a sample, out of every random generator that there is; its last column tells which sample it is."

    def encodes(self, i: int):
        return torch.tensor(
            [i / 50 + random.random() / 50 + np.random.rand() / 50 + torch.rand(1).item() / 50, float(i)]
        )


class Net(nn.Module):
    def __init__(self, n_hidden=8, norm=nn.BatchNorm1d):
        super().__init__()
        self.body, self.head = (
            nn.Sequential(nn.Linear(1, n_hidden), norm(n_hidden), nn.Dropout(0.3)),
            nn.Linear(n_hidden, 1),
        )

    def forward(self, x):
        return self.head(self.body(x[:, :1]))


def target(i):
    return torch.tensor([i / 25])


def halves(model):
    return [list(model.body.parameters()), list(model.head.parameters())]


def learner(path, n=38, bs=5, num_workers=0, drop_last=False, model={}, **kwargs):
    "`n` samples to train on, equal on all ranks; every rank has random numbers of its own."
    set_seed(3)
    dls = Datasets(list(range(n + 9)), [[Augment()], [target]], splits=[range(n), range(n, n + 9)]).dataloaders(
        bs=bs, num_workers=num_workers, drop_last=drop_last
    )
    learn = Learner(dls, Net(**model), nn.MSELoss(), path=Path(path), **kwargs)
    set_seed(100 + rank())
    return learn


# -- what happens to it


class Ends(Callback):
    "Something that happens in a given epoch of a given fit: after that batch, or after all that an epoch's end does."

    order = 95

    def __init__(self, epoch, batch=None, ranks=None, fit=0):
        self.at, self.ranks, self.fit, self.fits = (epoch, batch), ranks, fit, -1

    def before_fit(self):
        self.fits += 1

    def after_batch(self):
        if self.training:
            self._maybe(self.iter)

    def after_epoch(self):
        self._maybe(None)

    def _maybe(self, batch):
        if self.fits == self.fit and (self.epoch, batch) == self.at and (self.ranks is None or rank() in self.ranks):
            self._end()


class Dies(Ends):
    def _end(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(Ends):
    def _end(self):
        raise KeyError('boom')


class Cancels(Ends):
    order = 20

    def _end(self):
        raise CancelEpochException()


class Signals(Ends):
    "Sends a signal to this process: when a batch begins, when validation does, or after the last epoch."

    order = 80

    def __init__(self, number, *args, times=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.number, self.times = number, times

    def _end(self):
        [signal.raise_signal(self.number) for _ in range(self.times)]

    def before_batch(self):
        if self.training:
            self._maybe(self.iter)

    def before_validate(self):
        self._maybe('validation')

    def after_fit(self):
        self._maybe('end')

    def after_batch(self):
        pass

    def after_epoch(self):
        pass


class DiesAfter(Callback):
    "Kills the process after so many batches of its own."

    order = 95

    def __init__(self, batches):
        self.left = batches

    def after_batch(self):
        self.left -= self.training
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


class Seen(Callback):
    "Notes which samples are trained on, in a file by epoch that outlives the process."

    order = 80

    def after_batch(self):
        if not self.training:
            return
        with open(self.path / f'seen-{self.epoch}', 'a') as f:
            f.write(''.join(f'{int(i)} ' for i in self.xb[0][:, 1]))


class Counts(Callback):
    "A callback with a state of its own."

    order = 40

    def before_fit(self):
        self.n = 0

    def after_batch(self):
        self.n += self.training

    def state_dict(self):
        return dict(n=self.n)

    def load_state_dict(self, state):
        self.n = state['n']


class Clock(Callback):
    "Has the time pass by so many seconds per batch; may differ by rank."

    order = -50

    def __init__(self, *seconds):
        self.seconds = seconds

    def before_fit(self):
        save_schedule.time = SimpleNamespace(
            monotonic=lambda: 1e6 * rank() + self.seconds[rank()] * getattr(self.learn, 'train_iter', 0)
        )


class Saves(resume.DDPResumeCallback):
    "Notes when it saves."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.saves = []

    def _save(self, epoch, batch=0, **kwargs):
        self.saves.append((epoch, batch))
        return super()._save(epoch, batch, **kwargs)


# -- fits, and what they came to


def train(path, *cbs, fit='fit_one_cycle', n=4, data={}, look=None, **kwargs):
    "Fit on one rank, going on with what is there, and tell what it came to."
    if look is not None:
        save_schedule._INTERVAL = look
    learn, cb = learner(path, **data), Saves(**kwargs)
    with warnings.catch_warnings(record=True) as seen, ddp_ctx(learn):
        warnings.simplefilter('always')
        getattr(learn, fit)(n, 0.1, cbs=[cb, *cbs])
    return dict(
        outcome(learn, cbs),
        saves=cb.saves,
        # those of other packages are shown once in a process
        warnings=[str(o.message) for o in seen if o.category is UserWarning and 'site-packages' not in o.filename],
    )


def outcome(learn, cbs=()):
    "All that must not depend on whether the fit was interrupted."
    rec = learn.recorder
    rec.plot_loss(skip_start=0)
    return dict(
        weights=digest(learn.model),
        values=[list(map(float, o)) for o in rec.values],
        losses=[float(o) for o in rec.losses],
        lrs=list(map(float, rec.lrs)),
        iters=list(rec.iters),
        hps={k: list(map(float, v)) for k, v in getattr(rec, 'hps', {}).items()},
        state=[_counted(cb) for cb in cbs],
        draw=(random.random(), float(np.random.rand()), float(torch.rand(1))),
    )


def _counted(cb):
    "What a callback counts, as far as it does."
    return {
        k: getattr(cb, k)
        for k in ('best', 'wait', 'n')
        if k in vars(cb) or isinstance(getattr(type(cb), k, None), property)
    }


def start(world_size, path, *cbs, timeout=60, **kwargs):
    "Begin that fit, or begin it again, on so many ranks. Gives their results."
    return run(partial(train, **kwargs), world_size, path, *cbs, timeout=timeout)


def killed(results):
    assert {o.exitcode for o in results} == {-signal.SIGKILL}, report(results)
    return results


def left(results, status=0):
    "All ranks have left, after they were told to by a signal."
    assert all(isinstance(o.error, Preempted) and o.exitcode == status for o in results), report(results)
    return results


def refused(results):
    "What all ranks raise: by type and text, wherever it was found."
    assert not any(o.ok for o in results), report(results)
    types = {o.error.error_type if isinstance(o.error, RankFailedError) else type(o.error).__name__ for o in results}
    assert len(types) == 1, report(results)
    return types.pop(), str(results[0].error)


def table(result):
    "The rows of the epoch table that a rank has printed, without the times."
    rows = [o.split() for o in result.output.replace('\r', '\n').splitlines()]
    return [o[:-1] for o in rows if len(o) == 4 and (o[0] == 'epoch' or o[0].isdigit() and ':' in o[-1])]


def seen(path, epoch):
    return sorted(map(int, (Path(path) / f'seen-{epoch}').read_text().split()))


def files(path):
    return sorted(o.name for o in (Path(path) / 'models').iterdir())


def resumes(path):
    return [o for o in files(path) if o.startswith('resume')]


KINDS = 'weights', 'values', 'losses', 'lrs', 'iters', 'hps', 'state', 'draw'


def same(results, quiet, but=()):
    "Every rank came to what it comes to when nobody interrupts it."
    for r, (a, b) in enumerate(zip(values(results), values(quiet), strict=True)):
        assert not [k for k in KINDS if k not in but and a[k] != b[k]], {
            k: (r, a[k], b[k]) for k in KINDS if a[k] != b[k]
        }
    assert table(results[0]) == table(quiet[0])

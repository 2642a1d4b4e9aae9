"The demonstration's training in fastai 2, with the callback under watch."

from __future__ import annotations

from fastai.basics import Callback, CrossEntropyLossFlat, DataLoaders, Learner, Metric, accuracy
from fastai.callback.progress import ProgressCallback
from fastai.callback.schedule import fit_one_cycle  # noqa: F401 (gives it to Learner)
from fastai.callback.tracker import SaveModelCallback, TrackerCallback

from ..fastai2.context import ddp_ctx
from .notes import LOADED, TRAINED
from .race import FNAME, digits
from ..fastai2.save_model import DDPSaveModelCallback

__all__ = ['train']


def train(
    race,  # the `Race` of this rank
) -> None:
    dls = DataLoaders.from_dsets(*digits(), bs=64, num_workers=0, device=race.device)
    learn = Learner(
        dls, race.model, loss_func=CrossEntropyLossFlat(), metrics=[accuracy, Score(race)], path=race.args.path
    )
    learn.remove_cb(ProgressCallback)  # plain lines
    learn.logger = _Table(learn)
    saver = (Stock if race.args.stock else Ours)(monitor='score', fname=FNAME)
    saver.race = race
    with ddp_ctx(learn):
        learn.fit_one_cycle(race.args.epochs, 1e-2, cbs=[saver, Trained(race)])


class Ours(DDPSaveModelCallback):
    def _write(self, *args):
        return self.race.saving(super()._write, *args)

    def _load_best(self):
        self.race.wants_to_load()
        super()._load_best()
        self.race.note(LOADED)


class Stock(SaveModelCallback):
    def _save(self, name):
        self.race.saving(super()._save, name)

    def after_fit(self):
        self.race.wants_to_load()
        super().after_fit()
        self.race.note(LOADED)


class Trained(Callback):
    order = TrackerCallback.order - 1

    def __init__(self, race):
        self.race = race

    def after_epoch(self):
        if self.epoch == self.n_epoch - 1:
            self.race.note(TRAINED)


class Score(Metric):
    "What is monitored: staged, so that the last epoch is the best one."

    def __init__(self, race):
        self.race = race

    def reset(self):
        pass

    def accumulate(self, learn):
        self.epoch = learn.epoch

    @property
    def value(self):
        return self.race.score(self.epoch)


class _Table:
    "fastai's table of epochs, one line at a time."

    def __init__(self, learn):
        self.learn, self.begun = learn, False

    def __call__(self, row):
        if not self.begun:
            self._line(self.learn.recorder.metric_names)
        self.begun = True
        self._line([f'{o:.6f}' if isinstance(o, float) else o for o in row])

    def _line(self, cells):
        print(''.join(f'{o!s:<12}' for o in cells).rstrip(), flush=True)

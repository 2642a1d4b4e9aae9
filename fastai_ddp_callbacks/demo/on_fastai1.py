"The demonstration's training in fastai 1, with the callback under watch."

from __future__ import annotations

import fastai.basic_train
from fastai.basic_data import DataBunch
from fastai.basic_train import Learner, LearnerCallback
from fastai.callback import Callback
from fastai.callbacks.tracker import SaveModelCallback
from fastai.metrics import accuracy
from fastai.torch_core import add_metrics
from fastai.train import fit_one_cycle
from torch import nn

from .notes import LOADED, TRAINED
from .race import FNAME, digits
from ..fastai1 import DDPSaveModelCallback, ddp_ctx

__all__ = ['train']


def train(
    race,  # the `Race` of this rank
) -> None:
    data = DataBunch.create(*digits(), bs=64, num_workers=0, device=race.device, pin_memory=race.device != 'cpu')
    learn = Learner(
        data, race.model, loss_func=nn.CrossEntropyLoss(), metrics=[accuracy, Score(race)], path=race.args.path
    )
    saver = Stock(learn, race) if race.args.stock else Ours(learn, race)
    fastai.basic_train.master_bar, fastai.basic_train.progress_bar = Lines, lambda batches, **kwargs: batches
    with ddp_ctx(learn):
        fit_one_cycle(learn, race.args.epochs, 1e-2, callbacks=[Trained(learn, race), saver])


class Ours(DDPSaveModelCallback):
    def __init__(self, learn, race):
        super().__init__(learn, monitor='score', mode='max', name=FNAME)
        self.race = race

    def _write(self, *args):
        return self.race.saving(super()._write, *args)

    def _finish(self):
        self.race.wants_to_load()
        super()._finish()
        self.race.note(LOADED)


class Stock(SaveModelCallback):
    def __init__(self, learn, race):
        super().__init__(learn, monitor='score', name=FNAME)
        self.race, self.load, self.save = race, learn.load, learn.save
        learn.save, learn.load = self._saves, self._loads

    def _saves(self, *args, **kwargs):
        return self.race.saving(lambda: self.save(*args, **kwargs))

    def _loads(self, *args, **kwargs):
        self.load(*args, **kwargs)
        self.race.note(LOADED)

    def on_train_end(self, **kwargs):
        self.race.wants_to_load()
        super().on_train_end(**kwargs)


class Score(Callback):
    "What is monitored: staged, so that the last epoch is the best one."

    def __init__(self, race):
        self.race = race

    def on_epoch_end(self, last_metrics, epoch, **kwargs):
        return add_metrics(last_metrics, self.race.score(epoch))


class Trained(LearnerCallback):
    _order = -5  # after the Recorder, before the saver

    def __init__(self, learn, race):
        super().__init__(learn)
        self.race = race

    def on_epoch_end(self, epoch, **kwargs):
        if epoch == self.race.args.epochs - 1:
            self.race.note(TRAINED)


class Lines:
    "fastai's table of epochs, one line at a time and no bars."

    def __init__(self, epochs, **kwargs):
        self.epochs = epochs

    def __iter__(self):
        return iter(self.epochs)

    def write(self, cells, table=False):
        print(''.join(f'{o!s:<12}' for o in cells).rstrip(), flush=True)

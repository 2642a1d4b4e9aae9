"fastai 1: train a learner in DDP, on GPUs or on the CPU, and leave it as it was."

from __future__ import annotations
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fastprogress.fastprogress
from fastai.basic_data import DatasetType
from fastai.basic_train import Learner, LearnerCallback
from fastai.callback import Callback
from fastai.distributed import DistributedTrainer, TextClasDataBunch
from torch.nn.parallel import DistributedDataParallel

from ..distributed import agree, barrier, print_on_main, propagate_failure, rank, world_size
from ..timeline import straggler_summary
from ..training.process_group import process_group
from .fit import Fit, FitCallback
from .validation import EvenBatches, Shares, exact_metrics

__all__ = ['ddp_ctx']


class _Watch(FitCallback, LearnerCallback):
    "Reports which rank kept the others waiting in a fit that ends well."

    cb_name = 'ddp_watch'
    _order = 200  # when all others have finished

    def begin(self, fit: Fit) -> None:
        self.start = time.time_ns()

    def on_train_end(self, exception=False, pbar=None, **kwargs):
        if not self._hears(pbar) or self._fit.error(exception):
            return
        line = straggler_summary(self.start, time.time_ns())
        if line:
            print_on_main(line)


class _DDPTrainer(FitCallback, DistributedTrainer):
    "A `DistributedTrainer` for any device, which validates every sample once and is undone however a fit ends."

    cb_name = 'distributed_trainer'
    _order = -20  # before the Recorder
    hears_lr_find = True

    def __init__(self, learn: Learner, **kwargs):
        super().__init__(learn)
        self.kwargs = kwargs  # for `DistributedDataParallel`
        self.shares = Shares(None)
        self.exclude += ['_whole']  # not pickled

    def metrics_of(self, metrics: list) -> list:
        return exact_metrics(metrics, self.shares)

    def on_train_begin(self, pbar=None, **kwargs):
        if not self._hears(pbar):
            return
        fit: Any = self._fit
        # a rank that has other callbacks would wait for the others elsewhere, or not at all
        names = (type(cb).__name__ for cb in fit.ours if not isinstance(cb, (_DDPTrainer, _Watch)))
        barrier(f'fit with {", ".join(names) or "no callback of ours"}')
        self._wrap_model(fit)
        self._share_data(fit)
        recorder = fit.recorder
        recorder.silent = recorder.silent or rank() != 0

    def _wrap_model(self, fit):
        model = self.learn.model
        device = next(model.parameters()).device
        ids = None if device.type == 'cpu' else [device.index]
        self.learn.model = DistributedDataParallel(model, device_ids=ids, **self.kwargs)
        fit.callback(self._unwrap_model)

    def _unwrap_model(self):
        if isinstance(self.learn.model, DistributedDataParallel):
            self.learn.model = self.learn.model.module

    def _share_data(self, fit):
        data = self.learn.data
        whole = {DatasetType.Train: data.train_dl, DatasetType.Valid: data.valid_dl}
        fit.callback(self._restore_data)
        self._whole = whole
        shuffle = getattr(data.train_dl, 'init_kwargs', {}).get('shuffle', True)
        is_text = isinstance(data, TextClasDataBunch)
        _, data.train_dl, self.train_sampler = self._change_dl(data.train_dl, shuffle or is_text)
        self.shares.sampler = None
        if data.valid_dl is not None:
            data.valid_dl = self._share_validation(data.valid_dl, shuffle)

        def dl(ds_type: DatasetType = DatasetType.Valid):
            return whole.get(ds_type) or type(data).dl(data, ds_type)

        data.dl = dl  # `get_preds` in a fit: predictions for the whole set, on every rank

    def _share_validation(self, loader, shuffle):
        keeps_order = isinstance(loader.dataset, Callback)  # a language model's, which takes batches as they come
        if keeps_order or getattr(loader, 'init_kwargs', {}).get('drop_last'):
            return self._change_dl(loader, shuffle)[1]
        self.shares.sampler = EvenBatches(len(loader.dataset), loader.batch_size)
        return loader.new(shuffle=False, sampler=self.shares.sampler)

    def _restore_data(self):
        if self._whole is None:
            return
        data = self.learn.data
        data.train_dl, data.valid_dl = self._whole.values()
        self._whole = None
        vars(data).pop('dl', None)

    _whole: dict | None = None  # during a fit: the loaders of before

    def on_epoch_begin(self, epoch=0, pbar=None, **kwargs):
        super().on_epoch_begin(pbar)
        if self._hears(pbar):
            self.train_sampler.set_epoch(epoch)
            self.shares.reset()

    def on_batch_end(self, last_target, train=True, pbar=None, **kwargs):
        if self._hears(pbar) and not train:
            self.shares.add(self._fit.batch_loss, last_target)

    def on_epoch_end(self, last_metrics=None, pbar=None, **kwargs):
        "Make the validation loss that of all ranks. `lr_find` ends in the same epoch on all of them."
        if not self._hears(pbar):
            return
        if getattr(pbar, 'clean_on_interrupt', False):  # of `lr_find`, where each rank judges by its own loss
            self.learn.lr_finder.stop = agree(bool(self.learn.lr_finder.stop), 'any', 'end of lr_find')
        if last_metrics and last_metrics[0] is not None:
            return {'last_metrics': [self.shares.average(), *last_metrics[1:]]}

    def on_train_end(self, pbar=None, **kwargs):
        if self._hears(pbar):
            self._unwrap_model()
            self._restore_data()


@contextmanager
def ddp_ctx(
    learn: Learner,  # the `Learner` to train; its data say whether on GPUs (each rank on its own) or on the CPU
    **kwargs,  # for `DistributedDataParallel`
) -> Iterator[Learner]:
    """Adapt a learner to DistributedDataParallel, as `learn.to_distributed(gpu)` does; on the CPU and one rank too.

    Uses the default process group, or makes it where a launcher has set its variables. Whatever is raised inside is
    reported to the other ranks, and the learner is restored: model, data loaders and callbacks."""
    with process_group(learn.data.device), propagate_failure():
        if world_size() == 1 or any(isinstance(cb, _DDPTrainer) for cb in learn.callbacks):
            yield learn
        else:
            with _distributed(learn, kwargs):
                yield learn


@contextmanager
def _distributed(learn, kwargs):
    bars = fastprogress.fastprogress
    no_bar = bars.NO_BAR
    bars.NO_BAR = rank() != 0 or no_bar
    learn.callbacks += [_DDPTrainer(learn, **kwargs), _Watch(learn)]
    try:
        yield
    finally:
        bars.NO_BAR = no_bar
        learn.callbacks[:] = [cb for cb in learn.callbacks if not isinstance(cb, (_DDPTrainer, _Watch))]
        del learn.distributed_trainer, learn.ddp_watch

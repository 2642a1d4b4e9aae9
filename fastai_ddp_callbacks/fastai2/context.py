"fastai 2: train a learner in DDP, on GPUs or on the CPU, and leave it as it was."

from __future__ import annotations
import time
from contextlib import contextmanager
from copy import deepcopy

import torch
from accelerate import Accelerator
from fastai.callback.progress import ProgressCallback
from fastai.distributed import DistributedDL, DistributedTrainer, _hidden_params
from fastai.callback.schedule import ParamScheduler
from fastai.torch_core import delegates, get_model, to_cpu, to_device
from torch.nn.parallel import DistributedDataParallel

from ..distributed import broadcast, rank, propagate_failure, print_on_main, world_size
from ..training.process_group import process_group
from .metrics import ExactAverages
from ..timeline import straggler_summary
from .fit import WatchedCallback, running_fit

__all__ = ['ddp_ctx']


class _DDPLoader(DistributedDL):
    "A `DistributedDL` whose indices are shared at a rendezvous, and that knows which samples it repeats."

    def _broadcast(self, t, rank):
        return broadcast(t, rank, 'order of samples')

    def get_idxs(self):
        if self.dl.n != 0:
            return super().get_idxs()
        self.n = self.n_padded = 0  # nothing to share, as in a validation set that is empty
        return []

    def one_batch(self):
        return self.dl.one_batch()  # loggers and `show_results` ask for one on rank 0 alone: no indices to share

    def n_own(self, bs):
        "How many samples of the last batch, of size `bs`, are not repeated to make the ranks even."
        begin, end = (r * self.n_padded // self.world_size for r in (self.rank, self.rank + 1))
        return max(0, min(self.n, end) - begin - (self.i - bs)) if self.i > min(self.n, end) - begin else bs


class _DDPTrainer(WatchedCallback, DistributedTrainer):
    "A `DistributedTrainer` for any device, that can be undone when a fit has raised."

    name, old_dls, averages = 'distributed_trainer', None, None

    def _wrap_dl(self, dl):
        if isinstance(dl, (DistributedDL, list)):
            return dl  # `show_results` gives a list of batches
        return _DDPLoader(dl, rank(), world_size(), device=next(self.learn.model.parameters()).device)

    def before_fit(self):
        fit = running_fit(self.learn)
        if fit:
            fit.callback(self._fit_ends, fit, time.time_ns())
        if hasattr(self.learn, 'lr_finder'):
            _restore_from_memory(self.learn.lr_finder)
        super().before_fit()
        self.averages = ExactAverages(self.learn) if hasattr(self.learn, 'recorder') else None

    def after_train(self):
        if self.averages and self.learn.recorder.train_metrics:
            self.averages.gather()

    def after_validate(self):
        if self.averages:
            self.averages.gather()

    def after_fit(self):
        super().after_fit()
        self._forget()

    def _fit_ends(self, fit, begun):
        "Clean up after a fit that raised; report who kept the others waiting in one that ended well."
        if fit.failed:
            return self.undo()
        line = straggler_summary(begun, time.time_ns())
        if line:
            print_on_main(line)

    def undo(self):
        "What `after_fit` did not come to do."
        if isinstance(self.learn.model, DistributedDataParallel):
            self.learn.model = self.learn.model.module
        if self.old_dls is not None:
            self.learn.dls.loaders = self.old_dls
        self._forget()

    def _forget(self):
        if self.averages:
            self.averages.restore()
        self.old_dls, self.averages = None, None


def _restore_from_memory(finder):
    """Let `lr_find` keep the weights in the memory of each rank. Stock keeps them in a file, which rank 0 alone writes, in a
    folder of a random name, so that the others neither find it nor come to the barrier in which rank 0 waits to load it."""
    learn, kept = finder.learn, []

    def before_fit():
        ParamScheduler.before_fit(finder)
        kept.extend(to_cpu(deepcopy(o.state_dict())) for o in (get_model(learn.model), learn.opt))
        finder.best_loss = float('inf')

    def after_fit():
        learn.opt.zero_grad()
        get_model(learn.model).load_state_dict(kept[0])
        learn.opt.load_state_dict(to_device(kept[1], next(learn.model.parameters()).device))

    finder.before_fit, finder.after_fit = before_fit, after_fit


@contextmanager
@delegates(Accelerator, but=_hidden_params)
def ddp_ctx(
    learn,  # the `Learner` to train; its `dls` tell whether on GPUs or on the CPU
    sync_bn=True,  # Whether to replace all batch norm with `nn.SyncBatchNorm`, which exists on GPUs only
    **kwargs,
):
    """Adapt a learner to DistributedDataParallel, as `learn.distrib_ctx()` does; also on the CPU with gloo, and with one rank.

    Uses the default process group, or makes it where a launcher (torchrun, accelerate, a notebook) has set the stage.
    Whatever is raised inside is told to the other ranks, and the learner is restored: model, data loaders, progress bar
    and logger."""
    device = torch.device(learn.dls.device or 'cpu')
    with process_group(device), propagate_failure():
        if learn._grab_cbs(_DDPTrainer):
            yield learn
        elif world_size() == 1:
            yield learn
        else:
            with _distributed(
                learn, _DDPTrainer(sync_bn and device.type != 'cpu', **{'cpu': device.type == 'cpu', **kwargs})
            ):
                yield learn


@contextmanager
def _distributed(learn, trainer):
    logger, progress = learn.logger, learn._grab_cbs(ProgressCallback)
    if rank():
        learn.remove_cbs(progress)
    learn.add_cb(trainer)
    try:
        yield
    finally:
        trainer.undo()
        learn.remove_cb(trainer)
        learn.logger = logger
        if rank():
            learn.add_cbs(progress)

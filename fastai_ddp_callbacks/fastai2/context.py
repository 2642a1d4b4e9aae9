"fastai 2: train a learner in DDP, on GPUs or on the CPU, and leave it as it was."

from __future__ import annotations
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import Accelerator
from fastai.basics import Learner
from fastai.callback.progress import ProgressCallback
from fastai.distributed import _hidden_params
from fastai.torch_core import delegates

from ..distributed import rank, propagate_failure, world_size
from ..training.process_group import process_group
from .departure import departures_explained
from .trainer import DDPTrainer

__all__ = ['ddp_ctx']


@contextmanager
@delegates(Accelerator, but=_hidden_params)
def ddp_ctx(
    learn: Learner,  # the `Learner` to train; its `dls` say whether on GPUs or on the CPU
    sync_bn: bool = True,  # Whether to replace all batch norm with `nn.SyncBatchNorm`, which exists on GPUs only
    timeout: float | timedelta | None = None,  # limit of collectives in a group made here; `get_timeout()` by default
    **kwargs,
) -> Iterator[Learner]:
    """Adapt a learner to DistributedDataParallel, as `learn.distrib_ctx()` does; also on the CPU, and with one rank.

    Uses the default process group, or makes it where a launcher (torchrun, accelerate, a notebook) has set its
    variables. Whatever is raised inside is reported to the other ranks, and the learner is restored: model, data
    loaders, progress bar and logger."""
    device = _device(learn)
    with process_group(device, timeout), propagate_failure(), departures_explained():
        if learn._grab_cbs(DDPTrainer) or world_size() == 1:
            yield learn
        else:
            on_cpu = device.type == 'cpu'
            with _distributed(learn, DDPTrainer(sync_bn and not on_cpu, **{'cpu': on_cpu, **kwargs})):
                yield learn


def _device(learn):
    "Where the learner trains: loaders of torch do not say so."
    device = getattr(learn.dls, 'device', None)
    if device is None:
        device = next((parameter.device for parameter in learn.model.parameters()), 'cpu')
    return torch.device(device)


@contextmanager
def _distributed(learn, trainer):
    logger = learn.logger
    hidden = learn._grab_cbs(ProgressCallback) if rank() else []
    learn.remove_cbs(hidden)
    learn.add_cb(trainer)
    try:
        yield
    finally:
        trainer.undo()
        learn.remove_cb(trainer)
        learn.logger = logger
        learn.add_cbs(hidden)

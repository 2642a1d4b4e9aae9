"The variables from which fastai and accelerate learn the rank, made to agree with the process group."

from __future__ import annotations
import os, warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch, torch.distributed as dist

from ..distributed import get_timeout, rank, world_size

__all__ = ['LAUNCHED', 'process_group', 'hide_stray_environment', 'restore_environment']

LAUNCHED = ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')  # what every launcher of torch sets
_hidden = {}  # what `hide_stray_environment` has taken away


@contextmanager
def process_group(
    device: torch.device | str,  # what the model is trained on
    timeout: float
    | timedelta
    | None = None,  # limit of collectives in a group made here, in s; by default `get_timeout()`
) -> Iterator[None]:
    """With the default process group, and with variables that agree with it.

    The group is made where a launcher has set its variables and there is none."""
    restore_environment()
    if not dist.is_initialized() and all(o in os.environ for o in LAUNCHED) and int(os.environ['WORLD_SIZE']) > 1:
        _make_group(torch.device(device), timeout)
    before = {k: os.environ.get(k) for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')}
    if dist.is_initialized():
        local = before['LOCAL_RANK'] or rank() % (torch.cuda.device_count() or world_size())
        os.environ.update(RANK=str(rank()), WORLD_SIZE=str(world_size()), LOCAL_RANK=str(local))
    else:
        hide_stray_environment()
    try:
        yield
    finally:
        _put_back(before)
        _hidden.clear()


def _make_group(device, timeout):
    if device.type == 'cuda':
        local = int(os.environ.get('LOCAL_RANK', os.environ['RANK'])) if device.index is None else device.index
        torch.cuda.set_device(local % torch.cuda.device_count())
    # torchrun keeps one store for all its attempts: what a dead rank left there is not for the one that takes its place
    store, me, n = next(dist.rendezvous('env://'))
    store = dist.PrefixStore(f'attempt/{os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)}', store)
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=get_timeout() if timeout is None else timeout)
    backend = 'gloo' if device.type == 'cpu' else 'nccl'
    dist.init_process_group(backend, store=store, rank=me, world_size=n, timeout=timeout)


def hide_stray_environment() -> None:
    "Where there is no process group, hide `RANK` and `WORLD_SIZE` from fastai, and warn if they are of several ranks."
    if dist.is_initialized():
        return
    said = {k: os.environ.pop(k) for k in ('RANK', 'WORLD_SIZE') if k in os.environ}
    _hidden.update(said)
    if said.get('RANK', '0') == '0' and said.get('WORLD_SIZE', '1') in ('0', '1'):
        return
    warnings.warn(
        'The environment has '
        + ' and '.join(f'{k}={v}' for k, v in said.items())
        + ', but there is no process group: this process trains alone, as rank 0 of 1. If it should be one of several, '
        'train inside `ddp_ctx(learn)` or initialise the group first; otherwise unset these variables.',
        stacklevel=3,
    )


def restore_environment() -> None:
    "Undo `hide_stray_environment`."
    _put_back(_hidden)
    _hidden.clear()


def _put_back(variables):
    for k, v in variables.items():
        if v is None:
            os.environ.pop(k, None)
        else:
            os.environ[k] = v

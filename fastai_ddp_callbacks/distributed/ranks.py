"Which rank this process is. Without a process group, or in one of one rank, it is rank 0 of 1."

from __future__ import annotations
import os, warnings
from typing import TypeVar

import torch.distributed as dist

from ..notice import warn_user
from .call_site import frame_outside

__all__ = ['rank', 'world_size', 'is_main_process']

_Value = TypeVar('_Value')
_PACKAGE = __package__.partition('.')[0]
_warned = False


def has_group() -> bool:
    "Whether there is a default process group."
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    "The rank of this process in the default process group; 0 without one."
    return dist.get_rank() if has_group() else alone('rank()', 0)


def world_size() -> int:
    "The number of ranks in the default process group; 1 without one."
    return dist.get_world_size() if has_group() else alone('world_size()', 1)


def is_main_process() -> bool:
    "Whether this is rank 0, the one that writes files and prints. True without a process group."
    return dist.get_rank() == 0 if has_group() else alone('is_main_process()', True)


def print_on_main(
    text: str,  # one line for the user
    warn: bool = False,  # whether as a warning
) -> None:
    "Print `text` on rank 0, in the manner of fastai. No rendezvous."
    if not is_main_process():
        return
    if warn:
        warn_user(text)
    else:
        print(text)


def launched_without_group() -> str | None:  # 'RANK=1 and WORLD_SIZE=2'; None if this process is right to be alone
    """What a launcher says where it speaks of several ranks and there is no process group: the call comes too early,
    as on the other ranks, and all of them take themselves for rank 0."""
    if has_group() or 'RANK' not in os.environ or os.environ.get('WORLD_SIZE', '') in ('', '0', '1'):
        return None
    frame, _ = frame_outside()
    if frame.f_globals.get('__name__', '').startswith(_PACKAGE + '.'):
        return None  # a callback, which has a warning of its own
    return f'RANK={os.environ["RANK"]} and WORLD_SIZE={os.environ["WORLD_SIZE"]}'


def alone(
    call: object,  # what the user has called, or the place of it
    value: _Value,  # what is right for a process alone
) -> _Value:
    "`value`. Warns, once, where a launcher says that this process is one of several."
    global _warned
    said = None if _warned else launched_without_group()
    if said:
        _warned = True
        _, level = frame_outside()
        warnings.warn(
            f'{call}: the environment has {said}, but there is no process group: this process is rank 0 of 1 here, and '
            'so is every other one. Call it inside `ddp_ctx(learn)` or after '
            '`torch.distributed.init_process_group()`; if this process is alone, unset these variables.',
            stacklevel=level,
        )
    return value

"What a rank sees by itself, and what takes several: its files on the others' disks, gloo, clocks."

from __future__ import annotations
import os, platform, secrets, shutil, socket, time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import torch, torch.distributed as dist

from .. import __version__
from ..distributed import all_gather, barrier
from ..process import host
from .launcher_variables import VARIABLES, look_at_variables
from .roll_call import RollCall, first_line

__all__ = ['own_facts', 'examine']

_DISK_DELAY = 3  # seconds that a network disk may take to show a file
_ROUNDS = 9  # rendezvous of which the median is taken


def own_facts(
    folder: str,  # where checkpoints are to go
) -> dict:  # what JSON can hold
    "What this rank sees by itself."
    env = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    rank, size, line = look_at_variables(env)
    packages = {name: _version(name) for name in ('torch', 'fastai', 'accelerate')}
    facts = dict(
        rank=rank,
        size=size,
        launcher=line,
        env=env,
        host=socket.gethostname(),
        machine=host(),
        pid=os.getpid(),
        gloo=dist.is_gloo_available(),
        nccl=dist.is_nccl_available(),
        gpus=torch.cuda.device_count(),
        visible=os.environ.get('CUDA_VISIBLE_DEVICES'),
        driver=os.path.exists('/dev/nvidia0'),
        folder=os.path.abspath(folder),
        free=None,
        disk_error=None,
        sees=[],
        after=0,
        met=None,
        versions=dict(python=platform.python_version(), fastai_ddp_callbacks=__version__, **packages),
    )
    with suppress(OSError):  # the probe reports what is wrong with the folder
        facts['free'] = shutil.disk_usage(folder).free
    return facts


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def examine(
    roll_call: RollCall,
    own: dict,  # facts of this rank, to which more are added
    folder: str,  # where checkpoints are to go
    timeout: float,  # seconds to wait for the other ranks
) -> dict[int, dict]:  # by rank
    "The facts of all ranks that answered, after they have looked at what takes several."
    roll_call.join()
    with _probe_file(folder) as (name, own['disk_error']):
        facts = roll_call.exchange('facts', dict(own, probe=name))
        if name:
            names = {rank: other['probe'] for rank, other in facts.items() if other['probe']}
            own['sees'], own['after'] = _look_for(names, folder, min(_DISK_DELAY, timeout / 2))
        all_there = len(facts) == own['size'] > 1 and not roll_call.duplicates
        if all_there and all(other['gloo'] and other['size'] == own['size'] for other in facts.values()):
            own['met'] = _meet(roll_call)
        return facts | roll_call.exchange('seen', own)  # after this no rank looks for the files any more


@contextmanager
def _probe_file(folder) -> Iterator[tuple[str | None, str | None]]:
    "A file for the other ranks to see, in the block. Gives its name, and what was wrong."
    name, error, made = f'.fastai-ddp-doctor-{secrets.token_hex(8)}', None, False
    try:
        try:
            with open(os.path.join(folder, name), 'xb') as f:
                made = True
                f.write(bytes(4096))  # a full disk has room for a name
        except OSError as e:
            error = e.strerror
        yield None if error else name, error
    finally:
        if made:
            os.unlink(os.path.join(folder, name))


def _look_for(names, folder, limit):
    "The ranks whose file is here, and after how many seconds the last one was."
    begin, delay, seen = time.monotonic(), 0, set()
    while True:
        now = {rank for rank, name in names.items() if os.path.exists(os.path.join(folder, name))}
        if now != seen:
            seen, delay = now, time.monotonic() - begin
        if len(seen) == len(names) or time.monotonic() - begin > limit:
            return sorted(seen), delay
        time.sleep(0.05)


def _meet(roll_call):
    "Make a gloo group, meet on ours, compare clocks: figures, or the error."
    begin, trips, ahead = time.monotonic(), [], []
    try:
        dist.init_process_group(
            'gloo',
            store=dist.PrefixStore('gloo', roll_call.store),
            rank=roll_call.rank,
            world_size=roll_call.size,
            timeout=timedelta(seconds=roll_call.timeout),
        )
        barrier('doctor: everybody', roll_call.timeout)
        seconds = time.monotonic() - begin
        for _ in range(_ROUNDS):
            barrier('doctor: now', roll_call.timeout)
            left = time.monotonic()
            clocks = all_gather(time.time(), 'doctor: clocks', roll_call.timeout)
            trips.append(time.monotonic() - left)
            ahead.append([clock - clocks[0] for clock in clocks])
        return dict(seconds=seconds, trip=median(trips), ahead=[median(of_rank) for of_rank in zip(*ahead)])
    except RuntimeError as e:
        return dict(error=first_line(e))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()

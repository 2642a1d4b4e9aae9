"Running a measurement in several processes that form a gloo group."

from __future__ import annotations
import logging, os, socket, warnings

import torch, torch.distributed as dist, torch.multiprocessing as mp


def worker(rank, f, size, port, *args):
    torch.set_num_threads(1)  # as launchers set it
    warnings.simplefilter('ignore')
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    os.environ.update(
        {
            k: str(v)
            for k, v in dict(
                RANK=rank,
                LOCAL_RANK=rank,
                WORLD_SIZE=size,
                LOCAL_WORLD_SIZE=size,
                OMP_NUM_THREADS=1,
                MASTER_ADDR='127.0.0.1',
                MASTER_PORT=port,
            ).items()
        }
    )
    dist.init_process_group('gloo')
    f(rank, size, *args)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(f, size, folder, end):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    context = mp.get_context('fork')
    queue, shared = (
        context.SimpleQueue(),
        ([mp.RawArray('q', size) for _ in range(3)], context.Barrier(size, timeout=120).wait, mp.RawValue('i', 1)),
    )
    mp.start_processes(worker, (f, size, port, folder, end, shared, queue), size, start_method='fork')
    return queue.get()

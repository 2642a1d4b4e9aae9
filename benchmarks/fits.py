"Whole fits on two ranks, which take turns: their time, that of their checkpointing, and their memory."

from __future__ import annotations
import gc, io, os, time
from contextlib import redirect_stdout
from statistics import median

import torch.multiprocessing as mp
from fastai.distributed import DistributedDL

from clock import Clock, count_collectives
from fit_contenders import EPOCHS, FITS, FIT_MB, IDLE, Net, cpu_broadcast
from memory import anonymous, release_free_memory


def watch(pids, peaks):
    while True:
        for i, o in enumerate(pids):
            peaks[i] = max(peaks[i], anonymous(o))
        time.sleep(0.004)


def fits(rank, size, folder, end, shared, queue):
    numbers, meet, more = shared
    pids, peaks, before = numbers  # of each rank
    DistributedDL._broadcast = cpu_broadcast
    count_collectives()
    pids[rank] = os.getpid()
    meet()
    watcher = mp.get_context('fork').Process(target=watch, args=(list(pids), peaks), daemon=True)
    if rank == 0:
        watcher.start()
    figures, idle, names = {k: [] for k in FITS}, {k: [] for k in IDLE}, [*FITS]
    model = sum(o.nbytes for o in Net(FIT_MB, 0).state_dict().values())

    def begin(*_):
        before[rank] = peaks[rank] = anonymous(os.getpid())  # what DDP needed to begin with is free again

    environment = dict(os.environ)

    def run(f, mb, n):
        net, clock = Net(mb, n), Clock(meet, begin)
        os.environ.update(environment)  # Lightning takes variables away
        gc.collect()
        release_free_memory()
        if rank == 0:
            os.sync()
        meet()
        start = time.perf_counter()
        with redirect_stdout(io.StringIO()):
            f(net, folder, clock)
        meet()
        return clock, time.perf_counter() - start

    for name in names:
        run(FITS[name], 1, 64)  # warms up
    rounds = 0
    while more.value:
        for name in names:
            if 'lightning' in name and rounds % 2:
                continue
            clock, seconds = run(FITS[name], FIT_MB, 256)
            figures[name].append(
                dict(
                    clock.spent,
                    checkpointing=sum(clock.spent.values()),
                    fit=seconds,
                    **{f'memory{r}': (peaks[r] - before[r]) / model for r in range(size)},
                    collectives=(clock.collectives[-1] - clock.collectives[0]) / (EPOCHS - 1),
                )
            )
        for name, f in IDLE.items():
            ends = run(f, 1, 64)[0].ends
            idle[name] += [b - a for a, b in zip(ends[1:], ends[2:])]  # in the second epoch nothing is saved any more
        names, rounds = names[1:] + names[:1], rounds + 1
        if rank == 0:
            more.value = rounds < 3 or time.monotonic() < end
        meet()
    if rank == 0:
        watcher.kill()
        queue.put(
            dict(
                rounds=rounds,
                idle={k: median(v) for k, v in idle.items()},
                **{k: {o: median(r[o] for r in v) for o in v[0]} for k, v in figures.items()},
            )
        )

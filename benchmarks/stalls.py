"How long a save keeps one process from its next step, and the steps while it is written."

from __future__ import annotations
import os, time, warnings
from statistics import median

import torch

from contenders import STALLS, learner, lightning


def step(seen={}, x=torch.ones(16)):
    "About 2 ms, of which almost all is the interpreter's."
    for i in range(24000):
        seen[i & 63] = seen.get(i & 7, 0) + (i & 15)
    for _ in range(20):
        x.mul_(1.0)


def steps(more):
    "The time of each step, as long as there are to be more."
    times = []
    while more(len(times)):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def stalls(rank, mb, folder, end, queue):
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter('ignore')
    learn = learner(mb, folder)
    those, figures, n = {k: v(learn) for k, v in STALLS.items()}, {k: [] for k in STALLS}, 20
    names, rounds = [*those], 0
    while rounds < 2 or time.monotonic() < end and rounds < 41:
        for name in names:
            if 'lightning' in name and rounds and rounds % 2 == 0:
                continue  # they take the longest
            o = those[name]
            os.sync()
            alone = steps(lambda i: i < n) if hasattr(o, 'done') else []
            start = time.perf_counter()
            o.save()
            row = dict(stall=time.perf_counter() - start)
            if alone:
                writing = steps(lambda i: i == 0 or not o.done())
                row.update(
                    write=time.perf_counter() - start,
                    alone=median(alone),
                    worst_alone=max(alone),
                    step=median(writing),
                    worst=max(writing),
                )
                n = max(20, len(writing))
            figures[name].append(row)
        names, rounds = names[1:] + names[:1], rounds + 1
    if lightning:
        those['lightning async'].trainer.strategy.checkpoint_io.teardown()
    those['background'].writer.wait()
    first = {k: v.pop(0)['stall'] for k, v in figures.items()}  # takes memory, and makes the file
    queue.put(
        dict(
            rounds=rounds - 1,
            first=first,
            **{k: {o: median(r[o] for r in v) for o in v[0]} for k, v in figures.items()},
        )
    )

"What a rank spends in the calls of a fit, and how many collectives Python starts."

from __future__ import annotations
import time

import torch.distributed as dist


class Clock:
    """What a rank spends in some calls, when both ranks have come to them; and how many collectives there were at
    each epoch's end."""

    def __init__(self, meet, begin=lambda *_: None):
        self.meet, self.begin, self.spent, self.collectives, self.ends = meet, begin, dict(saving=0.0, end=0.0), [], []

    def timed(self, o, what, *names):
        for name in names:
            if hasattr(o, name):
                setattr(o, name, self.call(what, getattr(o, name)))
        return o

    def call(self, what, f):
        def inner(*args, **kwargs):
            self.meet()
            start = time.perf_counter()
            res = f(*args, **kwargs)
            self.spent[what] += time.perf_counter() - start
            return res

        return inner

    def epoch(self, *_):
        self.collectives.append(Clock.count)
        self.ends.append(time.perf_counter())

    count = 0


def count_collectives():
    def counted(f):
        def inner(*args, **kwargs):
            Clock.count += 1
            return f(*args, **kwargs)

        return inner

    for o in dist.ProcessGroup, dist.ProcessGroupGloo:
        for name in vars(o):
            if name.startswith(('all', '_all', 'reduce', '_reduce', 'broadcast', 'gather', 'scatter', 'barrier')):
                setattr(o, name, counted(getattr(o, name)))

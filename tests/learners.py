"Small learners, and callbacks that bring about what the tests are about. Imported in ranks and in the tests' own process."
from __future__ import annotations
import hashlib, time

import torch.distributed as dist
from fastai.basics import Callback, set_seed
from fastai.test_utils import synth_learner

from fastai_ddp_callbacks import loading, rank
from fastai_ddp_callbacks.save_model import DDPSaveModelCallback


def learner(path, **kwargs):
    "A line to fit, the same on every rank."
    set_seed(1)
    return synth_learner(n_trn=2, path=path, cuda=False, **kwargs)

def digest(model): return hashlib.sha256(b''.join(v.cpu().numpy().tobytes() for v in model.state_dict().values())).hexdigest()


class Records(Callback):
    "Puts given values into the Recorder, epoch by epoch: a list, or a dict of lists by rank."
    order = 51
    def __init__(self, values, column='valid_loss'): self.given,self.column = values,column
    def after_epoch(self):
        given = self.given[rank()] if isinstance(self.given, dict) else self.given
        if len(self.recorder.values[-1]): self.recorder.values[-1][list(self.recorder.metric_names[1:]).index(self.column)] = given[self.epoch]


class Observed(DDPSaveModelCallback):
    "Notes when a file is written and read, and takes its time over it where told: `slow={'write':2}`, on `slow_rank`."
    def __init__(self, *args, slow=None, slow_rank=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.slow,self.slow_rank,self.events = slow or {},slow_rank,[]
    def _do(self, what, f, *args, **kwargs):
        self.events.append((f'wants to {what}', time.monotonic()))
        if self.slow_rank in (None, rank()): time.sleep(self.slow.get(what, 0))
        res = f(*args, **kwargs)
        self.events.append((what, time.monotonic()))
        return res
    def _write(self, *args): return self._do('write', super()._write, *args)
    def _load_best(self):
        read = loading.read_checkpoint
        loading.read_checkpoint = lambda *args, **kwargs: self._do('read', read, *args, **kwargs)
        try: super()._load_best()
        finally: loading.read_checkpoint = read
    def when(self, what): return [t for o,t in self.events if o == what]


class Trace:
    "Every collective that our own group makes, in order, for the time of the block."
    _NAMES = [o for o in dir(dist.ProcessGroupGloo) if o.startswith(('all', 'reduce', 'broadcast', 'gather', 'scatter', 'barrier', '_all', '_reduce_scatter'))]
    def __enter__(self):
        self.calls,self.before = [],{o:getattr(dist.ProcessGroupGloo, o) for o in self._NAMES}
        for name,f in self.before.items(): setattr(dist.ProcessGroupGloo, name, self._traced(name, f))
        return self
    def _traced(self, name, f):
        def inner(*args, **kwargs):
            self.calls.append(name)
            return f(*args, **kwargs)
        return inner
    def __exit__(self, *_):
        for name,f in self.before.items(): setattr(dist.ProcessGroupGloo, name, f)

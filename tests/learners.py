"""Small learners, and callbacks that bring about what the tests are about. Imported in ranks and in the tests' own
process."""

from __future__ import annotations
import hashlib

import torch.distributed as dist
from fastai.basics import Callback, set_seed
from fastai.test_utils import synth_learner

from fastai_ddp_callbacks import rank
from fastai_ddp_callbacks.fastai2.save_model import DDPSaveModelCallback
from observed import Observes


def learner(path, **kwargs):
    "A line to fit, the same on every rank."
    set_seed(1)
    return synth_learner(n_trn=2, path=path, cuda=False, **kwargs)


def digest(model):
    return hashlib.sha256(b''.join(v.cpu().numpy().tobytes() for v in model.state_dict().values())).hexdigest()


class Records(Callback):
    "Puts given values into the Recorder, epoch by epoch: a list, or a dict of lists by rank."

    order = 51

    def __init__(self, values, column='valid_loss'):
        self.given, self.column = values, column

    def after_epoch(self):
        given = self.given[rank()] if isinstance(self.given, dict) else self.given
        row, i = (
            self.recorder.values[-1] if self.recorder.values else [],
            list(self.recorder.metric_names[1:]).index(self.column),
        )
        if len(row) > i:
            row[i] = given[self.epoch]


class Observed(Observes, DDPSaveModelCallback):
    def _load_best(self):
        self._observed(super()._load_best)


# collectives at the beginning of a fit in `ddp_ctx`, whatever the callbacks: the sizes of the data
OF_A_FIT = 1
# collectives of an epoch in `ddp_ctx`, whatever the callbacks: the order in training and in validation, the averages
OF_AN_EPOCH = 3


class Trace:
    "Every collective that our own group makes, in order, for the time of the block."

    _NAMES = [
        o
        for o in dir(dist.ProcessGroupGloo)
        if o.startswith(('all', 'reduce', 'broadcast', 'gather', 'scatter', 'barrier', '_all', '_reduce_scatter'))
    ]

    def __enter__(self):
        self.calls, self.before = [], {o: getattr(dist.ProcessGroupGloo, o) for o in self._NAMES}
        for name, f in self.before.items():
            setattr(dist.ProcessGroupGloo, name, self._traced(name, f))
        return self

    def _traced(self, name, f):
        def inner(*args, **kwargs):
            self.calls.append(name)
            return f(*args, **kwargs)

        return inner

    def __exit__(self, *_):
        for name, f in self.before.items():
            setattr(dist.ProcessGroupGloo, name, f)

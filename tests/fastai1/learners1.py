"""Small fastai 1 learners, and callbacks that bring about what the tests are about. Imported in ranks and in the
tests' own process."""

from __future__ import annotations
import hashlib

import torch
from fastai.basics import DataBunch, DataLoader, Learner, LearnerCallback, TensorDataset, nn, optim, partial

from fastai_ddp_callbacks import DDPSaveModelCallback, ddp_ctx, rank
from observed import Observes


def learner(path, bs=4, **kwargs):
    """A line to fit, the same on every rank. The batch norm's statistics are each rank's own, as nothing else is
    under DDP."""
    torch.manual_seed(1)
    x = torch.randn(24, 1)
    data = TensorDataset(x, 2 * x + 1)
    data = DataBunch(
        DataLoader(data, bs, shuffle=True, num_workers=0),
        DataLoader(data, bs, num_workers=0),
        path=path,
        device=torch.device('cpu'),
    )
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return Learner(data, model, loss_func=nn.MSELoss(), opt_func=partial(optim.SGD, momentum=0.9), **kwargs)


def mae(out, y):
    return (out - y).abs().mean()


def digest(model):
    return hashlib.sha256(b''.join(v.cpu().numpy().tobytes() for v in model.state_dict().values())).hexdigest()


def fit(learn, *callbacks, n=3, values=None, lr=0.1):
    "Fit in DDP; `values` are what the epochs' validation losses become."
    with ddp_ctx(learn):
        learn.fit(n, lr, callbacks=[*callbacks, *([Records(learn, values)] if values else [])])


class Hook(LearnerCallback):
    "Calls `f` at `event`, before all of ours and of fastai's or, with `late`, after them."

    def __init__(self, learn, event, f, late=False):
        super().__init__(learn)
        self._order = 100 if late else -50
        setattr(self, f'on_{event}', f)


class Records(LearnerCallback):
    "Makes the validation losses those given, epoch by epoch: a list, or a dict of lists by rank."

    _order = -20  # before the Recorder sees them

    def __init__(self, learn, values):
        super().__init__(learn)
        self.values = values[rank()] if isinstance(values, dict) else values

    def on_epoch_end(self, epoch, last_metrics, **kwargs):
        return {'last_metrics': [self.values[epoch], *last_metrics[1:]]}


class Observed(Observes, DDPSaveModelCallback):
    def _finish(self):
        self._observed(super()._finish)

"""fastai 2: ways to end training that all ranks take at the same batch.

What a rank sees in one batch, all ranks know in the next: the exchange runs in the background, and no rank waits. It
costs one small message to each other rank per batch, which is under way while the next batch is computed."""

from __future__ import annotations

import torch
from fastai.callback.core import CancelFitException
from fastai.callback.tracker import TerminateOnNaNCallback

from ..distributed.batch_flag import BatchFlag
from ..distributed import broadcast, print_on_main, world_size
from . import learner  # noqa: F401 (gives the timeline to Learner)
from .fit import Fit, FitCallback

__all__ = ['DDPTerminateOnNaNCallback', 'DDPStopCallback']


class _StopTogether(FitCallback):
    "Ends the fit of all ranks one batch after one of them wants to; at once where there is only one."

    order = -9

    def begin(self, fit: Fit) -> None:
        self._flag = BatchFlag(self.name)
        self._flag.open()

    def after_batch(self):
        "Report whether to stop, and learn who wanted to in the batch before."
        ranks = self._flag.exchange(self._wants_to_stop())
        if ranks:
            self._explain(ranks)
            raise CancelFitException()

    def after_fit(self):
        "Wait for the last exchange."
        ranks = self._flag.read()
        if ranks:
            self._explain(ranks)


class DDPTerminateOnNaNCallback(_StopTogether, TerminateOnNaNCallback):
    """A `TerminateOnNaNCallback` that stops all ranks at the same batch, whichever of them had a NaN or infinite loss.

    With several ranks that is the batch after. The loss is looked at as stock does, so no device is waited for that
    stock does not wait for."""

    name = 'terminate_on_na_n'

    def _wants_to_stop(self):
        return not bool(torch.isfinite(self.loss).all())

    def _explain(self, ranks):
        where = f' on rank {", ".join(map(str, ranks))}' if world_size() > 1 else ''
        print_on_main(f'Epoch {self.epoch}: loss is NaN or infinite{where}, terminating training.')


class DDPStopCallback(_StopTogether):
    """Lets code on any rank ask for a stop: `learn.ddp_stop.ask('why')`.

    All ranks stop at the same batch, and whatever is due at the end of training is done: the best model is loaded,
    `at_end` saves."""

    name = 'ddp_stop'
    reason: str | None = None  # why the last fit was stopped, the same on all ranks
    _asked: str | None = None

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        self.reason = None

    def after_fit(self):
        super().after_fit()
        self._asked = None  # for this fit, which is over

    def ask(
        self,
        reason: str = 'no reason given',  # for the message
    ) -> None:
        "Ask for a stop. Can be called at any time, from a callback, another thread or a signal handler."
        self._asked = str(reason)

    def _wants_to_stop(self):
        return self._asked is not None

    def _explain(self, ranks):
        self.reason = broadcast(self._asked, ranks[0], f'{self.name}: why')
        self._asked = None
        print_on_main(f'Stopped in epoch {self.epoch}, as rank {ranks[0]} asked for: {self.reason}')

"fastai 1: the end of training by a loss that is NaN, which all ranks take at the same batch."

from __future__ import annotations

import torch
from fastai.callbacks.tracker import TerminateOnNaNCallback

from ..distributed import print_on_main, world_size
from ..distributed.batch_flag import BatchFlag
from .fit import Fit, FitCallback

__all__ = ['DDPTerminateOnNaNCallback']


class DDPTerminateOnNaNCallback(FitCallback, TerminateOnNaNCallback):
    """A `TerminateOnNaNCallback` that stops all ranks at the same batch, whichever of them had the NaN loss.

    With several ranks that is the batch after: they exchange flags in the background. Validation is not cut short, as
    metrics may have a collective in each of its batches."""

    exclude = ['_flag']  # not pickled
    _flag: BatchFlag | None = None

    def begin(self, fit: Fit) -> None:
        self.stop = False
        self._nan = False  # in the validation of this epoch
        self._flag = BatchFlag('NaN loss')
        self._flag.open()

    def on_batch_end(self, last_loss, epoch, num_batch, train=True, pbar=None, **kwargs):
        "Report whether the loss is NaN, and learn on which rank it was in the batch before."
        if not self._hears(pbar):
            return
        nan = bool(torch.isnan(last_loss).any())
        if not train:
            self._nan = self._nan or nan
        elif self._is_reported(self._flag.exchange(nan), f'Epoch/Batch ({epoch}/{num_batch})'):
            return {'stop_epoch': True, 'stop_training': True, 'skip_validate': True}

    def on_epoch_end(self, epoch, pbar=None, **kwargs):
        "Learn of the last batch, and of validation."
        if not self._hears(pbar) or self.stop:
            return
        ranks = self._flag.exchange(self._nan) or self._flag.read()
        self._nan = False
        if self._is_reported(ranks, f'End of epoch {epoch}'):
            return {'stop_training': True}

    def _is_reported(self, ranks, when):
        self.stop = bool(ranks)
        where = f' on rank {", ".join(map(str, ranks))}' if world_size() > 1 else ''
        if ranks:
            print_on_main(f'{when}: Invalid loss{where}, terminating training.')
        return self.stop

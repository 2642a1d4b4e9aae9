"fastai 2: evaluation in DDP, of samples that are divided among the ranks, or by each rank alone."

from __future__ import annotations

from fastai.basics import nn
from fastai.data.load import DataLoader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader as TorchLoader

from ..distributed.sections import refuse_on_one_rank
from .fit import WatchedCallback, is_evaluating, running_fit
from .loaders import DDPLoader, EvaluationLoader, OwnLoader, divisible, is_divided
from .metrics import ExactAverages

__all__ = ['DividedEvaluation']


class DividedEvaluation(WatchedCallback):
    """What `DDPTrainer` does in the events of an evaluation, in a fit and outside of one.

    Outside of a fit, the samples are divided among the ranks, and all have to take part. Within a fit, each rank
    makes predictions by itself, since loggers ask for some on rank 0 alone. A single sample, and a list of batches,
    is evaluated by each rank itself everywhere."""

    averages: ExactAverages | None = None
    syncs_buffers = True  # whether DDP shares buffers before the next forward pass of training or validation
    hidden_model: nn.Module | None = None  # the model in DDP, while this rank evaluates the bare one by itself

    def before_validate(self):
        "Divide the samples, unless this rank evaluates by itself."
        dl = self.learn.dl
        if self._evaluates_alone(dl):
            self.learn.dl = OwnLoader(dl.dl if isinstance(dl, DDPLoader) else dl)
            self._hide_model()
        elif not is_divided(dl):
            self.learn.dl = self._divided_evaluation(dl)
        if not is_evaluating(self.learn):
            self._restore_sync()

    def _evaluates_alone(self, dl):
        if running_fit(self.learn) and hasattr(self.learn, 'gather_preds'):
            return True
        if not isinstance(dl, (DataLoader, TorchLoader)):
            return True  # `show_results` gives a list of batches
        n = getattr(dl, 'n', None)
        return n is not None and n <= 1  # as in `predict`

    def _hide_model(self):
        "Evaluate the bare model: in DDP it would share buffers with ranks that do not take part."
        if isinstance(self.learn.model, DistributedDataParallel):
            self.hidden_model = self.learn.model
            self.learn.model = self.hidden_model.module

    def _show_model(self):
        if self.hidden_model is not None:
            self.learn.model, self.hidden_model = self.hidden_model, None

    def before_batch(self):
        if self.learn.training:
            self._show_model()  # if an evaluation has raised, and a callback has ignored it

    def _divided_evaluation(self, dl):
        refuse_on_one_rank('learn.get_preds' if hasattr(self.learn, 'gather_preds') else 'learn.validate')
        if not isinstance(dl, EvaluationLoader):
            dl = self._divided(divisible(getattr(dl, 'dl', dl), 'given'), EvaluationLoader)
        dl.place = f'order of {self._evaluated()}'
        if not running_fit(self.learn):
            # before DDP exchanges anything, by which a rank that is here alone would not be named
            dl.share_order()
            if not isinstance(self.learn.model, DistributedDataParallel):
                self._wrap_model()
        return dl

    def _evaluated(self):
        "What is evaluated, for the names of rendezvous: ranks that evaluate something else are at another place."
        if hasattr(self.learn, 'gather_preds'):
            return 'samples in get_preds'
        if not is_evaluating(self.learn):
            return f'validation samples in epoch {self.learn.epoch}'
        within = f' in epoch {self.learn.epoch}' if running_fit(self.learn) else ''
        return f'samples in validate{within}'

    def after_validate(self):
        "Gather the averages."
        dl, own = self.learn.dl, not is_evaluating(self.learn)
        if isinstance(dl, OwnLoader):
            self._show_model()
        elif self.averages and not hasattr(self.learn, 'gather_preds'):
            self.averages.gather(f'averages of epoch {self.learn.epoch}' if own else 'averages of validate')
        if own:
            self._keep_sync()

    def _restore_sync(self):
        """Undo what forward passes between training and validation have changed.

        Loggers make some on rank 0 alone, after which it would share buffers with ranks that do not."""
        if isinstance(self.learn.model, DistributedDataParallel):
            self.learn.model.require_forward_param_sync = self.syncs_buffers

    def _keep_sync(self):
        self.syncs_buffers = getattr(self.learn.model, 'require_forward_param_sync', True)

"fastai 2: the callback with which a learner trains and evaluates in DDP, and that restores it."

from __future__ import annotations
import time
from copy import deepcopy

from fastai.basics import Callback, nn, noop
from fastai.callback.progress import CSVLogger, ShowGraphCallback
from fastai.callback.schedule import ParamScheduler
from fastai.distributed import DistributedTrainer
from fastai.torch_core import get_model, to_cpu, to_device
from torch.nn.parallel import DistributedDataParallel

from ..distributed import all_gather, all_or_none, print_on_main, rank, world_size
from ..distributed.sections import refuse_on_one_rank
from ..timeline import straggler_summary
from .departure import note_departure
from .divided_evaluation import DividedEvaluation
from .fit import running_fit
from .loaders import DDPLoader, EvaluationLoader, divisible, is_divided
from .metrics import ExactAverages

__all__ = ['DDPTrainer']

_OF_RANK_0 = CSVLogger, ShowGraphCallback  # one writes a file, the other one draws into the bar, which rank 0 alone has


class DDPTrainer(DividedEvaluation, DistributedTrainer):
    "A `DistributedTrainer` for any device, that can be undone when a fit has raised."

    name = 'distributed_trainer'

    def __init__(
        self,
        sync_bn: bool = True,  # whether to replace all batch norm with `nn.SyncBatchNorm`, which exists on GPUs only
        **kwargs,  # for `Accelerator`
    ):
        super().__init__(sync_bn, **kwargs)
        self._reset()

    def _reset(self) -> None:
        self.old_dls: list | None = None  # the learner's loaders, while divided ones take their place
        self.undivided: list = []  # the loaders of this fit as they are before they are divided
        self.averages: ExactAverages | None = None
        self.silenced: list[Callback] = []  # callbacks that only rank 0 has to run
        self.syncs_buffers = True  # whether DDP shares buffers before the next forward pass of training or validation
        self.hidden_model: nn.Module | None = None  # the model in DDP, while this rank evaluates the bare one by itself

    def __deepcopy__(self, memo):
        copy = memo[id(self)] = type(self).__new__(type(self))
        copy.sync_bn, copy.accelerator = self.sync_bn, self.accelerator  # there is one accelerator for a process
        copy._reset()
        vars(copy)['_learn'] = deepcopy(self.learn, memo)
        return copy

    def __reduce__(self):
        return Callback, ()  # a learner that is exported in here is an ordinary one where it is loaded

    # -- a fit

    def before_fit(self):
        "Divide the loaders; outside of a fit, replace the averages only."
        fit = running_fit(self.learn)
        if fit is None:
            self._replace_averages()
            return
        refuse_on_one_rank('learn.fit')
        fit.callback(self._end, fit, time.time_ns())
        if hasattr(self.learn, 'lr_finder'):
            _restore_from_memory(self.learn.lr_finder)
        loaders = [dl if is_divided(dl) else divisible(dl, _name(i)) for i, dl in enumerate(self.learn.dls)]
        self.undivided = loaders
        self.old_dls = list(self.learn.dls)
        self.learn.dls.loaders = [
            self._divided(dl, EvaluationLoader if i else DDPLoader) for i, dl in enumerate(loaders)
        ]
        self._replace_averages()
        if rank():
            self.learn.logger = noop
            self.silenced = [cb for cb in self.learn.cbs if isinstance(cb, _OF_RANK_0)]
            for cb in self.silenced:
                cb.run = False

    def before_epoch(self):
        "Wrap the model: later than in stock, since loggers trace it at the beginning of a fit, on rank 0 alone."
        if running_fit(self.learn) and not isinstance(self.learn.model, DistributedDataParallel):
            _compare_data(self.undivided)  # first, as torch cannot name a rank that is at another place
            self._wrap_model()

    def _wrap_model(self):
        model = self.learn.model
        if self.sync_bn:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        wrapped = self.accelerator.prepare(model)
        wrapped.training = model.training  # in an evaluation outside of a fit it is in eval mode by now
        self.learn.model = wrapped
        if not getattr(wrapped, 'broadcast_buffers', True) and any(True for _ in model.buffers()):
            print_on_main(
                'With broadcast_buffers=False each rank validates with buffers of its own, as the averages of batch '
                'norm, while a saved model has those of rank 0: the values by which the best is chosen are not those '
                'of what is saved. Leave broadcast_buffers=True, or use sync_bn=True on GPUs.',
                warn=True,
            )

    def _divided(self, dl, kind):
        if is_divided(dl):
            return dl
        return kind(dl, rank(), world_size(), next(self.learn.model.parameters()).device)

    def _replace_averages(self):
        if hasattr(self.learn, 'recorder'):
            self.averages = ExactAverages(self.learn)

    def before_train(self):
        self._restore_sync()
        if isinstance(self.learn.dl, DDPLoader):
            self.learn.dl.place = f'order of training samples in epoch {self.learn.epoch}'

    def after_train(self):
        self._keep_sync()
        if self.averages and self.learn.recorder.train_metrics:
            self.averages.gather(f'averages of training in epoch {self.learn.epoch}')

    def after_fit(self):
        self.silenced = []  # they run again after this event, which they must not get either
        self.undo()

    def _end(self, fit, begin):
        "Clean up after a fit that raised; report which rank kept the others waiting in one that ended well."
        if fit.failed:
            self.undo()
            return
        line = straggler_summary(begin, time.time_ns())
        if line:
            print_on_main(line)

    def undo(self) -> None:
        "Restore the learner, in whatever state a fit or an evaluation has left it."
        self._show_model()
        if isinstance(self.learn.model, DistributedDataParallel):
            self.learn.model = self.learn.model.module
        if self.old_dls is not None:
            self.learn.dls.loaders = self.old_dls
            for dl in self.old_dls:
                vars(dl).pop('it', None)  # the iterator of an epoch that was cancelled, which cannot be copied
        if self.averages:
            self.averages.restore()
        for cb in self.silenced:
            cb.run = True
        self._reset()

    def after_cancel_fit(self):
        "Leave a note for ranks that may be waiting for this one: it may be the only one that has cancelled its fit."
        if running_fit(self.learn):
            note_departure(f'cancelled its fit in epoch {self.learn.epoch}')


def _name(i):
    return ('training', 'validation')[i] if i < 2 else f'{i + 1}th'


def _compare_data(loaders):
    "`ValueError` on all ranks if they have other numbers of samples or batches: some would wait for others in vain."
    own = [_sizes(_name(i), dl) for i, dl in enumerate(loaders)]
    by_rank = all_gather(own, 'sizes of the data')
    if all(sizes == own for sizes in by_rank):
        return
    lines = [f'  rank {r}: {"; ".join(sizes)}\n' for r, sizes in enumerate(by_rank)]
    with all_or_none('data that differ'):  # all ranks raise it
        raise ValueError(
            f'The ranks have different data:\n{"".join(lines)}'
            'Make the same data loaders on all ranks, with a seed for what is drawn at random (`seed=` of a splitter, '
            'or `set_seed`), from files that all ranks see.'
        )


def _sizes(name, dl):
    "In words, what has to be the same on all ranks."
    if is_divided(dl):
        return f'{name}: {len(dl)} batches'
    bs = f'batches of {dl.bs}' if dl.bs else 'batches as they are'
    return f'{name}: {"unknown" if dl.n is None else dl.n} samples in {bs}'


def _restore_from_memory(finder):
    """Let `lr_find` keep the weights in the memory of each rank.

    Stock keeps them in a file, which rank 0 alone writes, in a folder of a random name: the others neither find it nor
    come to the barrier in which rank 0 waits to load it."""
    learn, kept = finder.learn, []

    def before_fit():
        ParamScheduler.before_fit(finder)
        kept.extend(to_cpu(deepcopy(part.state_dict())) for part in (get_model(learn.model), learn.opt))
        finder.best_loss = float('inf')

    def after_fit():
        learn.opt.zero_grad()
        get_model(learn.model).load_state_dict(kept[0])
        learn.opt.load_state_dict(to_device(kept[1], next(learn.model.parameters()).device))

    finder.before_fit, finder.after_fit = before_fit, after_fit

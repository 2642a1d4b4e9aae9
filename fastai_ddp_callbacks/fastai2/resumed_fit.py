"fastai 2: the fit that is saved to be resumed, and what is left to do of one that was interrupted."

from __future__ import annotations
from dataclasses import dataclass, field
from functools import partial

import torch
from fastai.learner import Learner
from fastai.torch_core import to_device
from torch.nn.parallel import DistributedDataParallel

from ..checkpoint.background import Writer
from ..distributed import rank, world_size
from ..training.earlier_fits import EarlierFits
from ..training.preemption import SignalWatch
from ..training.resume_files import ResumeFiles
from ..training.save_schedule import SaveSchedule
from .fit import Fit
from .history import CSVTables
from .loader_state import own_state, restore_own
from .rest_of_epoch import Stage, train_on_rest
from .resume_state import restore_gradients

__all__ = ['ResumableFit', 'Epoch', 'Resumed']


@dataclass
class Epoch:
    "How far the running epoch is trained."

    order: dict | None = None  # random states when it began, on this rank
    first_batch: int | None = None  # of those that this process trains in it
    is_trained: bool = False


class Resumed:
    "What the file of an interrupted fit says of its running epoch. Held until that epoch is trained."

    def __init__(
        self,
        learn: Learner,  # in a fit
        state: dict,  # of the file, beside weights and optimizer
        opt: dict,  # the optimizer's state
    ):
        self.learn = learn
        self.state = state
        self.opt: dict | None = opt
        self.stages = [Stage(*stage) for stage in state['stages']]  # of the epoch, that are trained

    def restart_epoch(self) -> None:
        "Undo what callbacks have done again, as the interrupted epoch began again."
        self.restore_optimizer()
        self.opt = None  # not needed any more
        self.learn.pct_train = self.state['pct_train']

    def restore_optimizer(self) -> None:
        "Give the optimizer its state."
        device = next(self.learn.model.parameters()).device
        self.learn.opt.load_state_dict(to_device(self.opt, device))

    def restore_random_states(self) -> None:
        "This rank's own, if there was such a rank."
        if rank() < len(self.state['ranks']):
            restore_own(self.learn, self.state['ranks'][rank()])

    def replace_all_batches(self) -> None:
        "Train on the rest of the epoch instead of all of it."
        restore = self.restore_random_states
        self.learn.all_batches = partial(train_on_rest, self.learn, self.stages, self.state['order'], restore)

    def before_first_batch(self) -> None:
        "Bring DDP and the gradients to where they were."
        model = self.learn.model
        on_cpu = not next(model.parameters()).is_cuda
        if on_cpu and isinstance(model, DistributedDataParallel) and world_size() > 2:
            self._show_ddp_a_batch()
        restore_gradients(self.learn, self.state.get('gradients'))

    def _show_ddp_a_batch(self):
        """DDP lays gradients out in the order in which they come, once it has seen a batch; and three numbers or more
        that are added in another order may differ in the last bit."""
        learn = self.learn
        buffers = [buffer.clone() for buffer in learn.model.buffers()]
        states = own_state(learn)
        learn.loss_func(learn.model(*learn.xb), *learn.yb).backward()
        learn.opt.zero_grad()
        with torch.no_grad():
            for buffer, before in zip(learn.model.buffers(), buffers):
                buffer.copy_(before)
        restore_own(learn, states)


@dataclass
class ResumableFit:
    "One fit of one `DDPResumeCallback`, from `before_fit` until it has returned or raised."

    learn: Learner
    fit: Fit
    files: ResumeFiles
    earlier: EarlierFits  # the fits that came before this one
    signature: list  # when it began
    schedule: SaveSchedule
    tables: CSVTables
    watch: SignalWatch = field(default_factory=SignalWatch)
    writer: Writer = field(default_factory=Writer)
    rows: list = field(default_factory=list)  # of the table of epochs
    epoch: Epoch = field(default_factory=Epoch)
    resumed: Resumed | None = None  # until its first epoch is trained, or the first batch if it begins with an epoch
    was_finished: bool = False  # before it began
    was_cut: bool = False  # stopped within an epoch

    @property
    def stages(self) -> list[Stage]:
        "The parts of the running epoch that were trained before this process has trained in it."
        return self.resumed.stages if self.resumed else []

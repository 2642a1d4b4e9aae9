"fastai 2: a saved optimizer state, and whether it belongs to the optimizer: fastai's own, or one of torch."

from __future__ import annotations
from pathlib import Path

from fastai.learner import Learner
from fastai.torch_core import to_device

from ..errors import MismatchedCheckpointError

__all__ = ['check_optimizer', 'load_optimizer']


def check_optimizer(
    learn: Learner,  # whose optimizer it is to be loaded into
    path: Path,  # the file that it comes from, for the message
    rest: dict,  # what a checkpoint holds beside the model: {'opt': the `state_dict()` of an optimizer}
) -> None:
    "`MismatchedCheckpointError` if the groups of parameters differ; nothing is changed."
    state = rest['opt']
    groups = [len(group) for group in learn.opt.param_lists]
    if 'hypers' in state:
        fits = (len(state['hypers']), len(state.get('state', ()))) == (len(groups), sum(groups))
    else:
        fits = [len(group['params']) for group in state.get('param_groups', ())] == groups
    if not fits or ('hypers' in state) == hasattr(learn.opt, 'opt'):
        raise MismatchedCheckpointError(f'{path}: its optimizer state does not fit this optimizer.', path)


def load_optimizer(
    learn: Learner,  # whose optimizer it is loaded into
    path: Path,  # the file that it comes from
    rest: dict,  # as for `check_optimizer`
) -> None:
    "Load the state, on the device of the model."
    learn.opt.load_state_dict(to_device(rest['opt'], next(learn.model.parameters()).device))

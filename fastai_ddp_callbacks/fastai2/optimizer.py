"fastai 2: whether a saved optimizer state belongs to an optimizer, fastai's own or one of torch in an `OptimWrapper`."

from __future__ import annotations
from pathlib import Path

from ..errors import MismatchedCheckpointError

__all__ = ['check_optimizer']


def check_optimizer(
    opt,  # the learner's optimizer
    state: dict,  # as its `state_dict()`, or that of another one
    path: Path,  # the file that `state` comes from, for the message
) -> None:
    "`MismatchedCheckpointError` if the groups of parameters differ; nothing is changed."
    groups = [len(group) for group in opt.param_lists]
    if 'hypers' in state:
        fits = (len(state['hypers']), len(state.get('state', ()))) == (len(groups), sum(groups))
    else:
        fits = [len(group['params']) for group in state.get('param_groups', ())] == groups
    if not fits or ('hypers' in state) == hasattr(opt, 'opt'):
        raise MismatchedCheckpointError(f'{path}: its optimizer state does not fit this optimizer.', path)

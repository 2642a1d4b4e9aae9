"fastai 2: what makes two fits the same, so that one of them may be resumed as the other."

from __future__ import annotations

import numpy as np
from fastai.callback.schedule import ParamScheduler
from fastai.callback.tracker import TrackerCallback
from fastai.learner import Learner

from ..checkpoint.state import to_builtin
from ..training.resume_files import FROM_SCRATCH, callback_keys
from .loader_state import loaders

__all__ = ['fit_signature', 'check_signature', 'data_sizes', 'trained_parameters']


def fit_signature(
    learn: Learner,  # when a fit begins
) -> list:
    "The hyperparameters, where each schedule will have them, and which parameters are trained."
    curves = [
        [name, [np.ravel(schedule(i / 8)).astype(float).tolist() for i in range(9)]]
        for cb in learn.cbs
        if isinstance(cb, ParamScheduler)
        for name, schedule in sorted(cb.scheds.items())
    ]
    scheduled = [name for name, _ in curves]  # an interrupted fit leaves some value of these behind
    hypers = [
        [[name, repr(to_builtin(value))] for name, value in sorted(group.items()) if name not in scheduled]
        for group in getattr(learn.opt, 'hypers', [])
    ]
    return [hypers, curves, trained_parameters(learn)]


def trained_parameters(
    learn: Learner,
) -> list[bool]:
    "Which parameters of the model are trained, in order."
    return [parameter.requires_grad for parameter in learn.model.parameters()]


def data_sizes(
    learn: Learner,
) -> list:  # [samples, samples per batch], None for what the loader does not know
    "How much there is to train on."
    dl = loaders(learn)[0]
    samples = len(dl.dataset) if hasattr(dl.dataset, '__len__') else None
    return [samples, getattr(dl, 'bs', None) or getattr(dl, 'batch_size', None)]


def check_signature(
    learn: Learner,  # when a fit begins
    path: str,  # of the file, for messages
    opt: dict,  # the optimizer's state in that file
    state: dict,  # what else is in it
    signature: list,  # of this fit
) -> None:
    "`ValueError` if the file is not of this fit; nothing is changed yet."
    different = f'{path} belongs to a different fit, '
    if _optimizer_kind(opt) != _optimizer_kind(learn.opt.state_dict()):
        raise ValueError(f'{different}with another optimizer or other parameter groups. {FROM_SCRATCH}')
    *settings, trained = state['plan']
    if settings != signature[:2]:
        raise ValueError(
            f'{different}with other learning rates, other hyperparameters or another schedule. {FROM_SCRATCH}'
        )
    # `state['trained']`: it has raised in this process, after a callback had changed which are trained
    if signature[2] not in (trained, state['trained']):
        raise ValueError(
            f'{different}which trained other parameters. Call `freeze` or `unfreeze` as before. {FROM_SCRATCH}'
        )
    for key, cb in callback_keys(learn.cbs):
        monitor = state['callbacks'].get(key, {}).get('monitor')
        if isinstance(cb, TrackerCallback) and monitor not in (None, cb.monitor):
            raise ValueError(
                f'{different}in which {type(cb).__name__} followed {monitor!r}, and not {cb.monitor!r}. {FROM_SCRATCH}'
            )


def _optimizer_kind(state):
    "By the state of fastai's own optimizer, or of a wrapped one of torch."
    if 'hypers' in state:
        return [sorted(group) for group in state['hypers']], len(state['state'])
    groups = state.get('param_groups', ())
    return sorted(state), [len(group['params']) for group in groups]

"fastai 2: where a fit is, in plain values and tensors that are the same on all ranks."

from __future__ import annotations

import torch
from fastai.callback.schedule import ParamScheduler
from fastai.callback.tracker import TrackerCallback
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner

from ..checkpoint.state import to_builtin
from ..distributed import print_on_main
from ..training.resume_files import callback_keys, is_stateful
from .fit_signature import data_sizes, trained_parameters
from .history import recorded, recorder_state, restore_recorder
from .tracker import DDPTrackerCallback

__all__ = ['shared_state', 'restore_shared', 'restore_gradients', 'not_saved']


def shared_state(
    learn: Learner,  # in a fit
) -> dict:
    "The Recorder's history, the position in the schedules, and the state of each callback."
    scaler = getattr(learn, 'scaler', None)
    states = {key: state for key, cb in callback_keys(learn.cbs) if (state := _state(cb)) is not None}
    return dict(
        trained=trained_parameters(learn),
        pct_train=float(learn.pct_train),
        data=data_sizes(learn),
        frozen=getattr(learn.opt, 'frozen_idx', None),
        train_iter=learn.train_iter,
        recorder=recorder_state(learn),
        scaler=scaler and scaler.state_dict(),
        callbacks=states,
        gradients=_accumulated(learn),
    )


def restore_shared(
    learn: Learner,  # in a fit
    state: dict,  # as `shared_state` gave it
    finished: bool = False,  # whether that fit is finished, so that no tracker is resumed
) -> None:
    "Bring it back. `ValueError` if a callback follows another column than it did."
    if state['frozen'] is not None:
        learn.opt.freeze_to(state['frozen'])
    for parameter, is_trained in zip(learn.model.parameters(), state['trained']):
        parameter.requires_grad_(is_trained)  # a callback may have changed it by itself
    restore_recorder(learn, state['recorder'])
    learn.pct_train = state['pct_train']
    learn.train_iter = state['train_iter']
    if state['scaler'] and getattr(learn, 'scaler', None):
        learn.scaler.load_state_dict(state['scaler'])
    _restore_callbacks(learn, state['callbacks'], finished)


def _restore_callbacks(learn, states, finished):
    callbacks = {key: cb for key, cb in callback_keys(learn.cbs) if _has_state(cb)}
    for key, cb in callbacks.items():  # in one order on all ranks, as a callback may meet them here
        if key in states:
            _restore(cb, dict(states[key], finished=finished) if isinstance(cb, DDPTrackerCallback) else states[key])
    new = [f'{key} starts from scratch' for key in sorted(callbacks.keys() - states.keys())]
    gone = [f'{key} is not there any more' for key in sorted(states.keys() - callbacks.keys())]
    if (new or gone) and not finished:
        print_on_main(f'The interrupted fit had other callbacks: {"; ".join(new + gone)}.', warn=True)


# -- callbacks


def not_saved(
    learn: Learner,
) -> list[str]:
    "The names of those of its callbacks whose state is needed to resume, and is not saved."
    return [
        type(cb).__name__
        for cb in learn.cbs
        if not is_stateful(cb)
        and any(
            cls.__module__ == 'fastai.vision.gan' and cls.__name__ != 'GANDiscriminativeLR' for cls in type(cb).__mro__
        )
    ]


def _has_state(cb):
    return is_stateful(cb) or isinstance(cb, (ParamScheduler, TrackerCallback, GradientAccumulation))


def _state(cb):
    if is_stateful(cb):
        return to_builtin(cb.state_dict())
    if isinstance(cb, ParamScheduler):
        return {name: torch.tensor([float(v) for v in values], dtype=torch.float64) for name, values in cb.hps.items()}
    if isinstance(cb, TrackerCallback):
        return dict(monitor=cb.monitor, best=recorded(cb.best), wait=getattr(cb, 'wait', None))
    if isinstance(cb, GradientAccumulation):
        return dict(count=cb.count)
    return None


def _restore(cb, state):
    if is_stateful(cb):
        cb.load_state_dict(state)
    elif isinstance(cb, ParamScheduler):
        cb.hps = {name: values.tolist() for name, values in state.items()}
    elif isinstance(cb, GradientAccumulation):
        cb.count = state['count']
    else:
        cb.best = state['best']
        if state['wait'] is not None:
            cb.wait = state['wait']


# -- gradients that are accumulated over batches


def _accumulated(learn):
    "The gradients that the next step will use; None where each batch makes a step."
    if not any(isinstance(cb, GradientAccumulation) and cb.count for cb in learn.cbs):
        return None
    grads = [parameter.grad for parameter in learn.model.parameters()]
    return [None if grad is None else to_builtin(grad).clone() for grad in grads]


def restore_gradients(
    learn: Learner,  # in a fit, before the first batch
    gradients: list | None,  # as `shared_state` gave them
) -> None:
    "Give each parameter the gradient that it had."
    for parameter, grad in zip(learn.model.parameters(), gradients or ()):
        parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)

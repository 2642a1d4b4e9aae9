"fastai 2: where a fit is, in plain values and tensors: what is the same on all ranks, and what is each rank's own."

from __future__ import annotations
import math

import numpy as np, torch
from fastai.basics import L
from fastai.callback.schedule import ParamScheduler
from fastai.callback.tracker import TrackerCallback

from ..distributed import print_on_main
from ..training.resume_files import callback_keys, is_stateful
from ..checkpoint.state import to_builtin
from .loader_state import loaders
from .tracker import DDPTrackerCallback

__all__ = ['number', 'shared_state', 'restore_shared']


# -- the same on all ranks


def shared_state(
    learn,  # a `Learner` in a fit
) -> dict:
    "The Recorder's history, the position in the schedules, and what each callback has to tell."
    rec, sm = learn.recorder, learn.recorder.smooth_loss
    recorder = dict(
        values=[list(map(number, o)) for o in rec.values],
        lrs=_numbers(rec.lrs),
        iters=list(rec.iters),
        losses=torch.stack([to_builtin(o).cpu() for o in rec.losses]) if rec.losses else None,
        smooth_loss=to_builtin(sm.val).cpu(),
        count=sm.count,
    )
    scaler = getattr(learn, 'scaler', None)
    return dict(
        trained=_trained(learn),
        pct_train=float(learn.pct_train),
        data=sizes(learn),
        frozen=getattr(learn.opt, 'frozen_idx', None),
        train_iter=learn.train_iter,
        recorder=recorder,
        scaler=scaler and scaler.state_dict(),
        callbacks={k: s for k, cb in callback_keys(learn.cbs) if (s := _state(cb)) is not None},
    )


def restore_shared(
    learn,  # a `Learner` in a fit, of the same callbacks
    state: dict,  # as `shared_state` gave it
    finished=False,  # whether that fit has come to its end, so that no tracker has to go on
) -> None:
    "`ValueError` if a callback follows another column than it did."
    rec, o = learn.recorder, state['recorder']
    if state['frozen'] is not None:
        learn.opt.freeze_to(state['frozen'])
    rec.values, rec.lrs, rec.iters = [L(v) for v in o['values']], o['lrs'].tolist(), list(o['iters'])
    rec.losses = list(o['losses']) if o['losses'] is not None else []
    rec.smooth_loss.val, rec.smooth_loss.count = o['smooth_loss'].to(rec.smooth_loss.val.device), o['count']
    if rec.losses:
        learn.smooth_loss = rec.losses[-1]
    if rec.values:
        learn.final_record = rec.values[-1].copy()
    learn.pct_train, learn.train_iter = state['pct_train'], state['train_iter']
    if state['scaler'] and getattr(learn, 'scaler', None):
        learn.scaler.load_state_dict(state['scaler'])
    cbs, kept = {k: cb for k, cb in callback_keys(learn.cbs) if _has_state(cb)}, state['callbacks']
    for k, cb in cbs.items():  # in one order on all ranks, as a callback may meet them here
        if k in kept:
            _restore(cb, dict(kept[k], finished=finished) if isinstance(cb, DDPTrackerCallback) else kept[k])
    others = [
        f'{", ".join(sorted(o))} {what}'
        for o, what in ((cbs.keys() - kept.keys(), 'begins anew'), (kept.keys() - cbs.keys(), 'is not there any more'))
        if o
    ]
    if others and not finished:
        print_on_main(f'The fit that goes on had other callbacks: {"; ".join(others)}.', warn=True)


def sizes(learn) -> list:
    "How many samples there are, and how many in a batch, as far as the loader tells."
    o = loaders(learn)[0]
    return [
        len(o.dataset) if hasattr(o.dataset, '__len__') else None,
        getattr(o, 'bs', None) or getattr(o, 'batch_size', None),
    ]


def plan(learn) -> list:
    "When a fit begins: the hyperparameters, where each schedule will have them, and which parameters are trained."
    curves = [
        [k, [np.ravel(f(i / 8)).astype(float).tolist() for i in range(9)]]
        for cb in learn.cbs
        if isinstance(cb, ParamScheduler)
        for k, f in sorted(cb.scheds.items())
    ]
    scheduled = [k for k, _ in curves]  # of which an interrupted fit leaves some value behind
    return [
        [
            [[k, repr(to_builtin(v))] for k, v in sorted(h.items()) if k not in scheduled]
            for h in getattr(learn.opt, 'hypers', [])
        ],
        curves,
        _trained(learn),
    ]


def _trained(learn):
    return [o.requires_grad for o in learn.model.parameters()]


def check_kind(learn, opt, state, now):
    "`ValueError` if it is not the state of a fit of this kind; nothing is changed yet."

    def kind(o):
        return (
            [sorted(h) for h in o['hypers']] if 'hypers' in o else sorted(o)
        )  # fastai's own, or a wrapped one of torch

    if kind(opt) != kind(learn.opt.state_dict()):
        raise ValueError('the fit to go on with had another optimizer, or other parameter groups.')
    *was, trained = state['plan']
    if was != now[:2]:
        raise ValueError(
            "the fit to go on with had other learning rates, other hyperparameters or another schedule. Give this fit another fname, or resume='never' to start anew."
        )
    if now[2] not in (
        trained,
        state['trained'],
    ):  # the second, where it has raised in this process after a callback had changed them
        raise ValueError(
            "the fit to go on with trained other parameters: call `freeze` or `unfreeze` as before, or give this fit another fname, or resume='never' to start anew."
        )
    for k, cb in callback_keys(learn.cbs):
        was = state['callbacks'].get(k, {})
        if isinstance(cb, TrackerCallback) and was.get('monitor', cb.monitor) != cb.monitor:
            raise ValueError(
                f"{type(cb).__name__}(monitor={cb.monitor!r}): the fit to go on with followed {was['monitor']!r}."
            )


def _has_state(cb):
    return is_stateful(cb) or isinstance(cb, (ParamScheduler, TrackerCallback))


def _state(cb):
    if is_stateful(cb):
        return to_builtin(cb.state_dict())
    if isinstance(cb, ParamScheduler):
        return {k: _numbers(v) for k, v in cb.hps.items()}
    if isinstance(cb, TrackerCallback):
        return dict(monitor=cb.monitor, best=number(cb.best), wait=getattr(cb, 'wait', None))


def _restore(cb, state):
    if is_stateful(cb):
        return cb.load_state_dict(state)
    if isinstance(cb, ParamScheduler):
        cb.hps = {k: v.tolist() for k, v in state.items()}
    else:
        if state['monitor'] != cb.monitor:
            raise ValueError(
                f"{type(cb).__name__}(monitor={cb.monitor!r}): the fit to go on with followed {state['monitor']!r}."
            )
        cb.best = state['best']
        if state['wait'] is not None:
            cb.wait = state['wait']


def number(o):
    "What the Recorder has of a metric, in plain types; NaN for what is no number."
    if isinstance(o, (torch.Tensor, np.ndarray, np.generic)):
        return o.item() if math.prod(o.shape) == 1 else math.nan
    return o if o is None or isinstance(o, (bool, int, float, str)) else math.nan


def _numbers(o):
    return torch.tensor([float(v) for v in o], dtype=torch.float64)

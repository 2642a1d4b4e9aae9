"fastai 2: other callbacks that save models, and what becomes of them beside ours."

from __future__ import annotations

from fastai.callback.tracker import SaveModelCallback

from ..training.save_policy import SavePolicy
from .fit import Fit

__all__ = ['replace_other_savers']


def replace_other_savers(
    cb: SaveModelCallback,  # ours
    fit: Fit,  # that begins
) -> None:
    """`ValueError` if another callback saves to the same file. One of stock's that `WandbCallback(log_model=True)` has
    added by itself rests during the fit: W&B then finds ours as `learn.save_model`."""
    learn = cb.learn
    ours = _targets(cb)
    for other in learn.cbs:
        if not isinstance(other, SaveModelCallback) or other is cb or not _targets(other) & ours:
            continue
        if type(other) is SaveModelCallback and any(type(o).__name__ == 'WandbCallback' for o in learn.cbs):
            _rest(other, cb, fit)
            continue
        raise ValueError(
            f'{type(other).__name__} and {type(cb).__name__} both save to {str(cb.fname)!r}: '
            'give each an fname (and a `last`) of its own.'
        )


def _targets(cb):
    if hasattr(type(cb), 'policy'):
        return cb.policy.targets()
    return SavePolicy(cb.fname, cb.every_epoch, cb.at_end).targets()


def _rest(other, cb, fit):
    "Its events are not sent to it, and the attribute is ours, until the fit is over."
    learn = cb.learn
    other.run = False
    vars(learn)[cb.name] = cb
    fit.callback(vars(learn).update, {cb.name: other})
    fit.callback(setattr, other, 'run', True)

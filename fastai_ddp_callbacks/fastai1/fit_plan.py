"fastai 1: what makes two fits of one kind, so that one of them can be resumed by the other."

from __future__ import annotations
from typing import Any

import numpy as np
from fastai.callback import Callback, OptimWrapper
from fastai.callbacks.general_sched import GeneralScheduler
from fastai.callbacks.one_cycle import OneCycleScheduler

from ..checkpoint.state import to_builtin
from ..training.resume_files import FROM_SCRATCH

__all__ = ['check_plan', 'fit_plan', 'has_schedule']

_LENGTHS = 'lengths of phases'  # in batches, so that they may differ with the number of ranks
_CYCLE = ('lr_max', 'moms', 'div_factor', 'pct_start', 'final_div')


def has_schedule(
    callbacks: list[Callback],  # of a fit
) -> bool:
    "Whether hyperparameters depend on the number of epochs."
    return any(isinstance(cb, (OneCycleScheduler, GeneralScheduler)) for cb in callbacks)


def fit_plan(
    opt: OptimWrapper,  # the optimizer as it is when a fit begins
    callbacks: list[Callback],  # of the fit
) -> dict[str, str]:
    "The optimizer, its hyperparameters, and where each schedule will have them, in words."
    groups = opt.opt.param_groups
    cycles = [cb for cb in callbacks if isinstance(cb, OneCycleScheduler)]
    phases = [phase for cb in callbacks if isinstance(cb, GeneralScheduler) for phase in cb.phases]
    scheduled = {name for phase in phases for name in phase.scheds}  # an interrupted fit leaves some value of these
    if cycles:
        scheduled |= {'lr', 'mom'}
    plan: dict[str, Any] = {
        'optimizer': type(opt.opt).__name__,
        'parameters by group': [sum(p.numel() for p in group['params']) for group in groups],
        'trained parameters': [sum(p.numel() for p in group['params'] if p.requires_grad) for group in groups],
        'true_wd': opt.true_wd,
        'bn_wd': opt.bn_wd,
    }
    values = {'wd': opt._wd}
    values.update((name, [dict(_hypers(group)).get(name) for group in groups]) for name, _ in _hypers(groups[0]))
    for name, by_group in values.items():
        if name not in scheduled:
            is_one = all(value == by_group[0] for value in by_group)
            plan[name] = by_group[0] if is_one else by_group
    for cycle in cycles:
        plan['one-cycle schedule'] = ', '.join(f'{name}={to_builtin(getattr(cycle, name))}' for name in _CYCLE)
    if phases:
        plan['phases'] = [_course(phase) for phase in phases]
        plan[_LENGTHS] = [phase.length for phase in phases]
    return {name: str(to_builtin(value)) for name, value in plan.items()}


def check_plan(
    path: str,  # the file that the first plan comes from, for the message
    was: dict[str, str],  # plan of the fit that was interrupted
    now: dict[str, str],  # plan of the one that is to continue it
    same_ranks: bool,  # whether both have the same number of ranks
) -> None:
    "`ValueError` if they are not of one kind."
    names = [name for name in {**was, **now} if name != _LENGTHS or same_ranks]
    differ = [name for name in names if was.get(name) != now.get(name)]
    if differ:
        what = '; '.join(f'{name} was {was.get(name, "none")} and is {now.get(name, "none")}' for name in differ[:3])
        raise ValueError(f'{path} belongs to a different kind of fit: {what}. {FROM_SCRATCH}')


def _hypers(group):
    "Those of a group of parameters, by fastai's names. It holds weight decay itself."
    for name, value in group.items():
        if name == 'betas':
            yield from zip(('mom', 'beta'), value)
        elif name not in ('params', 'weight_decay'):
            yield {'momentum': 'mom', 'alpha': 'beta'}.get(name, name), value


def _course(phase):
    "The hyperparameters at nine points of a phase."
    return {
        name: [_rounded(sched.func(sched.start, sched.end, i / 8)) for i in range(9)]
        for name, sched in phase.scheds.items()
    }


def _rounded(values):
    return [f'{value:.6g}' for value in np.ravel(values)]  # the last bits are each machine's own

"fastai 2: what an evaluation during a fit changes, and has to leave as it was."

from __future__ import annotations
import copy

from fastai.learner import Learner

from .loader_state import own_state, restore_own

__all__ = ['FitState']

# of the learner's loop; `final_record` is not among them, as `validate` returns it after its last event
_LOOP = (
    *('epoch', 'n_epoch', 'train_iter', 'pct_train', 'iter', 'n_iter', 'dl', 'xb', 'yb', 'pred'),
    *('loss', 'loss_grad', 'smooth_loss', 'training', 'create_mbar'),
)


class FitState:
    """Where a fit is: the learner's loop, the state of fastai's own callbacks and of the metrics, and random states.

    `learn.validate()`, `get_preds`, `tta` and `show_results` use all of these for themselves. A fit in which somebody
    calls them goes on as if nobody had."""

    def __init__(
        self,
        learn: Learner,  # in a fit
        members: set,  # `id` of the callbacks of the fit: others are there for the evaluation
    ):
        self.learn = learn
        self.loop = {name: vars(learn)[name] for name in _LOOP if name in vars(learn)}
        self.objects = [(o, {k: _copied(v) for k, v in vars(o).items()}) for o in _stateful(learn, members)]
        self.modes = [(module, module.training) for module in learn.model.modules()]
        self.random = own_state(learn)

    def restore(self) -> None:
        "Bring it back."
        vars(self.learn).update(self.loop)
        for o, before in self.objects:
            vars(o).clear()
            vars(o).update(before)
        for module, training in self.modes:
            module.training = training
        restore_own(self.learn, self.random)


def _stateful(learn, members):
    "fastai's own callbacks and what the Recorder adds up; others see an evaluation as in any fit."
    yield from (cb for cb in learn.cbs if id(cb) in members and type(cb).__module__.startswith('fastai.'))
    yield from learn.metrics
    recorder = vars(learn).get('recorder')
    if recorder is not None:
        yield from (recorder.loss, recorder.smooth_loss)


def _copied(value):
    "Lists grow in place."
    return copy.copy(value) if isinstance(value, (list, dict, set)) or type(value).__name__ == 'L' else value

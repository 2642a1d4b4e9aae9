"fastai 2: one call of `learn.fit` is one object, and our callbacks hear of nothing else."

from __future__ import annotations
import copy
from contextlib import ExitStack

from fastai.callback.core import Callback
from fastai.learner import Learner

from . import learner  # noqa: F401 (gives the timeline to Learner)
from .stock import reduce_to_stock
from .watch import FitWatch, watch_on

__all__ = ['Fit', 'FitCallback', 'WatchedCallback', 'running_fit', 'is_evaluating']


class Fit(ExitStack):
    """One running call of `learn.fit`, from `before_fit` until it has returned or raised.

    What a callback takes for the time of the fit (a lock, a signal handler, a changed method) it registers here, with
    `enter_context` or `callback`, and the fit gives it back in reverse order, however it ends."""

    def __init__(
        self,
        learn: Learner,  # the learner that is trained
    ):
        super().__init__()
        self.learn = learn
        self.failed = True  # until it has ended well
        self.announced = False  # whether its `before_fit` is being sent, or has been
        self.ignored = hasattr(learn, 'lr_finder')  # `lr_find` trains and throws the result away: nothing to follow
        self.first_epoch = 0  # epochs before it are passed over, without an event
        self.starts_over = False  # whether there was nothing to resume, although it would have been
        self.agreed: dict = {}  # (monitor, reduce) -> the value of this epoch, which all trackers share
        self.trained = False  # whether any batch was to be trained yet
        self.completed: set = set()  # parts of this epoch that ran and were not cancelled: 'train', 'validate'
        self.members = set(map(id, learn.cbs))  # the callbacks that heard it begin

    def begin(self) -> None:
        "Start our callbacks, in their order, now that every callback of the learner knows of the fit."
        if self.ignored:
            return
        for cb in self.learn.cbs.sorted('order'):
            if getattr(type(cb), 'hears_fits_only', False):
                self.callback(self._end, cb)
                cb.begin(self)

    def _end(self, cb):
        cb.end(self)

    def note(
        self,
        event_name: str,  # an event of the fit itself
    ) -> None:
        "Note which parts of the epoch ran: after a cancelled one the Recorder's last row may be of an earlier epoch."
        if event_name == 'before_epoch':
            self.agreed, self.completed = {}, set()
        elif event_name == 'before_train':
            self.trained = True
        elif event_name in ('after_train', 'after_validate'):
            self.completed.add(event_name.removeprefix('after_'))
        elif event_name == 'after_cancel_epoch':
            self.completed.clear()


def running_fit(
    learn: Learner,  # any learner
) -> Fit | None:
    "The fit that is running on a watched learner; None if there is none."
    watch = watch_on(learn)
    return watch.fit if watch else None


def is_evaluating(
    learn: Learner,  # a watched learner
) -> bool:
    "Whether what is running is no part of a fit itself: an evaluation, in a fit or outside of one."
    watch = watch_on(learn)
    return watch is None or watch.fit is None or watch.evaluations.level > 0


class WatchedCallback(Callback):
    "A callback whose learner is watched, so that it knows whether a fit is running, and what is called during one."

    is_watched = True
    _learn: Learner | None = None

    @property
    def learn(self):
        return self._learn

    @learn.setter
    def learn(self, learn):
        before = self._learn
        vars(self)['_learn'] = learn
        if learn is not None:
            watch_on(learn) or FitWatch(learn, Fit)
        elif before is not None and (watch := watch_on(before)):
            watch.remove_unless_needed(besides=self)


class FitCallback(WatchedCallback):
    """A callback that hears of fits only: of no `validate`, `get_preds`, `tta`, `show_results` or `lr_find`, wherever
    these are called. Its events are those of the outermost fit. Pickled with its learner, it becomes one of fastai's
    own."""

    hears_fits_only = True

    def __reduce_ex__(self, protocol):
        return super().__reduce_ex__(protocol) if self.learn is None else reduce_to_stock(self)

    def __deepcopy__(self, memo):
        new = memo[id(self)] = type(self).__new__(type(self))
        vars(new).update(copy.deepcopy(self.__getstate__(), memo))
        return new

    def begin(
        self,
        fit: Fit,  # the fit that begins; `before_fit` has been sent to all callbacks
    ) -> None:
        "Once per fit, before its first epoch."

    def end(
        self,
        fit: Fit,  # the fit that `begin` was called with; its `failed` says whether it raised
    ) -> None:
        "Once per fit that began, when it has returned or raised."

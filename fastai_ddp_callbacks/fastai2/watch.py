"""fastai 2: the watch on a learner, which separates the events of a fit from those of evaluations during it.

fastai sends the events of a fit (`before_fit`, `before_epoch`, ...) from `validate`, `get_preds`, `tta`,
`show_results` and `lr_find` too, even while a fit is running, and sends no event when a fit raises. So a learner is
watched, as long as one of our callbacks is on it, at the methods that everything passes through: `_with_events`,
which runs a fit and each of its parts, `_do_epoch_validate`, which evaluates, and `_call_one`, which sends one event
to all callbacks."""

from __future__ import annotations
import copy
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

from fastai.learner import Learner, Recorder

from .evaluation import FitState

__all__ = ['FitWatch', 'watch_on']

_METHODS = ('_with_events', '_call_one', '_do_epoch_validate')
_BATCH = ('before_batch', 'after_pred', 'after_loss', 'after_batch')
_FRAME = ('before_fit', 'before_epoch', 'after_epoch', 'after_fit')  # the events that an evaluation borrows from a fit


class FitWatch:
    "The watch on one learner: keeps the running fit, and separates its events from those of evaluations."

    def __init__(
        self,
        learn: Learner,  # to be watched
        new_fit: Callable,  # makes the object of a fit of the learner
    ):
        self.new_fit = new_fit
        self.shadowed = {name: vars(learn)[name] for name in _METHODS if name in vars(learn)}  # another package's
        self._reset(learn)
        learn._with_events = _Watched(self.with_events, self)
        learn._call_one = _Watched(self.call_one, self)
        learn._do_epoch_validate = _Watched(self.do_epoch_validate, self)

    def _reset(self, learn):
        self.learn = learn
        self.inner = [self.shadowed.get(name) or MethodType(getattr(type(learn), name), learn) for name in _METHODS]
        self.fit: Any = None
        self.depth: list[str] = []  # of what is running: 'epoch' while its events are sent, 'epoch body' between them
        self.evaluations: Any = None  # the `_Evaluations` of the running fit

    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.new_fit = self.new_fit
        new.shadowed = copy.deepcopy(self.shadowed, memo)
        new._reset(copy.deepcopy(self.learn, memo))
        return new

    def remove_unless_needed(self, besides=None) -> None:
        "Leave the learner as it was, unless a fit is running or another callback needs the watch."
        if self.fit or any(_is(cb, 'is_watched') and cb is not besides for cb in self.learn.cbs):
            return
        for name in _METHODS:
            vars(self.learn).pop(name, None)
        vars(self.learn).update(self.shadowed)

    # -- a fit and its parts

    def with_events(self, f, event_type, *args, **kwargs):
        "In the place of `Learner._with_events`."
        if self.fit is None and event_type == 'fit':
            return self._fit(f, event_type, *args, **kwargs)
        if self.fit is None or event_type in ('batch', 'backward', 'step'):
            return self.inner[0](f, event_type, *args, **kwargs)
        if self._is_own_part(event_type):
            self.evaluations.abandon()
            if event_type == 'epoch' and self.learn.epoch < self.fit.first_epoch:
                return None
            return self._part(f, event_type, *args, **kwargs)
        with self.evaluations.one():
            return self._part(f, event_type, *args, **kwargs)

    def do_epoch_validate(self, *args, **kwargs):
        "In the place of `Learner._do_epoch_validate`, which sets `learn.dl` before its first event."
        if self.fit is None or self._is_own_part('validate'):
            return self.inner[2](*args, **kwargs)
        with self.evaluations.one():
            return self.inner[2](*args, **kwargs)

    def _is_own_part(self, event_type):
        "Whether the fit itself runs this, and no callback: an epoch in the fit, training and validation in the epoch."
        return self.depth == (
            ['fit', 'fit body'] if event_type == 'epoch' else ['fit', 'fit body', 'epoch', 'epoch body']
        )

    def _fit(self, *args, **kwargs):
        try:
            with self.new_fit(self.learn) as self.fit:
                self.evaluations = _Evaluations(self.learn, self.fit.members)
                result = self._part(*args, **kwargs)
                self.fit.failed = False
                return result
        finally:
            self._reset(self.learn)
            self.remove_unless_needed()

    def _part(self, f, event_type, *args, **kwargs):
        level = len(self.depth)

        def body():
            self.depth.append(f'{event_type} body')
            try:
                f()
            finally:
                del self.depth[level + 1 :]

        self.depth.append(event_type)
        try:
            return self.inner[0](body, event_type, *args, **kwargs)
        finally:
            del self.depth[level:]

    # -- an event

    def call_one(self, event_name):
        "In the place of `Learner._call_one`."
        fit = self.fit
        if fit is None:
            return self._send(event_name, _hears_anything)
        begins = event_name == 'before_fit' and not fit.announced
        if begins:
            fit.announced = True
        elif event_name == 'before_fit':
            self.evaluations.begin()
        if self.evaluations.level:
            return self._send_in_evaluation(event_name)
        if fit.ignored or self._is_extra_batch(event_name):
            self._send(event_name, _hears_anything)
        else:
            fit.note(event_name)
            self.inner[1](event_name)
        if begins:
            fit.begin()

    def _is_extra_batch(self, event_name):
        "Whether this is of a `learn.one_batch` that a callback calls between training and validation, as loggers do."
        parts = 'train body', 'validate body'
        return event_name in _BATCH and not any(part in self.depth for part in parts)

    def _send(self, event_name, hears):
        for cb in self.learn.cbs.sorted('order'):
            if hears(cb):
                cb(event_name)

    def _send_in_evaluation(self, event_name):
        if event_name not in _FRAME:
            hears = _hears_anything
        elif 'fit' in self.depth[1:]:  # `lr_find` during a fit
            hears = _hears_a_fit_within
        else:
            hears = self._hears_evaluation
        self._send(event_name, hears)
        if event_name == 'after_fit':
            self.evaluations.end(self.evaluations.level - 1)

    def _hears_evaluation(self, cb):
        "The Recorder, which makes the row that `validate` returns, and callbacks that are there for the evaluation."
        return isinstance(cb, Recorder) or id(cb) not in self.fit.members and not _is(cb, 'is_watched')


class _Evaluations:
    "Evaluations during one fit, also within each other; when the last one ends, the fit is where it was."

    def __init__(self, learn, members):
        self.learn, self.members = learn, members
        self.level = 0
        self.state: FitState | None = None

    @contextmanager
    def one(self):
        level = self.level
        self.begin()
        try:
            yield
        finally:
            self.end(level)

    def begin(self):
        if self.level == 0:
            self.state = FitState(self.learn, self.members)
        self.level += 1

    def abandon(self):
        "End one whose end nobody saw, as its first event raised. The fit has moved on to its next part since."
        if self.level:
            part = {name: vars(self.learn)[name] for name in ('epoch', 'dl') if name in vars(self.learn)}
            self.end(0)
            vars(self.learn).update(part)

    def end(self, level):
        if self.level and not level:
            self.state.restore()
            self.state = None
        self.level = level


def _is(cb, role):
    return getattr(type(cb), role, False)


def _hears_anything(cb):
    "Everybody but those who hear of fits only."
    return not _is(cb, 'hears_fits_only')


def _hears_a_fit_within(cb):
    return not _is(cb, 'is_watched')


class _Watched:
    "A method of the watch as an attribute of the learner. With the learner it is pickled as fastai's own method."

    def __init__(self, method, watch):
        self.method, self.watch = method, watch

    def __call__(self, *args, **kwargs):
        return self.method(*args, **kwargs)

    def __reduce__(self):
        return partial, (getattr(Learner, self._name), self.watch.learn)

    @property
    def _name(self):
        return '_' + self.method.__name__

    def __deepcopy__(self, memo):
        watch = copy.deepcopy(self.watch, memo)
        return _Watched(getattr(watch, self.method.__name__), watch)


def watch_on(
    learn: Learner,  # any learner
) -> FitWatch | None:
    "The watch on a learner, if there is one."
    method = vars(learn).get('_with_events')
    return method.watch if isinstance(method, _Watched) else None

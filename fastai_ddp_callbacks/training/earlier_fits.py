"Which fits this process has finished: fits of one learner are numbered, and no other learner continues one of them."

from __future__ import annotations
import weakref
from typing import Any, NamedTuple

__all__ = ['EarlierFits', 'has_ended_here']

# by `id` of the learner, as fastai 1's cannot be hashed, and by name of the files
_finished: dict[int, dict[str, EarlierFits]] = {}
_ended_runs: set[str] = set()


class EarlierFits(NamedTuple):
    "The fits of one learner, saved under one name, that are finished."

    fits: int = 0
    last: str | None = None  # which fit the last one was, as the files of the next one record; rank 0 knows
    trained: bool = False  # whether any of them was trained in this process, and not found finished

    @classmethod
    def of(
        cls,
        learn: Any,  # a `Learner` of fastai 1 or 2
        name: str,  # of the files
    ) -> EarlierFits:
        "Those that are known of this learner."
        return _fits_of(learn).get(name, cls())

    def name(
        self,
        name: str,  # of the first fit's files
    ) -> str:
        "The name of the files of the next fit."
        return f'{name}-{self.fits + 1}' if self.fits else name

    def and_this(
        self,
        learn: Any,  # a `Learner` of fastai 1 or 2
        name: str,  # of the files
        run: str,  # that the finished fit's files belong to
        epochs: int,  # that it has trained
        was_finished: bool,  # whether it was found finished
    ) -> EarlierFits:
        "Remember one more."
        now = EarlierFits(self.fits + 1, f'{run}, {epochs} epochs', self.trained or not was_finished)
        _fits_of(learn)[name] = now
        _ended_runs.add(run)
        return now


def has_ended_here(
    run: str,  # that files belong to
) -> bool:
    "Whether a fit of that run is finished in this process."
    return run in _ended_runs


def _fits_of(learn):
    if id(learn) not in _finished:
        _finished[id(learn)] = {}
        weakref.finalize(learn, _finished.pop, id(learn), None).atexit = False
    return _finished[id(learn)]

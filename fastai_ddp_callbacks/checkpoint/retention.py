"Which checkpoints of a run stay, which go, and which is the best. Pure functions of lists of files: no disk, no ranks."

from __future__ import annotations
import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ['Saved', 'Policy', 'Kept', 'retain', 'ranked', 'is_wanted', 'in_order']


class Saved(NamedTuple):
    "A checkpoint that is on disk, whole."

    path: str
    checksum: str | None
    epoch: int
    value: float | None  # of the monitored column, as far as it was followed
    sequence: int = 0  # of two files of one run, the one that was begun later has the higher number


class Policy(NamedTuple):
    "What is to be kept."

    lower: bool = True  # whether lower values are better
    keep_best: int | None = None  # how many of the best stay; the best always does
    keep_last: int | None = None  # how many of the newest stay; the newest always does

    @property
    def selective(self) -> bool:
        "Whether not everything stays."
        return bool(self.keep_best or self.keep_last)

    def most_files(
        self,
        count: int,  # how many are to come at most
    ) -> int:
        "How many files of the run are there at one time, but for the one that is being written."
        return min(count, (self.keep_best or 1) + (self.keep_last or 0)) if self.selective else count

    def rank(
        self,
        value: float | None,  # of a checkpoint
    ) -> float:  # lower is better
        "What to sort by; without a value comes last."
        if value is None:
            return math.inf
        return value if self.lower else -value


class Kept(NamedTuple):
    "What becomes of files."

    files: list[Saved]  # that stay, oldest first
    to_delete: list[Saved]


def retain(
    files: Sequence[Saved],  # all of a run, oldest first
    best: Saved | None,  # which stays in any case; a better value may exist, if it is better by too little to count
    policy: Policy,
    protected: Collection[str] = (),  # paths that stay in any case
) -> Kept:
    "Of all files those that the policy keeps: the best ones (of equals the older ones), the newest ones, and the best."
    if not policy.selective:
        return Kept(list(files), [])
    with_value = sorted((f for f in files if f.value is not None), key=lambda f: policy.rank(f.value))
    newest = files[-(policy.keep_last or 1) :]
    kept = [*with_value[: policy.keep_best or 1], *newest, best]
    stays = [f in kept or f.path in protected for f in files]
    return Kept([f for f, s in zip(files, stays) if s], [f for f, s in zip(files, stays) if not s])


def ranked(
    files: Sequence[Saved],  # oldest first
    best: Saved | None,
    policy: Policy,
) -> list[Saved]:
    "The files with a value: the best one first, then by value; of equals the older one first."
    with_value = [f for f in files if f.value is not None]
    return sorted(with_value, key=lambda f: (f is not best, policy.rank(f.value)))


def is_wanted(
    value: float,  # of the model that there is now
    values: Sequence[float | None],  # of what has been saved
    policy: Policy,
) -> bool:
    "Whether a model of this value would be among the best that stay."
    ranks = sorted(policy.rank(v) for v in values if v is not None)
    k = policy.keep_best or 1
    return len(ranks) < k or policy.rank(value) < ranks[k - 1]


def in_order(
    metas: dict,  # of path to metadata
) -> list[Saved]:  # oldest first
    """The files by when they were begun. Not by epochs or iterations, which begin again with each fit, nor by the
    time alone, which may go back when a fit is resumed on another host."""
    found = [
        (Saved(str(path), meta['checksum'], meta['epoch'], meta['value'], _sequence(meta)), meta['time'])
        for path, meta in metas.items()
    ]
    return [saved for saved, time in sorted(found, key=lambda pair: (pair[0].sequence, pair[1]))]


def _sequence(meta):
    "0 in files of version 0.1, which are older than all that have a number."
    return meta['sequence'] if isinstance(meta.get('sequence'), int) else 0

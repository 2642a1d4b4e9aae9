"A run that was interrupted: which of the files it has left count, which are saved again, and which were to be deleted."

from __future__ import annotations
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import CheckpointError
from .disk import Disk
from .retention import Policy, Saved, retain

__all__ = ['InterruptedRun', 'Files', 'Best', 'replaced']


class Files(NamedTuple):
    "The files of an interrupted run, each list oldest first."

    counted: list[Saved]  # saved before the moment from which the run is resumed
    again: list[Saved]  # saved after it: their epochs are trained once more
    to_delete: list[Saved]  # no longer to be kept: the run was interrupted before it had deleted them


class Best(NamedTuple):
    "What counts as the best when a run is resumed."

    saved: Saved | None
    value: float
    is_lost: bool  # whether the best that the run knew is no longer there


class InterruptedRun:
    "What the last state of a run says of its files; the files themselves may tell of more."

    def __init__(
        self,
        state: dict,  # of a store: `run`, `files`, `file`, `path`, `value`, since 0.2 also `sequence` and `under_way`
        policy: Policy,
    ):
        self.state = state
        self.policy = policy
        self.known = set(state['files'])
        self.sequence = state.get('sequence', 0)
        self.under_way = set(state.get('under_way', ()))

    def sort(
        self,
        found: Iterable[Saved],  # what is on disk of this run, oldest first
    ) -> Files:
        "What becomes of the files of the run."
        found = list(found)
        again = [saved for saved in found if self._is_later(saved)]
        earlier = [saved for saved in found if saved not in again]
        best = next((saved for saved in earlier if saved.checksum == self.state['file']), None)
        is_lost = self.state['file'] is not None and best is None
        if not self.policy.selective or is_lost:  # what was to be deleted may be the best that is left
            return Files(earlier, again, [])
        to_delete = [saved for saved in earlier if not self._counts(saved)]
        kept = retain([saved for saved in earlier if saved not in to_delete], best, self.policy)
        return Files(kept.files, again, to_delete + kept.to_delete)

    def _counts(self, saved):
        "What was being written has become whole since."
        return saved.checksum in self.known or saved.sequence in self.under_way

    def _is_later(self, saved):
        "Files of version 0.1 have no sequence."
        return not self._counts(saved) and (saved.sequence == 0 or saved.sequence > self.sequence)

    def whole(
        self,
        found: Iterable[Saved],  # what is on disk of this run
        disk: Disk,  # where it is
    ) -> list[Saved]:
        """Those that are not damaged. The best and what the state does not know is verified; a warning names the
        damaged."""
        whole = []
        for saved in found:
            try:
                if self._is_new(saved):
                    disk.verify(saved.path)
            except CheckpointError as e:
                warnings.warn(str(e), stacklevel=3)
            else:
                whole.append(saved)
        return whole

    def _is_new(self, saved):
        return saved.checksum == self.state['file'] or saved.checksum not in self.known

    def best(
        self,
        files: Files,
        better: Callable[[float, float], bool],  # whether the first value counts as better than the second
        worst: float,  # value that any other is better than
        name_of: Callable[[str], str],  # of a path, as the state has it
    ) -> Best:
        "The best from now on: that of the state, or what was saved after it and is better."
        best = next((saved for saved in files.counted if saved.checksum == self.state['file']), None)
        value = worst if self.state['value'] is None else self.state['value']
        for saved in files.counted + files.again:
            if self._is_new(saved) and saved.value is not None and better(saved.value, value):
                best = saved
                value = saved.value
        was_overwritten = any(name_of(saved.path) == self.state['path'] for saved in files.again)
        if best or not self.state['file'] or self.state.get('finished') or was_overwritten:
            return Best(best, value, False)
        with_value = [saved for saved in files.counted if saved.value is not None]
        best = min(with_value, key=lambda saved: self.policy.rank(saved.value), default=None)
        return Best(best, worst if best is None or best.value is None else best.value, True)


def replaced(
    again: Iterable[Saved],  # saved of epochs that are trained once more
    epoch: int,  # of a model that is to be saved
    value: float | None,  # of it
    best: Saved | None,
    policy: Policy,
) -> set[str]:  # paths
    """What a save of this epoch takes the place of: what was saved of it before; not the best, unless the new one is
    as good."""

    def gives_way(saved):
        return saved != best or value is not None and policy.rank(value) <= policy.rank(saved.value)

    return {saved.path for saved in again if saved.epoch == epoch and gives_way(saved)}

"The list of the files of a run, the same on all ranks: which of them is the best, and what a new one displaces."

from __future__ import annotations
import os, secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from .interrupted import InterruptedRun, replaced
from .retention import Policy, Saved, is_wanted, ranked, retain

__all__ = ['KeptFiles', 'Resumed']


class Resumed(NamedTuple):
    "How a run is resumed."

    best: float  # the value to compare with from now on
    warning: str | None  # what the user should know


class KeptFiles:
    "What a run has saved and keeps. Touches no disk; what it returns as no longer to be kept rank 0 deletes."

    def __init__(
        self,
        folder: str | Path,  # where the files are
        policy: Policy,
    ):
        self.folder = Path(folder).absolute()
        self.policy = policy
        self.run = secrets.token_hex(6)  # rank 0's is in the files
        self.files: list[Saved] = []  # oldest first
        self.best: Saved | None = None
        self.again: list[Saved] = []  # saved of epochs that are trained once more
        self.resumed: str | None = None  # path of the file with which this process went on
        self._added: set[Saved] = set()
        self._sequence = 0  # of the file that was begun last
        self._under_way: set[int] = set()  # sequences of files that were begun and are not yet added

    @property
    def selective(self) -> bool:
        "Whether not everything stays. Without fields or retention a name is overwritten, or every epoch has its own."
        return self.policy.selective

    def wants(
        self,
        epoch: int,
        value: float,  # of the model that there is now
        others: Sequence[float | None] = (),  # values of what is being written
    ) -> bool:
        "Whether `value` is among the best of the run."
        gone = self.replaced(epoch, value)
        return is_wanted(value, [*(f.value for f in self.files if f.path not in gone), *others], self.policy)

    def add(
        self,
        saved: Saved,  # durable; one that is there already changes nothing
        best: bool = False,  # whether it is the best now
    ) -> list[Saved]:  # what is no longer to be kept
        "Note what rank 0 has written, and forget what it is to delete."
        if saved in self._added:
            return []
        self._added.add(saved)
        self._sequence = max(self._sequence, saved.sequence)
        self._under_way.discard(saved.sequence)
        gone = self.replaced(saved.epoch, saved.value)
        if best or self.best and self.best.path in gone:
            self.best = saved
        elif self.best and self.best.path == saved.path:
            self.best = None  # overwritten
        to_delete = [f for f in self.again if f.path in gone and f.path != saved.path] if self.selective else []
        dropped = {saved.path, *(f.path for f in to_delete)}
        self.files = [f for f in self.files if f.path not in dropped] + [saved]
        self.again = [f for f in self.again if f.path not in gone]
        return to_delete + self.forget()

    def replaced(
        self,
        epoch: int,
        value: float | None,  # of a model that is to be saved
    ) -> set[str]:  # paths
        "What this run has saved of the same epoch before it was interrupted, without what was better then."
        return replaced(self.again, epoch, value, self.best, self.policy)

    def forget(self) -> list[Saved]:  # what is no longer to be kept
        "Forget what rank 0 is to delete."
        kept = retain(self.files, self.best, self.policy, [self.resumed] if self.resumed else ())
        self.files = kept.files
        return kept.to_delete

    def ranked(self) -> list[Saved]:
        "Those with a value, the best first, then by value; of equals the older."
        return ranked(self.files, self.best, self.policy)

    def name_of(
        self,
        path: str | Path,  # of a file of the run
    ) -> str:
        "Its name with folders, as seen from the run's folder: so a folder may be moved."
        return Path(os.path.relpath(path, self.folder)).as_posix()

    def state(self) -> dict:
        "What an interrupted run needs to be resumed: plain values. Rank 0's is right."
        best = self.best
        return dict(
            run=self.run,
            files=[f.checksum for f in self.files],
            file=best and best.checksum,
            path=best and self.name_of(best.path),
            value=best and best.value,
            sequence=self._sequence,
            under_way=sorted(self._under_way),
        )

    def resume(
        self,
        state: dict,  # of a callback in the run that was interrupted: the `state` of its store, and `monitor`
        found: Sequence[Saved],  # what rank 0 has `found_whole` of that run
        better: Callable[[float, float], bool],  # whether the first value counts as better than the second
        worst: float,  # value that any other is better than
    ) -> Resumed:
        "Resume with the files of that run. A warning if the best is no longer there, and would be needed."
        run = InterruptedRun(state, self.policy)
        files = run.sort(found)
        best = run.best(files, better, worst, self.name_of)
        self.run = state['run']
        self.files = sorted(files.counted + files.again, key=list(found).index)
        self.again = files.again
        self.best = best.saved
        self._sequence = max([self._sequence, run.sequence, *(f.sequence for f in found)])
        if not best.is_lost:
            return Resumed(best.value, None)
        instead = f'the best that is left, with {best.value}, takes its place.'
        return Resumed(
            best.value,
            f'The best model of the resumed run, with {state["monitor"]} value {state["value"]}, '
            'is no longer there: ' + (instead if best.saved else 'the next one counts as the best.'),
        )

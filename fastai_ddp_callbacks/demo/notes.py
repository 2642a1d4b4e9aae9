"What each rank notes in a file of its own, so that the parent can judge whatever became of the rank."

from __future__ import annotations
import json, time
from pathlib import Path
from typing import Any

__all__ = ['FAILED', 'LOADED', 'SAVED', 'STARTED', 'TRAINED', 'WANTS', 'WEIGHTS', 'Notebook', 'read_notes']

TRAINED = 'trained the last epoch'
SAVED = 'saved'
WANTS = 'wants to load'
LOADED = 'loaded'
FAILED = 'failed'
# for the parent only, not printed as lines of their own
STARTED = 'started'
WEIGHTS = 'weights'


class Notebook:
    "Where one rank notes what it does and when."

    def __init__(
        self,
        folder: str | Path,  # that of all ranks' notes
        rank: int,  # whose notes these are
    ):
        self.rank = rank
        self.file = open(Path(folder) / f'{rank}.notes', 'w', buffering=1)

    def note(
        self,
        what: str,  # one of the constants of this module
        **details: Any,  # more that JSON can hold
    ) -> None:
        "Write one line, with the time."
        print(json.dumps(dict(time=time.time(), rank=self.rank, what=what, **details)), file=self.file)


def read_notes(
    folder: str | Path,  # that of all ranks' notes
) -> list[dict]:  # each with `time`, in s since the epoch, `rank`, `what` and details
    "The notes of all ranks in the order of time."
    lines = []
    for file in sorted(Path(folder).glob('*.notes')):
        lines += file.read_text().splitlines(keepends=True)
    # a rank that was killed may leave half a line
    notes = [json.loads(line) for line in lines if line.endswith('\n')]
    return sorted(notes, key=lambda note: note['time'])

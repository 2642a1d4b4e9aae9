"What rank 0 does to save: it prepares the store, writes, at once or in the background, and deletes."

from __future__ import annotations
from functools import partial
from typing import Any, NamedTuple

from ..checkpoint.background import Writer
from ..checkpoint.store import Store, delete
from ..distributed import print_on_main
from ..distributed.progress import with_progress
from ..errors import CheckpointError, CheckpointWriteError
from .save_policy import SavePolicy
from .tracking import Verdict

__all__ = ['SaverOnMain', 'Snapshot']


class Snapshot(NamedTuple):
    "What rank 0 is to save."

    state: dict  # of the model, or {'model':..., 'opt':...}
    fields: dict  # what the name of the file may say
    meta: dict  # what the file says of itself


class SaverOnMain:
    "The half of a `Saver` that runs on rank 0, while the other ranks wait for it."

    def __init__(
        self,
        policy: SavePolicy,
        store: Store,  # where the files go
    ):
        self.policy = policy
        self.store = store
        self.writer = Writer()
        self.due: list[Verdict] = []  # of the saves whose outcome is not known yet, the oldest first; on all ranks

    def _prepare(self, size, epochs, state, again, takes_over):
        if again:
            self._finish_earlier_write()
        try:
            self.store.prepare(size(), -(-epochs // (self.policy.save_interval or 1)))
        except CheckpointWriteError as e:
            if self.policy.on_error == 'raise':
                raise
            print_on_main(str(e), warn=True)
        if state:
            return self.store.found_whole(state), None, self.store.run, []
        if takes_over:
            self.store.replace_killed_run()
        return self.store.files, self.store.best, self.store.run, self.store.again

    def _finish_earlier_write(self):
        "Of an earlier fit that raised while it was writing."
        writer, self.writer = self.writer, Writer()
        if not writer.busy:
            return
        try:
            saved = writer.wait()
        except CheckpointError as e:
            print_on_main(str(e), warn=True)
        else:
            for old in self.store.add(saved, self.due[0].best):
                delete(old, self.store.disk)

    def write_on_main(
        self,
        snapshot: Snapshot,
        now: bool,  # whether to wait until it is written
        name: str | None = None,  # of the file; the next of the store's by default
    ) -> list:  # outcomes of what was being written, and of this one if `now`
        "Write, or begin to write. Only on rank 0."
        outcomes = self._finished()
        verdict = self.due[-1]
        path = self._path(snapshot.fields, verdict) if name is None else self.store.folder / f'{name}.pth'
        write: Any = self.store.begin(path, snapshot.meta)
        if now:
            write = partial(with_progress, f'saving {path.name}', write, snapshot.state)
            return [*outcomes, self._outcome(write, verdict)]
        self.writer.start(write, snapshot.state)
        return outcomes

    def _path(self, fields, verdict):
        return self.store.place(fields, self.store.replaced(verdict.epoch, verdict.value))

    def _finished(self, if_done=False):
        "The outcome of what is being written, when it is done. None if nothing is, or, with `if_done`, not yet."
        if not self.writer.busy or if_done and not self.writer.done:
            return []
        return [self._outcome(self.writer.wait, self.due[0])]

    def _outcome(self, written, due):
        "The `Saved`, after which others may be deleted; or the reason why there is none."
        try:
            saved = written()
        except CheckpointWriteError as e:
            if self.policy.on_error == 'raise':
                raise
            return str(e)
        for old in self.store.add(saved, due.best):
            delete(old, self.store.disk)
        return saved

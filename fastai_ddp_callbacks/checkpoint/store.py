"""The checkpoints of one run in a folder: their names, which of them stay, and which is the best.

All ranks have the same list. Rank 0 alone touches the disk, between two barriers: it saves first, and deletes what is
no longer to be kept when the new file is durable. Nothing is deleted that this run has not written."""

from __future__ import annotations
import os, warnings
from collections.abc import Callable, Collection
from pathlib import Path

from ..errors import CheckpointError, CheckpointWriteError
from .disk import Disk
from .interrupted import InterruptedRun
from .kept import KeptFiles, Resumed
from .names import Template, check_name, lock_name, numbered
from .retention import Policy, Saved, in_order

__all__ = ['Saved', 'Store', 'Resumed', 'check_name', 'delete', 'in_order']


class Store(KeptFiles):
    "What one run has saved under one name: the list of `KeptFiles`, and on rank 0 the files themselves."

    def __init__(
        self,
        folder: str | Path,  # where
        fname: str | Path,  # name without suffix, which may have fields: 'model-{epoch}-{accuracy:.3f}'
        lower: bool = True,  # whether lower values are better
        keep_best: int | None = None,  # how many of the best stay; the best always does
        keep_last: int | None = None,  # how many of the newest stay; the newest always does
        last: str | None = None,  # a name that the newest has too
        several: bool = False,  # whether a name without fields gets the epoch
        disk: Disk | None = None,  # where files are written, listed and deleted
    ):
        super().__init__(folder, Policy(lower, keep_best, keep_last))
        self.disk = disk or Disk()
        self.last = last
        self.fields = Template(fname).fields
        self.several = several or bool(self.fields)
        self.template = Template(fname).with_epoch() if several else Template(fname)
        reserved = {self.template.text: self.template, **({Template(last).text: Template(last)} if last else {})}
        self.locks = [self._lock(name) for name in reserved.values()]

    def prepare(
        self,
        size: int,  # bytes of one checkpoint, about
        count: int,  # how many are to come at most
    ) -> None:
        """Reserve the name, remove what killed runs have left half written, and warn if the disk is too small.
        `CheckpointInUseError` if another run has the name, `CheckpointWriteError` if nothing can be written."""
        for lock in self.locks:
            lock.acquire()
        for folder in {self.folder, *(lock.path.parent for lock in self.locks)}:
            self.disk.sweep(folder)
        most = self.policy.most_files(count) if self.selective or self.several else 1
        needed = size * (most + 1)  # one more while the next one is written
        free = self.disk.free(self._base(self.template), self._path(self.template.text))
        _warn_of_little_space(self.folder, free, needed)

    def release(self) -> None:
        "Let other runs have the name."
        self.again = []  # another fit has epochs of the same numbers
        for lock in self.locks:
            lock.release()

    def replace_killed_run(self) -> None:
        """Take the files of the run from which the name was taken over, as it had been killed, for those of this one:
        each is replaced when its epoch is saved again. To be called after `prepare` where that run would have gone
        on, if it had lived long enough to save what it needs for that; any other one's files are not this run's."""
        run = self.locks[0].killed_run
        if run:
            self.again = self._found(run)
            self._sequence = max((saved.sequence for saved in self.again), default=0)
            self.run = run
            for lock in self.locks:
                lock.record(run)

    def place(
        self,
        fields: dict,  # names and values, of the template
        over: Collection[str] = (),  # paths of this run that may be overwritten, beside the only one of a plain name
    ) -> Path:
        "Where the next file goes: no file is overwritten that another run has made, or that is kept."
        path = self._path(self.format(fields))
        if self.fields or self.selective and self.several:
            return numbered(path, lambda other: self.disk.is_taken(other) and str(other) not in over)
        return path

    def begin(
        self,
        path: str | Path,  # as `place` gave it
        meta: dict,  # more metadata; `epoch` and `value` are needed
    ) -> Callable[..., Saved]:  # called with the state, and a `progress` for `write_checkpoint`; may run in a thread
        "Number the next file, in the order in which files are asked for, and return what writes it."
        meta = dict({'sequence': self._sequence + 1}, **meta, run=self.run, name=self.name_of(path))
        self._sequence = meta['sequence']
        self._under_way.add(self._sequence)

        def write(state, progress=None):
            written = self.disk.write(state, str(path), meta, progress)
            if self.last:
                try:
                    self.disk.also_call(str(path), str(self._path(self.last)))
                except CheckpointWriteError as e:
                    warnings.warn(f'{path} is saved, but cannot have its second name: {e}', stacklevel=2)
            return Saved(str(path), written['checksum'], meta['epoch'], meta['value'], meta['sequence'])

        return write

    def write(
        self,
        state,  # for `write_checkpoint`
        path: str | Path,  # as `place` gave it
        meta: dict,  # more metadata; `epoch` and `value` are needed
        progress: Callable[[int, int], object] | None = None,  # as for `write_checkpoint`
    ) -> Saved:
        "Number and write a file at once."
        return self.begin(path, meta)(state, progress)

    def found_whole(
        self,
        state: dict,  # as for `resume`
    ) -> list[Saved]:  # oldest first
        """Take the place of a run that was interrupted. What it had not come to delete is deleted. Its best, and what
        it saved later, is verified; a warning names what is damaged, which does not count."""
        self.run = state['run']
        run = InterruptedRun(state, self.policy)
        whole = run.whole(self._found(self.run), self.disk)
        to_delete = run.sort(whole).to_delete  # only of what is whole: a damaged file displaces none
        for saved in to_delete:
            delete(saved, self.disk)
        return [saved for saved in whole if saved not in to_delete]

    def _found(self, run):
        "The `Saved` of a run that are on disk, oldest first: the run may have gone on after its state was saved."
        metas = {path: self.own_metadata(path) for path in self.disk.list(self._base(self.template))}
        return in_order({path: meta for path, meta in metas.items() if meta and meta.get('run') == run})

    def own_metadata(
        self,
        path: str | Path,  # of a file in the folder
    ) -> dict | None:
        "What a file says of itself; None if it is damaged, a stock one, or a copy that somebody has made."
        try:
            meta = self.disk.metadata(str(path))
        except CheckpointError:
            return None
        return meta if meta and meta.get('name') == self.name_of(path) else None

    def format(
        self,
        fields: dict,  # names and values, of the template
    ) -> str:
        "The name of a file, without suffix."
        return self.template.format(fields)

    def _path(self, name):
        return self.folder / f'{os.path.normpath(str(name))}.pth'

    def _base(self, template):
        "The folder of all files of a template, without the parts that differ."
        return self.folder / template.folder()

    def _lock(self, template):
        base = self._base(template)
        path = base / lock_name(self.folder / template.text, base)
        return self.disk.lock(path, f'{template.text!r} in {self.folder}', self.run)


def _warn_of_little_space(folder, free, needed):  # in bytes
    if free < needed:
        warnings.warn(
            f'{folder} has {free / 1e6:.1f} MB left. The checkpoints of this run will need about '
            f'{needed / 1e6:.1f} MB: saving may fail.',
            stacklevel=3,  # where `prepare` was called
        )


def delete(
    saved: Saved,  # no longer to be kept
    disk: Disk | None = None,  # where it is
) -> None:
    "Remove a file, if it is still the one that was written; else warn. Training continues."
    disk = disk or Disk()
    try:
        if saved.checksum and (disk.metadata(saved.path) or {}).get('checksum') == saved.checksum:
            disk.delete(saved.path)
            return
    except (OSError, CheckpointError) as e:
        warnings.warn(f'{saved.path} is no longer to be kept and could not be deleted: {e}', stacklevel=2)
        return
    warnings.warn(
        f'{saved.path} is not deleted, although it is no longer to be kept: something else has written it since.',
        stacklevel=2,
    )

"""What a store asks of the place where its files are: this class is the folder on a disk.

For another storage give `Store` an object with the same methods. Paths are those that `Store` has made from its
folder and its names; nothing else in this folder of modules touches what a store has saved."""

from __future__ import annotations
import errno, os, shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from .atomic import sweep, temporary_beside, write_error
from .file import open_regular, read_metadata, verify_checkpoint, write_in_place
from .lock import Lock
from .lock_file import remove_dead_locks

__all__ = ['Disk']

_MANY = 5000  # folders in which killed runs are looked for, at most
_ABANDONED = 24 * 3600  # seconds after which another host's silent lock counts as a dead run's


class Disk:
    "A folder on a disk, for one writer at a time."

    def write(
        self,
        state,  # for `write_checkpoint`
        path: str,
        meta: dict,  # for `write_checkpoint`
        progress: Callable[[int, int], object] | None = None,  # called with the bytes written and the bytes there are
    ) -> dict:  # the metadata of the file, with its checksum
        """Make or replace a file, durable when this returns. `CheckpointWriteError`, with what was there unchanged,
        if that fails. May be called in a thread."""
        return write_in_place(state, path, meta, progress)

    def also_call(
        self,
        path: str,  # of a file that is there
        name: str,  # another path for it; what was there is replaced
    ) -> None:
        "Give a file a second name, in one step; a copy where the disk knows no hard links. `CheckpointWriteError`."
        target = Path(name)
        new = temporary_beside(target)
        try:
            if target.is_dir() and not target.is_symlink():
                raise IsADirectoryError(errno.EISDIR, 'Is a directory')
            target.parent.mkdir(parents=True, exist_ok=True)
            sweep(target.parent, os.stat(path).st_mtime)  # it was written just now, by the clock of the disk
            try:
                os.link(path, new)
            except OSError:
                _copy(path, new)
            os.replace(new, target)
        except OSError as e:
            raise write_error(e, target) from e
        finally:
            with suppress(OSError):  # `replace` leaves it where both are names of one file already
                new.unlink()

    def delete(
        self,
        path: str,
    ) -> None:
        "Remove a file. `OSError` if that fails."
        os.unlink(path)

    def metadata(
        self,
        path: str,
    ) -> dict | None:  # None for a file that this package did not write
        "What a file says of itself. `CheckpointError` if it cannot be read."
        return read_metadata(path)

    def verify(
        self,
        path: str,
    ) -> None:
        "`CheckpointError` if a file is damaged."
        verify_checkpoint(path)

    def list(
        self,
        folder: Path,
    ) -> Iterator[str]:
        "The paths of all checkpoints in a folder and in the folders in it."
        for root, _, names in os.walk(folder):
            yield from (os.path.join(root, name) for name in names if name.endswith('.pth'))

    def is_taken(
        self,
        path: str | Path,
    ) -> bool:
        "Whether something has this name, be it a link to nowhere."
        return os.path.lexists(path)

    def free(
        self,
        folder: Path,  # which is there
        path: Path,  # of a file that the next one may replace
    ) -> int:  # bytes
        "How much may still be written."
        old = path.stat().st_size if path.is_file() else 0
        return shutil.disk_usage(folder).free + old

    def lock(
        self,
        path: Path,  # of the lock
        what: str,  # what it reserves, for messages
        run: str,  # the number of the run for which it is
    ) -> Lock:  # `acquire`, `release`, `killed_run`
        "What keeps other runs from a name."
        return Lock(path, what, run)

    def sweep(
        self,
        folder: Path,
    ) -> None:
        "Remove the half-written files and the locks that killed runs have left in a folder and in the folders in it."
        with suppress(OSError):
            now = _clock(folder)
            for count, (root, _, names) in enumerate(os.walk(folder)):
                if count >= _MANY:
                    return  # a tree that is not one of checkpoints
                if any(name.startswith('.') for name in names):
                    sweep(root, now)
                    remove_dead_locks(root, now, _ABANDONED)


def _clock(folder):
    "The time by the clock of the disk, which may be another host's."
    probe = temporary_beside(folder / 'clock')
    try:
        with open(probe, 'xb') as f:
            return os.fstat(f.fileno()).st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _copy(old, new):
    "Not through a link, into which somebody else may have made the name meanwhile."
    with open_regular(old) as source, open(new, 'xb') as f:
        shutil.copyfileobj(source, f, 1 << 20)
        f.flush()
        os.fsync(f.fileno())

"""A file that is written whole or not at all: beside its place first, durable, then moved there in one step.

What a killed process has left half written bears a name that identifies its process, so that others can sweep it."""

from __future__ import annotations
import errno, os, re, secrets, stat, threading, warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..errors import CheckpointWriteError
from ..process import host, is_same_process, start_time

__all__ = ['new_file', 'NewFile', 'temporary_beside', 'sweep', 'write_error', 'sync_folder']

_TEMPORARY = re.compile(r'\..*\.([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{16}\.writing', re.DOTALL)
_ABANDONED = 24 * 3600  # seconds after which another host's file that is not written to counts as a dead process's
_LONGEST = 40  # characters of the name that a temporary file's name begins with: 160 bytes at most, of 255


class NewFile(NamedTuple):
    "A file that is being written."

    file: BinaryIO  # unbuffered
    old: int | None  # descriptor of the file that it is to replace; None if there is none


@contextmanager
def new_file(
    path: Path,  # where it is to be; a link there is replaced, not followed
) -> Iterator[NewFile]:
    """Write what takes the place of `path`, whole and durable, when the block ends.

    At every instant `path` is either what it was or the new file. If anything fails, `path` is what it was and no
    other file is left; an `OSError` becomes a `CheckpointWriteError`."""
    try:
        _refuse_what_is_no_file(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(path)
        file = _create(temporary)
    except OSError as e:
        raise write_error(e, path) from e
    with _kept_open(path) as old:
        try:
            with file:
                now = os.fstat(file.fileno()).st_mtime
                _take_mode(file, path)
                sweep(path.parent, now)
                yield NewFile(file, old)
                os.fsync(file.fileno())  # before the name points here: a power cut must not leave a name without bytes
            os.replace(temporary, path)
        except BaseException as e:
            with suppress(OSError):  # a later save sweeps it; the error that matters is the first one
                os.unlink(temporary)
            if isinstance(e, OSError) and not isinstance(e, CheckpointWriteError):
                raise write_error(e, path) from e
            raise
        try:
            sync_folder(path.parent)  # the new name itself
        except OSError as e:
            warnings.warn(
                f'{path} is written, but its folder could not be synced: {e}. After a power cut it may be what it was '
                'before.',
                stacklevel=4,
            )


def _create(path):
    "Open a new file with the permissions that the umask gives."
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, 'O_CLOEXEC', 0), 0o666)
    return open(fd, 'wb', buffering=0)


def _take_mode(file, path):
    "Give the new file the permissions of the one that it replaces."
    with suppress(OSError):  # there is none, or this disk does not allow it
        mode = os.lstat(path).st_mode
        if stat.S_ISREG(mode):
            os.fchmod(file.fileno(), mode & 0o777)


def _refuse_what_is_no_file(path):
    "A folder cannot be replaced, and a device should not be."
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, 'Is a directory')
    if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
        raise OSError(errno.EINVAL, 'Is a device')


_ADVICE = {
    errno.EISDIR: 'A folder is there: remove it, or choose another name.',
    errno.EINVAL: 'Remove it, or choose another name or folder.',
    errno.ENOTDIR: 'A part of the path is a file: choose another folder.',
    errno.EEXIST: 'A file is where a folder should be: choose another folder.',
    errno.ENAMETOOLONG: 'Choose a shorter name.',
    errno.EACCES: 'Choose a folder that this user may write to.',
    errno.EPERM: 'Choose a folder that this user may write to.',
    errno.EROFS: 'Choose a folder that may be written to.',
    errno.ELOOP: 'Its path has links that lead to each other: choose another folder.',
}


def write_error(
    e: OSError,  # as the system raised it
    path,  # the file that could not be written
    state: str = 'What was there before is unchanged.',  # what became of it, or what it is for
) -> CheckpointWriteError:
    "The error to raise: which file, why, and what to do."
    advice = _ADVICE.get(e.errno or 0, 'Free some space or choose another folder.')
    reason = e.strerror or str(e)
    error = CheckpointWriteError(f'{path} could not be written: [Errno {e.errno}] {reason}. {state} {advice}', path)
    error.errno = e.errno
    return error


def temporary_beside(
    path: Path,  # of a file to be made
) -> Path:  # in the same folder
    "A name that nobody else uses, for a file that is swept once this process has gone."
    pid = os.getpid()
    owner = f'{host()}-{pid}-{start_time(pid)}-{secrets.token_hex(8)}'
    return path.with_name(f'.{path.name[:_LONGEST]}.{owner}.writing')


def sweep(
    folder,  # in which killed processes may have left files
    now: float,  # seconds since 1970 by the clock of that folder's disk
) -> None:
    "Remove what killed processes have left half written in `folder`, and nothing else. Raises nothing."
    with suppress(OSError), os.scandir(folder) as entries:  # a save does not fail because of another one's remains
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name)
            if found and entry.is_file(follow_symlinks=False):
                with suppress(OSError):  # another process has swept it, or it is not ours to sweep
                    if _is_dead(found, entry, now):
                        os.unlink(entry.path)


def _is_dead(found, entry, now):
    if found[1] == host():
        return not is_same_process(int(found[2]), int(found[3]))
    return now - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED


@contextmanager
def _kept_open(path):
    """The descriptor of the file at `path`, or None. As long as it is open the system does not free the blocks of the
    file that is replaced, which takes a quarter of a save's time: nobody waits for that, least of all the sync of the
    folder."""
    try:
        # a fifo would block without O_NONBLOCK; a link is replaced, not followed
        old = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | getattr(os, 'O_CLOEXEC', 0))
    except OSError:
        old = None  # there is none, or it is not ours to read
    try:
        yield old
    finally:
        if old is not None:
            try:
                threading.Thread(target=os.close, args=(old,)).start()
            except RuntimeError:
                os.close(old)  # the interpreter is ending


def sync_folder(
    folder,  # whose names have changed
) -> None:
    "Make the names in a folder durable. `OSError` if that fails."
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise  # some network disks know no such thing
    finally:
        os.close(fd)

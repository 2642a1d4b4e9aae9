"The file of a lock: who has it, read and replaced by one process at a time, whatever is in its place."

from __future__ import annotations
import errno, fcntl, json, os, secrets, socket, stat, time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ..process import host, is_same_process, start_time

__all__ = ['Owner', 'OpenedLock', 'create', 'link', 'remove_dead_locks', 'swept_runs']

BUSY = 5.0  # seconds for which others may be at work on one lock
swept_runs: dict[
    str, str
] = {}  # of killed owners, by the lock that was removed: another lock of this process asks for it
_LARGEST = 1 << 16  # bytes; what is larger is no lock of ours


class Owner(NamedTuple):
    "Who has a lock, as its file says; `pid` is None if that cannot be read."

    host: str | None = None
    name: str | None = None  # of the host
    pid: int | None = None
    start: int | None = None
    job: str = 'none'  # the launcher's number of it
    id: str | None = None
    run: str | None = None  # the number that the owner's files have

    @classmethod
    def this_process(cls, run: str | None) -> Owner:
        pid = os.getpid()
        job = os.environ.get('TORCHELASTIC_RUN_ID', 'none')
        return cls(host(), socket.gethostname(), pid, start_time(pid), job, secrets.token_hex(8), run)

    @classmethod
    def parse(cls, data: bytes) -> Owner:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return cls()
        if not isinstance(found, dict) or not all(type(found.get(k)) is int for k in ('pid', 'start')):
            return cls()
        if not 0 < found['pid'] < 1 << 31:  # to the system, others are groups of processes, or errors
            return cls()
        return cls(**{k: found[k] for k in cls._fields if k in found})

    def dump(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    def __str__(self):
        if self.pid is None:
            return 'whose lock file is unreadable'
        printable = isinstance(self.name, str) and self.name.isprintable()
        return f'process {self.pid} on {self.name if printable else repr(self.name)}'


class OpenedLock:
    """A lock that is there, for the time of the block, in which no other process takes it over. `owner` is None if it
    is gone, or another process was quicker."""

    def __init__(self, path):
        self.path = path
        self.owner = None
        self.mtime = 0.0
        self._fd = None

    def __enter__(self):
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return self
        except OSError as e:
            if not self.path.is_symlink():
                raise
            _remove_copied_lock(self.path, e)
            return self
        try:
            self._read()
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, *_):
        if self._fd is not None:
            os.close(self._fd)

    def _read(self):
        status = os.fstat(self._fd)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, 'Is a directory')
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, 'Is a pipe, a socket or a device')
        _lock_file(self._fd)
        try:
            if os.lstat(self.path).st_ino != status.st_ino:
                return
        except FileNotFoundError:
            return
        self.mtime = os.fstat(self._fd).st_mtime
        self.owner = Owner.parse(os.read(self._fd, _LARGEST))


def _lock_file(fd):
    "One process at a time. Not every disk knows this; then the moves of the file itself must do."
    end = time.monotonic() + BUSY
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)
        except OSError:
            return None


def _remove_copied_lock(path, e):
    "A link to a lock, as `cp -rs` makes: the folder that it leads to is another one. Any other link is not ours."
    fd = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _lock_file(fd)  # of several processes that find it, none may remove what another one has put there since
        with suppress(FileNotFoundError):
            if path.is_symlink():
                if os.path.basename(os.readlink(path)) != path.name:
                    raise OSError(errno.EINVAL, 'Is a symbolic link that does not lead to a lock') from e
                path.unlink()
    finally:
        os.close(fd)


def create(path, data):
    "Make the file, which must not exist, or nothing."
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with open(fd, 'wb') as f:
            f.write(data)
    except BaseException:
        with suppress(OSError):
            os.unlink(path)
        raise


def link(mine, path):
    "Make `path` unless it exists, whole from the beginning. Whether it was made."
    try:
        os.link(mine, path)
    except FileExistsError:
        return False
    except OSError:  # a disk without hard links
        try:
            create(path, mine.read_bytes())
        except FileExistsError:
            return False
    return True


def remove_dead_locks(
    folder: str | Path,  # in which runs may have been killed
    now: float,  # seconds since 1970 by the clock of the folder's disk
    age: float,  # seconds without a refresh after which another host's owner counts as dead
) -> None:
    "Remove the locks of processes that are gone, and nothing else. Raises nothing."
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            is_lock = entry.name.startswith('.') and entry.name.endswith('.lock')
            if is_lock and entry.is_file(follow_symlinks=False):
                with suppress(OSError):
                    _remove_if_dead(Path(entry.path), now, age)


def _remove_if_dead(path, now, age):
    with OpenedLock(path) as found:
        owner = found.owner
        if owner is None or owner.id is None:
            return  # gone, or not ours
        if owner.host == host():
            dead = not is_same_process(owner.pid, owner.start)
        else:
            dead = now - found.mtime > age
        if dead:
            path.unlink()
            if isinstance(owner.run, str):
                swept_runs[str(path)] = owner.run

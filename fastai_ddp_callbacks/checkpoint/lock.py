"""One run at a time under one name in a folder, also between hosts, and also after a run was killed.

Why not `filelock.SoftFileLease`, which is close to it and was tried: its owner on another host counts as dead only
after each newcomer has watched for the whole lease, however old the lock is; a lock that a full disk has left half
written stays for ever; it does not know that a launcher has restarted the same job elsewhere, and has no room for the
run's number; a fifo or a foreign file in its place is a timeout without a reason; and torch is content with versions
of filelock that do not have it."""

from __future__ import annotations
import errno, math, os, re, threading, time, warnings, weakref
from contextlib import suppress
from pathlib import Path

from ..errors import CheckpointInUseError
from ..process import is_same_process
from .atomic import temporary_beside, write_error
from .lock_file import BUSY, OpenedLock, Owner, create, link, swept_runs

__all__ = ['Lock']

_BEAT = 10.0  # seconds after which a running owner refreshes the file's mtime
_FRESH = 60.0  # seconds without a refresh after which another host's owner counts as dead
_POLL = 0.5  # seconds between two looks at a lock whose owner may be dead
_UUID = re.compile(r'[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')
_RESERVES = 'It reserves the name for this run.'


class Lock:
    """A file that names the process for which a name is reserved.

    A process of this host holds it as long as it is running; one of another host as long as it refreshes the file's
    mtime, every ten seconds. Given back at the latest when this object or the process ends."""

    def __init__(
        self,
        path: str | Path,  # of the file
        what: str = '',  # what it reserves, for messages
        run: str | None = None,  # the number of the run for which it is, which the next owner can read
    ):
        self.path = Path(path)
        self.what = what
        self.run = run
        self.killed_run: str | None = None  # `run` of the owner from which it was taken over, as that had been killed
        self._id: str | None = None  # of this object as the owner
        self._release: weakref.finalize | None = None

    def __reduce__(self):
        return Lock, (self.path, self.what, self.run)  # a copy holds nothing

    def acquire(self) -> None:
        """Does nothing if this object has it. `CheckpointInUseError` if another run has it, `CheckpointWriteError` if
        the folder cannot be written to, or something else is in the lock's place. Waits for up to a minute, with a
        warning, if the owner may have been in a container of this host that is gone."""
        if self._release and self._release.alive:
            return
        me = Owner.this_process(self.run)
        mine = temporary_beside(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            create(mine, me.dump())
            self._take(me, mine)
        except CheckpointInUseError:
            raise
        except OSError as e:
            raise write_error(e, self.path, _RESERVES) from e
        finally:
            with suppress(OSError):  # the next save sweeps it
                mine.unlink()
        self._id = me.id
        stop = threading.Event()
        name = f'lock of {self.path.name}'
        threading.Thread(target=_refresh, args=(self.path, me, stop), daemon=True, name=name).start()
        self._release = weakref.finalize(self, _give_back, self.path, me, stop)

    def record(
        self,
        run: str,  # the number of the run that this one has become
    ) -> None:
        "Have the next owner read another number. Raises nothing: without it the next owner knows the number of before."
        self.run = run
        if not self._release or not self._release.alive:
            return
        new = temporary_beside(self.path)
        with suppress(OSError):
            try:
                with OpenedLock(self.path) as found:
                    if found.owner is not None and found.owner.id == self._id:
                        create(new, found.owner._replace(run=run).dump())
                        os.replace(new, self.path)
            finally:
                new.unlink(missing_ok=True)

    def release(self) -> None:
        "Give it back, if this object has it."
        if self._release:
            self._release()

    def _take(self, me, mine):
        watch = _Watch()
        end = time.monotonic() + BUSY
        while not link(mine, self.path):
            with OpenedLock(self.path) as found:
                if found.owner is None:  # it was given back between the two, or another process was quicker
                    if time.monotonic() > end:
                        raise OSError(errno.EBUSY, 'Changes whenever it is looked at')
                    continue
                left = watch.seconds_left(found, me, mine)
                if left <= 0:
                    os.replace(mine, self.path)
                    if found.owner.pid != me.pid and isinstance(found.owner.run, str):
                        self.killed_run = found.owner.run
                    return
            if math.isinf(left):
                raise self._in_use(found.owner)
            if not watch.announced:
                watch.announced = True
                warnings.warn(
                    f'{self.what or self.path} was reserved by a container of this host ({found.owner}), which may be '
                    f'gone: waiting up to {math.ceil(left)} s for a sign that it is not.',
                    stacklevel=3,
                )
            time.sleep(_POLL)
            end = time.monotonic() + BUSY
        # one of another name in this fit may have swept the lock of the same killed run
        self.killed_run = swept_runs.pop(str(self.path), None)

    def _in_use(self, owner):
        return CheckpointInUseError(
            f'{self.what or self.path} is in use by another run ({owner}), which would overwrite what this one saves, '
            'and the other way round. Give this run a file name or a folder of its own. If that process no longer '
            f'trains, end it or delete {self.path}.',
            self.path,
        )


class _Watch:
    "For how long an owner counts as alive, and what has been seen of it since this process has looked."

    def __init__(self):
        self.announced = False
        self._first = None  # owner and mtime when it was first seen
        self._since = 0.0
        self._patience = 0.0

    def seconds_left(self, found, me, mine):
        "0 for a dead owner, infinity for a living one; else how long it is to be watched without a refresh."
        owner = found.owner
        if owner.host == me.host:
            alive = owner.pid != me.pid and is_same_process(owner.pid, owner.start)
            return math.inf if alive else 0
        if owner.job != 'none' and owner.job == me.job:
            return 0  # rank 0 of an earlier try, restarted on another host
        seen = (owner, found.mtime)
        if self._first is None:
            left = _FRESH - (mine.stat().st_mtime - found.mtime)  # both by the clock of the disk
            self._first = seen
            self._since = time.monotonic()
            self._patience = min(left, _FRESH)  # its clock may have been ahead
            if left > 0 and not _may_be_gone(owner, me):
                return math.inf
        elif seen != self._first:
            return math.inf  # it was refreshed
        return self._patience - (time.monotonic() - self._since)


def _may_be_gone(owner, me):
    """Whether the owner was perhaps in a container of which this one is the next start: they have the host's name in
    common, and not its processes. Two jobs that were given different numbers are two."""
    if owner.name != me.name:
        return False
    return owner.job == me.job or not (_is_given(owner.job) and _is_given(me.job))


def _is_given(job):
    "Whether it is the same after a restart: `torchrun --standalone` makes a new one each time."
    return job != 'none' and not (isinstance(job, str) and _UUID.fullmatch(job))


def _refresh(path, me, stop):
    "Until it is stopped, set the lock's mtime."
    while not stop.wait(_BEAT):
        try:
            with OpenedLock(path) as found:
                owner = found.owner
            if owner is not None and owner.id != me.id:  # this process has not refreshed it for too long
                warnings.warn(
                    f'{path}: another run has taken the name of this one, process {me.pid}. Both save under it now: '
                    'end one of them.'
                )
                return
            os.utime(path, follow_symlinks=False)
        except FileNotFoundError:
            return  # nothing is left to reserve
        except OSError:
            pass  # the disk may be back next time


def _give_back(path, me, stop):
    stop.set()
    if me.pid != os.getpid():
        return  # a forked child
    with suppress(OSError), OpenedLock(path) as found:  # the folder may be gone
        if found.owner is not None and found.owner.id == me.id:
            path.unlink()

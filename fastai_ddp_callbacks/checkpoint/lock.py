"One run at a time under one name in a folder, also between hosts, and also after a run was killed."

from __future__ import annotations
import fcntl, json, os, secrets, socket, threading, warnings, weakref
from contextlib import suppress
from pathlib import Path

from .file import temporary_beside, write_error
from ..errors import CheckpointInUseError
from ..process import start_time, host, is_same_process

__all__ = ['Lock']

_BEAT, _FRESH = 10.0, 60.0  # seconds between signs of life; how old the last one of a living run may be


class Lock:
    """A file that names the process for which a name is reserved.

    A process of this host holds it as long as it lives; one of another host as long as it gives a sign of life, which
    is the time of the file, every ten seconds. Given back at the latest when this object or the process ends."""

    def __init__(
        self,
        path,  # of the file
        what='',  # what it reserves, for messages
    ):
        self.path, self.what, self._release = Path(path), what, None

    def __reduce__(self):
        return Lock, (self.path, self.what)  # a copy holds nothing

    def acquire(self):
        "`CheckpointInUseError` if another run has it, `CheckpointWriteError` if the folder cannot be written to. Does nothing if this object has it."
        if self._release and self._release.alive:
            return
        pid = os.getpid()
        me = dict(
            host=host(),
            name=socket.gethostname(),
            pid=pid,
            start=start_time(pid),
            job=os.environ.get('TORCHELASTIC_RUN_ID', 'none'),
            id=secrets.token_hex(8),
        )
        mine = temporary_beside(self.path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            mine.write_text(json.dumps(me))
            while not (_link(mine, self.path) or self._take_over(me, mine)):
                pass  # it was given back between the two, or another one was quicker
        except CheckpointInUseError:
            raise
        except OSError as e:
            raise write_error(
                e, self.path, 'It reserves the name for this run. Free some space or choose another folder.'
            ) from e
        finally:
            with suppress(FileNotFoundError, NotADirectoryError):
                mine.unlink()
        stop = threading.Event()
        threading.Thread(
            target=_beat, args=(self.path, me, stop), daemon=True, name=f'lock of {self.path.name}'
        ).start()
        self._release = weakref.finalize(self, _give_back, self.path, me, stop)

    def release(self):
        "Give it back, if this object has it."
        if self._release:
            self._release()

    def _take_over(self, me, mine):
        "Whether it was a dead one's, and is ours now."
        with suppress(FileNotFoundError), open(self.path, 'rb') as f:
            with suppress(OSError):
                fcntl.flock(f, fcntl.LOCK_EX)  # of several that find it dead, one at a time; not every disk knows this
            if os.fstat(f.fileno()).st_ino != os.stat(self.path).st_ino:
                return False  # another one was quicker
            owner = _parsed(f.read())
            if _holds(owner, me, self.path, mine):
                who = (
                    f'process {owner["pid"]} on {owner.get("name")}'
                    if 'pid' in owner
                    else 'whose lock file is unreadable'
                )
                raise CheckpointInUseError(
                    f'{self.what or self.path} is in use by another run ({who}), which would overwrite what this one saves, and the other way '
                    f'round. Give this run a file name or a folder of its own. If that process no longer trains, end it or delete {self.path}.',
                    self.path,
                )
            os.replace(mine, self.path)
            return True
        return False


def _link(old, new):
    "Make `new` unless it exists, whole from the beginning. Whether it was made."
    try:
        os.link(old, new)
    except FileExistsError:
        return False
    except OSError:  # a disk without hard links
        try:
            fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        with open(fd, 'wb') as f:
            f.write(old.read_bytes())
    return True


def _parsed(data):
    "Who has it; nothing if that cannot be read."
    try:
        owner = json.loads(data)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) and all(isinstance(owner.get(k), int) for k in ('pid', 'start')) else {}


def _holds(owner, me, path, mine):
    if owner.get('host') == me['host']:
        return owner['pid'] != me['pid'] and is_same_process(owner['pid'], owner['start'])
    if owner.get('job', 'none') != 'none' and owner['job'] == me['job']:
        return False  # rank 0 of an earlier try, restarted on another host
    return mine.stat().st_mtime - path.stat().st_mtime < _FRESH  # both by the clock of the disk


def _beat(path, me, stop):
    while not stop.wait(_BEAT):
        try:
            if _parsed(path.read_bytes()) != me:  # this process gave no sign of life for too long
                return warnings.warn(
                    f'{path}: another run has taken the name of this one, process {me["pid"]}. Both save under it now: end one of them.'
                )
            os.utime(path)
        except FileNotFoundError:
            return  # nothing is left to reserve
        except OSError:
            pass  # the disk may be back at the next beat


def _give_back(path, me, stop):
    stop.set()
    if me['pid'] != os.getpid():
        return  # a forked child
    with suppress(OSError):  # the folder may be gone
        if _parsed(path.read_bytes()) == me:
            path.unlink()

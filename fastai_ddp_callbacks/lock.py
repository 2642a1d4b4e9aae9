"One run at a time under one name in a folder, also between hosts, and also after a run was killed."
from __future__ import annotations
import json, os, secrets, socket, threading, weakref
from pathlib import Path

from .checkpoint import temporary_beside
from .errors import CheckpointInUseError
from .process import alive, host, lives

__all__ = ['Lock']

_BEAT, _FRESH = 10., 60. # seconds between signs of life; how old the last one of a living run may be


class Lock:
    """A file that names the process for which a name is reserved.

    A process of this host holds it as long as it lives; one of another host as long as it gives a sign of life, which
    is the time of the file, every ten seconds. Given back at the latest when this object or the process ends."""
    def __init__(self,
        path, # of the file
        what='', # what it reserves, for messages
    ):
        self.path,self.what,self._release = Path(path),what,None

    def __reduce__(self): return Lock,(self.path, self.what) # a copy holds nothing

    def acquire(self):
        "`CheckpointInUseError` if another run has it. Does nothing if this object has it."
        if self._release and self._release.alive: return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        pid = os.getpid()
        me = dict(host=host(), name=socket.gethostname(), pid=pid, start=alive(pid), job=os.environ.get('TORCHELASTIC_RUN_ID', 'none'), id=secrets.token_hex(8))
        mine = temporary_beside(self.path)
        mine.write_text(json.dumps(me))
        try:
            while not _link(mine, self.path): self._take_from_the_dead(me, mine)
        finally: mine.unlink()
        stop = threading.Event()
        threading.Thread(target=_beat, args=(self.path, stop), daemon=True, name=f'lock of {self.path.name}').start()
        self._release = weakref.finalize(self, _give_back, self.path, me, stop)

    def release(self):
        "Give it back, if this object has it."
        if self._release: self._release()

    def _take_from_the_dead(self, me, mine):
        owner = _owner(self.path)
        if owner is None: return # given back in this moment
        if _holds(owner, me, self.path, mine):
            since = f'process {owner.get("pid")} on {owner.get("name")}'
            raise CheckpointInUseError(f'{self.what or self.path} is in use by another run ({since}), which would overwrite what this one saves, and the other way '
                                       f'round. Give this run a file name or a folder of its own. If that process no longer trains, end it or delete {self.path}.', self.path)
        # Of several that find it dead only one gets hold of it. It may have been replaced since it was read: then it is put back.
        aside = temporary_beside(self.path)
        try: os.rename(self.path, aside)
        except FileNotFoundError: return
        if _owner(aside) != owner: _link(aside, self.path)
        aside.unlink()


def _link(old, new):
    "Make `new` unless it exists, whole from the beginning. Whether it was made."
    try: os.link(old, new)
    except FileExistsError: return False
    except OSError: # a disk without hard links
        try: fd = os.open(new, os.O_WRONLY|os.O_CREAT|os.O_EXCL)
        except FileExistsError: return False
        with open(fd, 'wb') as f: f.write(old.read_bytes())
    return True

def _owner(path):
    "Who has it; empty if that cannot be read, None if nobody."
    try: return json.loads(path.read_text())
    except FileNotFoundError: return None
    except ValueError: return {}

def _holds(owner, me, path, mine):
    if owner.get('host') == me['host']: return owner['pid'] != me['pid'] and lives(owner['pid'], owner['start'])
    if owner.get('job', 'none') != 'none' and owner['job'] == me['job']: return False # rank 0 of an earlier try, restarted on another host
    try: return mine.stat().st_mtime-path.stat().st_mtime < _FRESH # both by the clock of the disk
    except FileNotFoundError: return False

def _beat(path, stop):
    while not stop.wait(_BEAT):
        try: os.utime(path)
        except OSError: return # the folder has gone: nothing is left to reserve

def _give_back(path, me, stop):
    stop.set()
    if me['pid'] == os.getpid() and _owner(path) == me: path.unlink(missing_ok=True) # and not in a forked child

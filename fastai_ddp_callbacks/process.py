"Which process this is, in words that another one can read, and whether a process is still running."

from __future__ import annotations
import hashlib, os, socket
from functools import lru_cache


@lru_cache(1)
def host() -> str:
    "Eight letters that two processes share if they can see each other's process number."
    try:
        space = os.readlink('/proc/self/ns/pid')
    except OSError:
        space = ''
    return hashlib.blake2b(f'{socket.gethostname()} {space}'.encode(), digest_size=4).hexdigest()


def start_time(
    pid: int,  # of a process on this host
) -> (
    int | None
):  # what distinguishes it from later ones of the same number (0: unknown); None if it is gone or a zombie
    "The start time of a process, as far as it lives."
    # In ticks since the machine was booted, which nothing changes. psutil's `create_time()` adds the time of the boot
    # by the wall clock, which moves when the clock is set: a live process would be taken for another one, and its
    # lock or its rank for a dead one's.
    try:
        with open(f'/proc/{pid}/stat') as f:
            fields = f.read().rpartition(')')[2].split()
        return None if fields[0] in 'ZX' else int(fields[19])
    except FileNotFoundError:
        pass  # no such system, or somebody else's process is hidden
    except ProcessLookupError:
        return None  # it went between open and read
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return 0  # somebody else's, so alive
    return 0


def is_same_process(
    pid: int,  # of a process on this host
    start: int,  # its start time, as `start_time` gave it
) -> bool:
    "Whether it is still that process."
    return start_time(pid) in (start, 0)

"Disks for tests: small ones that are really full, and one for each rank that the others do not see."

from __future__ import annotations
import ctypes, os, tempfile
from contextlib import contextmanager
from pathlib import Path

from fastai_ddp_callbacks.checkpoint import file as checkpoint
from fastai_ddp_callbacks.training import loading

_libc = ctypes.CDLL(None)
NEW_MOUNTS, NEW_NAMES, NEW_NET = 0x20000, 0x4000000, 0x40000000  # namespaces of this process, for `unshare`
_PRIVATE = 0x4000 | 1 << 18


def unshare(flags):
    return _libc.unshare(flags) == 0


def mount(folder, size=None, read_only=False):
    "Put an empty disk over `folder`, of so many bytes. Whether we may."
    return _libc.mount(b'tmpfs', os.fsencode(folder), b'tmpfs', int(read_only), b'size=%d' % size if size else b'') == 0


@contextmanager
def disk(folder, size=None, read_only=False):
    """An empty disk in the place of `folder` for the time of the block, if we may mount one, and else the folder.
    Tells which."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = mount(folder, size, read_only)
    try:
        yield mounted
    finally:
        if mounted and _libc.umount2(os.fsencode(folder), 2):
            raise OSError(f'{folder} is still mounted')


def own_disk(folder, lag=0.1):
    """From now on this rank has an empty disk of its own in the place of `folder`; it waits `lag` seconds for a file.

    If it may not mount one, it sees another folder in its place. Gives what brings the files there that the others
    have."""
    folder.mkdir(parents=True, exist_ok=True)
    real, own, loading._LAG = os.open(folder, os.O_RDONLY), folder, lag
    if not (unshare(NEW_MOUNTS) and _libc.mount(b'none', b'/', None, _PRIVATE, None) == 0 and mount(folder)):
        own = Path(tempfile.mkdtemp(dir=folder.parent))

        def seen(path):
            return own / Path(path).name if not isinstance(path, int) and Path(path).parent == folder else path

        open_regular = checkpoint.open_regular
        checkpoint.open_regular = lambda path: open_regular(seen(path))

    def arrive():
        for o in os.listdir(real):
            with open(os.open(o, os.O_RDONLY, dir_fd=real), 'rb') as f:
                (own / f'{o}.new').write_bytes(f.read())
            os.replace(own / f'{o}.new', own / o)
        return own

    return arrive

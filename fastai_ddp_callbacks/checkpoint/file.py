"""One checkpoint file: written whole or not at all, verified when it is read, with its metadata inside.

The file is what `torch.save` makes, so that stock fastai and torch load it. A zip archive may end in a comment, which
they ignore: ours holds the metadata as JSON and a checksum over every byte before the checksum."""

from __future__ import annotations
import errno, mmap, os, pickle, stat, struct, time, warnings, zipfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch, xxhash

from ..errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from .archive import CHECKSUM_SIZE, FORMAT, read_footer, write_archive
from .atomic import new_file
from .hashing import HashingWriter
from .safety import allowed, refuse_inflating, refuse_unsafe
from .state import size_of

__all__ = ['write_checkpoint', 'read_checkpoint', 'verify_checkpoint', 'read_metadata']

_READ_SIZE = 1 << 24  # bytes that are hashed at once
# what torch raises for a file in which bytes are not what they should be
_UNREADABLE = (
    RuntimeError,
    ValueError,
    EOFError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
    MemoryError,
    OverflowError,
    struct.error,
    zipfile.BadZipFile,
)

Progress = Callable[[int, int], object]  # called with the bytes done and the bytes there are


# -- writing


def write_checkpoint(
    state,  # what `torch.save` can save; to be readable here: tensors and plain values in lists and dicts
    path: str
    | Path,  # the file to make or replace; its folder is made too. A link stays one, and its target is replaced
    meta: dict | None = None,  # more metadata, that JSON can hold; `format`, `time`, `torch`, `checksum` are added
    progress: Progress | None = None,  # called with the bytes written and the bytes there are, about every MB
) -> dict:  # the metadata of the file
    """Write `state` so that at every instant `path` is either what it was or the new checkpoint, whole and on disk.

    `CheckpointWriteError` if that fails, with the old file unchanged and no other file left."""
    return write_in_place(state, os.path.realpath(path), meta, progress)


def write_in_place(
    state,  # as for `write_checkpoint`
    path: str | Path,  # the file to make or replace; a link is replaced itself
    meta: dict | None = None,  # more metadata
    progress: Progress | None = None,  # as for `write_checkpoint`
) -> dict:  # the metadata of the file
    "`write_checkpoint` that follows no link: what a link leads to may be another run's."
    path = Path(path)
    refuse_unsafe(state, path)
    meta = dict(meta or {}, format=FORMAT, time=time.time(), torch=torch.__version__)
    total = size_of(state)
    with new_file(path) as new:
        written = None if progress is None else lambda done: progress(done, total)
        meta['checksum'] = write_archive(state, meta, HashingWriter(new.file.fileno(), new.old, written))
    return meta


# -- reading


def read_metadata(
    path: str | Path,  # a checkpoint
) -> dict | None:  # None for a file of stock fastai or torch, which has none
    "The metadata of a checkpoint, without reading its weights. `CheckpointError` if there is no whole end of a file."
    with _opened(path) as f:
        return read_footer(f, path)


def verify_checkpoint(
    path: str | Path,  # a checkpoint
    progress: Progress | None = None,  # called with the bytes read and the bytes there are, about every 16 MB
) -> dict | None:  # its metadata; None for a file of stock fastai or torch, which cannot be verified
    "Read every byte of a checkpoint and compare the checksum. Nothing in it is executed. `CheckpointError` if damaged."
    with _opened(path) as f:
        meta = read_footer(f, path)
        if meta is not None:
            _verify(f, meta, path, progress)
        return meta


def read_checkpoint(
    path: str | Path,  # a checkpoint of this package, or of stock fastai or torch
    device='cpu',  # where its tensors go
    verify: bool = True,  # whether to read all bytes and compare the checksum first
    checksum: str | None = None,  # of the one file that is meant, as `write_checkpoint` gave it
    progress: Progress | None = None,  # called with the bytes verified and the bytes there are, about every 16 MB
) -> tuple:  # (state, metadata); metadata is None for a file that this package did not write
    """Load a checkpoint, safely: only tensors and plain values, whatever the file holds.

    On the CPU the tensors are the mapped file itself, copied page by page when they are read. `CheckpointError` with
    file and reason if the file is missing, another one, truncated, corrupt, unsafe or of a newer format."""
    with _opened(path) as f:
        meta = read_footer(f, path)
        if checksum is not None and (meta is None or meta['checksum'] != checksum):
            raise CheckpointError(
                f'{path} is not the file that this run saved: something else has written it since. '
                'Give each run a folder or a file name of its own.',
                path,
            )
        if verify and meta is not None:
            _verify(f, meta, path, progress)
        if meta is None:
            warnings.warn(
                f'{path} has no checksum (it was not written by this package): loaded without verification.',
                stacklevel=2,
            )
        return _load(f, path, device), meta


def _load(f, path, device):
    f.seek(0)
    zipped = f.read(2) == b'PK'
    # the name may be given to a newer file at any moment: load the one that was verified
    source = f'/proc/self/fd/{f.fileno()}' if os.path.exists('/proc/self/fd') else str(path)
    try:
        refuse_inflating(f, zipped, path)
        with allowed():
            return torch.load(source, map_location=device, weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as e:
        raise UnsafeCheckpointError(
            f'{path} was refused: it holds more than tensors and plain values, so that loading it could run code '
            f'({(str(e).splitlines() or ["no reason"])[0]}). If you trust it, load it with '
            'torch.load(..., weights_only=False) yourself.',
            path,
        ) from e
    except OSError:
        raise  # it has the system's reason
    except _UNREADABLE as e:
        raise CorruptCheckpointError(
            f'{path} cannot be read as a checkpoint: {type(e).__name__}: {str(e)[:300]}', path
        ) from e


def open_regular(
    path: str | Path,  # of a file, or a link to one
):  # the file, open for reading in binary
    "Open what is a file and nothing else, without waiting: to open a fifo waits for who writes into it."
    _refuse_special(os.stat(path).st_mode)  # to open a device may do something to it
    f = open(path, 'rb', opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    try:
        _refuse_special(os.fstat(f.fileno()).st_mode)  # the name may have changed between the two
    except OSError:
        f.close()
        raise
    return f


def _refuse_special(mode):
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, 'Is a directory')
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, 'Is a pipe, a socket or a device, not a file')


@contextmanager
def _opened(path):
    try:
        f = open_regular(path)
    except (OSError, ValueError) as e:  # a name with a zero byte is a ValueError
        raise _read_error(e, path) from e
    with f:
        try:
            yield f
        except CheckpointError:
            raise
        except OSError as e:
            raise _read_error(e, path) from e


def _read_error(e, path):
    return CheckpointError(f'{path} could not be read: {getattr(e, "strerror", None) or e}.', path)


def _verify(f, meta, path, progress):
    seen = xxhash.xxh3_128()
    with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
        total = len(view) - CHECKSUM_SIZE
        for start in range(0, total, _READ_SIZE):
            end = min(start + _READ_SIZE, total)
            seen.update(view[start:end])
            if progress:
                progress(end, total)
    if seen.hexdigest() != meta['checksum']:
        raise CorruptCheckpointError(
            f'{path} is corrupt: its bytes do not match its checksum. Use an earlier checkpoint.', path
        )

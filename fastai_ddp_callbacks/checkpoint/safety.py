"What a checkpoint may hold: nothing that runs code when it is read, and nothing that grows to more than the file."

from __future__ import annotations
import mmap, os, re, struct, sys, threading, zipfile
from collections import OrderedDict
from contextlib import contextmanager
from pickle import UnpicklingError

import numpy as np, torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..errors import CorruptCheckpointError, UnsafeCheckpointError
from .state import is_sharded, sharded_message

__all__ = ['refuse_unsafe', 'refuse_inflating', 'allowed']

_LAZY = (UninitializedParameter, UninitializedBuffer)
_PLAIN = (
    torch.Tensor,
    torch.nn.Parameter,
    *_LAZY,
    torch.dtype,
    torch.device,
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
)
_LONGEST_INT = 2032  # bits; torch reads no longer integers back
_END_SIZE = 22  # bytes of zip's end record
_LOCATOR_SIZE = 20  # bytes of what stands before it in a large archive
_END64_SIZE = 56  # bytes of the large archive's own end record, which stands before that


# -- before writing


def refuse_unsafe(
    value,  # what is to be saved
    path,  # where
    name: str = 'state',  # what it is called in a message
) -> None:
    "`UnsafeCheckpointError` for what could not be read again. Better now than at the end of training."
    if type(value) in (dict, OrderedDict):
        for k, v in value.items():
            refuse_unsafe(k, path, f'a key of {name}')
            refuse_unsafe(v, path, f'{name}[{k!r}]')
    elif type(value) in (list, tuple, torch.Size):
        for i, v in enumerate(value):
            refuse_unsafe(v, path, f'{name}[{i}]')
    elif is_sharded(value):
        raise UnsafeCheckpointError(f'{path} is not written: {name} {sharded_message(value)}', path)
    elif not _can_be_read_again(value):
        what = 'empty bytes' if value == b'' else f'a {type(value).__name__}'
        raise UnsafeCheckpointError(
            f'{path} is not written: {name} is {what}, and a file is only safe to read if it holds nothing but tensors '
            'and plain values.',
            path,
        )


def _can_be_read_again(value):
    if type(value) is bytes:
        return bool(value)
    if type(value) is int:
        return value.bit_length() <= _LONGEST_INT
    return type(value) in _PLAIN


# -- before reading


def refuse_inflating(
    f,  # the file, open for reading in binary
    zipped: bool,  # whether it is an archive, as `torch.save` makes it today
    path,  # for messages
) -> None:
    "`CorruptCheckpointError` or `UnpicklingError` for what torch would make more memory of than the file has bytes."
    if not zipped:
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = bool(_BYTEARRAY.search(data))
    else:
        found = any(_BYTEARRAY.search(pickled) for pickled in _pickles(f, path))
    if found:
        raise UnpicklingError('a bytearray')  # torch allows it, with a size; nothing that is saved needs it


_BYTEARRAY = re.compile(rb'c(builtins|__builtin__)\nbytearray\n')


def _pickles(f, path):
    archive = zipfile.ZipFile(f)
    size = os.fstat(f.fileno()).st_size
    entries = archive.infolist()
    if not entries or not _all_readers_agree(f, archive, size) or _is_packed(entries, size):
        raise CorruptCheckpointError(
            f'{path} was refused: it unpacks to something else or more than it holds, as nothing does that torch '
            'saves.',
            path,
        )
    for entry in entries:
        if entry.filename.endswith('/data.pkl'):
            f.seek(entry.header_offset + 26)
            lengths = struct.unpack('<HH', f.read(4))
            f.seek(sum(lengths), os.SEEK_CUR)
            yield f.read(entry.file_size)


def _all_readers_agree(f, archive, size):
    """Two readers may find two lists of contents in one file. Only where the list stands right before the end, and is
    said to, do all find the same."""
    end = size - _END_SIZE - len(archive.comment)
    f.seek(max(end - _LOCATOR_SIZE, 0))
    tail = f.read(_LOCATOR_SIZE + 4)
    if tail[_LOCATOR_SIZE:] != b'PK\5\6' or min(entry.header_offset for entry in archive.infolist()):
        return False
    is_large = tail[:4] == b'PK\6\7'
    return not is_large or int.from_bytes(tail[8:16], 'little') == end - _LOCATOR_SIZE - _END64_SIZE


def _is_packed(entries, size):
    "Whether it grows when it is read; `torch.save` packs nothing."
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        return True
    return sum(entry.file_size for entry in entries) > size


# -- while reading

_lock = threading.Lock()


@contextmanager
def allowed():
    """What the optimizer state of a stock fastai file holds beside tensors is allowed to `torch.load`. Its list is the
    process's, not the thread's: one thread at a time, and what was allowed before stays so."""
    core = sys.modules.get('fastcore.foundation')
    with _lock:
        before = torch.serialization.get_safe_globals()
        torch.serialization.add_safe_globals(
            [
                *((_number, f'numpy.{module}.multiarray.scalar') for module in ('core', '_core')),
                np.dtype,
                *(getattr(np.dtypes, name) for name in np.dtypes.__all__),
                *_LAZY,
                *([core.L] if core else []),
            ]
        )
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _number(dtype, data):
    "A number of numpy. Its own function would make gigabytes out of a dtype that says so."
    if not isinstance(dtype, np.dtype) or dtype.kind not in 'biufc':
        raise UnpicklingError(f'a number of type {dtype}')
    return np.frombuffer(data, dtype, 1)[0]

"What a checkpoint may hold: nothing that runs code when it is read, and nothing that grows to more than the file."

from __future__ import annotations
import mmap, os, re, struct, sys, threading, zipfile
from collections import OrderedDict
from contextlib import contextmanager
from pickle import UnpicklingError

import numpy as np, torch

from ..errors import CorruptCheckpointError, UnsafeCheckpointError

_PLAIN = torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device, str, bytes, bool, int, float, complex, type(None)
_END, _LOCATOR = 22, 20  # bytes of zip's end record, and of what stands before it in a large archive


# -- before writing


def refuse_unsafe(
    o,  # what is to be saved
    path,  # where
    name='state',
):
    "`UnsafeCheckpointError` for what could not be read again. Better now than at the end of training."
    if type(o) in (dict, OrderedDict):
        for k, v in o.items():
            refuse_unsafe(k, path, f'a key of {name}'), refuse_unsafe(v, path, f'{name}[{k!r}]')
    elif type(o) in (list, tuple, torch.Size):
        for i, v in enumerate(o):
            refuse_unsafe(v, path, f'{name}[{i}]')
    elif (
        type(o) not in _PLAIN or type(o) is bytes and not o or type(o) is int and o.bit_length() > 2032
    ):  # torch reads no longer integers back
        raise UnsafeCheckpointError(
            f'{path} is not written: {name} is {"empty bytes" if o == b"" else f"a {type(o).__name__}"}, and a file is only safe to read '
            'if it holds nothing but tensors and plain values.',
            path,
        )


# -- before reading


def refuse_inflating(
    f,  # the file, open
    zipped: bool,  # whether it is an archive, as `torch.save` makes it today
    path,  # for messages
):
    "`CorruptCheckpointError` or `UnpicklingError` for what torch would make more memory of than the file has bytes."
    if not zipped:
        with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = bool(_BYTEARRAY.search(data))
    else:
        found = any(_BYTEARRAY.search(o) for o in _pickles(f, path))
    if found:
        raise UnpicklingError('a bytearray')  # torch allows it, with a size; nothing that is saved needs it


_BYTEARRAY = re.compile(rb'c(builtins|__builtin__)\nbytearray\n')


def _pickles(f, path):
    archive, size = zipfile.ZipFile(f), os.fstat(f.fileno()).st_size
    entries, end = archive.infolist(), size - _END - len(archive.comment)
    f.seek(max(end - _LOCATOR, 0))
    tail = f.read(_LOCATOR + 4)
    # Two readers may find two lists of contents in one file. Only where the list stands right before the end, and is said to, do all find the same.
    agreed = tail[_LOCATOR:] == b'PK\5\6' and (
        tail[:4] != b'PK\6\7' or int.from_bytes(tail[8:16], 'little') == end - 76
    )
    packed = (
        any(o.compress_type != zipfile.ZIP_STORED for o in entries) or sum(o.file_size for o in entries) > size
    )  # `torch.save` packs nothing
    if not agreed or not entries or min(o.header_offset for o in entries) or packed:
        raise CorruptCheckpointError(
            f'{path} was refused: it unpacks to something else or more than it holds, as nothing does that torch saves.',
            path,
        )
    for o in entries:
        if o.filename.endswith('/data.pkl'):
            f.seek(o.header_offset + 26)
            f.seek(sum(struct.unpack('<HH', f.read(4))), 1)
            yield f.read(o.file_size)


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
                *((_number, f'numpy.{o}.multiarray.scalar') for o in ('core', '_core')),
                np.dtype,
                *(getattr(np.dtypes, o) for o in np.dtypes.__all__),
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

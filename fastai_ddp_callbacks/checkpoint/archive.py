"""The bytes of a checkpoint: those of `torch.save`, and a comment at their end with metadata and a checksum.

torch's own writer would take the interpreter's lock from the training five times per tensor, and compute a CRC that
nobody reads. So torch writes the frame, without the tensors' bytes, and we put these in. Where torch lays a file out
in another way than is known here, `torch.save` writes it whole, and a warning says so."""

from __future__ import annotations
import io, json, os, pickle, struct, warnings
from functools import lru_cache
from types import SimpleNamespace

import torch

from ..errors import CorruptCheckpointError, NewerCheckpointError
from .hashing import HashingWriter

__all__ = ['FORMAT', 'write_archive', 'read_footer', 'CHECKSUM_SIZE']

FORMAT = 1
CHECKSUM_SIZE = 16  # bytes, the last ones of a file
_FOOTER = struct.Struct('<8sHH16s')  # magic, format, length of the JSON before it, checksum
_MAGIC = b'fastaiDC'
_END_SIZE = 22  # bytes of zip's end record, whose last two are the length of the comment that follows
_END_MAGIC = b'PK\5\6'
_LARGEST_COMMENT = 65535


class _UnknownLayout(Exception):
    "torch has not written what this module expects."


# -- writing


def write_archive(
    state,  # what `torch.save` can save
    meta: dict,  # what JSON can hold
    out: HashingWriter,
) -> str | None:  # the checksum in hex; None if the file could not have one
    "Write what `torch.save` writes, and our comment."
    try:
        if not _layout_is_known():
            raise _UnknownLayout
        frame, storages = _framed(state)
    except _UnknownLayout:
        warnings.warn(
            f'torch {torch.__version__} lays files out in a way that is not known here: saving takes longer, by '
            'torch.save. Update this package.',
            stacklevel=4,
        )
        return _write_by_torch(state, meta, out)
    except RuntimeError:  # quantized and nested tensors, and those of devices without storages, torch writes itself
        return _write_by_torch(state, meta, out)
    for part, storage in zip(frame.parts, storages):
        out.write(part)
        out.write(torch.empty(0, dtype=torch.uint8, device='cpu').set_(storage.cpu()).numpy().data)
    return _seal(frame.parts[-1], meta, out)


def _seal(end, meta, out):
    "Write zip's end with our comment after it; returns the checksum in hex."
    text = json.dumps(meta).encode()
    comment_size = len(text) + _FOOTER.size
    if comment_size > _LARGEST_COMMENT:
        raise ValueError(f'The metadata of a checkpoint must fit in 65 kB of JSON; these take {len(text)} bytes.')
    footer = _FOOTER.pack(_MAGIC, FORMAT, len(text), b'')[:-CHECKSUM_SIZE]
    out.write(bytes(end[:-2]) + struct.pack('<H', comment_size) + text + footer)
    return out.end()


def _write_by_torch(state, meta, out):
    held = _HoldsBackEnd(out)
    torch.save(state, held)
    if held.end.startswith(_END_MAGIC) and held.end.endswith(b'\0\0'):
        return _seal(held.end, meta, out)
    warnings.warn(
        f'torch {torch.__version__} ends files in a way that is not known here: this one has no checksum and no '
        'metadata. Update this package.',
        stacklevel=5,
    )
    out.write(held.end)
    out.flush()
    return None


class _HoldsBackEnd:
    "The file object to which `torch.save` writes whole: it keeps zip's end record, which our comment changes."

    def __init__(self, out):
        self.out = out
        self.end = b''

    def write(self, data):
        size = len(data)
        if size < _END_SIZE:
            rest = self.end + bytes(data)
        else:
            self.out.write(self.end)
            rest = memoryview(data).cast('B')
        self.out.write(rest[:-_END_SIZE])
        self.out.flush()  # the memory is torch's, which uses it again
        self.end = bytes(rest[-_END_SIZE:])
        return size

    def flush(self):
        pass


def _framed(state):
    "What `torch.save` writes around the tensors' bytes, and the storages that have these bytes, in order."
    try:
        from torch.serialization import skip_data
    except ImportError as e:
        raise _UnknownLayout from e
    frame = _Frame()
    noted = {}
    try:
        with skip_data():
            torch.save(state, frame, SimpleNamespace(__name__='pickle', Pickler=_noting(noted)))
    except (TypeError, AttributeError, LookupError) as e:  # it calls the frame or the pickler in another way
        raise _UnknownLayout from e
    storages = [storage for storage in noted.values() if storage.nbytes()]
    noted.clear()  # the pickler's class has it too, and classes live until the next collection of garbage
    if frame.gaps != [storage.nbytes() for storage in storages]:
        raise _UnknownLayout
    return frame, storages


class _Frame:
    "The file object to which `torch.save` writes all but the bytes of tensors, over which it passes."

    def __init__(self):
        self.parts = [bytearray()]
        self.gaps = []

    def write(self, data):
        self.parts[-1] += data
        return len(data)

    def seek(self, size, whence):  # forward from where it is
        if whence != os.SEEK_CUR:
            raise _UnknownLayout
        self.gaps.append(size)
        self.parts.append(bytearray())

    def flush(self):
        pass


def _noting(noted):
    "A pickler that notes the storages, which `torch.save` replaces by numbers, in the order in which it writes them."

    class Noting(pickle.Pickler):
        def __init_subclass__(cls):
            persistent_id = cls.persistent_id

            def noting(self, storage):
                key = persistent_id(self, storage)
                if key:
                    noted.setdefault(key[2], getattr(storage, '_untyped_storage', storage))
                return key

            cls.persistent_id = noting

    return Noting


@lru_cache(1)
def _layout_is_known():
    """Whether a small file comes back as it was. Sizes alone would not show that torch has changed the order: tensors
    of equal size would then get each other's values."""
    state = [torch.full((3,), i) for i in range(12)]  # more than ten, whose names sort otherwise than their numbers
    try:
        frame, storages = _framed(state)
        data = b''.join(
            bytes(part) + bytes(storage.tolist()) for part, storage in zip(frame.parts, [*storages, torch.empty(0)])
        )
        found = torch.load(io.BytesIO(data), weights_only=True)
    except Exception:  # whatever torch makes of it, we do not know its layout
        return False
    return [t.tolist() for t in found] == [t.tolist() for t in state]


# -- reading


def read_footer(
    f,  # the file, open for reading in binary
    path,  # for messages
) -> dict | None:  # the metadata with the checksum; None for what looks like a whole file of others
    "Read a file's metadata from its end. `CorruptCheckpointError` or `NewerCheckpointError` if there are none to read."
    size = f.seek(0, os.SEEK_END)

    def tail(n):
        f.seek(max(size - n, 0))
        return f.read(n)

    footer = tail(_FOOTER.size)
    if len(footer) == _FOOTER.size and footer.startswith(_MAGIC):
        _, version, n, digest = _FOOTER.unpack(footer)
        if version > FORMAT:
            raise NewerCheckpointError(
                f'{path} is of format {version}, this version of the package reads up to {FORMAT}: update it.', path
            )
        try:
            return {**json.loads(tail(n + _FOOTER.size)[:n]), 'checksum': digest.hex()}
        except (TypeError, ValueError, RecursionError) as e:
            raise CorruptCheckpointError(f'{path} is corrupt: its metadata are unreadable.', path) from e
    f.seek(0)
    start = f.read(2)
    end = tail(_END_SIZE)
    cut = start == b'PK' and not (end.startswith(_END_MAGIC) and end.endswith(b'\0\0'))
    if cut or size < _END_SIZE:
        raise CorruptCheckpointError(
            f'{path} is truncated or corrupt: it has {size} bytes and does not end as a checkpoint does.', path
        )
    return None

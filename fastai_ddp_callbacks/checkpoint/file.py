"""One checkpoint file: written whole or not at all, verified when it is read, with its metadata inside.

The file is what `torch.save` makes, so that stock fastai and torch load it. A zip archive may end in a comment, which
they ignore: ours holds the metadata as JSON and a checksum over every byte before the checksum."""

from __future__ import annotations
import ctypes, errno, json, mmap, os, pickle, re, secrets, struct, sys, threading, time, warnings, zipfile
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch, xxhash
from torch.serialization import skip_data

from ..errors import (
    CheckpointError,
    CheckpointWriteError,
    CorruptCheckpointError,
    NewerCheckpointError,
    UnsafeCheckpointError,
)
from ..process import start_time, host, is_same_process
from ..distributed.progress import Progress
from .safety import allowed, refuse_inflating, refuse_unsafe
from .state import size_of

__all__ = ['write_checkpoint', 'read_checkpoint', 'verify_checkpoint', 'read_metadata']

_FORMAT = 1
_FOOTER = struct.Struct('<8sHH16s')  # magic, format, length of the JSON before it, checksum
_MAGIC = b'fastaiDC'
_END = 22  # bytes of zip's end record, whose last two are the length of the comment that follows
_END_MAGIC = b'PK\5\6'


# -- writing


def write_checkpoint(
    state,  # what `torch.save` can save; to be readable here: tensors and plain values in lists and dicts
    path: str | Path,  # the file to make or replace; its folder is made too
    meta: dict | None = None,  # more metadata, that JSON can hold; `format`, `time`, `torch` and `checksum` are added
) -> dict:  # the metadata of the file
    """Write `state` so that at every instant `path` is either what it was or the new checkpoint, whole and on disk.

    `CheckpointWriteError` if that fails, with the old file unchanged and no other file left."""
    path = Path(os.path.realpath(path))  # a link stays one, and its target is replaced
    refuse_unsafe(state, path)
    meta = dict(meta or {}, format=_FORMAT, time=time.time(), torch=torch.__version__)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary, file = _open_beside(path)
    except OSError as e:
        raise write_error(e, path) from e
    with _replaced(path) as old:
        try:
            with file, Progress(f'saving {path.name}') as bar:
                _sweep(path.parent, os.fstat(file.fileno()).st_mtime)
                if path.exists():
                    with suppress(OSError):
                        os.fchmod(file.fileno(), path.stat().st_mode & 0o777)  # some network disks do not allow it
                meta['checksum'] = _write(
                    state, meta, _Sealed(file.fileno(), old, partial(bar.update, total=size_of(state)))
                )
                os.fsync(file.fileno())  # before the name points here: a power cut must not leave a name without bytes
            os.replace(temporary, path)
        except BaseException as e:
            temporary.unlink(missing_ok=True)
            if isinstance(e, OSError):
                raise write_error(e, path) from e
            raise
        try:
            _sync_folder(path.parent)  # the new name itself
        except OSError as e:
            warnings.warn(
                f'{path} is written, but its folder could not be synced: {e}. After a power cut it may be what it was before.',
                stacklevel=2,
            )
    return meta


def write_error(e, path, now='What was there before is unchanged. Free some space or choose another folder.'):
    error = CheckpointWriteError(f'{path} could not be written: [Errno {e.errno}] {e.strerror or e}. {now}', path)
    error.errno = e.errno
    return error


def temporary_beside(
    path: Path,  # of a file to be made
) -> Path:  # in the same folder
    "A name that nobody else uses, for a file that is swept once this process has gone."
    pid = os.getpid()
    return path.with_name(f'.{path.name[:40]}.{host()}-{pid}-{start_time(pid)}-{secrets.token_hex(8)}.writing')


def _open_beside(path):
    "A new file in the folder of `path`, with the permissions that the umask gives."
    temporary = temporary_beside(path)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, 'O_CLOEXEC', 0), 0o666)
    return temporary, open(fd, 'wb', buffering=0)


_TEMPORARY = re.compile(r'\..*\.([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{16}\.writing', re.DOTALL)
_ABANDONED = (
    24 * 3600
)  # seconds after which a file that a process of another host has stopped writing is taken for a dead one's


def _sweep(folder, now):
    "Remove what killed processes have left half written in `folder`, and nothing else. `now`: by the clock of the disk."
    with os.scandir(folder) as entries:
        found = [(o, m) for o in entries if (m := _TEMPORARY.fullmatch(o.name)) and o.is_file(follow_symlinks=False)]
    for entry, m in found:
        try:
            dead = (
                not is_same_process(int(m[2]), int(m[3]))
                if m[1] == host()
                else now - entry.stat().st_mtime > _ABANDONED
            )
            if dead:
                os.unlink(entry.path)
        except (FileNotFoundError, PermissionError):
            pass  # another process has swept it, or it is not ours to sweep


@contextmanager
def _replaced(path):
    """The old file, open, or None. As long as it is open the system does not free its blocks, which takes a quarter of a save's
    time: nobody waits for that, least of all the sync of the folder."""
    try:
        old = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        old = None  # there is none, or it is not ours to read
    try:
        yield old
    finally:
        if old is not None:
            try:
                threading.Thread(target=os.close, args=(old,)).start()
            except RuntimeError:
                os.close(old)  # the interpreter is ending


def _sync_folder(folder):
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise  # some network disks know no such thing
    finally:
        os.close(fd)


# torch's own writer would take the interpreter's lock from the training five times per tensor, and count a CRC that nobody reads.


def _write(state, meta, out):
    "Write what `torch.save` writes, and our comment; gives the checksum in hex."
    frame, storages = _framed(state)
    if frame.gaps != [o.nbytes() for o in storages]:
        raise RuntimeError(
            f'torch {torch.__version__} lays files out in a way that is not known here: update this package.'
        )
    for part, storage in zip(frame.parts, storages):
        out.write(part)
        out.write(torch.empty(0, dtype=torch.uint8, device='cpu').set_(storage.cpu()).numpy().data)
    return out.seal(frame.parts[-1], meta)


def _framed(state):
    "What `torch.save` writes around the tensors' bytes, and the storages that have these bytes, in order."
    frame, noted = _Frame(), {}
    try:
        with skip_data():
            torch.save(state, frame, SimpleNamespace(__name__='pickle', Pickler=_noting(noted)))
    except (
        RuntimeError
    ):  # quantized and nested tensors, and those of devices without storages, torch writes whole or not at all
        frame, noted = _Frame(), {}
        torch.save(state, frame)
    storages = [o for o in noted.values() if o.nbytes()]
    noted.clear()  # the pickler's class has it too, and classes live until the next collection of garbage
    return frame, storages


class _Frame:
    "The file object to which `torch.save` writes all but the bytes of tensors, over which it passes."

    def __init__(self):
        self.parts, self.gaps = [bytearray()], []

    def write(self, data):
        self.parts[-1] += data
        return len(data)

    def seek(self, n, whence):  # forward by so many
        self.gaps.append(n)
        self.parts.append(bytearray())

    def flush(self):
        pass


def _noting(noted):
    "A pickler that notes the storages, which `torch.save` replaces by numbers, in the order in which it writes them."

    class Noting(pickle.Pickler):
        def __init_subclass__(cls):
            persistent_id = cls.persistent_id

            def noting(self, o):
                res = persistent_id(self, o)
                if res:
                    noted.setdefault(res[2], getattr(o, '_untyped_storage', o))
                return res

            cls.persistent_id = noting

    return Noting


_PIECE, _PIECES = 1 << 20, 512  # bytes, and memories, that are given to the system at once
_PART = 1 << 23  # bytes with which the disk is asked to begin


def _start_writing(fd, start, n):
    "Have the system begin to write these bytes to the disk. Only a hint: what becomes of it, `fsync` tells."
    f = getattr(_libc, 'sync_file_range', None)
    if f:
        f(fd, ctypes.c_int64(start), ctypes.c_int64(n), 2)  # SYNC_FILE_RANGE_WRITE


_libc = ctypes.CDLL(None) if sys.platform == 'linux' else None


class _Sealed:
    """Hashes what goes into the file, and ends it with our comment.

    To find page cache for a second checkpoint beside the old one can take five times as long as the rest of a save: in a virtual
    machine whose host takes free memory back, it does. So each part comes to where that of the old file was, in pieces for which
    Linux needs no block of 2 MB, which are the ones that the host takes."""

    def __init__(self, fd, old, progress):
        self.fd, self.old, self.progress, self.hash, self.pieces, self.size, self.written, self.started = (
            fd,
            old,
            progress,
            xxhash.xxh3_128(),
            [],
            0,
            0,
            0,
        )
        self._make_room()

    def write(self, data):
        "Small pieces go to the system together: to get the interpreter back from the training costs both more than to write them."
        data = memoryview(data)
        while data:
            room = _PIECE - self.size
            self.pieces.append(data[:room])
            self.size, data = self.size + len(self.pieces[-1]), data[room:]
            if self.size == _PIECE or len(self.pieces) == _PIECES:
                self._pass()

    def _pass(self):
        pieces, self.pieces, self.size = self.pieces, [], 0
        for o in pieces:
            self.hash.update(o)
        self._write_all(pieces)

    def _write_all(self, pieces):
        left = [memoryview(o) for o in pieces]
        while left:
            n = os.writev(self.fd, left)
            self.written += n
            while left and n >= len(left[0]):
                n -= len(left.pop(0))
            if left:
                left[0] = left[0][n:]
        if self.written - self.started >= _PART:  # the disk works on this while we go on
            _start_writing(self.fd, self.started, self.written - self.started)
            self.started = self.written
            self._make_room()
        self.progress(self.written)

    def _make_room(self):
        "For the next part. Only a hint: who reads the old file meanwhile still can."
        if self.old is None or not hasattr(os, 'posix_fadvise'):
            return
        with suppress(OSError):
            os.posix_fadvise(self.old, self.written, _PART, os.POSIX_FADV_DONTNEED)

    def seal(self, end, meta):
        "Write zip's end with our comment after it; gives the checksum in hex."
        text = json.dumps(meta).encode()
        if len(text) + _FOOTER.size > 65535:
            raise ValueError(f'The metadata of a checkpoint must fit in 65 kB of JSON; these take {len(text)} bytes.')
        head = _FOOTER.pack(_MAGIC, _FORMAT, len(text), b'')[:-16]
        self.write(end[:-2] + struct.pack('<H', len(text) + _FOOTER.size) + text + head)
        self._pass()
        self._write_all([self.hash.digest()])
        return self.hash.hexdigest()


# -- reading


def read_metadata(
    path: str | Path,  # a checkpoint
) -> dict | None:  # None for a file of stock fastai or torch, which has none
    "The metadata of a checkpoint, without reading its weights. `CheckpointError` if there is no whole end of a file."
    with _opened(path) as f:
        return _footer(f, path)


def verify_checkpoint(
    path: str | Path,  # a checkpoint
    progress=None,  # called with the bytes read and the bytes there are, about every 16 MB
) -> dict | None:  # its metadata; None for a file of stock fastai or torch, which cannot be verified
    "Read every byte of a checkpoint and compare the checksum. Nothing in it is executed. `CheckpointError` if damaged."
    with _opened(path) as f:
        meta = _footer(f, path)
        if meta is not None:
            _verify(f, meta, path, progress)
        return meta


def read_checkpoint(
    path: str | Path,  # a checkpoint of this package, or of stock fastai or torch
    device='cpu',  # where its tensors go
    verify: bool = True,  # whether to read all bytes and compare the checksum first
    checksum: str | None = None,  # of the one file that is meant, as `write_checkpoint` gave it
) -> tuple:  # (state, metadata); metadata is None for a file that this package did not write
    """Load a checkpoint, safely: only tensors and plain values, whatever the file holds.

    On the CPU the tensors are the mapped file itself, copied page by page when they are read. `CheckpointError` with
    file and reason if the file is missing, another one, truncated, corrupt, unsafe or of a newer format."""
    with _opened(path) as f:
        meta = _footer(f, path)
        if checksum is not None and (meta is None or meta['checksum'] != checksum):
            raise CheckpointError(
                f'{path} is not the file that this run saved: something else has written it since. '
                'Give each run a folder or a file name of its own.',
                path,
            )
        if verify and meta is not None:
            with Progress(f'verifying {Path(path).name}') as bar:
                _verify(f, meta, path, bar.update)
        if meta is None:
            warnings.warn(
                f'{path} has no checksum (it was not written by this package): loaded without verification.',
                stacklevel=2,
            )
        f.seek(0)
        zipped = f.read(2) == b'PK'
        # the name may be given to a newer file at any moment: load the one that was verified
        source = f'/proc/self/fd/{f.fileno()}' if os.path.exists('/proc/self/fd') else str(path)
        try:
            refuse_inflating(f, zipped, path)
            with allowed():
                return torch.load(source, map_location=device, weights_only=True, mmap=zipped), meta
        except pickle.UnpicklingError as e:
            raise UnsafeCheckpointError(
                f'{path} was refused: it holds more than tensors and plain values, so that loading it could run code '
                f'({str(e).splitlines()[0]}). If you trust it, load it with torch.load(..., weights_only=False) yourself.',
                path,
            ) from e
        except OSError:
            raise  # it has the system's reason
        except (
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
        ) as e:
            raise CorruptCheckpointError(
                f'{path} cannot be read as a checkpoint: {type(e).__name__}: {str(e)[:300]}', path
            ) from e


@contextmanager
def _opened(path):
    try:
        f = open(path, 'rb')
    except OSError as e:
        raise _read_error(e, path) from e
    with f:
        try:
            yield f
        except CheckpointError:
            raise
        except OSError as e:
            raise _read_error(e, path) from e


def _read_error(e, path):
    return CheckpointError(f'{path} could not be read: {e.strerror or e}.', path)


def _footer(f, path):
    "The metadata with the checksum, or None for what looks like a whole file of others."
    size = f.seek(0, os.SEEK_END)

    def tail(n):
        f.seek(max(size - n, 0))
        return f.read(n)

    footer = tail(_FOOTER.size)
    if len(footer) == _FOOTER.size and footer.startswith(_MAGIC):
        _, version, n, digest = _FOOTER.unpack(footer)
        if version > _FORMAT:
            raise NewerCheckpointError(
                f'{path} is of format {version}, this version of the package reads up to {_FORMAT}: update it.', path
            )
        try:
            return {**json.loads(tail(n + _FOOTER.size)[:n]), 'checksum': digest.hex()}
        except (TypeError, ValueError, RecursionError) as e:
            raise CorruptCheckpointError(f'{path} is corrupt: its metadata are unreadable.', path) from e
    f.seek(0)
    start, end = f.read(2), tail(_END)
    if start == b'PK' and not (end.startswith(_END_MAGIC) and end.endswith(b'\0\0')) or size < _END:
        raise CorruptCheckpointError(
            f'{path} is truncated or corrupt: it has {size} bytes and does not end as a checkpoint does.', path
        )
    return None


def _verify(f, meta, path, progress=None):
    seen = xxhash.xxh3_128()
    with mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
        n = len(view) - 16  # the checksum itself
        for i in range(0, n, 1 << 24):
            seen.update(view[i : min(i + (1 << 24), n)])
            if progress:
                progress(min(i + (1 << 24), n), n)
    if seen.hexdigest() != meta['checksum']:
        raise CorruptCheckpointError(
            f'{path} is corrupt: its bytes do not match its checksum. Use an earlier checkpoint.', path
        )

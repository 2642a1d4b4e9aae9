"Bytes on their way to the disk: hashed, gathered into pieces of one size, and kind to the page cache."

from __future__ import annotations
import ctypes, os, sys
from collections.abc import Callable
from contextlib import suppress

import xxhash

__all__ = ['HashingWriter']

_PIECE = 1 << 20  # bytes that are given to the system at once
_PIECES = 512  # buffers that are given to the system at once
_PART = 1 << 23  # bytes after which the disk is asked to begin

_libc = ctypes.CDLL(None) if sys.platform == 'linux' else None
_SYNC_FILE_RANGE_WRITE = 2


class HashingWriter:
    """Writes to a file, and hashes what it writes.

    To find page cache for a second checkpoint beside the old one can take five times as long as the rest of a save:
    in a virtual machine whose host takes free memory back, it does. So each part takes the place of the same part of
    the old file, in pieces for which Linux needs no block of 2 MB, which are the ones that the host takes."""

    def __init__(
        self,
        fd: int,  # of the new file
        old: int | None = None,  # of the file that it replaces, open; None if there is none
        progress: Callable[[int], object] | None = None,  # called with the bytes written so far
    ):
        self.fd = fd
        self.old = old
        self.progress = progress
        self.hash = xxhash.xxh3_128()
        self.written = 0
        self._pieces = []  # views of what is not yet written; whoever gave them keeps them as they are until `flush`
        self._size = 0
        self._started = 0  # bytes that the disk was asked to begin with
        self._make_room()

    def write(
        self,
        data,  # bytes, or what has them, unchanged until the next `flush`
    ) -> None:
        """Hash and write `data`, together with its neighbours: to get the interpreter back from training costs more
        than both."""
        rest = memoryview(data)
        while rest:
            piece = rest[: _PIECE - self._size]
            rest = rest[len(piece) :]
            self._pieces.append(piece)
            self._size += len(piece)
            if self._size == _PIECE or len(self._pieces) == _PIECES:
                self.flush()

    def flush(self) -> None:
        "Give the system all that it has not got yet."
        pieces = self._pieces
        self._pieces = []
        self._size = 0
        for piece in pieces:
            self.hash.update(piece)
        self._write_all(pieces)

    def end(self) -> str:
        "Write the hash itself behind all that it covers; returns it in hex."
        self.flush()
        self._write_all([self.hash.digest()])
        return self.hash.hexdigest()

    def _write_all(self, pieces):
        left = [memoryview(piece) for piece in pieces]
        while left:
            n = os.writev(self.fd, left)
            self.written += n
            while left and n >= len(left[0]):
                n -= len(left.pop(0))
            if left:
                left[0] = left[0][n:]
        if self.written - self._started >= _PART:  # the disk works on this part while we prepare the next
            _start_writing(self.fd, self._started, self.written - self._started)
            self._started = self.written
            self._make_room()
        if self.progress:
            self.progress(self.written)

    def _make_room(self):
        "Drop the old file's next part from the page cache. Only a hint: whoever reads that file still can."
        if self.old is None or not hasattr(os, 'posix_fadvise'):
            return
        with suppress(OSError):
            os.posix_fadvise(self.old, self.written, _PART, os.POSIX_FADV_DONTNEED)


def _start_writing(fd, start, size):
    "Have the system begin to write these bytes to the disk. Only a hint: `fsync` reports what becomes of it."
    sync_file_range = getattr(_libc, 'sync_file_range', None)
    if sync_file_range:
        sync_file_range(fd, ctypes.c_int64(start), ctypes.c_int64(size), _SYNC_FILE_RANGE_WRITE)

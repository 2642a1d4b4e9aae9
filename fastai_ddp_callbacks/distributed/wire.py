"What one rank brings to a rendezvous, as bytes of the same length on all ranks."

from __future__ import annotations
import hashlib, struct
from functools import lru_cache
from typing import Any, NamedTuple

NOTHING, BOOL, INT, FLOAT, BYTES, FAILED = range(6)  # what a row carries
_HEAD = struct.Struct('<4q')


class Row(NamedTuple):
    "What one rank brings to a rendezvous: four int64, and a few bytes if they are few."

    place: int  # hash of the place, which must be the same on all ranks
    kind: int
    bits: int  # a number, or how many bytes there are
    entered: int  # ns since the epoch on that rank's clock
    data: bytes = b''  # all of them, or nothing


def pack_row(
    row: Row,
    inline: int,  # how many bytes may ride along
) -> bytes:  # equally long on all ranks
    "A row as bytes; data that do not fit are left out."
    data = row.data if len(row.data) <= inline else b''
    return _HEAD.pack(*row[:4]) + data.ljust(inline, b'\0')


def unpack_row(
    packed: bytes | memoryview,  # as `pack_row` gave it
    inline: int,  # how many bytes may ride along
) -> Row:
    "The row in these bytes."
    place, kind, bits, entered = _HEAD.unpack_from(packed)
    size = bits if kind == BYTES and bits <= inline else 0
    return Row(place, kind, bits, entered, bytes(packed[_HEAD.size : _HEAD.size + size]))


@lru_cache(1024)
def place_hash(
    call: str,  # of a `Place`
) -> int:  # 64 bits, with sign
    "What tells rendezvous apart in a row."
    digest = hashlib.blake2b(call.encode(errors='surrogatepass'), digest_size=8).digest()
    return int.from_bytes(digest, 'little', signed=True)


def to_number(
    value: Any,  # a number, bool, 0-d tensor, numpy scalar or None
) -> float | int | bool | None:
    "`value` as a number of Python's; `TypeError` if it is none, or an int of more than 64 bits."
    if hasattr(value, 'item') and type(value) not in (bool, int, float):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as e:
            raise TypeError(f'agree needs one number per rank, not a {type(value).__name__} of several: {e}') from e
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and fits(value):
        return value
    raise TypeError(f'agree needs a number (an int of at most 64 bits), a bool or None, not {value!r:.100}.')


def fits(
    number: float | int,
) -> bool:
    "Whether a number fits into a row."
    return not isinstance(number, int) or -(2**63) <= number < 2**63


def encode(
    value: float | int | bool | None,
) -> tuple[int, int]:  # `kind` and `bits` of a row
    "A number for a row."
    if value is None:
        return NOTHING, 0
    if isinstance(value, bool):
        return BOOL, int(value)
    if isinstance(value, int):
        return INT, value
    return FLOAT, struct.unpack('<q', struct.pack('<d', value))[0]


def decode(
    row: Row,
) -> float | int | bool | None:
    "The number in a row."
    if row.kind == NOTHING:
        return None
    if row.kind == FLOAT:
        return struct.unpack('<d', struct.pack('<q', row.bits))[0]
    return bool(row.bits) if row.kind == BOOL else row.bits

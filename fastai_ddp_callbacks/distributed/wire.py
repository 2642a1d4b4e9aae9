"One number per rank: how it travels in a row, and how those of all ranks become one."

from __future__ import annotations
import math, struct
from typing import Any

from .control import BOOL, FLOAT, INT, NOTHING

__all__ = ['REDUCTIONS']


def plain(value):
    "`value` as None, bool, int or float."
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


def fits(number):
    return not isinstance(number, int) or -(2**63) <= number < 2**63


def encode(value):
    if value is None:
        return NOTHING, 0
    if isinstance(value, bool):
        return BOOL, int(value)
    if isinstance(value, int):
        return INT, value
    return FLOAT, struct.unpack('<q', struct.pack('<d', value))[0]


def decode(kind, bits):
    if kind == NOTHING:
        return None
    if kind == FLOAT:
        return struct.unpack('<d', struct.pack('<q', bits))[0]
    return bool(bits) if kind == BOOL else bits


def _mean(values):
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values)  # fsum refuses inf-inf, which a diverging loss may bring
    return (
        math.fsum(o / len(values) for o in values)
        if math.isinf(sum(map(float, values)))
        else math.fsum(values) / len(values)
    )


REDUCTIONS = 'mean', 'main', 'min', 'max'  # those of `agree` that make a number of numbers
REDUCERS: dict[str, Any] = {'mean': _mean, 'main': None, 'min': min, 'max': max, 'any': any, 'all': all}

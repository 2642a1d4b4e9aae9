"How `agree` makes one value out of one per rank. To add a reduction, add it to the table at the end."

from __future__ import annotations
import math
from typing import Any, Callable, NamedTuple

__all__ = ['REDUCTIONS', 'NUMERIC']


class Reduction(NamedTuple):
    "Makes one value out of those of all ranks."

    of: Callable[[list], Any]  # called with the values by rank, None for a rank that has none
    numeric: bool  # whether it makes a number out of numbers, which is what a monitored metric needs


def _numeric(reduce):
    "A reduction of the numbers of the ranks that have one. If they are all the same, exactly that comes back."

    def of(numbers):
        first = numbers[0]
        if all(type(number) is type(first) and number == first for number in numbers):
            return first
        return reduce(numbers)

    return Reduction(_of_those_present(of), numeric=True)


def _logical(reduce):
    "A reduction of the truth of the values of the ranks that have one."
    return Reduction(_of_those_present(lambda values: reduce(map(bool, values))), numeric=False)


def _of_those_present(reduce):
    "`reduce` without the ranks that have no value. A NaN on any rank is the result: nothing may hide it."

    def of(values):
        present = [value for value in values if value is not None]
        if not present:
            return None
        if any(isinstance(value, float) and math.isnan(value) for value in present):
            return math.nan
        return reduce(present)

    return of


def _mean(numbers):
    if not all(map(math.isfinite, numbers)):
        return sum(numbers) / len(numbers)  # fsum refuses inf-inf, which a diverging loss may bring
    if math.isinf(sum(map(float, numbers))):
        return math.fsum(number / len(numbers) for number in numbers)  # the sum is too large, the mean is not
    return math.fsum(numbers) / len(numbers)


REDUCTIONS = {
    'mean': _numeric(_mean),
    'main': Reduction(lambda values: values[0], numeric=True),
    'min': _numeric(min),
    'max': _numeric(max),
    'any': _logical(any),
    'all': _logical(all),
}
NUMERIC = tuple(name for name, reduction in REDUCTIONS.items() if reduction.numeric)

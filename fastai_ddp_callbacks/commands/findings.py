"What a check yields, and how facts of several ranks are put into words."

from __future__ import annotations
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

__all__ = ['Line', 'Finding', 'ok', 'note', 'problem', 'count', 'ranks_in_words', 'ranks_by', 'each_in_words']


class Line(NamedTuple):
    "What a check has seen."

    verdict: str  # 'ok', 'note' or 'problem'
    text: str  # what was seen
    advice: str  # what to do about it


class Finding(NamedTuple):
    "One line of the report."

    verdict: str  # 'ok', 'note' or 'problem'
    check: str  # what was looked at
    text: str  # what was seen
    advice: str = ''  # what to do about it


def ok(text: str) -> Line:
    "All is well: nothing to do."
    return Line('ok', text, '')


def note(text: str, advice: str) -> Line:
    "Something that may be meant so."
    return Line('note', text, advice)


def problem(text: str, advice: str) -> Line:
    "Something that keeps training from working."
    return Line('problem', text, advice)


def count(
    n: int,
    what: str,  # a noun in the singular
) -> str:
    "`n` and the noun: 'no GPUs', '1 GPU', '2 GPUs'."
    return f'{n or "no"} {what}{"" if n == 1 else "s"}'


def ranks_in_words(ranks: Sequence[int]) -> str:
    "'rank 1', 'ranks 0, 2'."
    return f'rank{"" if len(ranks) == 1 else "s"} {", ".join(map(str, ranks))}'


def ranks_by(
    facts: dict[int, Any],  # by rank
    get: Callable[[Any], Hashable],  # what of a rank's facts to group the ranks by
) -> dict:  # {what `get` returns: the ranks for which it does}
    "Which ranks have the same."
    groups: dict = {}
    for rank, own in facts.items():
        groups.setdefault(get(own), []).append(rank)
    return groups


def each_in_words(
    groups: dict,  # as `ranks_by` returns them
) -> str:
    "'rank 0: this; ranks 1, 2: that'."
    return '; '.join(f'{ranks_in_words(ranks)}: {what}' for what, ranks in groups.items())

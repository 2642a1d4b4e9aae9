"Types of command line arguments, for argparse: refused with the reason."

from __future__ import annotations
import argparse, math, os
from collections.abc import Callable
from pathlib import Path

__all__ = ['number', 'folder_for_models']


def number(
    kind: type,  # `int` or `float`
    low: float,  # the smallest number that is allowed
    high: float,  # the largest
) -> Callable[[str], int | float]:
    "A type for numbers of one kind within bounds."

    def parse(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan  # which is within no bounds
        if not low <= value <= high:
            wanted = 'a whole number' if kind is int else 'a number'
            raise argparse.ArgumentTypeError(f'{text!r} is not {wanted} from {low} to {high}')
        return value

    return parse


def folder_for_models(
    text: str,  # a path; the folder is made, with one for models in it
) -> str:  # the same path
    "A type for a folder in which a `Learner` can save."
    models = Path(text, 'models')
    try:
        models.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise argparse.ArgumentTypeError(f'{text!r} cannot be used as a folder: {e.strerror}') from e
    if not os.access(models, os.W_OK):
        raise argparse.ArgumentTypeError(f'{text!r} cannot be written to')
    return text

"""Barriers that have a name, carry an outcome and end; code for one rank only; one value out of one per rank.

Needs torch, not fastai."""

from .collectives import *
from .collectives import __all__ as _collectives
from .tensors import *
from .tensors import __all__ as _tensors

__all__ = [*_collectives, *_tensors]

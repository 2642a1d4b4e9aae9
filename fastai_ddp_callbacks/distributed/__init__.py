"""Barriers that have a name, carry an outcome and end; code for one rank only; one value out of one per rank.

Needs torch, not fastai. Ranks are those of the default process group; without one, or in a group of one, everything here
has its single-process meaning and costs next to nothing."""

from . import collectives, nodes, propagate, ranks, sections, tensors, time_limit
from .collectives import *
from .nodes import *
from .propagate import *
from .ranks import *
from .ranks import print_on_main as print_on_main  # for the floors above
from .sections import *
from .tensors import *
from .time_limit import *

__all__ = [
    name for module in (ranks, nodes, collectives, tensors, sections, propagate, time_limit) for name in module.__all__
]

"""Barriers that have a name, carry an outcome and end; code for one rank only; one value out of one per rank.

Needs torch, not fastai. Ranks are those of the default process group; without one, or in a group of one, everything here
has its single-process meaning and costs next to nothing."""

from .collectives import *
from .nodes import *
from .propagate import *
from .ranks import *
from .ranks import print_on_main as print_on_main  # for the floors above
from .sections import *
from .tensors import *
from .time_limit import *

__all__ = [  # written out, as type checkers read it
    'rank',
    'world_size',
    'is_main_process',
    'is_local_main_process',
    'barrier',
    'agree',
    'broadcast',
    'all_gather',
    'all_or_none',
    'broadcast_tensors',
    'run_on_main',
    'main_process_only',
    'run_once_per_node',
    'once_per_node',
    'main_process_first',
    'no_collectives',
    'propagate_failure',
    'get_timeout',
    'set_timeout',
    # their names in 0.1, until 0.3
    'together',
    'no_barrier',
    'reports_failure',
]

"""Barriers that have a name, carry an outcome and end; code for one rank only; one value out of one per rank.

Needs torch, not fastai. Ranks are those of the default process group; without one, or in a group of one, everything
here has its single-process meaning and costs next to nothing."""

from .collectives import agree, all_gather, all_or_none, barrier, broadcast, together
from .nodes import is_local_main_process
from .propagate import propagate_failure, reports_failure
from .ranks import is_main_process, print_on_main as print_on_main, rank, world_size  # one for the floors above only
from .sections import (
    main_process_first,
    main_process_only,
    no_barrier,
    no_collectives,
    once_per_node,
    run_on_main,
    run_once_per_node,
)
from .tensors import broadcast_tensors
from .time_limit import get_timeout, set_timeout

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

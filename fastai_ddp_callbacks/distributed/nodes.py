"Which ranks share a node, that is a machine with disks of its own."

from __future__ import annotations
import os

from .call_site import Place, place_of
from .control import Control
from .current import current_control
from .ranks import alone
from .rendezvous import Rendezvous
from .time_limit import get_timeout
from .wire import INT

__all__ = ['is_local_main_process']


def is_local_main_process() -> bool:
    """Whether this is the first rank of its node. True without a process group.
    The launcher's `LOCAL_RANK` tells; where it sets none, the first call is a rendezvous of all ranks."""
    control = current_control()
    if control is None:
        return alone('is_local_main_process()', True)
    if 0 <= local_rank() <= control.rank:
        return local_rank() == 0
    return _first_on_host(control, place_of('is_local_main_process()', True), get_timeout()) == control.rank


def local_rank() -> int:
    "What the launcher says, or -1."
    local = os.environ.get('LOCAL_RANK', '')
    return int(local) if local.isascii() and local.isdecimal() else -1


def agreed_leader(meeting: Rendezvous) -> int:
    "The first rank of this rank's node. What the launcher says counts if it makes sense for all ranks together."
    control, place, timeout = meeting.control, meeting.place, meeting.timeout
    assert control is not None  # several ranks are around
    local = [row.bits for row in control.meet(place, timeout, INT, local_rank())]
    if all(0 <= own <= rank and local[rank - own] == 0 for rank, own in enumerate(local)):
        return control.rank - local[control.rank]
    return _first_on_host(control, place, timeout)


def _first_on_host(control: Control, place: Place, timeout: float) -> int:
    return control.ranks_of_node(place, timeout)[0]

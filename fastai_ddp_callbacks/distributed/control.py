"""The control traffic of this process in one default process group: exchanges among all ranks that end.

A rendezvous is a single all-to-all of a small row per rank on a gloo group of our own, so that every rank sees where
every other one is. What goes wrong outside a rendezvous is written as a note into the job's store, where a rank that
waits looks every now and then. After a note the group is given up, and the ranks meet in one of the next generation."""

from __future__ import annotations
import time, weakref
from collections import deque
from typing import NamedTuple

import torch, torch.distributed as dist

from . import heard
from .assembly import Assembly
from .blocking import new_connection
from .call_site import Place
from .exclusive_wait import ExclusiveWait
from .failure import NOTE_SIZE, Board, Note, failed
from .lookout import Lookout
from .presence import Presence
from .reports import Reports
from .wait import FIRST_LOOK, Wait
from .wire import FAILED, NOTHING, Row, pack_row, place_hash, unpack_row
from .witness import mismatch

__all__ = ['Control', 'Met']

_INLINE, _FEW_RANKS = 480, 64  # so many bytes ride along in a row, up to so many ranks: they cost no time, but traffic
_REMEMBERED = 2000  # rendezvous


class Met(NamedTuple):
    "A rendezvous that took place; times are ns since the epoch."

    place: Place
    entered: tuple[int, ...]  # when each rank came, by its own clock
    left: int  # when this one left


class Control:
    "Where this process meets the other ranks of one default process group."

    def __init__(self) -> None:
        self.world = weakref.ref(dist.group.WORLD)  # held, it would keep the store's server alive
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.inline = _INLINE if self.size <= _FEW_RANKS else 0
        store = dist.PrefixStore('fastai_ddp_callbacks', new_connection(dist.distributed_c10d._get_default_store()))
        # Some launchers keep one store over several process groups: count the groups that this rank has seen.
        self.store = dist.PrefixStore(str(store.add(f'life/{self.rank}', 1)), store)
        self.presence, self.board = Presence(self.store, self.rank, self.size), Board(self.store)
        self.reports = Reports(self.board, self.rank, self.size)
        self.lookout = Lookout(self.presence, self.reports)
        self._assembly = Assembly(self.store, self.presence, self.lookout, self.world)
        self._one_wait = ExclusiveWait(self.reports)
        self.record: deque[Met] = deque(maxlen=_REMEMBERED)
        heard.forget()

    @property
    def generation(self):
        "The group at hand."
        return self.reports.generation

    def meet(
        self,
        place: Place,
        timeout: float,  # seconds
        kind: int = NOTHING,  # of `bits`: NOTHING, BOOL, INT, FLOAT or BYTES
        bits: int = 0,  # a number, or how many bytes there are
        data: bytes | memoryview = b'',  # these bytes, which ride along if they are few
        failure: BaseException | None = None,  # with which this rank comes, if it has failed
    ) -> list[Row]:  # one per rank
        "Meet all ranks at `place`. Raises on every rank if one has failed, is elsewhere, or does not come."
        came = time.time_ns()  # before the group is made, which waits for all ranks too
        with self._one_wait.begin(place, timeout, failure) as wait:
            here = place_hash(place.call)
            row = Row(here, FAILED if failure else kind, bits, came, bytes(data) if len(data) <= self.inline else b'')
            packed = pack_row(row, self.inline)
            self._assembly.join(wait)
            rows = [unpack_row(one, self.inline) for one in self._all_to_all(packed, len(packed), wait)]
            self._remember(place, rows)
            # Those who came first may have given up before the last one came, with their messages under way. If the
            # store has gone, whoever kept it came here and left.
            if max(o.entered for o in rows) - min(o.entered for o in rows) > FIRST_LOOK * 1e9:
                self.lookout.check_for_failure(wait)
            if any(o.kind == FAILED or o.place != here for o in rows):
                self._raise_disagreement(wait)
        return rows

    def all_gather_bytes(
        self,
        data: bytes | memoryview,  # of this rank
        size: int,  # bytes of the longest on any rank
        place: Place,
        timeout: float,  # seconds
    ) -> list[memoryview]:  # of each rank, in `size` bytes with blanks behind them
        "What every rank has, on every rank."
        with self._one_wait.begin(place, timeout) as wait:
            return self._all_to_all(data, size, wait)

    def broadcast_bytes(
        self,
        data: bytes | memoryview,  # of rank `src`; ignored on the others
        size: int,  # how many there are
        src: int,
        place: Place,
        timeout: float,  # seconds
    ) -> memoryview:
        "The bytes of rank `src`, on every rank. They are not copied there."
        tensor = torch.frombuffer(data, dtype=torch.uint8) if self.rank == src else torch.empty(size, dtype=torch.uint8)
        self.broadcast_tensor(tensor, src, place, timeout)
        return tensor.numpy().data

    def broadcast_tensor(
        self,
        tensor: torch.Tensor,  # on the CPU; filled in on all ranks but `src`
        src: int,
        place: Place,
        timeout: float,  # seconds
    ) -> None:
        "Fill `tensor` with what rank `src` has in it."
        with self._one_wait.begin(place, timeout) as wait:
            self.lookout.run(lambda: wait.generation.broadcast(tensor, src, timeout + 1), wait)

    def ranks_of_node(
        self,
        place: Place,
        timeout: float,  # seconds
    ) -> list[int]:
        "The ranks that run on this rank's host, in order. A rendezvous of all ranks the first time."
        with self._one_wait.begin(place, timeout) as wait:
            self._assembly.join(wait)
            return [neighbour.rank for neighbour in self.presence.neighbours()]

    def new_group(
        self,
        name: str,  # that no other group has
        place: Place,
        timeout: float,  # seconds
    ) -> dist.ProcessGroupGloo:
        "Another gloo group of all ranks, which are known to be about to make it too."
        with self._one_wait.begin(place, timeout) as wait:
            return self._assembly.make_group(name, wait)

    def wait_for(
        self,
        work: dist.Work,  # in such a group
        place: Place,
        timeout: float,  # seconds
    ) -> None:
        "Wait for `work` as for a rendezvous."
        with self._one_wait.begin(place, timeout) as wait:
            self.lookout.wait_for(work, wait)

    def raise_connection_lost(self, error: BaseException, place: Place) -> None:
        "Such a group is broken: raise why."
        with self._one_wait.begin(place, 1) as wait:
            self.lookout.raise_connection_lost(error, wait)

    def _all_to_all(self, data, size, wait):
        # ours is the first limit; after one second more gloo lets go of it too
        return self.lookout.run(lambda: wait.generation.all_to_all(data, size, wait.timeout + 1), wait)

    def _remember(self, place, rows):
        "All ranks have met."
        heard.forget()
        self.lookout.witness.have_met(place)
        self.record.append(Met(place, tuple(row.entered for row in rows), time.time_ns()))

    def _raise_disagreement(self, wait):
        "All ranks know that something is wrong: let each other know what, and raise."
        failure, place = wait.failure, wait.place
        mine = failed(failure, place, self.rank) if failure else Note('here', self.rank, str(place))
        exchange = Wait(place, wait.timeout, wait.generation)
        # JSON is followed by blanks, not by zeros
        notes = [Note.unpack(bytes(one)) for one in self._all_to_all(mine.pack().ljust(NOTE_SIZE), NOTE_SIZE, exchange)]
        self.lookout.witness.have_met(place)
        error = failure or next((note.error(self.rank, place) for note in notes if note.kind == 'failed'), None)
        error = error or mismatch({note.rank: note.place for note in notes})
        heard.mark(error)
        raise error

"Who is where, by the job's store: which ranks share this host, which of them live, and who waits at which rendezvous."

from __future__ import annotations
import json, os
from typing import NamedTuple

import torch.distributed as dist

from ..process import host, is_same_process, start_time

__all__ = ['Neighbour', 'Presence']


class Neighbour(NamedTuple):
    "A rank on this host."

    rank: int
    pid: int
    start: int  # when its process began, which distinguishes it from a later one of the same number


class Presence:
    "What this rank lets the others know of itself, and what it knows of them. No rendezvous."

    def __init__(
        self,
        store: dist.Store,  # of all ranks
        rank: int,
        size: int,
    ):
        self.store, self.rank, self.size = store, rank, size
        self._host = f'host/{host()}'
        self._neighbours: list[Neighbour] = []
        self._complete = False  # whether all ranks have come, so that the neighbours are known for good
        place = store.add(self._host, 1)
        pid = os.getpid()
        store.set(f'{self._host}/{place}', json.dumps(Neighbour(rank, pid, start_time(pid) or 0)))

    def join(
        self,
        generation: int,  # whose group this rank is about to make
    ) -> None:
        "Say that this rank has come."
        self.store.add(f'joined/{generation}', 1)

    def all_have_joined(self, generation: int) -> bool:
        "Whether all ranks have come."
        if self.store.add(f'joined/{generation}', 0) < self.size:
            return False
        self.neighbours()
        self._complete = True
        return True

    def neighbours(self) -> list[Neighbour]:
        "The ranks on this host that have come so far, this one too. Without the store once all have."
        if not self._complete:
            keys = [f'{self._host}/{i + 1}' for i in range(self.store.add(self._host, 0))]
            found = [self.store.get(key) for key in keys if self.store.check([key])]
            self._neighbours = sorted(Neighbour(*json.loads(text)) for text in found)
        return self._neighbours

    def dead(self) -> list[int]:
        "The ranks on this host whose process is gone."
        try:
            neighbours = self.neighbours()
        except RuntimeError:  # the store went with the process that kept it
            neighbours = self._neighbours
        return [o.rank for o in neighbours if not is_same_process(o.pid, o.start)]

    def announce(
        self,
        spot: str,  # tells waits apart, the same on all ranks
        place: str,  # for the reader
    ) -> None:
        "Say that this rank waits, for whoever must say who is missing."
        self.store.set(f'at/{self.rank}', json.dumps([spot, place]))

    def waiting(
        self,
        spot: str,  # as it was announced
    ) -> dict[int, str]:  # rank to place
        "The ranks that have said that they wait at this spot, this one too."
        keys = {rank: f'at/{rank}' for rank in range(self.size)}
        said = {rank: json.loads(self.store.get(key)) for rank, key in keys.items() if self.store.check([key])}
        return {rank: place for rank, (there, place) in said.items() if there == spot}

    def missing(
        self,
        spot: str,  # as it was announced
    ) -> list[int]:
        "The ranks that have not said that they wait at this spot."
        return sorted({*range(self.size)} - self.waiting(spot).keys())

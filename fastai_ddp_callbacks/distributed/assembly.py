"How the ranks come together to make the group in which they meet."

from __future__ import annotations
import time, weakref

import torch.distributed as dist

from ..errors import DDPError
from .blocking import call_in_thread, new_connection
from .group import make_gloo_group
from .lookout import Lookout
from .presence import Presence
from .wait import Wait

__all__ = ['Assembly']


class Assembly:
    "Makes gloo groups of all ranks, with connections of their own to the job's store."

    def __init__(
        self,
        store: dist.Store,
        presence: Presence,
        lookout: Lookout,
        world: weakref.ref[dist.ProcessGroup | None],  # the default group, borrowed where torch has no gloo
    ) -> None:
        self.store, self.presence, self.lookout, self.world = store, presence, lookout, world

    def join(self, wait: Wait) -> None:
        "Make the group of this generation, once all ranks ask for it."
        generation = wait.generation
        if generation.group is not None:
            return
        if not dist.is_gloo_available():
            generation.borrow(self.world(), wait.place)
            return
        self._gather(wait)
        generation.group = self.make_group(f'group/{generation.number}', wait)

    def _gather(self, wait):
        "Wait in the store until all ranks have come."

        def all_have_come(seconds):
            end, pause = time.monotonic() + seconds, 0.001
            try:
                while not self.presence.all_have_joined(wait.generation.number):
                    if time.monotonic() >= end:
                        return False
                    time.sleep(pause)
                    pause = min(2 * pause, seconds)
            except RuntimeError as e:
                self.lookout.raise_connection_lost(e, wait)
            return True

        self.presence.join(wait.generation.number)
        self.lookout.wait_until(all_have_come, wait)

    def make_group(
        self,
        name: str,  # that no other group has
        wait: Wait,
    ) -> dist.ProcessGroupGloo:
        "A gloo group of all ranks, which are known to be about to make it too."
        try:
            store = dist.PrefixStore(name, new_connection(self.store))
            return call_in_thread(
                lambda: make_gloo_group(store, self.presence.rank, self.presence.size, wait.timeout),
                lambda ended: self.lookout.wait_until(ended, wait),
            )
        except DDPError:
            raise
        except RuntimeError as e:
            self.lookout.raise_connection_lost(e, wait)

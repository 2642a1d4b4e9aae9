"The gloo group on which the ranks meet: one generation of it until something fails in it, then the next."

from __future__ import annotations
import ctypes, time
from collections.abc import Callable
from datetime import timedelta

import numpy as np, torch, torch.distributed as dist

from ..errors import DDPError

__all__ = ['Generation', 'keep_alive', 'make_gloo_group']


def keep_alive(
    group,  # of gloo, or None
    work: dist.Work | None,  # that may be under way in it
) -> None:
    """Never destroy a group in which something is under way: its destructor waits for that, which may be for ever when
    a rank has failed."""
    if work is not None and not work.is_completed():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def make_gloo_group(
    store: dist.Store,  # that nobody else uses
    rank: int,
    size: int,
    timeout: float,  # seconds
) -> dist.ProcessGroupGloo:
    "A gloo group of all ranks. Blocks, with a deaf ear to Ctrl-C, until all have come."
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout))


class Generation:
    "One group of all ranks, until something fails in it: what was under way may never end, and the next one is made."

    def __init__(
        self,
        number: int,  # how many were given up before
        size: int,  # ranks
    ):
        self.number, self.size = number, size
        self.count = 0  # waits of all ranks that have ended in it: what ranks do alike, they count alike
        self.group: dist.ProcessGroup | dist.ProcessGroupGloo | None = None
        self.device = torch.device('cpu')
        self.pending: dist.Work | None = None
        self.borrowed = False  # whether the group is the default process group

    @property
    def spot(self) -> str:
        "Tells the waits of this rank apart, the same on all ranks that have done the same."
        return f'{self.number}/{self.count}'

    def borrow(
        self,
        world,  # the default process group
        place: object,  # where this rank is, for the message
    ) -> None:
        "Use the default process group, where torch was built without gloo. `DDPError` if a failure has broken it."
        if self.number:
            raise DDPError(
                f'{place}: an earlier failure has broken the default process group, which is the only one here as '
                'torch was built without gloo. Destroy it and initialise a new one.'
            )
        devices = {device.type: device for device in world._device_types}
        self.device = devices.get('cpu', *list(devices.values())[:1])
        self.group, self.borrowed = world, True

    def all_to_all(
        self,
        data: bytes | memoryview,  # of this rank
        size: int,  # bytes for each rank, the same on all: blanks follow the data of those that have less
        timeout: float,  # seconds after which gloo gives up
    ) -> tuple[dist.Work, Callable[[], list[memoryview]]]:  # to be called when the work has ended: what each rank sent
        """Send `data` to every rank. A message from each rank to each other has no chain of neighbours in it: whoever
        dies is seen at once by all who wait."""
        rows = torch.zeros(self.size, size, dtype=torch.uint8)
        rows.numpy()[:, : len(data)] = np.frombuffer(data, dtype=np.uint8)
        sent = rows.to(self.device)
        received = torch.empty_like(sent)
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=timeout)
        work = self._in_use().alltoall_base(received.view(-1), sent.view(-1), [], [], options)
        return work, lambda: [one.data for one in received.cpu().numpy()]

    def broadcast(
        self,
        tensor: torch.Tensor,  # on the CPU; what rank `src` has in it is filled in on the others
        src: int,
        timeout: float,  # seconds after which gloo gives up
    ) -> tuple[dist.Work, Callable[[], torch.Tensor]]:  # to be called when the work has ended
        "Send the tensor of rank `src` to every rank."
        carried = tensor.to(self.device)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        options.timeout = timedelta(seconds=timeout)
        # what gloo fills in is `tensor` itself, which `copy_` then sees and leaves alone
        return self._in_use().broadcast([carried], options), lambda: tensor.copy_(carried)

    def _in_use(self):
        if self.group is None:
            raise DDPError('Another thread of this rank has reported a failure, which ended this rendezvous.')
        return self.group

    def has_ended(
        self,
        work: dist.Work,  # of this group or of another of all ranks
        seconds: float,  # to wait for it
    ) -> bool:
        "Whether `work` ends within so many seconds. `RuntimeError` if it has failed."
        if self.borrowed:  # `wait` of other backends than gloo may return early or never
            end = time.monotonic() + seconds
            while not work.is_completed():
                if time.monotonic() > end:
                    return False
                time.sleep(0.0005)
        else:
            try:
                work.wait(timedelta(seconds=seconds))
                return True
            except RuntimeError:
                if not work.is_completed():
                    return False  # the wait was over, the work continues
        work.wait()
        return True

    def discard(self) -> Generation:  # the one that follows
        "Give up the group."
        keep_alive(self.group, self.pending)
        self.group = self.pending = None
        return Generation(self.number + 1, self.size)

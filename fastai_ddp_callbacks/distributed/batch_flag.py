"""What one rank sees in a batch, all ranks know in the next one, without waiting for each other in between.

The exchange runs in the background, in order, on a gloo group of its own: the control group carries rendezvous only.
Ranks that train together are at most one batch apart, so that the answer is there when it is read."""

from __future__ import annotations
from datetime import timedelta
from weakref import WeakKeyDictionary, finalize

import torch, torch.distributed as dist

from .call_site import Place
from .collectives import agree
from .control import Control
from .current import current_control
from .group import keep_alive
from .time_limit import get_timeout

__all__ = ['BatchFlag']

_lines: WeakKeyDictionary[Control, dict[str, _Line]] = WeakKeyDictionary()  # of each `Control`: by name


class _Line:
    "The group on which the flags of one name travel, and the exchange that is under way there."

    def __init__(self, control: Control, key: str, timeout: float) -> None:
        self.group = control.new_group(key, Place(key, key), timeout)
        finalize(control, self.close)  # at the latest when the interpreter ends, while its threads can still be joined
        self.generation = control.generation
        self.work: dist.Work | None = None
        self.received: torch.Tensor | None = None

    def close(self):
        keep_alive(self.group, self.work)
        self.group = None

    def send(self, raised, size, timeout):
        row = torch.full((size,), raised, dtype=torch.uint8)
        self.received = torch.empty_like(row)
        options = dist.AllToAllOptions()
        options.timeout = timedelta(seconds=2 * timeout)  # it is read, with `timeout`, a batch later
        self.work = self.group.alltoall_base(self.received, row, [], [], options)


class BatchFlag:
    """A flag that any rank may raise in a batch, and that all ranks then see in the same batch: the next one.

    One object per fit. Every rank calls `open` before the first batch, `exchange` once per batch, and `read` when no
    batch follows, so that nothing is under way when the fit ends. In one process the answer comes at once."""

    def __init__(
        self,
        name: str,  # what the flag says, the same on all ranks
    ):
        self.name = name
        self._line: _Line | None = None

    def __reduce__(self):
        return BatchFlag, (self.name,)

    def open(self) -> None:
        """Make the connections, at a rendezvous. Before the first batch, so that a rank without this flag is found to
        be elsewhere, and not waited for in the exchange of gradients. Raises what `barrier` raises."""
        control = current_control()
        if control is not None and self._line is None:
            self._line = self._open(control)

    def exchange(
        self,
        raised: bool,  # whether this rank raises the flag in this batch
    ) -> list[int]:  # the ranks that raised it in the batch before
        "Send and receive. Raises what `barrier` raises. Once somebody has raised the flag, nothing more is sent."
        control = current_control()
        if control is None:
            return [0] if raised else []
        ranks = self.read()
        if not ranks:
            self.open()
            assert self._line is not None
            try:
                self._line.send(bool(raised), control.size, get_timeout())
            except RuntimeError as e:
                control.raise_connection_lost(e, self._place())  # a connection that is closed already
        return ranks

    def read(self) -> list[int]:  # the ranks that raised the flag in the last batch
        "Receive what is under way, and wait for it if need be."
        line, control = self._line, current_control()
        if line is None or line.work is None or line.received is None or control is None:
            return []
        control.wait_for(line.work, self._place(), get_timeout())
        line.work = None
        return line.received.nonzero().flatten().tolist()

    def _place(self):
        return Place(f'flag({self.name!r})', f'flag({self.name!r})')

    def _open(self, control):
        "The line of an earlier fit if all ranks still have it and left nothing unread there, else a new one."
        lines = _lines.setdefault(control, {})
        old = lines.get(self.name)
        sound = old is not None and old.generation is control.generation and old.work is None
        if not agree(sound, 'all', f'flag {self.name}'):
            # all ranks were just here: they have counted the same number of waits
            key = f'flag/{control.generation.number}/{control.generation.count}'
            lines[self.name] = _Line(control, key, get_timeout())
        return lines[self.name]

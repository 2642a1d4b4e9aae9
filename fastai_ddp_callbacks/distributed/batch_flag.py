"""What one rank sees in a batch, all ranks know in the next one, without waiting for each other in between.

The exchange runs in the background, in order, on a gloo group of its own: the control group carries rendezvous only.
Ranks that train together are at most one batch apart, so that the answer is there when it is read."""

from __future__ import annotations
from datetime import timedelta
from weakref import WeakKeyDictionary, finalize

import torch, torch.distributed as dist

from .control import Place, keep_alive
from .collectives import _get_control, agree, get_timeout

__all__ = ['BatchFlag']

_lines = WeakKeyDictionary()  # of each `Control`: the `_Line` of each name


class _Line:
    "The group on which the flags of one name travel, and the exchange that is under way there."

    def __init__(self, control, key, timeout):
        place = Place(key, key)
        self.group = control.another(key, place, timeout)
        finalize(control, self.close)  # at the latest when the interpreter ends, while its threads can still be joined
        self.generation, self.work = control.generation, None

    def close(self):
        keep_alive(self.group, self.work)
        self.group = None

    def send(self, raised, size, timeout):
        row, opts = torch.full((size,), raised, dtype=torch.uint8), dist.AllToAllOptions()
        self.heard, opts.timeout = (
            torch.empty_like(row),
            timedelta(seconds=2 * timeout),
        )  # it is read, with `timeout`, a batch later
        self.work = self.group.alltoall_base(self.heard, row, [], [], opts)


class BatchFlag:
    """A flag that any rank may raise in a batch, and that all ranks then see in the same batch: the next one.

    One object per fit. Every rank calls `exchange` once per batch and `read` when no batch follows, so that nothing is
    under way when the fit ends. In one process the answer comes at once."""

    def __init__(
        self,
        name,  # what the flag says, the same on all ranks
    ):
        self.name, self._line = name, None

    def __reduce__(self):
        return BatchFlag, (self.name,)

    def exchange(
        self,
        raised,  # whether this rank raises the flag in this batch
    ) -> list:  # the ranks that raised it in the batch before
        "Say and hear. Raises what `barrier` raises. Once somebody has raised the flag, nothing more is sent."
        control = _get_control()
        if control is None:
            return [0] if raised else []
        who = self.read()
        if not who:
            if self._line is None:
                self._line = self._open(control)
            try:
                self._line.send(bool(raised), control.size, get_timeout())
            except RuntimeError as e:
                control.lost(e, self._place())  # a connection that is closed already
        return who

    def read(self) -> list:  # the ranks that raised the flag in the last batch
        "Hear what is not heard yet, and wait for it if need be."
        line, control = self._line, _get_control()
        if line is None or line.work is None:
            return []
        control.wait(line.work, self._place(), get_timeout())
        line.work = None
        return line.heard.nonzero().flatten().tolist()

    def _place(self):
        return Place(f'flag({self.name!r})', f'flag({self.name!r})')

    def _open(self, control):
        "The line of an earlier fit if all ranks still have it and left nothing unread there, else a new one."
        lines = _lines.setdefault(control, {})
        old = lines.get(self.name)
        sound = old is not None and old.generation == control.generation and old.work is None
        if not agree(sound, 'all', f'flag {self.name}'):
            # all ranks were just here: they have counted the same number of rendezvous
            lines[self.name] = _Line(control, f'flag/{control.generation}/{control.count}', get_timeout())
        return lines[self.name]

"Tensors of one rank to all, in pieces of bounded size."

from __future__ import annotations
from datetime import timedelta
from typing import Iterator, NamedTuple

import torch

from .call_site import call_text, doing
from .progress import Progress
from .propagate import propagate_failure
from .ranks import rank
from .rendezvous import Rendezvous
from .wire import INT

__all__ = ['broadcast_tensors']

_BUCKET = 1 << 24  # bytes


class _Piece(NamedTuple):
    "Some bytes of a tensor."

    tensor: torch.Tensor
    begin: int
    end: int

    @property
    def nbytes(self):
        return self.end - self.begin

    def view(self):
        return self.tensor.reshape(-1).view(torch.uint8)[self.begin : self.end]


@doing('send')
def broadcast_tensors(
    tensors: list,  # on rank `src` what to send, on the others where to put it; shapes, types as there, on any device
    src: int = 0,  # the rank that sends
    name: str | None = None,  # what is sent, the same on all ranks; by default where the call stands in the code
    timeout: float | timedelta | None = None,  # time limit of each piece, in seconds; `get_timeout()` by default
) -> None:
    """Copy the tensors of rank `src` into those of all ranks, 16 MB at a time, which is all the memory that it needs.

    A `barrier` too, which raises what that raises, and `ValueError` if the sizes differ; a rank that dies on the way
    leaves the others with the tensors that have come."""
    meeting = Rendezvous(call_text('broadcast_tensors', name, f'src={src}'), timeout, name is not None)
    if meeting.control is None:
        return
    with meeting.collect() as outcome:
        outcome.kind, outcome.bits = INT, sum(tensor.nbytes for tensor in tensors)
    sizes = [row.bits for row in meeting.meet(outcome)]
    if len(set(sizes)) > 1:
        raise ValueError(f'{meeting.place}: the tensors of the ranks have {", ".join(map(str, sizes))} bytes.')
    detached = [tensor.detach() for tensor in tensors]
    flat = [
        tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in detached
    ]  # copies where it has gaps
    done = 0
    with propagate_failure(str(meeting.place)), Progress(f'sending {name or "tensors"}') as bar:
        for bucket in _buckets(flat):
            data = torch.empty(sum(piece.nbytes for piece in bucket), dtype=torch.uint8)
            parts = data.split([piece.nbytes for piece in bucket])
            if rank() == src:
                for piece, part in zip(bucket, parts):
                    part.copy_(piece.view())
            meeting.control.broadcast_tensor(data, src, meeting.place, meeting.timeout)
            if rank() != src:
                for piece, part in zip(bucket, parts):
                    piece.view().copy_(part)
            done += data.numel()
            bar.update(done, sizes[src])
    if rank() != src:
        for tensor, copy in zip(detached, flat):
            if copy is not tensor:
                tensor.copy_(copy)


def _buckets(tensors: list[torch.Tensor]) -> Iterator[list[_Piece]]:
    "The tensors in pieces, gathered until they fill a bucket."
    bucket: list[_Piece] = []
    room = _BUCKET
    for tensor in tensors:
        for begin in range(0, tensor.nbytes, _BUCKET):
            piece = _Piece(tensor, begin, min(begin + _BUCKET, tensor.nbytes))
            if bucket and piece.nbytes > room:
                yield bucket
                bucket, room = [], _BUCKET
            bucket.append(piece)
            room -= piece.nbytes
    if bucket:
        yield bucket

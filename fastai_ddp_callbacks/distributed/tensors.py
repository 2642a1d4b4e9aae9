"Tensors of one rank to all, in pieces of bounded size."

from __future__ import annotations
from datetime import timedelta

import torch

from .control import INT
from .collectives import _call, _Meeting, rank, propagate_failure
from .progress import Progress

__all__ = ['broadcast_tensors']

_BUCKET = 1 << 24  # bytes


def broadcast_tensors(
    tensors: list,  # on rank `src` what to send, on the others where to put it; of equal shapes and types on all ranks, on any device
    src: int = 0,  # the rank that sends
    name: str | None = None,  # what is sent, the same on all ranks; by default where the call stands in the code
    timeout: float | timedelta | None = None,  # time limit of each piece, in seconds; `get_timeout()` by default
) -> None:
    """Copy the tensors of rank `src` into those of all ranks, 16 MB at a time, which is all the memory that it needs.

    A `barrier` too, which raises what that raises, and `ValueError` if the sizes differ; a rank that dies on the way leaves
    the others with the tensors that have come."""
    meeting = _Meeting(_call('broadcast_tensors', name, f'src={src}'), timeout, name is not None)
    if meeting.control is None:
        return
    with meeting.failing_together() as outcome:
        outcome.row = INT, sum(o.nbytes for o in tensors)
    sizes = [o.bits for o in meeting.meet(outcome)]
    if len(set(sizes)) > 1:
        raise ValueError(f'{meeting.place}: the tensors of the ranks have {", ".join(map(str, sizes))} bytes.')
    flat = [
        o if o.is_contiguous() else o.contiguous() for o in (o.detach() for o in tensors)
    ]  # a copy of those with gaps
    pieces = [(o, i, min(i + _BUCKET, o.nbytes)) for o in flat for i in range(0, o.nbytes, _BUCKET)]
    sent = 0
    with propagate_failure(meeting.place), Progress(f'sending {name or "tensors"}') as bar:
        for bucket in _gathered(pieces):
            data = torch.empty(sum(j - i for _, i, j in bucket), dtype=torch.uint8)
            if rank() == src:
                _through(bucket, data, lambda part, piece: piece.copy_(part))
            meeting.control.spread(data, src, meeting.place, meeting.timeout)
            if rank() != src:
                _through(bucket, data, lambda part, piece: part.copy_(piece))
            sent += data.numel()
            bar.update(sent, sizes[src])
    if rank() != src:
        for t, o in zip(tensors, flat):
            if not t.is_contiguous():
                t.detach().copy_(o)


def _gathered(pieces):
    "Pieces of tensors, gathered until they fill a bucket."
    bucket, size = [], 0
    for o in pieces:
        if bucket and size + o[2] - o[1] > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(o)
        size += o[2] - o[1]
    if bucket:
        yield bucket


def _through(bucket, data, copy):
    "Copy each piece of a tensor from or to its place in `data`."
    at = 0
    for t, i, j in bucket:
        copy(t.reshape(-1).view(torch.uint8)[i:j], data[at : at + j - i])
        at += j - i

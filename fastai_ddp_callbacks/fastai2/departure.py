"""fastai 2: a rank that leaves its fit while others continue.

It knows nothing of them and does not wait, so it leaves a note in the job's store. To the others the network reports a
connection that is closed, when its process ends; the note says why."""

from __future__ import annotations
from collections.abc import Iterator
from contextlib import contextmanager

from ..distributed.current import current_control, known_control
from ..distributed.propagate import is_network_error
from ..errors import RankFailedError

__all__ = ['note_departure', 'departures_explained']


def note_departure(
    what: str,  # this rank has done
) -> None:
    "Leave a note. No rendezvous."
    control = current_control()
    if control is not None:
        control.store.set(f'departed/{control.rank}', what)


@contextmanager
def departures_explained() -> Iterator[None]:
    "Raise `RankFailedError` for a network error of torch in the block if another rank has left its fit."
    control = known_control()
    if control is not None:
        control.store.set(f'departed/{control.rank}', '')  # of an earlier block
    try:
        yield
    except RuntimeError as e:
        if not is_network_error(e):
            raise
        for rank, what in _departed().items():
            text = f'rank {rank} {what}, and this rank went on training.'
            raise RankFailedError(
                f'{text} Let all ranks cancel at the same batch: `DDPStopCallback` does, whichever rank asks for it.',
                rank=rank,
                place=what,
                error_type='CancelFitException',
                error_text=text,
                traceback_text='',
            ) from e
        raise


def _departed():
    "What other ranks have noted."
    control = current_control()
    if control is None:
        return {}
    notes = {}
    for rank in range(control.size):
        key = f'departed/{rank}'
        if rank != control.rank and control.store.check([key]):
            notes[rank] = control.store.get(key).decode()
    return {rank: what for rank, what in notes.items() if what}

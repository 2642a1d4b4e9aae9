"Which of the files of a fit it is resumed from, and which it must not be resumed from. Rank 0 alone deals with them."

from __future__ import annotations
import os
from collections.abc import Callable
from contextlib import suppress

from ..checkpoint.file import verify_checkpoint
from ..distributed import print_on_main
from ..errors import CheckpointError
from .earlier_fits import has_ended_here

__all__ = ['FROM_SCRATCH', 'candidates', 'check_epochs', 'newest_whole', 'refuse_if_ended_here', 'warn_of_damaged']

FROM_SCRATCH = "Give this fit another name, or resume='never' to start from scratch."


def candidates(
    metas: dict[str, dict],  # the metadata of the fit's files, by path
    n_epoch: int,  # how many epochs the fit is to have
    would_train: Callable[[dict], bool],  # whether a finished fit, stopped early, would train more now
) -> list[str]:
    """Paths of what this fit may be resumed from, the newest first. `ValueError` if it is to have more epochs than a
    finished one, of which only the end was kept."""
    newest = sorted(metas, key=lambda path: metas[path]['sequence'], reverse=True)
    if not newest or not metas[newest[0]]['finished']:
        return newest
    last = metas[newest[0]]
    if not (n_epoch > last['n_epoch'] > 0 or would_train(last)):
        return newest
    unfinished = [path for path in newest if not metas[path]['finished']]  # from before the best was loaded
    if not unfinished:
        raise ValueError(
            f'{newest[0]} is of a finished fit, and its last epoch was not kept: with keep=2 it could be trained '
            'for more epochs.'
        )
    return unfinished


def newest_whole(
    paths: list[str],  # the newest first
    damaged: list[CheckpointError],  # the errors of what is damaged are added to it
) -> str | None:
    "The first path whose file is whole; None if there is none."
    for path in paths:
        try:
            verify_checkpoint(path)
        except CheckpointError as e:
            damaged.append(e)
        else:
            return path
    return None


def warn_of_damaged(
    damaged: list[CheckpointError],
    path: str | None,  # of the file to resume from
) -> None:
    "Of what is newer than the file to resume from: an earlier start has warned of what is older."
    for error in damaged:
        if path is None:
            print_on_main(f'{error} Nothing before it is whole.', warn=True)
        elif _changed(error.path) > _changed(path):
            print_on_main(f'{error} Resuming from what was saved before it.', warn=True)


def check_epochs(
    path: str,
    meta: dict,  # of that file
    n_epoch: int,  # how many epochs the fit is to have
    scheduled: bool,  # whether a schedule depends on that number
) -> None:
    "`ValueError` if a fit of another number of epochs cannot be resumed from that file."
    before = meta['n_epoch']
    if n_epoch == before or n_epoch > before and not scheduled:
        return
    why = ', which gives another schedule' if scheduled else ''
    raise ValueError(f'{path} is of a fit of {before} epochs, and this one is to have {n_epoch}{why}. {FROM_SCRATCH}')


def refuse_if_ended_here(
    path: str,
    meta: dict,  # of that file
) -> None:
    "`ValueError` if that file is of a fit that has ended in this process."
    if has_ended_here(meta['run']):
        raise ValueError(
            f'{path} belongs to a different fit: one of another learner, which has ended in this process. '
            + FROM_SCRATCH
        )


def _changed(path):
    "When it was changed; of a link itself, which may lead nowhere."
    with suppress(FileNotFoundError):
        return os.lstat(path).st_mtime
    return 0.0  # gone since

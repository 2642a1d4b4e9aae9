"""The files from which a fit can be resumed: the newest whole one is found, a few of them are kept. Rank 0 alone deals
with them."""

from __future__ import annotations
import glob
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoint.file import read_metadata
from ..checkpoint.store import Saved, Store, delete, in_order
from ..distributed import print_on_main, world_size
from ..distributed.progress import with_progress
from ..errors import CheckpointError, MismatchedCheckpointError
from .earlier_fits import EarlierFits
from .loading import load_everywhere
from .resume_choice import (
    FROM_SCRATCH,
    candidates,
    check_epochs,
    newest_whole,
    refuse_if_ended_here,
    warn_of_damaged,
)

__all__ = ['EarlierFits', 'Found', 'ResumeFiles', 'load', 'callback_keys', 'is_stateful', 'progress', 'FROM_SCRATCH']


class Found(NamedTuple):
    "The file from which a fit is resumed."

    path: str
    checksum: str
    meta: dict  # its metadata


class ResumeFiles:
    "What one fit has saved to be resumed from, under one name in one folder."

    def __init__(
        self,
        folder: Path,  # where
        name: str,  # first part of the files' names
        keep: int,  # how many of the newest to keep
    ):
        self.name = name
        self.keep = keep
        self.sequence = 0  # of the file that was saved last
        self.store = Store(folder, f'{name}_{{iteration}}{{end}}', keep_last=keep)

    # -- to resume

    def find(
        self,
        size: int,  # bytes of a file, about
        n_epoch: int,  # how many epochs the fit is to have
        scheduled: bool,  # whether a schedule depends on that number
        resume: str,  # 'auto', 'must' or 'never'
        earlier: EarlierFits,  # the fits that came before this one
        would_train: Callable[[dict], bool] = lambda meta: (
            False
        ),  # whether a finished fit, stopped early, would train more now
    ) -> Found | None:  # the newest whole one; None to start from scratch
        """Reserve the name, and look for a file to resume from. `CheckpointError` if there is none and there must be;
        `ValueError` if what is there belongs to a different fit."""
        self.store.prepare(size, self.keep)
        metas, damaged = self._read()
        self.sequence = max((meta['sequence'] for meta in metas.values()), default=0)
        if resume == 'never':
            return None
        metas = self._after(metas, earlier)
        path = newest_whole(candidates(metas, n_epoch, would_train), damaged)
        warn_of_damaged(damaged, path)
        if path is None:
            if resume == 'must' and not earlier.trained:
                message = f'There is no whole {self._pattern} to resume from.'
                raise CheckpointError(message, str(self.store.folder))
            return None
        meta = metas[path]
        if meta['n_epoch'] == 0 < n_epoch:
            meta = dict(meta, finished=False)  # nothing was trained: whatever follows continues from its end
        else:
            check_epochs(path, meta, n_epoch, scheduled)
        refuse_if_ended_here(path, meta)
        self._continue(path, metas)
        return Found(path, meta['checksum'], meta)

    @property
    def _pattern(self):
        return f'{self.store.folder / self.name}_*.pth'

    def _read(self):
        "The metadata of all files of this name, by path; and the errors of those that are damaged."
        metas, damaged = {}, []
        for path in glob.glob(glob.escape(str(self.store.folder / self.name)) + '_*.pth'):
            try:
                meta = read_metadata(path) or {}
            except CheckpointError as e:
                damaged.append(e)
            else:
                if meta.get('resume') == self.name and meta.get('name') == self.store.name_of(path):
                    metas[path] = meta
        return metas, damaged

    def _after(self, metas, earlier):
        "Those of a fit that came after the same one as this fit does."
        ours = {path: meta for path, meta in metas.items() if meta.get('after') == earlier.last}
        newest = max(metas, key=lambda path: metas[path]['sequence'], default=None)
        if newest is not None and newest not in ours:
            print_on_main(
                f'{self._pattern} belongs to a fit that followed a different first fit, which was trained again or for '
                'more epochs since; starting from scratch.',
                warn=True,
            )
        return ours

    def _continue(self, path, metas):
        "Take over the files of that run."
        run = metas[path]['run']
        self.store.run = run
        self.store.resumed = path
        self.store.files = in_order({other: meta for other, meta in metas.items() if meta['run'] == run})
        if metas[path]['finished']:
            # no save comes after it that would delete: whoever wrote it may have been killed before it did
            self._delete(self.store.forget())

    # -- to save

    def next(
        self,
        meta: dict,  # what it is: epoch, n_epoch, iteration, finished, ...
    ) -> Callable[[Any], Saved]:  # writes a state there
        "Where the next one goes."
        self.sequence += 1
        meta = dict(meta, resume=self.name, sequence=self.sequence, value=None, world_size=world_size())
        fields = dict(iteration=meta['iteration'], end='_finished' if meta['finished'] else '', epoch=meta['epoch'])
        path = self.store.place(fields, {saved.path for saved in self.store.files})
        if meta['finished']:
            self.store.resumed = None  # what comes after it is whole, and enough
        write = self.store.begin(path, meta)
        return lambda state: with_progress(f'saving {path.name}', write, state)

    def keep_newest(
        self,
        saved: Saved,  # what was written, and is durable
    ) -> None:
        "Count it, and delete what is no longer to be kept."
        self._delete(self.store.add(saved))

    def _delete(self, to_delete):
        for saved in to_delete:
            delete(saved, self.store.disk)


def load(
    model,  # of the fit that is resumed
    path: str,
    checksum: str,  # of the file, as `find` gave them
    check_rest: Callable | None = None,  # called with the rest of the file before anything is changed, to refuse it
) -> dict:  # what the file holds beside the weights
    "Load the weights on all ranks. `ValueError` if they are of another model."
    kept: dict = {}
    try:
        load_everywhere(model, path, checksum, kept.update, check_rest)
    except MismatchedCheckpointError as e:
        raise ValueError(f'{e} It belongs to another model. {FROM_SCRATCH}') from e
    return kept


def callback_keys(callbacks):
    """(name, callback) by class and by name of the file that it writes, and by number if there are several of one: what
    its state is filed under."""
    seen: dict[str, int] = {}
    for cb in callbacks:
        fname = vars(cb).get('fname', vars(cb).get('name'))  # as fastai 2 and fastai 1 call it
        name = f'{type(cb).__name__} {fname}' if fname else type(cb).__name__
        seen[name] = seen.get(name, 0) + 1
        yield f'{name}-{seen[name]}', cb


def is_stateful(cb) -> bool:
    """Whether a callback has a state to save. Its class says so: an instance has the model's `state_dict`, by
    delegation."""
    return hasattr(type(cb), 'state_dict') and hasattr(type(cb), 'load_state_dict')


def progress(
    meta: dict,  # of a file to resume from
) -> str:
    "Where its fit is."
    if meta['finished']:
        return f'the end of a fit of {meta["n_epoch"]} epochs'
    if meta['batch']:
        where = f'epoch {meta["epoch"]} (of {meta["n_epoch"]}, from 0 on)'
        return f'batch {meta["batch"]} of {meta["n_iter"]} in {where}'
    return f'{meta["epoch"]} of {meta["n_epoch"]} epochs'

"The files from which a fit can go on: the newest whole one is found, a few of them are kept. Rank 0 alone deals with them."

from __future__ import annotations
import glob, os
from contextlib import suppress
from typing import NamedTuple

from ..checkpoint.file import read_metadata, verify_checkpoint
from ..distributed import print_on_main, world_size
from ..distributed.progress import with_progress
from ..errors import CheckpointError, MismatchedCheckpointError
from .loading import load_everywhere
from ..checkpoint.store import Store, delete, in_order

__all__ = ['EarlierFits', 'ResumeFiles', 'load', 'callback_keys', 'is_stateful', 'progress']


class EarlierFits(NamedTuple):
    "The fits of a learner and of one name that have come to their end in this process."

    fits: int = 0
    last: str | None = None  # which the last one was: the next one's files say that they come after it. Rank 0 knows
    trained: bool = False  # whether any was not found finished

    @classmethod
    def of(cls, learn, name):
        return cls(*vars(learn).setdefault('_fits_done', {}).get(name, ()))

    def name(self, name) -> str:
        return f'{name}-{self.fits + 1}' if self.fits else name

    def and_this(self, learn, name, run, n_epoch, finished):
        "With one more, of that run, which may have been found finished."
        now = EarlierFits(self.fits + 1, f'{run}, {n_epoch} epochs', self.trained or not finished)
        vars(learn).setdefault('_fits_done', {})[name] = tuple(
            now
        )  # `export` takes it along, to where this module may not be
        return now


class ResumeFiles:
    "What one fit has saved to go on from, under one name in one folder."

    def __init__(
        self,
        folder,  # where
        name,  # first part of the files' names
        keep,  # how many of the newest to keep
    ):
        self.name, self.keep, self.sequence, self.store = (
            name,
            keep,
            0,
            Store(folder, f'{name}_{{iteration}}{{end}}', keep_last=keep),
        )

    def find(
        self,
        size,  # bytes of a file, about
        n_epoch,  # how many epochs the fit is to have
        scheduled,  # whether something depends on that number
        resume,  # 'auto', 'must' or 'never'
        before,  # `Before`, the fits that came before this one
    ):  # (path, checksum, metadata) of the newest whole one; None to start anew
        """Reserve the name, and look for a file to go on with. `CheckpointError` if there is none and there must be;
        `ValueError` if it belongs to a fit of another kind."""
        self.store.prepare(size, self.keep)
        metas, damaged = {}, []
        for path in glob.glob(glob.escape(str(self.store.folder / self.name)) + '_*.pth'):
            try:
                meta = read_metadata(path) or {}
            except CheckpointError as e:
                damaged.append(e)
            else:
                if meta.get('resume') == self.name and meta.get('name') == self.store.name_of(path):
                    metas[path] = meta
        self.sequence = max((o['sequence'] for o in metas.values()), default=0)
        if resume == 'never':
            return None
        others = {o for o, m in metas.items() if m.get('after') != before.last}
        if max(metas, key=lambda o: metas[o]['sequence'], default=None) in others:
            print_on_main(
                f'{self.store.folder / self.name}_*.pth come after another fit than the one that this comes after, which has been trained anew or for more epochs since: this fit starts anew.',
                warn=True,
            )
        metas = {o: m for o, m in metas.items() if o not in others}
        path = self._newest_whole(metas, damaged, n_epoch)
        if path:
            damaged = [
                o for o in damaged if _changed(o.path) > _changed(path)
            ]  # of older ones an earlier start has told
        for o in damaged:
            print_on_main(
                f'{o} ' + ('The fit goes on with what was saved before it.' if path else 'Nothing before it is whole.'),
                warn=True,
            )
        if path is None:
            if resume == 'must' and not before.trained:
                raise CheckpointError(
                    f'There is no whole {self.store.folder / self.name}_*.pth to go on with.', str(self.store.folder)
                )
            return None
        meta = metas[path]
        if meta['n_epoch'] == 0 < n_epoch:
            meta = dict(meta, finished=False)  # nothing was trained: it goes on from its end, whatever follows
        elif n_epoch < meta['n_epoch'] or n_epoch != meta['n_epoch'] and scheduled:
            raise ValueError(
                f'{path} is of a fit of {meta["n_epoch"]} epochs, and this one is to have {n_epoch}'
                + (', which gives another schedule' if scheduled else '')
                + ". Give this fit another name, or resume='never' to start anew."
            )
        self.store.run, self.store.resumed = meta['run'], path
        self.store.files = in_order({o: m for o, m in metas.items() if m['run'] == meta['run']})
        if meta['finished']:
            self._delete(
                self.store.forget()
            )  # no save comes after it that would: the one that wrote it may have been killed before
        return path, meta['checksum'], meta

    def _newest_whole(self, metas, damaged, n_epoch):
        newest = sorted(metas, key=lambda o: metas[o]['sequence'], reverse=True)
        if newest and metas[newest[0]]['finished'] and n_epoch > metas[newest[0]]['n_epoch'] > 0:
            ended, newest = (
                newest[0],
                [o for o in newest if not metas[o]['finished']],
            )  # more epochs than planned: go on from before the best weights were loaded
            if not newest:
                raise ValueError(
                    f'{ended} is of a fit that has come to its end, and its last epoch was not kept: with keep=2 it could go on for more epochs.'
                )
        for path in newest:
            try:
                verify_checkpoint(path)
            except CheckpointError as e:
                damaged.append(e)
            else:
                return path

    def next(
        self,
        meta: dict,  # what it is: epoch, n_epoch, iteration, finished, ...
    ):  # a function that writes a state there, and gives the `Saved`
        "Where the next one goes."
        self.sequence += 1
        meta = dict(meta, resume=self.name, sequence=self.sequence, value=None, world_size=world_size())
        path = self.store.place(
            dict(iteration=meta['iteration'], end='_finished' if meta['finished'] else '', epoch=meta['epoch']),
            {o.path for o in self.store.files},
        )
        if meta['finished']:
            self.store.resumed = None  # what comes after it is whole, and enough
        write = self.store.begin(path, meta)
        return lambda state: with_progress(f'saving {path.name}', write, state)

    def keep_newest(
        self,
        saved,  # what was written, and is durable
    ):
        self._delete(self.store.add(saved))

    def _delete(self, victims):
        for o in victims:
            delete(o, self.store.disk)


def _changed(path):
    "When it was; of a link itself, which may lead nowhere."
    with suppress(FileNotFoundError):
        return os.lstat(path).st_mtime
    return 0.0  # gone since


def load(
    model,  # of the fit that goes on
    path,
    checksum,  # of the file, as `find` gave them
    fits=None,  # as for `load_everywhere`
) -> dict:  # what the file holds beside the weights
    "Load the weights on all ranks. `ValueError` if they are of another model."
    kept = {}
    try:
        load_everywhere(model, path, checksum, kept.update, fits)
    except MismatchedCheckpointError as e:
        raise ValueError(
            f"{e} It belongs to another model: give this fit another name, or resume='never' to start anew."
        ) from e
    return kept


def callback_keys(callbacks):
    "(name, callback) by class and by name of the file that it writes, and by number if there are several of one: what its state is filed under."
    seen = {}
    for cb in callbacks:
        fname = vars(cb).get('fname', vars(cb).get('name'))  # as fastai 2 and fastai 1 call it
        name = f'{type(cb).__name__} {fname}' if fname else type(cb).__name__
        seen[name] = seen.get(name, 0) + 1
        yield f'{name}-{seen[name]}', cb


def is_stateful(cb) -> bool:
    "Whether a callback says what it needs to go on. Its class does: an instance has the model's `state_dict`, by delegation."
    return hasattr(type(cb), 'state_dict') and hasattr(type(cb), 'load_state_dict')


def progress(
    meta: dict,  # of a file to go on from
) -> str:
    "Where its fit is."
    if meta['finished']:
        return f'the end of a fit of {meta["n_epoch"]} epochs'
    return (
        f'batch {meta["batch"]} of {meta["n_iter"]} in epoch {meta["epoch"]} (of {meta["n_epoch"]}, from 0 on)'
        if meta['batch']
        else f'{meta["epoch"]} of {meta["n_epoch"]} epochs'
    )

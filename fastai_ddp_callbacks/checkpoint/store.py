"""The checkpoints of one run in a folder: their names, which of them stay, and which is the best.

All ranks know the same list. Rank 0 alone touches the disk, between two barriers: it saves first, and deletes what is
no longer to be kept when the new file is durable. Nothing is deleted that this run has not written."""

from __future__ import annotations
import os, secrets, shutil, string, warnings
from pathlib import Path
from typing import NamedTuple

from .file import read_metadata, temporary_beside, verify_checkpoint, write_checkpoint, write_error
from ..distributed import print_on_main
from ..errors import CheckpointError, CheckpointWriteError
from .lock import Lock

__all__ = ['Saved', 'Store', 'delete', 'in_order']


class Saved(NamedTuple):
    "A checkpoint that is on disk, whole."

    path: str
    checksum: str
    epoch: int
    value: float | None  # of the monitored column, as far as it was followed


class _Names(string.Formatter):
    "`str.format` whose fields are names and nothing else, so that a column may be called `f1.score`."

    def get_field(self, name, args, kwargs):
        return kwargs[name], name

    def fields(self, template):
        return [o for _, o, _, _ in self.parse(template) if o is not None]


_names = _Names()


def check_name(
    fname,  # the name of a file, which may have fields
    fields: dict,  # what they may be, and values of the right types
) -> None:
    "`ValueError` if the name cannot be made."
    try:
        _names.vformat(str(fname), (), fields)
    except (ValueError, KeyError, IndexError, TypeError) as e:
        why = f'there is no {e.args[0]}' if isinstance(e, KeyError) else e
        raise ValueError(
            f'fname={str(fname)!r} makes no name: {why}. Fields are {", ".join(fields)}; a brace that is none is doubled.'
        ) from e


class Store:
    "What one run has saved under one name, and what is kept of it."

    def __init__(
        self,
        folder,  # where
        fname,  # name without suffix, which may have fields: 'model-{epoch}-{accuracy:.3f}'
        lower=True,  # whether lower values are better
        keep_best=None,  # how many of the best stay; the best always does
        keep_last=None,  # how many of the newest stay; the newest always does
        last=None,  # a name that the newest has too
        several=False,  # whether a name without fields gets the epoch
    ):
        self.folder, self.fname, self.lower, self.keep_best, self.keep_last, self.last = (
            Path(folder).absolute(),
            str(fname),
            lower,
            keep_best,
            keep_last,
            last,
        )
        self.fields = _names.fields(self.fname)
        self.several = several or bool(self.fields)
        self.template = f'{self.fname}_{{epoch}}' if several and not self.fields else self.fname
        self.files, self.best, self.run = (
            [],
            None,
            secrets.token_hex(6),
        )  # `Saved`, oldest first; the best of them; rank 0's is in the files
        self._noted = set()
        self.again = []  # `Saved` of a run that goes on from before they were written: their epochs are trained once more
        self.resumed = None  # path of the file with which this process went on
        self.locks = [
            Lock(self._base() / f'.{o.replace("/", "%")}.lock', f'{o!r} in {self.folder}')
            for o in (self.template, last)
            if o
        ]

    # -- the same on all ranks

    @property
    def selective(self):
        "Whether not everything stays. Without fields or retention a name is overwritten, or every epoch has its own."
        return bool(self.keep_best or self.keep_last)

    def wants(
        self,
        epoch,
        value,  # of the model that there is now
        others=(),  # values of what is being written
    ) -> bool:
        "Whether `value` is among the best of the run."
        k, rank, again = self.keep_best or 1, self._rank, self.replaced(epoch, value)
        best = sorted(
            rank(o) for o in (*(o.value for o in self.files if o.path not in again), *others) if o is not None
        )
        return len(best) < k or rank(value) < best[k - 1]

    def _rank(self, value):
        return value if self.lower else -value

    def add(
        self,
        saved,  # a `Saved`, durable; one that is there already changes nothing
        best=False,  # whether it is the best now
    ) -> list:  # what is no longer to be kept
        "Note what rank 0 has written, and forget what it is to delete."
        if saved in self._noted:
            return []
        self._noted.add(saved)
        again = self.replaced(saved.epoch, saved.value)
        if best or self.best and self.best.path in again:
            self.best = saved
        elif self.best and self.best.path == saved.path:
            self.best = None  # overwritten
        victims = [o for o in self.files if o.path in again and o.path != saved.path] if self.selective else []
        self.files = [o for o in self.files if o.path != saved.path and o not in victims] + [saved]
        self.again = [o for o in self.again if o.path not in again]
        return victims + self.forget()

    def replaced(
        self,
        epoch,
        value,  # of a model that is to be saved
    ) -> set:
        "The paths of what this run has saved of the same epoch before it was interrupted. What was better then, and the best, stays."
        return {
            o.path
            for o in self.again
            if o.epoch == epoch and (o != self.best or value is not None and self._rank(value) <= self._rank(o.value))
        }

    def forget(self) -> list:  # what is no longer to be kept
        "Forget what rank 0 is to delete."
        victims = self._victims()
        self.files = [o for o in self.files if o not in victims]
        return victims

    def ranked(self) -> list:
        "Those with a value, the best first, then by value; of equals the older."
        return sorted(
            (o for o in self.files if o.value is not None), key=lambda o: (o is not self.best, self._rank(o.value))
        )

    def _victims(self):
        if not self.selective:
            return []
        valued = sorted((o for o in self.files if o.value is not None), key=lambda o: self._rank(o.value))
        kept = *valued[: self.keep_best or 1], *self.files[-(self.keep_last or 1) :], self.best
        return [o for o in self.files if o not in kept and o.path != self.resumed]

    # -- on rank 0

    def prepare(
        self,
        size,  # bytes of one checkpoint, about
        count,  # how many are to come at most
    ):
        "Reserve the name, and warn if the disk is too small. `CheckpointInUseError` if another run has the name."
        for o in self.locks:
            o.acquire()
        kept = (
            min(count, (self.keep_best or 1) + (self.keep_last or 0))
            if self.selective
            else count
            if self.several
            else 1
        )
        needed, free = size * (kept + 1), shutil.disk_usage(self._base()).free  # one more while the next one is written
        old = self.folder / f'{self.template}.pth'
        if old.is_file():
            needed -= old.stat().st_size
        if free < needed:
            warnings.warn(
                f'{self.folder} has {free / 1e6:.1f} MB left. The checkpoints of this run will need about {needed / 1e6:.1f} MB: saving may fail.',
                stacklevel=2,
            )

    def place(
        self,
        fields,  # dict of names and values, of the template
        over=(),  # paths of this run that may be overwritten, beside the only one where no more is kept
    ) -> Path:  # of the next file
        path = self.folder / f'{self.format(fields)}.pth'
        if (
            self.fields or self.selective and self.several
        ):  # no file is overwritten: not one of another run, and not one of equal name that is kept
            name, n = path, 0
            while path.exists() and str(path) not in over:
                path, n = name.with_name(f'{name.stem}-{n + 1}.pth'), n + 1
        return path

    def found(self) -> list:
        "The `Saved` of this run that are on disk, oldest first by what they say of themselves: the run may have gone on after it was saved itself."
        return in_order(
            {o: m for o in self._base().rglob('*.pth') if (m := self.own_metadata(o)) and m.get('run') == self.run}
        )

    def own_metadata(
        self,
        path,  # of a file in the folder
    ) -> dict | None:
        "What a file says of itself; None if it is damaged, a stock one, or a copy that somebody has made."
        try:
            meta = read_metadata(path)
        except CheckpointError:
            return None
        return meta if meta and meta.get('name') == self.name_of(path) else None

    def name_of(self, path) -> str:
        return Path(os.path.relpath(path, self.folder)).as_posix()

    def found_whole(
        self,
        state: dict,  # as for `resume`
    ) -> list:  # of `Saved`
        "Take the place of a run that was interrupted. Its best, and what it saved later, is verified: what is damaged is gone, which a warning tells."
        self.run, whole = state['run'], []
        for o in self.found():
            try:
                if o.checksum == state['file'] or o.checksum not in state['files']:
                    verify_checkpoint(o.path)
            except CheckpointError as e:
                print_on_main(str(e), warn=True)
            else:
                whole.append(o)
        return whole

    def state(self) -> dict:
        "What a run that is interrupted needs to go on: plain values."
        path, file, _, value = self.best or (None,) * 4
        return dict(
            run=self.run,
            files=[o.checksum for o in self.files],
            file=file,
            path=path and self.name_of(path),
            value=value,
        )

    def resume(
        self,
        state: dict,  # of a callback in the run that was interrupted: the `state` of its store, and `monitor`; `finished` if it had come to its end
        found,  # what rank 0 has `found_whole` of that run
        better,  # function that compares a value to the best
        worst,  # value that any other is better than
    ):  # value of the best from now on
        "Go on with the files of that run. A warning if the best is no longer there, and would be needed."
        self.run, self.files, self.again = (
            state['run'],
            list(found),
            [o for o in found if o.checksum not in state['files']],
        )
        self.best = next((o for o in found if o.checksum == state['file']), None)
        value = worst if state['value'] is None else state['value']
        for o in self.again:
            if o.value is not None and better(o.value, value):
                self.best, value = o, o.value
        if (
            state['file']
            and self.best is None
            and not state.get('finished')
            and all(self.name_of(o.path) != state['path'] for o in self.again)
        ):  # nor overwritten by this run
            self.best = min(
                (o for o in found if o.value is not None and o not in self.again),
                key=lambda o: self._rank(o.value),
                default=None,
            )
            value = self.best.value if self.best else worst
            print_on_main(
                f"The best model of the run that goes on, with {state['monitor']} value {state['value']}, is no longer there: "
                + (
                    f'the best that is left, with {value}, takes its place.'
                    if self.best
                    else 'the next one counts as the best.'
                ),
                warn=True,
            )
        return value

    def write(
        self,
        state,  # for `write_checkpoint`
        path,  # where
        meta,  # more metadata; `epoch` and `value` are needed
    ) -> Saved:
        "Save. May run in a thread."
        meta = write_checkpoint(state, path, dict(meta, run=self.run, name=self.name_of(path)))
        if self.last:
            try:
                _also_call(path, self.folder / f'{self.last}.pth')
            except CheckpointWriteError as e:
                warnings.warn(f'{path} is saved, but cannot have its second name: {e}', stacklevel=2)
        return Saved(str(path), meta['checksum'], meta['epoch'], meta['value'])

    def release(self):
        "Let other runs have the name."
        self.again = []  # another fit has epochs of the same numbers
        for o in self.locks:
            o.release()

    def format(self, fields) -> str:
        "The name of a file. A value may be text with a slash in it: folders come from the template only."
        clean = {
            k: v.replace('/', '-').replace('\0', '') if isinstance(v, str) else float('nan') if v is None else v
            for k, v in fields.items()
        }
        return _names.vformat(self.template, (), clean)

    def _base(self):
        "The folder of all files, without the parts that differ."
        fixed = next((o for o, *_ in _names.parse(self.fname)), '')
        return (self.folder / f'{fixed}_').parent


def in_order(
    metas: dict,  # of path to metadata
) -> list:  # of `Saved`, oldest first by what they say of themselves
    return [
        Saved(str(o), m['checksum'], m['epoch'], m['value'])
        for o, m in sorted(metas.items(), key=lambda o: (o[1].get('iteration', 0), o[1]['time']))
    ]


def _also_call(path, name):
    "Give the file a second name, in one step; a copy where the disk knows no hard links."
    new = temporary_beside(name)
    try:
        name.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, new)
        except OSError:
            _copy(path, new)
        os.replace(new, name)
    except OSError as e:
        raise write_error(e, name) from e
    finally:
        new.unlink(missing_ok=True)  # `replace` leaves it where both are names of one file already


def _copy(old, new):
    with open(old, 'rb') as source, open(new, 'xb') as f:
        shutil.copyfileobj(source, f, 1 << 20)
        f.flush()
        os.fsync(f.fileno())


def delete(saved):
    "Remove the file, if it is still the one that was written."
    try:
        if (read_metadata(saved.path) or {}).get('checksum') == saved.checksum:
            return os.unlink(saved.path)
        warnings.warn(
            f'{saved.path} is not deleted, although it is no longer to be kept: something else has written it since.',
            stacklevel=2,
        )
    except (OSError, CheckpointError) as e:  # training goes on
        warnings.warn(f'{saved.path} is no longer to be kept and could not be deleted: {e}', stacklevel=2)

"fastai 1: what a saver writes of a learner, and how it comes back."

from __future__ import annotations
import math
from importlib.metadata import version
from typing import Any

from ..checkpoint.file import read_metadata
from ..checkpoint.state import model_state, to_builtin
from ..distributed import print_on_main, run_on_main, world_size
from ..training.loading import load_everywhere
from ..training.saving import Snapshot
from ..training.tracking import Verdict
from .tracker import DDPTrackerCallback

__all__ = ['LearnerSaver']


class LearnerSaver(DDPTrackerCallback):
    "A tracker that writes the learner's model and optimizer, and loads them."

    name: Any  # of the file
    _saver: Any = None  # the `Saver` of the last fit
    _row: dict = {}  # this rank's values of the last epoch, by column
    _iteration = 0  # how many batches had been trained when the last epoch ended
    _continues = False  # whether the fit is resumed

    @property
    def _folder(self):
        return (self.learn.path / self.learn.model_dir).absolute()

    def _write(self, verdict: Verdict, now: bool, name: str | None = None):
        "On rank 0: write what there is now, or begin to."
        return self._saver.write_on_main(self._snapshot(verdict), now, name)

    def _snapshot(self, verdict):
        # `learn.load` leaves the optimizer's state to torch, which refuses numpy's numbers
        state = {'model': model_state(self.learn.model), 'opt': to_builtin(self.learn.opt.state_dict())}
        columns = {**dict.fromkeys(self._columns()), **{name: _number(value) for name, value in self._row.items()}}
        if verdict.value is not None:
            columns[self.monitor] = verdict.value
        numbers = {k: v for k, v in columns.items() if v is not None and math.isfinite(v) and len(k) < 200}
        where = dict(epoch=verdict.epoch, iteration=self._iteration)
        meta = dict(
            **where,
            monitor=self.monitor,
            value=verdict.value,
            world_size=world_size(),
            fastai=version('fastai'),
            metrics=dict(list(numbers.items())[:100]),  # they must fit in 65 kB
        )
        return Snapshot(state, {**columns, **where}, meta)

    def _load_opt(self, rest):
        try:
            self.learn.opt.load_state_dict(rest['opt'])  # which puts each tensor where its parameter is
        except ValueError as e:  # as after unfreezing
            print_on_main(f'The saved optimizer state does not fit this optimizer and was left out: {e}', warn=True)

    def jump_to_epoch(self, epoch: int) -> None:
        "Load what was saved after the epoch before, if rank 0 finds it."
        if self._fit is None or self._continues:
            return  # a fit that is resumed has its weights
        name = f'{self.name}_{epoch - 1}'
        found = run_on_main(self._find, (name,))
        if found is None:
            return print_on_main(f'Model {name} not found.')
        path, checksum = found
        load_everywhere(self.learn.model, path, checksum, self._load_opt)
        print_on_main(f'Loaded {name}')

    def _find(self, name):
        path = self._folder / f'{name}.pth'
        return (str(path), (read_metadata(path) or {}).get('checksum')) if path.is_file() else None


def _number(value):
    "A metric as a number; None for what is none, or several."
    if getattr(value, 'ndim', None) == 0:
        value = value.item()
    return float(value) if isinstance(value, (bool, int, float)) else None

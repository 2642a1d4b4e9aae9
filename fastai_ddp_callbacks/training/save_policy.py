"What is asked of a callback that saves models: its arguments, read in one place."

from __future__ import annotations
import os
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint.names import Template

__all__ = ['SavePolicy']


@dataclass(frozen=True)
class SavePolicy:
    "When to save, under which name, what to keep, and what to load in the end."

    fname: str | Path = 'model'  # name without suffix, which may have fields: 'model-{epoch}-{accuracy:.3f}'
    every_epoch: bool | int = False  # save after every epoch, or every so many; else when the model is the best so far
    at_end: bool = False  # save when training ends, and load nothing
    with_opt: bool = False  # save the optimizer's state too
    keep_best: int | None = None  # how many of the best to keep
    keep_last: int | None = None  # how many of the newest to keep
    last: str | None = None  # another name that the newest always has
    on_error: str = 'raise'  # or 'warn': when rank 0 cannot write
    background: bool = False  # write while training continues

    def check(
        self,
        who: str,  # name of the class that has these arguments, for messages
    ) -> None:
        "`ValueError` or `TypeError` with the argument's name for what makes no sense."

        def refuse(argument, needed, error=ValueError):
            raise error(f'{who}({argument}={getattr(self, argument)!r}): {needed}')

        if self.every_epoch and self.at_end:
            raise ValueError(f'{who}: every_epoch and at_end cannot both be set. Use two callbacks.')
        if self.on_error not in ('raise', 'warn'):
            refuse('on_error', "choose 'raise' or 'warn'.")
        if not isinstance(self.every_epoch, int) or self.every_epoch < 0:
            refuse('every_epoch', 'True, False or a number of epochs is needed.')
        if not isinstance(self.fname, (str, os.PathLike)):
            refuse('fname', 'the name of a file is needed.', TypeError)
        if not str(self.fname):
            refuse('fname', 'the name of a file is needed.')
        if self.last is not None and not isinstance(self.last, str):
            refuse('last', 'the name of a file is needed.', TypeError)
        for argument in ('keep_best', 'keep_last'):
            number = getattr(self, argument)
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                refuse(argument, 'a number of files from 1 on is needed.')

    @property
    def save_interval(self) -> int:
        "Save after so many epochs, whatever the value; 0 if only for the value's sake."
        return int(self.every_epoch) or int(bool(self.keep_last or self.last))

    @property
    def tracks_metric(self) -> bool:
        "Whether the monitored value matters. With stock's `every_epoch` alone it does not: everything is kept."
        return not self.every_epoch or bool(self.keep_best or self.keep_last)

    @property
    def keeps_some_of_the_best(self) -> bool:
        return (self.keep_best or 1) > 1

    @property
    def loads_best(self) -> bool:
        "Whether the best is loaded in the end."
        return not self.at_end and (bool(self.keep_best) or not self.every_epoch)

    @property
    def numbered(self) -> bool:
        "Whether a name without fields gets the number of the epoch."
        return bool(self.every_epoch) or self.save_interval > 0 or self.keeps_some_of_the_best

    @property
    def kept_best(self) -> int | None:
        "How many of the best the store is to keep; None if everything stays, or one name is overwritten."
        one = self.keep_last or (self.last or '{' in str(self.fname)) and not self.every_epoch
        return self.keep_best or (1 if one else None)

    def is_due(
        self,
        epoch: int,  # that has been trained
    ) -> bool:
        "Whether to save after this epoch, whatever the value."
        return self.save_interval > 0 and epoch % self.save_interval == 0

    def needs_value(
        self,
        due: bool,  # whether a save is due
    ) -> bool:
        "Whether the ranks must agree on the value of an epoch."
        return self.tracks_metric and (due or bool(self.keep_best) or not self.every_epoch)

    def targets(self) -> set[str]:
        "The names of the files that are written, without suffix; fields stay fields."
        name = Template(self.fname)
        written = {self.last, name.with_epoch().text if self.numbered else name.text}
        if self.at_end:
            written.add(name.text)
        return {os.path.normpath(target) for target in written if target}

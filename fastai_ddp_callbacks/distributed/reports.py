"What this rank reports of failures to the others, and the generation that a report ends."

from __future__ import annotations
import warnings

from ..errors import DDPError
from . import heard
from .failure import Board, Note, failed
from .group import Generation

__all__ = ['Reports']


class Reports:
    "Puts notes of failures where all ranks look. After a note the group is given up."

    def __init__(
        self,
        board: Board,
        rank: int,
        size: int,
    ):
        self.board, self.rank = board, rank
        self.generation = Generation(0, size)

    def report_failure(
        self,
        error: BaseException,  # that ends this rank's part of the work
        place: object = None,  # where; by default the line that raised it
    ) -> None:
        "Let the other ranks know of `error`; with a warning if the store is gone."
        try:
            self.post(failed(error, place, self.rank), self.generation)
        except RuntimeError as e:
            warnings.warn(f'rank {self.rank} failed and could not report it to the other ranks: {e}')
        heard.mark(error)

    def discard_group(self, generation: Generation) -> None:
        "Give up the group of this generation, once: another thread of this rank may have done so."
        if generation is self.generation:
            self.generation = generation.discard()
            heard.forget()

    def post(self, note: Note, generation: Generation) -> Note:
        "Put `note` where all ranks look, and give up the group. Gives the note that counts."
        try:
            return self.board.post(generation.number, note)
        finally:
            self.discard_group(generation)

    def post_if_possible(self, note: Note, generation: Generation) -> Note:
        "The same; without the store, `note` itself."
        try:
            return self.post(note, generation)
        except RuntimeError:  # without the store nobody is left to read it
            return note

    def error(
        self,
        note: Note,
        place: object = None,  # where this rank waits
    ) -> DDPError:
        "The exception for `note`, of which all ranks hear."
        error = note.error(self.rank, place)
        heard.mark(error)
        return error

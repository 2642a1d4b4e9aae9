"""What a rank that has failed, or that misses another one, lets all ranks know: a note of few bytes.

Notes lie on a board in the job's store, one for each generation of the group: the first one counts, so that all ranks
raise the same."""

from __future__ import annotations
import json, os, traceback
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

from ..errors import BarrierTimeoutError, DDPError, RankFailedError

__all__ = ['NOTE_SIZE', 'Board', 'Note', 'failed']

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(__file__)), '')  # its frames
NOTE_SIZE = 8192  # bytes per rank in the exchange of notes, which only happens when something is wrong


@dataclass(frozen=True)
class Note:
    "What one rank lets the others know."

    kind: str  # 'failed', 'timeout', 'dead', or 'here' where nothing is wrong on this rank
    rank: int | None  # the rank that it is about; None if unknown
    place: str
    type: str = ''  # of the error
    text: str = ''  # of the error
    traceback: str = ''
    missing: list[int] = field(default_factory=list)  # the ranks that did not come
    seconds: float = 0  # for which they were waited

    def pack(self) -> bytes:
        "At most `NOTE_SIZE` bytes; the beginning of the text and the end of the traceback are kept."
        note = replace(self, place=self.place[:1500], text=self.text[:1500], traceback=self.traceback[-4000:])
        while True:
            data = json.dumps(asdict(note), ensure_ascii=False).encode(errors='backslashreplace')
            if len(data) <= NOTE_SIZE:
                return data
            longest = max(('place', 'text', 'traceback'), key=lambda name: len(getattr(note, name)))
            text = getattr(note, longest)
            keep = len(text) // 2
            note = replace(note, **{longest: text[-keep:] if longest == 'traceback' else text[:keep]})

    @classmethod
    def unpack(
        cls,
        data: bytes,  # as `pack` gave it, with blanks behind it
    ) -> Note:
        "The note in these bytes."
        return cls(**json.loads(data))

    def error(
        self,
        rank: int,  # that is to raise it
        place: object = None,  # where it does
    ) -> DDPError:
        "The exception for this note."
        here = f'\n(Raised on rank {rank} at {place}.)' if place else f'\n(Raised on rank {rank}.)'
        if self.kind == 'timeout':
            return BarrierTimeoutError(self.text + here, place=self.place, missing=self.missing, seconds=self.seconds)
        text = self.text
        if self.kind == 'failed':
            text = f'rank {self.rank} failed in {self.place}: {self.type}: {text}'
        tail = f'\n\nTraceback of rank {self.rank}:\n{self.traceback}' if self.traceback else ''
        return RankFailedError(
            text + here + tail,
            rank=self.rank,
            place=self.place,
            error_type=self.type,
            error_text=self.text,
            traceback_text=self.traceback,
        )


def failed(
    error: BaseException,
    place: object,  # what the rank was doing; by default the line that raised
    rank: int,  # that raised it
) -> Note:
    "An exception as a note, without the frames of ours through which it came."
    tb = error.__traceback__
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        tb = tb.tb_next
    frames = traceback.extract_tb(tb)
    if place is None:
        place = f'{frames[-1].name} at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}' if frames else ''
    try:
        text = str(error)
    except Exception as e:
        text = f'(its text cannot be had: {type(e).__name__})'
    lines = traceback.format_exception(type(error), error, tb)
    return Note('failed', rank, str(place), type(error).__name__, text, ''.join(lines))


class Board:
    "The first note of each generation, where all ranks look."

    def __init__(
        self,
        store: dist.Store,  # of all ranks
    ):
        self.store = store

    def post(
        self,
        generation: int,
        note: Note,
    ) -> Note:  # the one that counts: the first of its generation
        "Put a note where all ranks look. `RuntimeError` if the store is gone."
        return Note.unpack(self.store.compare_set(self._key(generation), '', note.pack().decode()))

    def first(
        self,
        generation: int,
    ) -> Note | None:
        "The note of a generation, if there is one. `RuntimeError` if the store is gone."
        key = self._key(generation)
        return Note.unpack(self.store.get(key)) if self.store.check([key]) else None

    def _key(self, generation):
        return f'note/{generation}'

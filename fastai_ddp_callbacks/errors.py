"What this package raises. The whole message is `args[0]`, which fastai keeps; details are attributes."

from __future__ import annotations

__all__ = [
    'DDPError',
    'BarrierMismatchError',
    'RankFailedError',
    'BarrierTimeoutError',
    'BarrierInBranchError',
    'CheckpointError',
    'CheckpointWriteError',
    'CorruptCheckpointError',
    'UnsafeCheckpointError',
    'NewerCheckpointError',
    'MismatchedCheckpointError',
    'CheckpointInUseError',
    'UnequalWeightsError',
    'Preempted',
]


class DDPError(RuntimeError):
    "Base of all errors of this package that concern several ranks; `fields` become attributes."

    def __init__(
        self,
        message: str = '',  # the whole story, for the person who reads the log
        **fields,  # what a program may want to look at
    ):
        super().__init__(message)
        self.__dict__.update(fields)


class BarrierMismatchError(DDPError):
    "The ranks met at different places. Raised on every rank. `places`: dict of rank to place."

    places: dict[int, str]


class RankFailedError(DDPError):
    """Another rank failed or died. Raised on all ranks but that one, which raises its own exception.
    `rank`: int or None if unknown, `place`, `error_type`, `error_text`, `traceback_text`: str."""

    rank: int | None
    place: str
    error_type: str
    error_text: str
    traceback_text: str


class BarrierTimeoutError(DDPError):
    "Some ranks did not come in time. `place`: str, `missing`: list of ranks, `seconds`: how long was waited."

    place: str
    missing: list[int]
    seconds: float


class BarrierInBranchError(DDPError):
    "A rendezvous inside `no_collectives()`, where not all ranks come. `call` and `block`: str, where each stands."

    call: str
    block: str


class CheckpointError(Exception):
    "Base of what goes wrong with a checkpoint file; `path`: str."

    path: str

    def __init__(
        self,
        message: str = '',  # names the file, the reason, and what to do
        path='',  # the file
    ):
        super().__init__(message)
        self.path = str(path)


class CheckpointWriteError(CheckpointError, OSError):
    "The file could not be written; `errno` as of the system. What was there before is unchanged."


class CorruptCheckpointError(CheckpointError):
    "The file is truncated, or not what was written."


class UnsafeCheckpointError(CheckpointError):
    "The file holds more than tensors and plain values; loading it could run code."


class NewerCheckpointError(CheckpointError):
    "A later version of this package wrote the file, in a format that this one does not know."


class MismatchedCheckpointError(CheckpointError):
    "The file is whole, but its weights are not those of this model."


class CheckpointInUseError(CheckpointError):
    "Another running job saves under this name in this folder."


class UnequalWeightsError(DDPError):
    "After all ranks have loaded a checkpoint, their weights differ. `digests`: list of int, by rank."

    digests: list[int]


class Preempted(SystemExit):
    "All ranks have saved, and exit, since one of them got a signal. `code`: exit status."

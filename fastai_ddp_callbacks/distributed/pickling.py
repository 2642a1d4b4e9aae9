"Objects as bytes and back, with no more than one copy on the way: they may be as large as a model."

from __future__ import annotations
import io, pickle
from typing import Any

import torch

__all__ = ['dumps']


class _Pickler(pickle.Pickler):
    "Writes the memory of tensors as it is; torch makes a file of it in memory first, and bytes of that file."

    def reducer_override(self, obj):
        if type(obj) is not torch.storage.TypedStorage:
            return NotImplemented
        storage = obj._untyped_storage  # its public methods warn that they are deprecated
        if storage.device.type != 'cpu':
            return NotImplemented
        memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        return _storage, (memory.numpy(), obj.dtype)


def _storage(memory, dtype):
    return torch.storage.TypedStorage(
        wrap_storage=torch.from_numpy(memory).untyped_storage(), dtype=dtype, _internal=True
    )


def dumps(
    obj: Any,  # anything that can be pickled
) -> memoryview:  # for `pickle.loads`
    "`obj` as bytes, in memory that can be sent as it is. Raises whatever makes it impossible."
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(obj)
    return file.getbuffer()

"Calls of torch that block, with a deaf ear to Ctrl-C, and may do so for ever when another rank is gone."

from __future__ import annotations
import threading
from concurrent.futures import Future
from typing import Callable, TypeVar

import torch.distributed as dist

__all__ = ['call_in_thread', 'new_connection']

_Result = TypeVar('_Result')
_LOOK = 0.05  # seconds


def call_in_thread(
    call: Callable[[], _Result],  # blocks
    watch: Callable[[Callable[[float], bool]], None],  # given `ended(seconds)`, waits for it or raises
) -> _Result:
    "What `call` gives or raises. It runs in a thread of its own, which is left alone if `watch` raises."
    result: Future[_Result] = Future()

    def run():
        try:
            result.set_result(call())
        except BaseException as e:
            result.set_exception(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def ended(seconds):
        thread.join(seconds)
        return not thread.is_alive()

    watch(ended)
    return result.result()


def new_connection(
    store: dist.Store,  # the job's
) -> dist.Store:
    """One more connection to the job's store, which neither blocks the others nor keeps the store's server alive after
    `destroy_process_group`, which would keep its port busy. `RuntimeError` if the server is gone."""

    def watch(ended):
        while not ended(_LOOK):
            store.check([''])  # raises when the server goes, where torch would try to connect again and again

    store.check([''])
    return call_in_thread(store.clone, watch)

"""Which ranks are there, and what they send each other.

They do so through the launcher's store, so that a rank that gloo cannot reach can report."""

from __future__ import annotations
import json, os, socket, threading, time
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

__all__ = ['RollCall', 'first_line']


class RollCall:
    "The ranks that answered. Every wait for another one has a limit."

    def __init__(
        self,
        rank: int,  # of this process
        size: int,  # how many ranks there should be
        timeout: float,  # seconds to wait for the others
    ):
        self.rank, self.size, self.timeout = rank, size, timeout
        self.present = [rank]
        self.missing: list[int] = []
        self.duplicates: list[int] = []  # ranks that several processes take themselves for
        self.connection_error = ''
        self.store: dist.Store | None = None

    def join(self) -> None:
        "Connect to the store. `RuntimeError` if that fails."
        if self.size == 1:
            return
        store = dist.PrefixStore(
            f'fastai_ddp_doctor/{os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)}',
            self._connection(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])),
        )
        if store.add(f'seat/{self.rank}', 1) > 1:
            self.duplicates = [self.rank]  # the first one speaks for this rank
        else:
            self.present, self.store = list(range(self.size)), store

    def _connection(self, address, port):
        """A connection to the store, which rank 0 keeps unless the launcher does.

        Made in a thread: torch ignores Ctrl-C meanwhile, exceeds its time limit, and has no limit where something
        answers that is no store."""
        is_keeper = self.rank == 0 and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'
        outcome = []

        def connect():
            limit = timedelta(seconds=self.timeout)
            try:
                outcome.append(dist.TCPStore(address, port, is_master=is_keeper, wait_for_workers=False, timeout=limit))
            except Exception as e:  # raised below, in the main thread
                outcome.append(e)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(self.timeout)
        try:
            if not outcome:
                socket.create_connection((address, port), 1).close()
            elif isinstance(outcome[0], Exception):
                raise outcome[0]
            else:
                return outcome[0]
        except Exception as e:
            how = 'opened' if is_keeper else 'reached'
            raise RuntimeError(f'the store at {address}:{port} cannot be {how}: {first_line(e)}') from e
        raise RuntimeError(
            f'something else answers at {address}:{port}: no store of torch answered within {self.timeout:g} s.'
        )

    def exchange(
        self,
        what: str,  # a key
        own: dict,  # what JSON can hold
    ) -> dict[int, dict]:  # by rank
        "What every rank has sent in time; the others are given up."
        if self.store is None:
            return {self.rank: own}
        self.store.set(f'{what}/{self.rank}', json.dumps(own))
        # later than at the first exchange, others may still wait for a rank that only they expect
        self.present = self._wait(what, self.timeout if what == 'facts' else 2 * self.timeout)
        self.missing = [rank for rank in range(self.size) if rank not in self.present]
        self.duplicates = [rank for rank in self.present if self.store.add(f'seat/{rank}', 0) > 1]
        return {rank: json.loads(self.store.get(f'{what}/{rank}')) for rank in self.present}

    def _wait(self, what, seconds):
        "The ranks that have sent `what` within `seconds`."
        end = time.monotonic() + seconds
        while True:
            sent = [rank for rank in self.present if self.store.check([f'{what}/{rank}'])]
            if len(sent) == len(self.present) or time.monotonic() > end:
                return sent
            time.sleep(0.02)

    def leave(self) -> None:
        "Leave the store; rank 0 leaves last, since it may keep it."
        if self.store is None or self.connection_error:
            return
        with suppress(RuntimeError):  # if the store is gone by now, nobody waits for this rank either
            self.store.set(f'left/{self.rank}', '')
            if self.rank == 0:
                self._wait('left', 2 * self.timeout)


def first_line(error: Exception) -> str:
    "As much of an error as fits into a report."
    return str(error).strip().split('\n')[0][:300] or type(error).__name__

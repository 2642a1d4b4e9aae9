"""The control group: one exchange among all ranks, waits that end, failures that reach everyone.

Everything here is private to `distributed.py`. A rendezvous is a single all-to-all of a small row per rank on a gloo
group of our own, so that every rank sees where every other one is. A message from each rank to each other has no
chain of neighbours in it: whoever dies is seen at once by all who wait.

What goes wrong outside a rendezvous is written as a note into the job's store, at most one per generation. A rank that
waits looks there every now and then. After a note the group is given up (its last exchange may never end) and the
ranks meet in a group of the next generation."""

from __future__ import annotations
import ctypes, hashlib, json, os, struct, threading, time, warnings, weakref
from collections import deque
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import NamedTuple

import torch, torch.distributed as dist

from ..errors import BarrierMismatchError, BarrierTimeoutError, DDPError, RankFailedError
from .failure import TEXT, describe, pack
from ..process import start_time, host, is_same_process

NOTHING, BOOL, INT, FLOAT, BYTES, FAILED = range(6)  # what a row carries
_FIRST_LOOK, _SLOWEST_LOOK = 0.05, 0.5  # seconds between looks at the store while waiting
_HEAD = struct.Struct('<4q')
_INLINE, _FEW_RANKS = 480, 64  # so many bytes ride along in a row, up to so many ranks: they cost no time, but traffic
_REMEMBERED = 2000  # rendezvous


class Place(NamedTuple):
    "Where a rank is: `call` must be the same on all ranks, `where` is for the reader."

    call: str
    where: str

    def __str__(self):
        return self.call if self.call.endswith(self.where) else f'{self.call} at {self.where}'


class Row(NamedTuple):
    "What one rank brings to a rendezvous: four int64, and a few bytes if they are few."

    place: int
    kind: int
    bits: int  # a number, or how many bytes there are
    entered: int  # ns since the epoch on that rank's clock
    data: bytes = b''  # all of them, or nothing


@lru_cache(1024)
def _hash(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), 'little', signed=True)


def _connection(store):
    """One more connection to the job's store, which neither blocks the others nor keeps the store's server alive after
    `destroy_process_group`, which would keep its port busy. Raises when the server goes: torch would try again and again."""
    made = []

    def make():
        try:
            made.append(store.clone())
        except RuntimeError as e:
            made.append(e)

    store.check([''])
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_FIRST_LOOK)
        store.check([''])
    if isinstance(made[0], RuntimeError):
        raise made[0]
    return made[0]


def keep_alive(group, work):
    "The destructor of a gloo group waits for what is under way, which may be for ever when a rank has failed: then never destroy it."
    if work is not None and not work.is_completed():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


class Control:
    "The control traffic of this process in one default process group."

    def __init__(self):
        self.world, self.pid = (
            weakref.ref(dist.group.WORLD),
            os.getpid(),
        )  # held, it would keep the store's server alive
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.inline = _INLINE if self.size <= _FEW_RANKS else 0
        store = dist.PrefixStore('fastai_ddp_callbacks', _connection(dist.distributed_c10d._get_default_store()))
        # Some launchers keep one store over several process groups: count the groups that this rank has seen.
        self.store = dist.PrefixStore(str(store.add(f'life/{self.rank}', 1)), store)
        self.generation, self.count, self.marks = (
            0,
            0,
            0,
        )  # groups given up so far; rendezvous in this one; errors that all know
        self.group = self.pending = self.neighbours = self.failure = None
        self.host = f'host/{host()}'
        self.store.set(
            f'{self.host}/{self.store.add(self.host, 1)}', json.dumps([self.rank, self.pid, start_time(self.pid)])
        )
        self.last = None  # the last place where all met, and when
        self.record = deque(
            maxlen=_REMEMBERED
        )  # of each rendezvous: its place, when each rank came by its own clock, when this one left, in ns since the epoch
        self.lock = threading.Lock()

    # -- the rendezvous

    def meet(
        self,
        place,  # `Place`
        timeout,  # seconds
        kind=NOTHING,
        bits=0,
        data=b'',  # what this rank brings
        failure=None,  # the exception with which this rank comes, if it has failed
    ):  # list of `Row`, one per rank
        "Meet all ranks at `place`. Raises on every rank if one has failed, is elsewhere, or does not come."
        # A rank that has failed does not wait for those who are late: after half a second it leaves a note instead.
        deadline = time.monotonic() + (timeout if failure is None else min(timeout / 2, 0.5))
        came = time.time_ns()  # before the group is made, which waits for all ranks too
        with self._waiting(place, failure):
            self._join(place, timeout, deadline)
            row = Row(
                _hash(place.call), FAILED if failure else kind, bits, came, data if len(data) <= self.inline else b''
            )
            rows = self._exchange(_HEAD.pack(*row[:4]) + row.data.ljust(self.inline, b'\0'), place, timeout, deadline)
            table = [self._row(o) for o in rows]
            self._met(place)
            self.record.append((place, tuple(o.entered for o in table), time.time_ns()))
            # Those who came first may have given up before the last one came, with their messages under way. If the store has
            # gone, whoever kept it came here and left.
            entered = [o.entered for o in table]
            if max(entered) - min(entered) > _FIRST_LOOK * 1e9:
                self._look()
            if any(o.kind == FAILED or o.place != row.place for o in table):
                self._complain(place, failure, timeout)
            return table

    def send(self, data, n, src, place, timeout):
        "The `n` bytes of rank `src`, on every rank: for those that were too many to come with the row that told `n`."
        with self._waiting(place):
            t = (
                torch.frombuffer(bytearray(data), dtype=torch.uint8)
                if self.rank == src
                else torch.empty(n, dtype=torch.uint8)
            )
            return self._spread(t, src, place, timeout).numpy().tobytes()

    def swap(self, data, n, place, timeout):
        "`data` of every rank, on every rank, each in `n` bytes with nothing behind it."
        with self._waiting(place):
            return self._exchange(data.ljust(n, b'\0'), place, timeout, time.monotonic() + timeout)

    def spread(self, t, src, place, timeout):
        "Fill `t`, on the CPU, with what rank `src` has in it, on every rank."
        with self._waiting(place):
            t.copy_(self._spread(t, src, place, timeout))  # which is `t` itself where the group is gloo's

    def _spread(self, t, src, place, timeout):
        t, opts = t.to(self.device), dist.BroadcastOptions()
        opts.rootRank, opts.rootTensor, opts.timeout = src, 0, timedelta(seconds=timeout + 1)
        self._wait(self.group.broadcast([t], opts), place, timeout, time.monotonic() + timeout)
        return t.cpu()

    def node(self, place, timeout):
        "The ranks that run on this rank's host, in order. A rendezvous of all ranks the first time."
        with self._waiting(place):
            self._join(place, timeout, time.monotonic() + timeout)
        return sorted(r for r, *_ in self.neighbours)

    def _neighbours(self):
        "(rank, process number, its start) of the ranks on this host: of those that have come so far, until all have."
        if self.neighbours is not None:
            return self.neighbours
        keys = [f'{self.host}/{i + 1}' for i in range(self.store.add(self.host, 0))]
        return [json.loads(self.store.get(o)) for o in keys if self.store.check([o])]

    @contextmanager
    def _waiting(self, place, failure=None):
        "One rendezvous at a time; whatever ends it early is told to the others. A rank that has failed raises its own `failure`."
        if not self.lock.acquire(blocking=False):
            raise DDPError(
                f'{place} was called on rank {self.rank} while another of its threads waits in a rendezvous. '
                'Let one thread of each rank do all the meeting.'
            )
        self.failure, self.begun, since = failure, self.generation, self.marks
        try:
            yield
        except BaseException as e:
            self.report(e, place, since)
            if failure is None or e is failure:
                raise
            raise self._known(failure) from e
        finally:
            self.failure = None
            self.lock.release()

    def _met(self, place):
        self.count, self.last, self.pending = self.count + 1, (place, time.monotonic()), None

    def _row(self, data):
        head = _HEAD.unpack_from(data)
        n = head[2] if head[1] == BYTES and head[2] <= self.inline else 0
        return Row(*head, data[_HEAD.size : _HEAD.size + n])

    def _exchange(self, data, place, timeout, deadline):
        "`data` of every rank, on every rank; it is equally long on all of them."
        row = torch.frombuffer(bytearray(data * self.size), dtype=torch.uint8).to(self.device)
        out, opts = torch.empty_like(row), dist.AllToAllOptions()
        opts.timeout = timedelta(seconds=timeout + 1)  # ours comes first; after that gloo lets go of it too
        try:
            work = self.group.alltoall_base(out, row, [], [], opts)
        except RuntimeError as e:
            self._lost(e, place)  # a connection that is closed already
        self._wait(work, place, timeout, deadline)
        out, n = out.cpu().numpy().tobytes(), len(data)
        return [out[i : i + n] for i in range(0, len(out), n)]

    def _complain(self, place, failure, timeout):
        "All ranks know that something is wrong: tell each other what, and raise."
        note = (
            describe(failure, place, self.rank)
            if failure
            else dict(kind='here', rank=self.rank, place=str(place), call=place.call)
        )
        rows = self._exchange(pack(note).ljust(TEXT), place, timeout, time.monotonic() + timeout)
        self._met(place)
        notes = [json.loads(o) for o in rows]
        if failure:
            raise self._known(failure)
        for o in notes:
            if o['kind'] == 'failed':
                raise self._error(o, place)
        places = {o['rank']: o['place'] for o in notes}
        raise self._known(
            BarrierMismatchError(
                'The ranks are at different places:\n'
                + ''.join(f'  rank {r}: {p}\n' for r, p in places.items())
                + 'Each rendezvous must be reached by all ranks in the same order. '
                'Look for a branch on the rank around one of these places; `run_on_main` is for what one rank does alone.',
                places=places,
            )
        )

    # -- waiting

    def _wait(self, work, place, timeout, deadline):
        "Wait for `work`; raise if a rank fails, dies, or does not come before `deadline`."
        self.pending, pause = work, _FIRST_LOOK
        while True:
            if self._ended(work, min(pause, max(deadline - time.monotonic(), 0.001)), place):
                break
            gone = self._look(announce=pause == _FIRST_LOOK)
            if gone is not None or pause == _SLOWEST_LOOK and self._dead():
                if self._ended(work, 0.001, place):
                    break  # the last that it did was to come here
                self._lost(gone, place)
            if time.monotonic() >= deadline:
                time.sleep(2 * _FIRST_LOOK)  # a rank that comes in the last moment is not missing
                if self._ended(work, 0.001, place):
                    break
                self._give_up(place, timeout)
            pause = min(2 * pause, _SLOWEST_LOOK)
        self.pending = None

    def _ended(self, work, seconds, place):
        try:
            return self._finished(work, seconds)
        except RuntimeError as e:
            self._lost(e, place)

    def _finished(self, work, seconds):
        "Whether `work` ends within `seconds`; raises what made it fail."
        if self.group is self.world():  # `wait` of other backends may return early or never
            end = time.monotonic() + seconds
            while not work.is_completed():
                if time.monotonic() > end:
                    return False
                time.sleep(0.0005)
        else:
            try:
                work.wait(timedelta(seconds=seconds))
                return True
            except RuntimeError:
                if not work.is_completed():
                    return False  # the wait was over, the work goes on
        work.wait()
        return True

    def _join(self, place, timeout, deadline):
        "Make the group of this generation, once all ranks ask for it."
        if self.group is not None:
            return
        if not dist.is_gloo_available():
            if self.generation:
                raise DDPError(
                    f'{place}: an earlier failure has broken the default process group, which is the only '
                    'one here as torch was built without gloo. Destroy it and initialise a new one.'
                )
            devices = {o.type: o for o in self.world()._device_types}
            self.group, self.device = self.world(), devices.get('cpu', *list(devices.values())[:1])
        else:
            self._gather(place, timeout, deadline)
            self.neighbours = self._neighbours()
            self.group, self.device = (
                self.connect(f'group/{self.generation}', place, timeout, deadline),
                torch.device('cpu'),
            )

    def _gather(self, place, timeout, deadline):
        "Wait in the store for all ranks."
        key, pause = f'joined/{self.generation}', 0.001
        self._announce()
        self.store.add(key, 1)
        while self.store.add(key, 0) < self.size:
            pause = self._pause(pause, time.sleep, place, timeout, deadline)

    def connect(self, name, place, timeout, deadline):
        """A gloo group of all ranks, which are known to be about to make it too. That blocks, with a deaf ear to Ctrl-C, until
        all have come: so it is done in a thread, over a connection of its own, while this one looks out."""
        made = []

        def make():
            try:
                made.append(dist.ProcessGroupGloo(store, self.rank, self.size, timedelta(seconds=timeout)))
            except RuntimeError as e:
                made.append(e)

        try:
            store, pause = dist.PrefixStore(name, _connection(self.store)), 0.001
        except RuntimeError as e:
            self._lost(e, place)
        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        while thread.is_alive():
            pause = self._pause(pause, thread.join, place, timeout, deadline)
        if isinstance(made[0], RuntimeError):
            self._lost(made[0], place)
        return made[0]

    def _pause(self, pause, wait, place, timeout, deadline):
        "Wait a little and look out; gives how long to wait the next time."
        wait(pause)
        gone = self._look()
        if gone is not None or pause == _SLOWEST_LOOK and self._dead():
            self._lost(gone, place)
        if time.monotonic() >= deadline:
            self._give_up(place, timeout)
        return min(2 * pause, _SLOWEST_LOOK)

    def wait(self, work, place, timeout):
        "Wait for `work` of another group of all ranks, as for a rendezvous."
        with self._waiting(place):
            self._wait(work, place, timeout, time.monotonic() + timeout)

    def lost(self, error, place):
        "Such a group is broken: raise why."
        with self._waiting(place):
            self._lost(error, place)

    def another(self, name, place, timeout):
        "Another group of all ranks, which are known to be about to make it too."
        with self._waiting(place):
            return self.connect(name, place, timeout, time.monotonic() + timeout)

    # -- failures

    def report(
        self,
        error,  # exception that leaves this rank's part of the work
        place=None,  # where; by default the line that raised it
        since=0,  # `marks` before it was raised
    ):
        "Tell the other ranks of `error`, unless all of them know it already."
        if self.knows(error, since):
            return
        try:
            self._post(describe(error, place, self.rank))
        except RuntimeError as e:
            warnings.warn(f'rank {self.rank} failed and could not tell the other ranks: {e}')
        self._known(error)

    def cause(self):
        "The error that another rank has told of in this generation, or None."
        note = self._note()
        return None if note is None or note['rank'] == self.rank else self._error(note, None)

    def _post(self, note):
        "Put `note` where all ranks look, and give up the group. Returns the note of this generation: the first one."
        try:
            note = json.loads(self.store.compare_set(f'note/{self.generation + 1}', '', pack(note).decode()))
        finally:
            self._abandon()
        return note

    def _note(self, generation=None):
        key = f'note/{(self.generation if generation is None else generation) + 1}'
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def _look(self, announce=False):
        "Raise if a rank has told of a failure. Gives the error if the store does not answer."
        try:
            if announce:
                self._announce()
            note = self._note(self.begun)
        except RuntimeError as e:
            return e
        if note is not None and self.generation > self.begun:
            raise self._error(note, None)  # told by another thread of this rank
        if note is not None:
            self._abandon()
            raise self._error(note, None)

    def _abandon(self):
        keep_alive(self.group, self.pending)
        self.group, self.pending = None, None
        self.generation, self.count = self.generation + 1, 0

    def _known(self, error):
        "Mark `error` as one that every rank has heard of."
        self.marks += 1
        error._known_at = id(self), self.generation, self.count, self.marks
        return error

    def knows(self, error, since):
        "Whether every rank has heard of `error`, after there were `since` marks: it may have been raised before, and again."
        at = getattr(error, '_known_at', None)
        return at is not None and at[:3] == (id(self), self.generation, self.count) and at[3] > since

    def _error(self, note, place):
        "The exception for a note, to be raised on this rank."
        here = f'\n(Raised on rank {self.rank} at {place}.)' if place else f'\n(Raised on rank {self.rank}.)'
        if note['kind'] == 'timeout':
            return self._known(
                BarrierTimeoutError(
                    note['text'] + here, place=note['place'], missing=note['missing'], seconds=note['seconds']
                )
            )
        first = note['text']
        if note['kind'] == 'failed':
            first = f"rank {note['rank']} failed in {note['place']}: {note['type']}: {first}"
        tail = f"\n\nTraceback of rank {note['rank']}:\n{note['traceback']}" if note.get('traceback') else ''
        return self._known(
            RankFailedError(
                first + here + tail,
                rank=note['rank'],
                place=note['place'],
                error_type=note['type'],
                error_text=note['text'],
                traceback_text=note.get('traceback', ''),
            )
        )

    # -- who is missing

    def _announce(self):
        "Say in the store that this rank waits, for whoever must tell who is missing."
        self.store.set(f'at/{self.rank}', f'{self.generation}/{self.count}')

    def _missing(self):
        "The ranks that have not said that they wait here too."
        here = f'{self.generation}/{self.count}'.encode()
        return [
            r for r in range(self.size) if not (self.store.check([f'at/{r}']) and self.store.get(f'at/{r}') == here)
        ]

    def _dead(self):
        "The ranks on this host whose process is gone."
        return [r for r, pid, start in self._neighbours() if not is_same_process(pid, start)]

    def _seen(self):
        if self.last is None:
            return 'not seen at any rendezvous yet'
        return f'last seen leaving {self.last[0]}, {time.monotonic() - self.last[1]:.1f} s ago'

    def _give_up(self, place, timeout):
        if self.failure is not None:
            raise self.failure
        gone = self._look()
        if gone is not None:
            self._lost(gone, place)
        missing = self._missing()
        who = ', '.join(f'rank {r}' for r in missing) or 'ranks that wait too, but at another place'
        text = (
            f'{place}: waited {timeout:g} s for {who}.\n'
            + ''.join(f'  rank {r}: {self._seen()}\n' for r in missing)
            + 'Either it is slow (give this rendezvous more time) or it will never come (look for a branch on the rank, '
            'or a loop with another number of turns there).'
        )
        raise self._error(
            self._post(
                dict(
                    kind='timeout',
                    rank=self.rank,
                    place=str(place),
                    type='BarrierTimeoutError',
                    text=text,
                    missing=missing,
                    seconds=timeout,
                )
            ),
            place,
        )

    def _lost(self, error, place):
        "A connection is closed or a process is gone: find out whose, tell everyone, raise."
        end, dead = time.monotonic() + 1.5, []
        try:
            self._announce()
            while time.monotonic() < end and not dead:
                note = self._note(self.begun)  # a rank that failed said so before it went
                if note is not None:
                    break
                dead = self._dead()
                time.sleep(_FIRST_LOOK)
            else:
                note = None
            missing = dead or [r for r in self._missing() if r != self.rank]
        except RuntimeError as e:  # the store went with the process that kept it
            error, note, dead = e, None, self._dead() if self.neighbours is not None else []
            missing = dead
        if note is not None:
            self._abandon()
            raise self._error(note, place) from error
        who = (
            ', '.join(f'rank {r}' for r in missing) or 'a rank that kept the job\'s store (rank 0 under most launchers)'
        )
        what = (
            'its process is gone: it was killed, or it exited early'
            if dead
            else 'the connection is closed, and it gives no sign of life'
        )
        note = dict(
            kind='dead',
            rank=missing[0] if missing else None,
            place=self._seen(),
            type='ProcessDied',
            text=f'{who} died ({what}; {self._seen()}).' + (f' The network said: {error}' if error else ''),
        )
        with suppress(RuntimeError):
            note = self._post(note)  # without the store nobody is left to tell
        raise self._error(note, place) from error

"""What goes wrong before training begins, looked at on every rank: `fastai-ddp doctor`, alone or under a launcher.

    torchrun --nproc_per_node=3 -m fastai_ddp_callbacks.cli doctor

The ranks tell each other what they see through the launcher's store, so that one which gloo cannot reach is heard too.
All of them judge by the same facts (`diagnosis.py`), and the first of them prints."""

from __future__ import annotations
import json, os, platform, secrets, shutil, socket, threading, time
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import torch, torch.distributed as dist

from .. import __version__
from ..demo.race import _number, _termination_raises
from .diagnosis import VARIABLES, count, judge, look_at_variables
from ..distributed import all_gather, barrier
from .files import _print, _print_json
from ..process import host

__all__ = ['add_arguments', 'run']

_LAG = 3  # seconds that a network disk may take to show a file


# -- the command


def add_arguments(parser) -> None:
    "Add the doctor's options to an argparse parser."
    parser.add_argument(
        '--folder',
        default='.',
        metavar='DIR',
        help='where checkpoints are to go: a small file is written there and removed (default: here)',
    )
    parser.add_argument(
        '--timeout',
        type=_number(float, 1, 3600),
        default=30.0,
        metavar='S',
        help='seconds to wait for the other ranks (default 30)',
    )
    parser.add_argument('--json', action='store_true', help='print JSON')


def run(args) -> int:
    "Look, exchange, judge, report; gives the exit status."
    me = _facts(args.folder)
    roll = _Roll(me['rank'], me['size'], args.timeout)
    with _termination_raises():  # a launcher that ends the ranks does not leave their files behind
        try:
            facts = _examine(roll, me, args)
        except RuntimeError as e:
            facts, roll.lost = {me['rank']: me}, _line(e)
    findings = judge(facts, me['size'], roll.missing, args.timeout, roll.lost, roll.twice)
    status = int(any(o.verdict == 'problem' for o in findings))
    if me['rank'] == min(facts):
        _report(facts, findings, status, args.json)
    roll.leave()
    return status


def _report(facts, findings, status, as_json):
    if as_json:
        return _print_json(dict(status=status, ranks=facts, checks=[o._asdict() for o in findings]))
    for r, o in facts.items():
        _print(
            f"rank {r} of {o['size']}: {o['host']}, process {o['pid']}, {count(o['gpus'], 'GPU')}, Python {o['versions']['python']}, "
            f"torch {o['versions']['torch']}, fastai {o['versions']['fastai'] or 'missing'}, {o['folder']}"
        )
    print()
    for o in findings:
        _print(f'{o.verdict:<8} {o.check:<9} {o.text}')
        if o.advice:
            _print(f'{"":18} -> {o.advice}')
    print(
        '\nVerdict: ' + ', '.join(count(sum(o.verdict == v for o in findings), v) for v in ('problem', 'note')) + '.',
        flush=True,
    )


def _line(e):
    return str(e).strip().split('\n')[0][:300] or type(e).__name__


# -- what a rank sees


def _facts(folder):
    env = {o: os.environ[o] for o in VARIABLES if o in os.environ}
    rank, size, finding = look_at_variables(env)
    packages = {o: _version(o) for o in ('torch', 'fastai', 'accelerate')}
    facts = dict(
        rank=rank,
        size=size,
        launcher=finding,
        env=env,
        host=socket.gethostname(),
        machine=host(),
        pid=os.getpid(),
        gloo=dist.is_gloo_available(),
        nccl=dist.is_nccl_available(),
        gpus=torch.cuda.device_count(),
        visible=os.environ.get('CUDA_VISIBLE_DEVICES'),
        driver=os.path.exists('/dev/nvidia0'),
        folder=os.path.abspath(folder),
        free=None,
        disk_error=None,
        sees=[],
        after=0,
        met=None,
        versions=dict(python=platform.python_version(), fastai_ddp_callbacks=__version__, **packages),
    )
    with suppress(OSError):
        facts['free'] = shutil.disk_usage(folder).free  # the probe tells what is wrong with the folder
    return facts


def _version(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _examine(roll, me, args):
    "{rank: facts} of all ranks that came, after they have looked at what takes several."
    roll.join()
    with _probe(args.folder) as (name, me['disk_error']):
        facts = roll.exchange('facts', dict(me, probe=name))
        if name:
            me['sees'], me['after'] = _look_for(
                {r: o['probe'] for r, o in facts.items() if o['probe']}, args.folder, min(_LAG, args.timeout / 2)
            )
        in_order = (
            len(facts) == me['size']
            and not roll.twice
            and all(o['gloo'] and o['size'] == me['size'] for o in facts.values())
        )
        if me['size'] > 1 and in_order:
            me['met'] = _meet(roll)
        return facts | roll.exchange('seen', me)  # and only now the files go


@contextmanager
def _probe(folder):
    "A file for the other ranks to see, for the time of the block. Gives its name, and what was wrong."
    name, error, made = f'.fastai-ddp-doctor-{secrets.token_hex(8)}', None, False
    try:
        try:
            with open(os.path.join(folder, name), 'xb') as f:
                made = True
                f.write(bytes(4096))  # a full disk has room for a name
        except OSError as e:
            error = e.strerror
        yield None if error else name, error
    finally:
        if made:
            os.unlink(os.path.join(folder, name))


def _look_for(names, folder, limit):
    "The ranks whose file is here, and after how many seconds the last one was."
    begin, after, seen = time.monotonic(), 0, set()
    while True:
        now = {r for r, o in names.items() if os.path.exists(os.path.join(folder, o))}
        if now != seen:
            seen, after = now, time.monotonic() - begin
        if len(seen) == len(names) or time.monotonic() - begin > limit:
            return sorted(seen), after
        time.sleep(0.05)


def _meet(roll):
    "Make a gloo group, meet on ours, compare clocks: figures, or the error."
    begin, rounds = time.monotonic(), []
    try:
        dist.init_process_group(
            'gloo',
            store=dist.PrefixStore('gloo', roll.store),
            rank=roll.rank,
            world_size=roll.size,
            timeout=timedelta(seconds=roll.timeout),
        )
        barrier('doctor: everybody', roll.timeout)
        seconds = time.monotonic() - begin
        for _ in range(9):
            barrier('doctor: now', roll.timeout)
            left = time.monotonic()
            rounds.append((all_gather(time.time(), 'doctor: clocks', roll.timeout), time.monotonic() - left))
        return dict(
            seconds=seconds,
            trip=median(o for _, o in rounds),
            ahead=[median(clocks[r] - clocks[0] for clocks, _ in rounds) for r in range(roll.size)],
        )
    except RuntimeError as e:
        return dict(error=_line(e))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Roll:
    "The ranks that came, and what they tell each other through the launcher's store; each waits there for a limited time."

    def __init__(self, rank, size, timeout):
        self.rank, self.size, self.timeout = rank, size, timeout
        self.ranks, self.store, self.missing = [rank], None, []  # who is still there, and who not
        self.lost, self.twice = (
            '',
            [],
        )  # what became of the connection; ranks that several processes take themselves for

    def join(self):
        "Connect to the store. `RuntimeError` if that fails."
        if self.size == 1:
            return
        address, port = os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT'])
        keeper = (
            self.rank == 0 and os.environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True'
        )  # else the launcher keeps it
        store = dist.PrefixStore(
            f"fastai_ddp_doctor/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}",
            self._connection(address, port, keeper),
        )
        if store.add(f'seat/{self.rank}', 1) > 1:
            self.twice = [self.rank]  # the first one speaks for this rank
        else:
            self.ranks, self.store = list(range(self.size)), store

    def _connection(self, address, port, keeper):
        "In a thread, since torch has a deaf ear to Ctrl-C meanwhile, overdraws its time, and knows no limit where something answers that is no store."
        made = []

        def make():
            try:
                made.append(
                    dist.TCPStore(
                        address, port, is_master=keeper, wait_for_workers=False, timeout=timedelta(seconds=self.timeout)
                    )
                )
            except Exception as e:
                made.append(e)

        thread = threading.Thread(target=make, daemon=True)
        thread.start()
        thread.join(self.timeout)
        try:
            if not made:
                socket.create_connection((address, port), 1).close()
            elif isinstance(made[0], Exception):
                raise made[0]
            else:
                return made[0]
        except Exception as e:
            raise RuntimeError(
                f'the store at {address}:{port} cannot be {"opened" if keeper else "reached"}: {_line(e)}'
            ) from e
        raise RuntimeError(
            f'something else answers at {address}:{port}: it said nothing that a store of torch says, in {self.timeout:g} s.'
        )

    def exchange(self, what, obj):
        "{rank: object} of those who have told theirs in time; the others are given up."
        if self.store is None:
            return {self.rank: obj}
        self.store.set(f'{what}/{self.rank}', json.dumps(obj))
        self.ranks = self._wait(what)
        self.missing = [r for r in range(self.size) if r not in self.ranks]
        self.twice = [r for r in self.ranks if self.store.add(f'seat/{r}', 0) > 1]
        return {r: json.loads(self.store.get(f'{what}/{r}')) for r in self.ranks}

    def _wait(self, what):
        end = time.monotonic() + self.timeout * (
            1 if what == 'facts' else 2
        )  # others may still wait for a rank that only they expect
        while True:
            here = [r for r in self.ranks if self.store.check([f'{what}/{r}'])]
            if len(here) == len(self.ranks) or time.monotonic() > end:
                return here
            time.sleep(0.02)

    def leave(self):
        "Rank 0 goes last, since it may keep the store."
        if self.store is None or self.lost:
            return
        with suppress(RuntimeError):  # if the store has gone by now, nobody waits for us either
            self.store.set(f'left/{self.rank}', '')
            if self.rank == 0:
                self._wait('left')

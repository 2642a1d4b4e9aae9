"""Any three programs of rendezvous, run by three ranks: all finish alike, or all raise, and never does one
rendezvous release another."""

from __future__ import annotations
import json, os, signal, sys, threading
from datetime import timedelta

import cloudpickle, pytest, torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings, strategies as st

from fastai_ddp_callbacks import (
    DDPError,
    agree,
    barrier,
    no_collectives,
    rank,
    propagate_failure,
    run_on_main,
    set_timeout,
)
from ranks import run

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that a rank need not import hypothesis

WORLD, PROGRAMS, SECONDS = 3, 200, 40  # a program takes a fraction of a second; one that takes `SECONDS` hangs


# -- the programs: lists of steps. Every one ends with the barrier at which ranks part


def boom():
    raise ValueError('boom')


def write():
    barrier('within')
    return 'written'


def write_twice():
    return [run_on_main(write), run_on_main(write), agree(rank(), 'max')]


def mend():
    try:
        run_on_main(boom)
    except ValueError:
        barrier('within')
    return 'mended'


def branch(*calls):
    with no_collectives() as on_main:
        if on_main:
            [call() for call in calls]


MEET = {  # steps at which all ranks meet, and what each gives
    'barrier a': (lambda: barrier('a'), None),
    'barrier b': (lambda: barrier('b'), None),
    'agree': (lambda: agree(rank(), 'max', name='value'), 2),
    'run_on_main': (lambda: run_on_main(write), 'written'),
    'nested run_on_main': (lambda: run_on_main(write_twice), ['written', 'written', 0]),
    'run_on_main that mends': (lambda: run_on_main(mend), 'mended'),
    'run_on_main that raises': (lambda: run_on_main(boom), None),
    'end': (lambda: barrier('end'), None),
}
ALONE = {  # steps that each rank takes by itself
    'branch': branch,
    'branch with a barrier': lambda: branch(lambda: barrier('branch')),
    'raise': boom,
}
STEPS = [o for o in (*MEET, *ALONE) if o != 'end']


def raises(step, r):
    "What step raises on rank `r` for a reason of its own, by name."
    if step == 'raise' or (step == 'run_on_main that raises' and r == 0):
        return 'ValueError'
    if step == 'branch with a barrier' and r == 0:
        return 'BarrierInBranchError'


def foretell(programs):
    "By rank: how many steps at which ranks meet are passed, and what is raised then (None: the program ends)."
    ways = []
    for r, program in enumerate(programs):  # the meetings of this rank, up to what it raises by itself
        way = []
        for step in (*program, 'end'):
            if step in MEET or raises(step, r):
                way.append((step, raises(step, r)))
            if raises(step, r):
                break
        ways.append(way)
    for k, steps in enumerate(zip(*ways)):
        if len({step for step, _ in steps}) > 1 or any(error for _, error in steps):
            other = 'RankFailedError' if any(error for _, error in steps) else 'BarrierMismatchError'
            return [(k, error or other) for _, error in steps]
    return [(len(ways[0]), None)] * WORLD


FAILING = [o for o in STEPS if raises(o, 0)]
healthy, failing = st.sampled_from([o for o in STEPS if o not in FAILING]), st.sampled_from(FAILING)


@st.composite
def programs(draw):
    "A program per rank: the same for all, with at most one step that fails, and at most two edits on one rank each."
    common = draw(st.lists(healthy, min_size=1, max_size=5))
    at = st.integers(0, len(common))
    if draw(st.booleans()):
        common.insert(draw(at), draw(failing))
    res = [list(common) for _ in range(WORLD)]
    for _ in range(draw(st.sampled_from([1, 0, 2]))):
        program, i, how = draw(st.sampled_from(res)), draw(at), draw(st.sampled_from(['insert', 'replace', 'delete']))
        if how != 'insert':
            del program[i : i + 1]
        if how != 'delete':
            program.insert(i, draw(st.one_of(healthy, failing)))
    return res


# -- the ranks: they are started once, take program after program out of a store, and put there what came of it


def follow(program):
    "What comes of `program` on this rank: results by step, and the exception."
    said, error = [], None
    try:
        with propagate_failure():
            for step in (*program, 'end'):
                if step in MEET:
                    said.append([step, MEET[step][0]()])
                else:
                    ALONE[step]()
    except BaseException as e:
        error = e
    return dict(
        said=said,
        error=error and type(error).__name__,
        text=str(error),
        ours=isinstance(error, DDPError),
        by=getattr(error, 'rank', None),
    )


def work(port):
    r, store = int(os.environ['RANK']), dist.TCPStore('127.0.0.1', port, timeout=timedelta(minutes=3))
    set_timeout(SECONDS - 10)
    for i in range(10**6):
        programs, fresh = json.loads(store.get(f'{i}'))
        if fresh and dist.is_initialized():
            dist.destroy_process_group()
        if programs is None:
            return
        signal.alarm(SECONDS)  # a rank that hangs is killed
        if fresh:
            dist.init_process_group('gloo', store=dist.PrefixStore(f'group {i}', store), rank=r, world_size=WORLD)
        store.set(f'{i}/{r}', json.dumps(follow(programs[r])))
        store.wait([f'{i}/{o}' for o in range(WORLD)], timedelta(seconds=SECONDS))
        signal.alarm(0)


class Crew:
    """Three ranks that wait for programs. `TURNS` programs are run in one process group: after an error it must
    serve the next one."""

    TURNS = 20

    def __init__(self):
        self.store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)
        self.count, self.before, self.lost = (
            0,
            [],
            False,
        )  # programs run so far; those in the group at hand; whether a rank is gone
        self.thread = threading.Thread(target=lambda: run(work, WORLD, self.store.port, group=False, timeout=170))
        self.thread.start()

    def check(self, programs):
        "Run `programs` and see whether what comes of them is right."
        i, fresh = self.count, not self.before
        self.store.set(f'{i}', json.dumps((programs, fresh)))
        keys, self.count = [f'{i}/{r}' for r in range(WORLD)], i + 1
        try:
            self.store.wait(keys, timedelta(seconds=SECONDS + 10))
        except RuntimeError:
            self.lost = True
        said = [json.loads(self.store.get(o)) if self.store.check([o]) else None for o in keys]
        try:
            check(programs, said)
        except AssertionError as e:
            story = [
                str(e).splitlines()[0],
                *(f'rank {r}: {p} -> {o}' for r, (p, o) in enumerate(zip(programs, said))),
                f'in the same group ran before: {self.before}',
            ]
            print(*story, sep='\n')  # should hypothesis not live to tell
            self.before = []  # the next one gets a new group
            raise AssertionError('\n'.join(story)) from None
        self.before = [*self.before, programs] if len(self.before) + 1 < self.TURNS else []

    def dismiss(self):
        self.store.set(f'{self.count}', json.dumps((None, True)))
        self.thread.join()


@pytest.fixture(scope='module')
def crew():
    "Gives the ranks; new ones, if one of those before is gone."
    crews = []

    def get():
        if not crews or crews[-1].lost:
            crews.append(Crew())
        return crews[-1]

    yield get
    for o in crews:
        o.dismiss()


def check(programs, said):
    for r, (k, error) in enumerate(foretell(programs)):
        o = said[r]
        assert o, f'rank {r} hangs or has died'
        assert o['error'] == error and (o['ours'] or error in (None, 'ValueError')), (
            f'rank {r} should have raised {error}'
        )
        passed = [step for step, _ in o['said']]
        meetings = [step for step in (*programs[r], 'end') if step in MEET]
        # A rank that waits may hear of a failure one meeting early: the failed rank was through, it not yet.
        assert passed == meetings[: len(passed)] and (
            len(passed) == k or error == 'RankFailedError' and len(passed) == k - 1
        ), f'rank {r} should have passed {k}'
        assert all(result == MEET[step][1] for step, result in o['said']), f'rank {r} has a wrong result'
        if error == 'RankFailedError':
            assert said[o['by']]['error'] in ('ValueError', 'BarrierInBranchError'), f'rank {r} blames the wrong rank'
        if error == 'BarrierMismatchError':
            assert all(f'rank {i}' in o['text'] for i in range(WORLD)), f'rank {r} does not say where all are'


@pytest.mark.begins_early
@settings(
    max_examples=PROGRAMS, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(programs())
@example([['barrier a', 'barrier b'], ['barrier a', 'barrier a'], ['barrier a', 'barrier a']])
@example([['run_on_main that raises'], ['raise'], ['run_on_main that raises']])
@example([['run_on_main that raises', 'barrier a'], ['barrier a'], ['run_on_main that raises']])
@example([['branch with a barrier', 'agree'], ['agree'], ['raise', 'agree']])
def test_any_three_programs_end_alike_or_raise_everywhere(crew, programs):
    crew().check(programs)


def test_what_is_foretold_of_programs_is_what_one_expects():
    a = ['barrier a']
    assert foretell([a, a, a]) == [(2, None)] * 3
    assert foretell([a, a + a, a]) == [(1, 'BarrierMismatchError')] * 3
    assert foretell([a, a + ['raise'], a]) == [(1, 'RankFailedError'), (1, 'ValueError'), (1, 'RankFailedError')]
    assert foretell([['branch'] + a, a, a]) == [(2, None)] * 3
    assert foretell([['branch with a barrier']] * 3) == [
        (0, 'BarrierInBranchError'),
        (0, 'RankFailedError'),
        (0, 'RankFailedError'),
    ]
    assert foretell([a, ['run_on_main that raises'], a]) == [(0, 'BarrierMismatchError')] * 3

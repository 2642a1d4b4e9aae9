"""The rendezvous on real ranks: that they hold, what they carry, and what becomes of everyone when one rank does
something else."""

from __future__ import annotations
import errno, math, os, pickle, signal, socket, subprocess, sys, threading, time, warnings
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median

import cloudpickle, numpy as np, pytest, torch, torch.distributed as dist

import fastai_ddp_callbacks
from fastai_ddp_callbacks import (
    BarrierInBranchError,
    BarrierMismatchError,
    BarrierTimeoutError,
    DDPError,
    RankFailedError,
    agree,
    all_gather,
    barrier,
    broadcast,
    broadcast_tensors,
    get_timeout,
    is_local_main_process,
    is_main_process,
    main_process_first,
    main_process_only,
    no_collectives,
    once_per_node,
    rank,
    propagate_failure,
    run_on_main,
    run_once_per_node,
    set_timeout,
    all_or_none,
    world_size,
)
from fastai_ddp_callbacks.distributed import presence
from fastai_ddp_callbacks.distributed.current import current_control
import ranks
from ranks import report, values

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # so that a rank need not import pytest
run = partial(ranks.run, timeout=30)


# What the stories use. Ranks that must order their steps do so through the job's store, not through what is tested.


def attempt(f, *args, **kwargs):
    "What a call comes to: its result, or the exception."
    try:
        return f(*args, **kwargs)
    except BaseException as e:
        return e


def timed(f, *args, **kwargs):
    "The same, and when that was. The clock is the same for all ranks of a host."
    return attempt(f, *args, **kwargs), time.monotonic()


def store():
    return dist.distributed_c10d._get_default_store()


def tell(word):
    store().set(word, '')


def hear(word):
    store().wait([word], timedelta(seconds=30))


def gather(word, n=None):
    "Wait until `n` ranks, or all, are here. Rank 0 leaves last, since the store goes with it."
    s = store()

    def all_say(key):
        s.add(key, 1)
        while s.add(key, 0) < (n or dist.get_world_size()):
            time.sleep(0.005)

    all_say(word)
    if dist.get_rank() == 0:
        all_say(f'{word}, seen')
    else:
        s.add(f'{word}, seen', 1)


def new_group(port=None):
    "Destroy the default process group and make one again, at the same address unless told otherwise."
    r, n = dist.get_rank(), dist.get_world_size()
    gather('leaving')
    dist.destroy_process_group()
    if r:
        time.sleep(0.5)  # the store that went with rank 0's group is not to be taken for the new one
    dist.init_process_group(
        'gloo',
        init_method=f'tcp://127.0.0.1:{port or os.environ["MASTER_PORT"]}',
        rank=r,
        world_size=n,
        timeout=timedelta(seconds=30),
    )


def fail(*args):
    raise ValueError('boom')


def in_a_block():
    with all_or_none('block'):
        pass


def failing(error=None, place=None):
    with propagate_failure(place):
        raise error or ValueError('boom')


def types(results):
    return [type(o) for o in results]


def assert_told(error, by, *words):
    "`error` is what rank `by`'s failure is on another rank, and has all `words`."
    assert type(error) is RankFailedError, repr(error)
    assert error.rank == by and all(w in str(error) for w in (f'rank {by}', *words)), error


# -- when all goes well


def healthy():
    "Everything once, on every rank."
    r, n, ran = rank(), world_size(), []

    def note(what, result=None):
        ran.append(what)
        return result

    def inside():  # on one rank only: nothing here waits for the others
        barrier('never')
        with all_or_none('never'):
            pass
        return (
            agree(r + 5, 'max'),
            broadcast({'of': r}, src=n - 1),
            run_on_main(note, ['innermost', 'deep']),
            run_once_per_node(lambda: 'node'),
        )

    @main_process_only
    def tagged(x, y=1):
        "What it is for."
        return note('tagged', (x, y, r))

    @once_per_node
    def fetched(x):
        return note('fetched', [x])

    held = []
    for name in ('one', 'two'):
        if r == 0:
            time.sleep(0.2)
        entered = time.monotonic()
        barrier(name)
        held.append((entered, time.monotonic()))
    barrier()
    with all_or_none('a block'):
        note('together')
    with no_collectives() as on_main:
        if on_main:
            note('branch')
    with propagate_failure('nothing'):
        note('reported')

    def slow_post(text='post'):
        time.sleep(0.1 * r)
        note(text)
        return time.monotonic()

    post_ended = []
    run_on_main(note, ['main'], post_func=lambda: post_ended.append(slow_post()))
    left = time.monotonic()
    run_on_main(
        note, ['main'], post_func=note, post_args=['everywhere'], post_kwargs={'result': 1}, run_post_on_main=True
    )
    return dict(
        who=(r, n, is_main_process(), is_local_main_process()),
        held=held,
        ran=ran,
        post_ended=post_ended,
        left=left,
        pid=os.getpid(),
        agreed=[
            agree(float(r)),
            agree(r, 'max'),
            agree(r, 'min', name='least'),
            agree(r == n - 1, 'any'),
            agree(r == 0, 'all'),
            agree(r, 'main'),
            agree(None),
        ],
        told=[
            [broadcast((s, 'x', r), src=s) for s in range(n)],
            broadcast(r + 7),
            broadcast(None),
            broadcast(0.5, src=n - 1),
            broadcast(r == 0),
            broadcast(2**80),
            len(broadcast(bytes(10**6), src=n - 1)),
            broadcast(torch.arange(3)).tolist(),
        ],
        main_pid=run_on_main(os.getpid),
        arguments=run_on_main(dict, [[('a', 1)]], {'b': r}),
        large=len(run_on_main(lambda: 'x' * 10**6)),
        inside=run_on_main(inside),
        tagged=tagged(3, y=4),
        about=(tagged.__name__, tagged.__doc__),
        fetched=fetched('file'),
    )


@pytest.fixture(scope='module', params=['no group', 'environment of one', 'group of one', 2, 3, 4], ids=str)
def told(request):
    "What each rank of a healthy run has to say."
    if request.param == 'no group':
        results = run(healthy, 1, group=False, env=lambda r: dict(RANK=None, WORLD_SIZE=None, LOCAL_RANK=None))
    elif request.param == 'environment of one':
        results = run(healthy, 1, group=False, env=lambda r: dict(RANK=0, WORLD_SIZE=1, LOCAL_RANK=0))
    else:
        results = run(healthy, 1 if request.param == 'group of one' else request.param)
    return values(results)


def test_everyone_knows_who_it_is(told):
    n = len(told)
    assert [o['who'] for o in told] == [(r, n, r == 0, r == 0) for r in range(n)]


def test_two_barriers_in_a_row_both_hold_everyone_until_the_last_rank_is_there(told):
    for k in range(2):
        last = max(o['held'][k][0] for o in told)
        assert all(o['held'][k][1] >= last for o in told)


def test_agreed_values_are_the_same_everywhere(told):
    n = len(told)
    mean = (n - 1) / 2 if n > 1 else 0.0
    assert all(repr(o['agreed']) == repr([mean, n - 1, 0, True, n == 1, 0, None]) for o in told), told[0]['agreed']


def test_what_a_rank_broadcasts_reaches_everyone(told):
    n = len(told)
    for o in told:
        assert o['told'] == [[(s, 'x', s) for s in range(n)], 7, None, 0.5, True, 2**80, 10**6, [0, 1, 2]]


def test_run_on_main_runs_on_rank_0_and_gives_everyone_its_result(told):
    for o in told:
        assert o['main_pid'] == told[0]['pid'] and o['arguments'] == {'a': 1, 'b': 0} and o['large'] == 10**6


def test_inside_run_on_main_the_rendezvous_are_those_of_one_process_and_calls_nest(told):
    assert all(o['inside'] == (5, {'of': 0}, 'deep', 'node') for o in told)


def test_decorated_functions_run_once_keep_their_name_and_give_everyone_the_result(told):
    for o in told:
        assert (o['tagged'], o['about'], o['fetched']) == ((3, 4, 0), ('tagged', 'What it is for.'), ['file'])


def test_each_part_ran_where_it_should(told):
    main = ['together', 'branch', 'reported', 'main', 'main', 'everywhere', 'innermost', 'tagged', 'fetched']
    others = ['together', 'reported', 'post', 'everywhere']
    assert [o['ran'] for o in told] == [main] + [others] * (len(told) - 1)


def test_after_post_func_all_ranks_meet_again(told):
    ended = [t for o in told for t in o['post_ended']]
    assert len(ended) == len(told) - 1 and all(o['left'] >= max(ended, default=0) for o in told)


UTILITIES = dict(
    rank=(rank, 0),
    world_size=(world_size, 1),
    is_main_process=(is_main_process, True),
    is_local_main_process=(is_local_main_process, True),
    barrier=(barrier, None),
    agree=(lambda: agree(2), 2),
    broadcast=(lambda: broadcast('x'), 'x'),
    all_gather=(lambda: all_gather('x'), ['x']),
    broadcast_tensors=(lambda: broadcast_tensors([torch.zeros(2)]), None),
)


def first_and_then(ran):
    with main_process_first('data'):
        ran.append('data')


FOR_ONE_RANK = dict(
    run_on_main=lambda ran: run_on_main(ran.append, ['data']),
    main_process_only=lambda ran: main_process_only(ran.append)('data'),
    run_once_per_node=lambda ran: run_once_per_node(ran.append, ['data']),
    once_per_node=lambda ran: once_per_node(ran.append)('data'),
    main_process_first=first_and_then,
)


@pytest.mark.parametrize('name', UTILITIES)
def test_before_there_is_a_group_each_launched_process_is_alone_and_is_warned_once_where_it_calls(name):
    call, expected = UTILITIES[name]

    def scenario():
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            alone = call(), call()
            dist.init_process_group('gloo', init_method='env://', rank=int(os.environ['RANK']), world_size=2)
            return (
                alone,
                rank(),
                agree(rank(), 'max'),
                [(str(o.message), o.filename == sys._getframe().f_code.co_filename) for o in seen],
            )

    for r, (alone, me, most, seen) in enumerate(values(run(scenario, 2, group=False))):
        assert (alone, me, most) == ((expected, expected), r, 1)
        ((text, here),) = seen
        assert f'{name}(' in text and f'RANK={r} and WORLD_SIZE=2' in text and 'ddp_ctx' in text and here


@pytest.mark.parametrize('name', FOR_ONE_RANK)
def test_before_there_is_a_group_what_is_for_one_rank_runs_on_none_and_says_what_to_write(name):
    call = FOR_ONE_RANK[name]

    def scenario():
        ran = []
        refused = attempt(call, ran)
        dist.init_process_group('gloo', init_method='env://', rank=int(os.environ['RANK']), world_size=2)
        return str(refused), type(refused), list(ran), attempt(call, ran), all_gather(len(ran))

    for r, (text, kind, ran, then, runs) in enumerate(values(run(scenario, 2, group=False))):
        assert (kind, ran) == (DDPError, [])
        for words in (f'{name}(', f'RANK={r} and WORLD_SIZE=2', 'init_process_group()', '`ddp_ctx(learn)`', 'unset'):
            assert words in text
        assert (then, runs[0]) == (None, 1)


@pytest.mark.parametrize('me,n', [(None, None), (None, 2), (0, None), (0, 1)])
def test_a_process_that_is_not_one_of_several_is_neither_warned_nor_refused(me, n):
    def scenario():
        ran = []
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            [call(ran) for call in FOR_ONE_RANK.values()]
            return [f() for f, _ in UTILITIES.values()], ran

    assert values(run(scenario, 1, group=False, env=lambda r: dict(RANK=me, WORLD_SIZE=n))) == [
        ([o for _, o in UTILITIES.values()], ['data'] * len(FOR_ONE_RANK))
    ]


def test_with_a_group_and_after_a_failure_without_one_nobody_is_warned():
    def scenario(group):
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            if group:
                return [f() for f, _ in UTILITIES.values()][1]
            try:
                with propagate_failure():
                    raise KeyError('mine')
            except KeyError:
                return 2

    for group in (True, False):
        assert values(run(scenario, 2, group, group=group)) == [2, 2]


nan, inf = math.nan, math.inf


def test_agree_makes_one_value_of_any_three():
    table = [
        ('mean', (1, 2, 6), 3.0),
        ('mean', (0.25, 0.5, 0.75), 0.5),
        ('mean', (None, 4.0, 8.0), 6.0),
        ('mean', (None, None, 3), 3),
        ('mean', (None, None, None), None),
        ('mean', (nan, 1.0, 2.0), nan),
        ('mean', (1.0, None, nan), nan),
        ('mean', (inf, 1.0, 2.0), inf),
        ('mean', (inf, -inf, 0.0), nan),
        ('mean', (True, False, None), 0.5),
        ('mean', (0.1, 0.1, 0.1), 0.1),
        ('mean', (1 / 3, 1 / 3, 1 / 3), 1 / 3),
        ('mean', (7, 7, 7), 7),
        ('mean', (True, True, True), True),
        ('mean', (-0.0, -0.0, -0.0), -0.0),
        ('mean', (2**63 - 1, 2**63 - 1, 2**63 - 1), 2**63 - 1),
        ('mean', (-(2**63), None, -(2**63)), -(2**63)),
        ('mean', (5e-324, 5e-324, 5e-324), 5e-324),
        ('mean', (1, 1.0, True), 1.0),
        ('mean', (1e308, 1e308, 1e308), 1e308),
        ('mean', (-inf, -inf, -inf), -inf),
        ('main', (5, 6, 7), 5),
        ('main', (0.1, None, None), 0.1),
        ('main', (None, 1, 2), None),
        ('main', (nan, 1.0, 2.0), nan),
        ('main', (True, 0, 0.0), True),
        ('min', (3, 1, 2), 1),
        ('min', (3.5, None, 2.5), 2.5),
        ('min', (1.0, nan, 0.0), nan),
        ('min', (None, None, None), None),
        ('min', (2, -inf, 1), -inf),
        ('min', (2**53 + 1, 2**53 + 2, 2**53 + 3), 2**53 + 1),
        ('max', (3, 1, 2), 3),
        ('max', (-inf, None, 0.0), 0.0),
        ('max', (1.0, nan, 0.0), nan),
        ('max', (0.1, 0.1, 0.1), 0.1),
        ('max', (False, True, False), True),
        ('any', (False, True, False), True),
        ('any', (0, 0, 0.0), False),
        ('any', (None, None, False), False),
        ('any', (None, 2, None), True),
        ('any', (None, None, None), None),
        ('any', (False, nan, True), nan),
        ('all', (True, True, False), False),
        ('all', (1, 2.0, True), True),
        ('all', (None, True, True), True),
        ('all', (None, None, None), None),
        ('all', (False, None, nan), nan),
        ('mean', (np.float32(0.5), np.float64(0.5), torch.tensor(0.5)), 0.5),
        ('max', (np.int64(3), torch.tensor([4]), 2), 4),
        ('any', (np.bool_(False), torch.tensor(True), False), True),
        ('min', (1.0, torch.tensor(nan), 2.0), nan),
        ('mean', (np.float32(0.1),) * 3, float(np.float32(0.1))),
    ]

    def scenario():
        return [agree(v[rank()], how) for how, v, _ in table]

    for said in values(run(scenario, 3)):
        for (how, given, expected), got in zip(table, said):
            assert (type(got), repr(got)) == (type(expected), repr(expected)), (how, given)


def test_what_cannot_be_agreed_upon_raises_on_all_ranks_and_harms_nothing():
    bad = ['text', [1.0], 2**63, 1j, np.array([1.0, 2.0]), torch.ones(2), object()]

    def scenario():
        r = rank()
        return dict(
            all=[attempt(agree, o) for o in bad],
            one=[attempt(agree, o if r == 1 else 1.0) for o in bad],
            how_all=attempt(agree, 1.0, 'median'),
            how_one=attempt(agree, 1.0, 'median' if r == 2 else 'mean'),
            hows=attempt(agree, 1.0, 'max' if r == 2 else 'min'),
            healthy=agree(r, 'max'),
        )

    said = values(run(scenario, 3))
    for r, o in enumerate(said):
        assert types(o['all']) == [TypeError] * len(bad) and all('agree needs' in str(e) for e in o['all'])
        assert type(o['how_all']) is ValueError and all(
            w in str(o['how_all']) for w in ("'median'", "'mean'", "'main'", "'any'")
        )
        assert type(o['hows']) is BarrierMismatchError and o['healthy'] == 2
        if r == 1:
            assert types(o['one']) == [TypeError] * len(bad)
        else:
            for e in o['one']:
                assert_told(e, 1, 'TypeError', 'agree needs')
        if r == 2:
            assert type(o['how_one']) is ValueError
        else:
            assert_told(o['how_one'], 2, "'median'")


def test_what_cannot_be_sent_raises_on_all_ranks_and_harms_nothing():
    def scenario():
        lock = threading.Lock()
        return [
            attempt(broadcast, lock),
            attempt(broadcast, lock, src=1),
            attempt(run_on_main, threading.Lock),
            attempt(broadcast, 1, src=3),
            attempt(broadcast, 1, src=-1),
            attempt(broadcast, 1, src=rank()),
        ], broadcast('fine')

    said = values(run(scenario, 3))
    for r, (errors, fine) in enumerate(said):
        assert fine == 'fine' and types(errors[3:]) == [ValueError, ValueError, BarrierMismatchError]
        for e, src in zip(errors, (0, 1, 0)):
            if r == src:
                assert type(e) is TypeError and 'lock' in str(e)
            else:
                assert_told(e, src, 'TypeError', 'lock')


def test_a_rendezvous_is_one_collective_and_never_touches_the_store_or_the_default_group():
    def scenario():
        made, touched = [], []
        for name in (
            'alltoall_base',
            'alltoall',
            'broadcast',
            'allreduce',
            'allreduce_coalesced',
            'allgather',
            '_allgather_base',
            'allgather_coalesced',
            'gather',
            'scatter',
            'reduce',
            'reduce_scatter',
            'barrier',
            'monitored_barrier',
            'send',
            'recv',
            'recv_anysource',
        ):

            def counted(self, *args, name=name, original=getattr(dist.ProcessGroupGloo, name), **kwargs):
                made.append(name)
                return original(self, *args, **kwargs)

            setattr(dist.ProcessGroupGloo, name, counted)

        class Watched:
            def __init__(self, store):
                self.store = store

            def __getattr__(self, name):
                touched.append(name)
                return getattr(self.store, name)

        barrier('the first one makes the group')
        own = current_control()
        own.presence.store = own.board.store = Watched(own.store)
        sequence = dist.group.WORLD._get_backend(torch.device('cpu'))._get_sequence_number_for_group
        before, counts, looks = sequence(), {}, {}
        for label, call in dict(
            barrier=barrier,
            agree=lambda: agree(rank(), 'max'),
            number=lambda: broadcast(0.5),
            nothing=lambda: broadcast(None),
            small=lambda: broadcast({'a': [1, 'two']}),
            large=lambda: broadcast('x' * 10**5),
            run_on_main=lambda: run_on_main(lambda: 3),
            skipped=lambda: run_on_main(lambda: (barrier(), agree(1), broadcast('y'), None)[-1]),
        ).items():
            counts[label], looks[label] = [], []
            for _ in range(9):
                made.clear(), touched.clear()
                call()
                counts[label].append(len(made)), looks[label].append(len(touched))
        return counts, looks, sequence() - before

    for counts, looks, default in values(run(scenario, 3)):
        assert {k: set(v) for k, v in counts.items()} == {k: {2 if k == 'large' else 1} for k in counts}
        assert all(median(v) == 0 for v in looks.values()), looks  # a rank that is 50 ms late has reason to look
        assert default == 0


def test_importing_touches_neither_cuda_nor_a_group_and_does_not_load_fastai():
    code = (
        'import sys, torch, torch.distributed as dist, fastai_ddp_callbacks; '
        'print(torch.cuda.is_initialized(), dist.is_initialized(), "fastai" in sys.modules)'
    )
    said = subprocess.run(
        [sys.executable, '-c', code],
        cwd=Path(fastai_ddp_callbacks.__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.stdout.split() == ['False'] * 3, said


# -- one process


@pytest.fixture
def default_timeout():
    before = get_timeout()
    yield
    set_timeout(before)


def test_the_time_limit_can_be_set_and_nonsense_is_refused(default_timeout):
    assert get_timeout() == 1800
    set_timeout(timedelta(minutes=2))
    assert get_timeout() == 120
    for bad in (0, -1, nan, inf, 'soon'):
        with pytest.raises(ValueError):
            set_timeout(bad)
        with pytest.raises(ValueError):
            barrier('x', timeout=bad)
    assert get_timeout() == 120


def test_in_one_process_exceptions_pass_through_unchanged():
    error = KeyError('mine')

    def oops():
        raise error

    for call in (
        lambda: run_on_main(oops),
        lambda: run_once_per_node(oops),
        main_process_only(oops),
        once_per_node(oops),
        lambda: run_on_main(int, post_func=oops, run_post_on_main=True),
    ):
        with pytest.raises(KeyError) as e:
            call()
        assert e.value is error
    with pytest.raises(KeyError) as e, all_or_none():
        oops()
    with pytest.raises(KeyError) as e, propagate_failure():
        oops()
    assert run_on_main(int, post_func=oops) == 0  # there is nobody but rank 0
    with pytest.raises(ValueError):
        agree(1, 'median')
    with pytest.raises(TypeError):
        agree('text')
    with pytest.raises(ValueError):
        broadcast(1, src=1)


CALLS = dict(
    barrier=lambda: barrier('save'),
    agree=lambda: agree(1.0, name='loss'),
    broadcast=lambda: broadcast('x'),
    run_on_main=lambda: run_on_main(fail),
    main_process_only=lambda: main_process_only(fail)(),
    run_once_per_node=lambda: run_once_per_node(fail),
    once_per_node=lambda: once_per_node(fail)(),
    all_or_none=lambda: in_a_block(),
)


@pytest.mark.parametrize('name', CALLS)
def test_a_rendezvous_in_a_branch_is_refused_in_one_process_too_and_says_how_to_mend_it(name):
    with no_collectives() as on_main:
        assert on_main
        with pytest.raises(BarrierInBranchError) as e:
            CALLS[name]()
    assert (
        e.value.call.startswith(name)
        and 'test_distributed.py:' in e.value.call
        and 'test_distributed.py:' in e.value.block
    )
    for words in ('rank 0', e.value.call, e.value.block, 'Move it out', 'run_on_main'):
        assert words in str(e.value)


def test_no_barrier_ends_where_the_block_ends_however_it_ends():
    with pytest.raises(KeyError):
        with no_collectives():
            with no_collectives():
                pass
            with pytest.raises(BarrierInBranchError):
                barrier()
            raise KeyError
    barrier('allowed again')
    with pytest.raises(BarrierInBranchError), no_collectives():
        barrier()
    barrier('allowed again')


def test_no_barrier_inside_run_on_main_is_harmless_and_run_on_main_inside_no_barrier_is_refused_before_it_runs():
    def branch():
        with no_collectives() as on_main:
            if on_main:
                barrier('skipped')
        return agree(3)

    assert run_on_main(branch) == 3
    ran = []
    with no_collectives(), pytest.raises(BarrierInBranchError):
        run_on_main(ran.append, [1])
    assert not ran


def test_an_exception_in_run_on_main_restores_the_state():
    def outer():
        with pytest.raises(ValueError):
            run_on_main(fail)
        with no_collectives():
            barrier('still inside, so skipped')
        raise KeyError

    with pytest.raises(KeyError):
        run_on_main(outer)
    with no_collectives(), pytest.raises(BarrierInBranchError):
        barrier('outside, so refused')


def in_a_thread(f):
    said = []
    thread = threading.Thread(target=lambda: said.append(attempt(f)))
    thread.start(), thread.join()
    return said[0]


def test_what_a_thread_is_in_concerns_that_thread_only():
    def branch():
        with no_collectives():
            return barrier()

    with no_collectives():
        assert in_a_thread(barrier) is None
    assert type(run_on_main(in_a_thread, [branch])) is BarrierInBranchError  # the thread is not the section
    assert run_on_main(branch) is None


def test_errors_keep_their_message_and_details_when_pickled_and_hold_the_message_as_their_only_argument():
    e = pickle.loads(pickle.dumps(BarrierTimeoutError('all of it', place='here', missing=[2], seconds=1.0)))
    assert (
        e.args == ('all of it',)
        and (e.place, e.missing, e.seconds) == ('here', [2], 1.0)
        and isinstance(e, DDPError)
        and isinstance(e, RuntimeError)
    )
    assert str(DDPError()) == ''


# -- ranks that take different ways


def test_different_barriers_never_release_each_other():
    def scenario():
        barrier('start')
        by_name = attempt(barrier, 'save' if rank() == 0 else 'load')

        def here():
            barrier()

        def there():
            barrier()

        by_place = attempt(there if rank() == 2 else here)
        by_kind = attempt(barrier, 'x') if rank() else attempt(agree, 1.0, name='x')
        by_func = attempt(run_on_main, int if rank() else float)
        barrier('end')
        return by_name, by_place, by_kind, by_func

    said = values(run(scenario, 3))
    for by_name, *others in said:
        assert type(by_name) is BarrierMismatchError and list(by_name.places) == [0, 1, 2]
        assert [o.split(' at ')[0] for o in by_name.places.values()] == [
            "barrier('save')",
            "barrier('load')",
            "barrier('load')",
        ]
        for words in (
            'rank 0',
            "barrier('save')",
            'rank 1',
            "barrier('load')",
            'rank 2',
            *by_name.places.values(),
            'run_on_main',
        ):
            assert words in str(by_name)
        assert types(others) == [BarrierMismatchError] * 3


def test_names_that_are_long_odd_or_empty_are_told_apart_and_shown():
    names = [
        ('x' * 20000 + '0', 'x' * 20000 + '1'),
        ('\udc80', '\udc81'),
        ('', ' '),
        ('Überprüfung 🚀', 'überprüfung 🚀'),
        ("it's", 'it"s'),
    ]

    def scenario():
        return [attempt(barrier, o[rank()]) for o in names], [barrier(o[0]) for o in names]

    for errors, _ in values(run(scenario, 2)):
        assert types(errors) == [BarrierMismatchError] * len(names)


def test_a_barrier_in_a_branch_raises_at_once_on_rank_0_and_the_others_hear_of_it_at_their_next_one():
    def scenario():
        barrier('start')
        with no_collectives() as on_main:
            first = timed(barrier, 'in the branch') if on_main else None
        second = None if on_main else timed(barrier, 'after the branch')
        return first, second, attempt(barrier, 'and on')

    (first, _, a), (_, (second, _), b), (_, (third, _), c) = values(run(scenario, 3))
    assert type(first[0]) is BarrierInBranchError and 'in the branch' in first[0].call
    for e in (second, third):
        assert_told(e, 0, 'BarrierInBranchError', "barrier('in the branch')")
    assert (a, b, c) == (None, None, None)


def test_an_inner_failure_that_is_caught_leaves_barriers_in_force():
    def scenario():
        def outer():
            caught = attempt(run_on_main, fail)
            barrier('still skipped')
            return type(caught).__name__

        name = run_on_main(outer)
        entered = []
        for wait in ('one', 'two'):
            if rank() == 0:
                time.sleep(0.2)
            t = time.monotonic()
            barrier(wait)
            entered.append((t, time.monotonic()))
        return name, entered

    said = values(run(scenario, 3))
    assert {o[0] for o in said} == {'ValueError'}
    for k in range(2):
        assert min(o[1][k][1] for o in said) >= max(o[1][k][0] for o in said)


def test_a_rank_that_never_comes_is_named_with_the_barrier_and_where_it_was_last():
    def scenario():
        barrier('epoch 3')
        if rank() == 2:
            hear('given up')
        late = attempt(barrier, 'epoch 4', timeout=1)
        if rank() == 0:
            tell('given up')
        return late, attempt(barrier, 'on we go'), agree(rank(), 'max')

    said = values(run(scenario, 3))
    for r, (e, then, agreed) in enumerate(said):
        assert (
            type(e) is BarrierTimeoutError and e.missing == [2] and e.seconds == 1 and "barrier('epoch 4')" in e.place
        )
        for words in ("barrier('epoch 4')", 'rank 2', '1 s', "last seen leaving barrier('epoch 3')"):
            assert words in str(e)
        assert (then, agreed) == (None, 2)


def test_the_shortest_time_limit_ends_the_wait_of_all():
    def scenario():
        barrier('start')
        set_timeout(1.5 if rank() == 0 else 60)
        first = None if rank() == 2 else timed(barrier, 'default')
        if rank() != 2:
            gather('first', 2)
        if rank() == 0:
            tell('two may go')
        if rank() == 2:
            hear('two may go'), attempt(barrier, 'default')
        second = (
            None if rank() == 2 else attempt(barrier, 'own', timeout=timedelta(seconds=0.5) if rank() == 1 else None)
        )
        gather('end')
        return first, second

    (a, b, _) = values(run(scenario, 3))
    for (first, t), second in (a, b):
        assert type(first) is BarrierTimeoutError and (first.seconds, first.missing) == (1.5, [2])
        assert type(second) is BarrierTimeoutError and (second.seconds, second.missing) == (0.5, [2])
    assert abs(a[0][1] - b[0][1]) < 3


def test_a_rank_that_comes_after_the_very_first_rendezvous_was_given_up_hears_of_it_at_once():
    def scenario():
        current_control(), gather('connected')  # which may take long where names are looked up
        if rank() == 2:
            hear('given up')
        start = time.monotonic()
        e = attempt(barrier, 'first', timeout=1 if rank() < 2 else 30)
        if rank() == 0:
            tell('given up')
        return e, time.monotonic() - start, attempt(barrier, 'second')

    for e, seconds, then in values(run(scenario, 3)):
        assert type(e) is BarrierTimeoutError and e.missing == [2] and seconds < 5 and then is None


def test_waiting_may_take_longer_than_the_default_groups_time_limit():
    def scenario():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=5))
        barrier('start')
        if rank() == 0:
            time.sleep(8)
        barrier('slow write')
        return agree(rank(), 'max')

    assert values(run(scenario, 2)) == [1, 1]


# -- a rank that fails


def test_a_full_disk_on_rank_0_is_raised_on_every_rank_within_2_seconds_with_the_file():
    def scenario():
        barrier('start')
        failed = []

        def save():
            failed.append(time.monotonic())
            raise OSError(errno.ENOSPC, 'No space left on device', '/checkpoints/model.pth')

        e, t = timed(run_on_main, save)
        gather('all have raised')  # the process of rank 0 lives on
        return e, t, failed

    (own, t0, (failed,)), *others = values(run(scenario, 3))
    assert type(own) is OSError and own.errno == errno.ENOSPC and own.filename == '/checkpoints/model.pth'
    for e, t, _ in others:
        assert_told(e, 0, 'No space', '/checkpoints/model.pth', 'in save')
        assert (e.error_type, 'No space' in e.error_text, 'save' in e.place, 'OSError' in e.traceback_text) == (
            'OSError',
            True,
            True,
            True,
        )
    assert max(t for _, t, *_ in ((0, t0), *others)) - failed < 2


def test_those_who_wait_hear_of_a_failure_on_main_though_another_rank_is_still_to_come():
    def scenario():
        barrier('start')
        if rank() == 1:
            hear('both have raised')
        e, t = timed(run_on_main, fail)
        if rank() != 1:
            gather('raised', 2)
        if rank() == 0:
            tell('both have raised')
        return e, t, attempt(barrier, 'on we go')

    own, late, told = values(run(scenario, 3))
    assert type(own[0]) is ValueError and str(own[0]) == 'boom'
    for e, *_ in (late, told):
        assert_told(e, 0, 'boom')
    assert [o[2] for o in (own, late, told)] == [None] * 3


@pytest.mark.parametrize('how', ['is late', 'fails too'])
def test_a_rank_raises_its_own_exception_even_if_another_one(how):
    def scenario():
        barrier('start')
        if rank() == 1 and how == 'is late':
            hear('given up')
        if rank() == 1 and how == 'fails too':
            time.sleep(0.3)
            own = attempt(failing, KeyError('of rank 1'))
        else:
            own = attempt(run_on_main, fail, timeout=1)
        if rank() == 0:
            tell('given up')
        gather('end')
        return own

    zero, one, two = values(run(scenario, 3))
    assert type(zero) is ValueError and str(zero) == 'boom'
    assert type(two) in (RankFailedError, BarrierTimeoutError)
    assert type(one) is (KeyError if how == 'fails too' else RankFailedError)


@pytest.mark.parametrize('where', ['post_func', 'together'])
def test_work_of_all_ranks_that_raises_on_one_raises_on_all(where):
    def scenario():
        def load():
            return fail() if rank() == 1 else 'loaded'

        def block():
            with all_or_none('load'):
                load()

        first = (
            attempt(block) if where == 'together' else attempt(run_on_main, int, post_func=load, run_post_on_main=True)
        )
        return first, agree(rank(), 'max')

    zero, one, two = values(run(scenario, 3))
    assert type(one[0]) is ValueError and one[0].args == ('boom',)
    for e in (zero, two):
        assert_told(e[0], 1, 'boom')
    assert [o[1] for o in (zero, one, two)] == [2] * 3


WAITS = [
    lambda: barrier('waiting'),
    lambda: agree(1.0),
    lambda: broadcast('x'),
    lambda: run_on_main(int),
    lambda: run_once_per_node(int),
    in_a_block,
]


def test_a_failure_reaches_those_who_wait_and_those_who_come_later_while_the_failed_rank_lives_on():
    def scenario():
        said = []
        for k, wait in enumerate(WAITS):
            barrier(f'start {k}')
            own = OSError(errno.EIO, 'disk on fire', f'/data/{k}')
            if rank() == 1:
                time.sleep(0.3)
                failed = time.monotonic()
                e, t = timed(failing, own, f'reading batch {k}')
                said.append((e is own, e.__traceback__.tb_next is not None, failed))
                tell(f'failed {k}')
            else:
                if rank() == 2:
                    hear(f'failed {k}')
                said.append(timed(wait))
            gather(f'end {k}')
        return said, agree(rank(), 'max')

    (early, a), (own, b), (late, c) = values(run(scenario, 3))
    assert (a, b, c) == (2, 2, 2)
    for k in range(len(WAITS)):
        assert own[k][:2] == (True, True)
        for e, t in (early[k], late[k]):
            assert_told(e, 1, f'reading batch {k}', 'disk on fire', f'/data/{k}', 'in failing')
            assert e.place == f'reading batch {k}' and t - own[k][2] < 2


def test_the_place_of_a_failure_is_the_line_that_raised_unless_told_otherwise():
    def scenario():
        barrier('start')
        e = attempt(failing) if rank() == 0 else attempt(barrier, 'next')
        gather('end')
        return e

    _, e = values(run(scenario, 2))
    assert e.place.startswith('failing at ') and e.error_text == 'boom' and 'failed in failing at ' in str(e)


def test_a_failure_passes_through_several_blocks_and_is_told_once():
    def scenario():
        barrier('start')

        def nested():
            with propagate_failure('outer'), all_or_none('middle'), propagate_failure('inner'):
                if rank() == 0:
                    fail()
                barrier('next')

        return attempt(nested), attempt(barrier, 'healthy again'), attempt(barrier, 'and again')

    zero, one, two = values(run(scenario, 3))
    assert type(zero[0]) is ValueError
    for e in (one[0], two[0]):
        assert_told(e, 0, 'boom', 'inner')
    assert [o[1:] for o in (zero, one, two)] == [(None, None)] * 3


def test_an_exception_that_is_raised_once_more_is_told_once_more():
    def scenario():
        own = ValueError('boom')

        def again():
            raise own

        return [attempt(failing, own) if rank() == 0 else attempt(barrier, 'next') for _ in range(2)] + [
            attempt(run_on_main, again) for _ in range(2)
        ]

    zero, one = values(run(scenario, 2))
    assert types(zero) == [ValueError] * 4
    for e in one:
        assert_told(e, 0, 'boom')


def test_a_failure_that_is_known_passes_through_the_sections_around_it_on_all_ranks():
    def scenario():
        def nested():
            with all_or_none('outer'), all_or_none('inner'):
                run_on_main(fail)

        return (
            attempt(nested),
            attempt(run_on_main, int, post_func=lambda: run_on_main(fail), run_post_on_main=True),
            attempt(barrier, 'healthy again'),
        )

    zero, *others = values(run(scenario, 3))
    assert types(zero[:2]) == [ValueError] * 2 and zero[2] is None
    for *told, then in others:
        for e in told:
            assert_told(e, 0, 'boom')
        assert then is None


def test_a_generator_that_is_closed_early_has_not_failed():
    def scenario():
        def batches():
            with propagate_failure():
                yield from range(3)

        barrier('start')
        for _ in batches():
            if rank() == 0:
                break
        return attempt(barrier, 'end')

    assert values(run(scenario, 2)) == [None] * 2


def test_the_last_barrier_of_a_script_is_passed_by_a_late_rank_though_rank_0_exits_at_once():
    def scenario():
        barrier('start')
        if rank() == 0:
            barrier('end')
            os._exit(0)
        own = current_control()

        class Slow:
            def __getattr__(self, name, store=own.store):
                time.sleep(0.5)
                return getattr(store, name)

        own.presence.store = own.board.store = Slow()
        time.sleep(0.3)
        return attempt(barrier, 'end')

    assert run(scenario, 2)[1].value is None


def test_exceptions_of_any_kind_travel():
    class Odd(Exception):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()  # cannot be pickled

    kinds = [
        lambda: ValueError(),
        lambda: Odd(),
        lambda: ValueError('long ' * 10000),
        lambda: ValueError('🚀' * 10000),
        lambda: AssertionError(),
        lambda: ValueError('\udc80 🚀 \x00 "quoted"\n'),
        lambda: StopIteration(3),
        lambda: FileNotFoundError(2, 'No such file', 'a.pth'),
    ]

    def scenario():
        said = []
        for make in kinds:

            def oops(make=make):
                raise make()

            for e in (
                attempt(run_on_main, oops),
                attempt(failing, make()) if rank() == 0 else attempt(barrier, 'next'),
            ):
                said.append((type(e).__name__, getattr(e, 'rank', 0), getattr(e, 'error_type', None)))
            gather(f'end {len(said)}')
        return said, agree(rank(), 'max')

    (own, a), (told, b) = values(run(scenario, 2))
    assert (a, b) == (1, 1)
    for (name, *_), other in zip(own, told):
        assert other == ('RankFailedError', 0, name)


def test_ctrl_c_on_a_waiting_rank_reaches_the_others():
    def scenario():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        barrier('start')
        if rank() == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        if rank() == 2:
            hear('interrupted')
        e, t = timed(barrier, 'long wait')
        if rank() == 1:
            tell('interrupted')
        gather('end')
        return e, attempt(barrier, 'on we go')

    zero, one, two = values(run(scenario, 3))
    assert type(one[0]) is KeyboardInterrupt
    for o in (zero, two):
        assert_told(o[0], 1, 'KeyboardInterrupt', "barrier('long wait')")
    assert [o[1] for o in (zero, one, two)] == [None] * 3


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit])
def test_an_exit_of_any_kind_counts_as_a_failure(error):
    def scenario():
        barrier('start')

        def leave():
            raise error(3)

        if rank() == 0:
            e = attempt(failing, error(3)), attempt(run_on_main, leave)
        else:
            e = attempt(barrier, 'waiting'), attempt(run_on_main, leave)
        return e, attempt(barrier, 'on we go')

    zero, one, two = values(run(scenario, 3))
    assert types(zero[0]) == [error] * 2 and zero[0][0].args == (3,)
    for told, _ in (one, two):
        for e in told:
            assert_told(e, 0, error.__name__)
    assert [o[1] for o in (zero, one, two)] == [None] * 3


@pytest.mark.parametrize(
    'victim,waiting', [(0, False), (1, True), (3, False)], ids=['rank 0 at work', 'rank 1 waiting', 'rank 3 at work']
)
def test_a_killed_rank_is_reported_dead_by_its_number_to_those_who_wait_and_those_who_come_later(victim, waiting):
    def scenario():
        barrier('start')
        if rank() == victim:
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
            barrier('next') if waiting else time.sleep(60)
        if rank() == 2:
            time.sleep(2)
        e = attempt(barrier, 'next')
        gather('end', 3) if victim else time.sleep(3)  # the others live on
        return e

    results = run(scenario, 4)
    assert results[victim].exitcode == -signal.SIGKILL
    for o in results:
        if o.rank != victim:
            assert o.ok, report(results)
            assert_told(o.value, victim, f'rank {victim} died', "barrier('start')")
            assert o.value.error_type == 'ProcessDied'


def test_a_rank_that_has_returned_early_is_reported_dead():
    def scenario():
        barrier('start')
        return attempt(barrier, 'one turn more') if rank() == 0 else None

    e, _ = values(run(scenario, 2))
    assert_told(e, 1, 'rank 1 died', 'exited early')


def test_a_rank_that_fails_and_exits_at_once_is_named_even_if_it_kept_the_jobs_store():
    def scenario():
        start = attempt(barrier, 'start')  # who is still on the way out of it may hear of the failure there
        if rank() == 0:
            failing(ValueError('boom'))
        heard = start or attempt(barrier, 'next')
        time.sleep(3)  # who has heard of it stays, so that only rank 0 is gone
        return heard

    zero, *others = run(scenario, 3)
    assert type(zero.error) is ValueError
    for e in values(others):
        assert_told(e, 0)


def test_a_wait_that_was_given_up_is_an_error_of_ours_on_all_even_if_rank_0_is_gone_by_then():
    def scenario():
        barrier('start')
        if rank() == 1:
            time.sleep(3)
        if rank() == 2:
            time.sleep(0.06)
        if rank() == 0:
            barrier('next', timeout=1)
        return attempt(barrier, 'next', timeout=1)

    zero, one, two = run(scenario, 3)
    assert type(zero.error) is BarrierTimeoutError
    assert isinstance(two.value, DDPError) and isinstance(one.value, DDPError), report([zero, one, two])


@pytest.mark.parametrize('late', [False, True], ids=['all others waiting', 'one still to come'])
def test_a_rank_killed_in_the_very_first_rendezvous_is_reported_dead_in_seconds(late):
    def scenario():
        current_control(), gather('connected')
        if rank() == 1:
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGKILL)).start()
        if rank() == 2:
            time.sleep(2 if late else 0.2)
        if rank() == 3:
            time.sleep(4)
        e = attempt(barrier, 'first')
        gather('end', 3)
        return e

    results = run(scenario, 4)
    assert all(o.ok for o in results if o.rank != 1), report(results)
    for r in (0, 2, 3):
        assert_told(results[r].value, 1, 'rank 1 died')


def test_a_rank_killed_before_the_first_rendezvous_ends_the_wait_of_the_others_at_their_time_limit():
    def scenario(victim):
        gather('start')
        if rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        e = attempt(barrier, 'first', timeout=2)
        if victim:
            gather('end', 2)
        return e

    for victim in (1, 0):
        others = [o for o in run(scenario, 3, victim) if o.rank != victim]
        assert all(o.ok and isinstance(o.value, DDPError) for o in others), report(others)


@pytest.mark.parametrize('met', [True, False], ids=['after a rendezvous', 'before any'])
def test_a_network_error_in_training_is_not_hidden_when_rank_0_has_died(met):
    def scenario():
        gather('start')
        if met:
            barrier('start')
        if rank() == 0:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

        def training():
            with propagate_failure():
                dist.all_reduce(torch.ones(1))

        return attempt(training)

    zero, *others = run(scenario, 3)
    for e in values(others):
        assert (type(e) is RankFailedError and e.rank == 0) or 'gloo' in str(e), repr(e)


@pytest.mark.parametrize('kind', [RuntimeError, ValueError])
def test_a_rank_that_fails_after_another_one_for_a_reason_of_its_own_raises_that(kind):
    def scenario():
        barrier('start')
        if rank() == 1:
            e = attempt(failing, ValueError('first'))
            tell('failed')
        else:
            hear('failed')
            e = attempt(failing, kind('out of memory'))
        return e, attempt(barrier, 'on we go')

    said = values(run(scenario, 3))
    assert [(type(e), str(e), then) for e, then in said] == [
        (kind, 'out of memory', None),
        (ValueError, 'first', None),
        (kind, 'out of memory', None),
    ]


def test_a_network_error_of_a_rank_left_alone_is_raised_as_the_failure_that_caused_it():
    def scenario():
        barrier('start')

        def training():
            with propagate_failure():
                if rank() == 1:
                    raise ValueError('boom')
                dist.all_reduce(torch.ones(1))

        e = attempt(training)
        if rank() == 1:
            dist.destroy_process_group()  # as a script does that ends
        return e

    zero, one = values(run(scenario, 2))
    assert type(one) is ValueError
    assert_told(zero, 1, 'boom')


# -- groups, threads, processes


def test_groups_can_be_destroyed_and_made_again_at_the_same_address():
    def scenario():
        said = []
        for k in range(3):
            barrier('x')
            said.append(agree(rank() + k, 'max'))
            new_group()
        return said, run_on_main(lambda: 'last')

    assert values(run(scenario, 3)) == [([2, 3, 4], 'last')] * 3


def test_the_address_is_free_once_the_group_is_destroyed():
    def scenario():
        barrier('x')
        gather('end')
        dist.destroy_process_group()
        time.sleep(0.5)
        with socket.socket() as s:
            return s.connect_ex(('127.0.0.1', int(os.environ['MASTER_PORT']))) == 0

    assert values(run(scenario, 2)) == [False, False]


def test_after_a_failure_that_left_a_wait_behind_a_new_group_works():
    def scenario():
        barrier('x')
        first = attempt(barrier, 'y', timeout=1) if rank() < 2 else None
        new_group()
        barrier('x')
        with all_or_none('in the new group'):
            second = agree(rank(), 'max')
        return type(first).__name__, second

    assert values(run(scenario, 3)) == [('BarrierTimeoutError', 2)] * 2 + [('NoneType', 2)]


def test_a_failure_before_the_first_rendezvous_does_not_disturb_the_next_group():
    def scenario():
        if rank() == 0:
            attempt(failing)
        new_group()
        return agree(rank(), 'max', timeout=12)

    assert values(run(scenario, 3)) == [2] * 3


def test_a_failure_in_a_new_default_group_is_told_once_however_many_there_were_in_the_one_before():
    def fails_on_rank_0():
        try:
            with propagate_failure():
                fail() if rank() == 0 else barrier('wait')
        except (ValueError, RankFailedError) as e:
            return type(e).__name__

    def scenario():
        told = [fails_on_rank_0() for _ in range(3)]
        new_group()
        told.append(fails_on_rank_0())
        return told, agree(rank(), 'max', timeout=10)

    zero, one = values(run(scenario, 2))
    assert zero == (['ValueError'] * 4, 1)
    assert one == (['RankFailedError'] * 4, 1)


def test_a_group_that_is_gone_while_ranks_are_set_leaves_one_process():
    def scenario():
        barrier('x')
        gather('end')
        dist.destroy_process_group()
        barrier('alone')
        return rank(), world_size(), agree(7), broadcast('y'), type(attempt(run_on_main, lambda: 'on both'))

    assert values(run(scenario, 2)) == [(0, 1, 7, 'y', DDPError)] * 2


def test_two_threads_of_a_rank_cannot_meet_at_once_and_the_first_one_is_not_harmed():
    def scenario():
        barrier('start')
        if rank() == 1:
            hear('refused')
            return attempt(barrier, 'first'), attempt(barrier, 'then')
        said = []
        first = threading.Thread(target=lambda: said.append(attempt(barrier, 'first')))
        first.start()
        time.sleep(0.3)
        second = attempt(barrier, 'second')
        tell('refused')
        first.join()
        return said[0], attempt(barrier, 'then'), second

    (a, b, refused), other = values(run(scenario, 2))
    assert (a, b) == other == (None, None)
    assert type(refused) is DDPError and all(w in str(refused) for w in ("barrier('second')", 'rank 0', 'thread'))


def test_a_failure_in_a_thread_reaches_the_others_and_the_waiting_thread_of_its_own_rank():
    def scenario():
        barrier('start')
        if rank() == 0:
            threading.Timer(0.5, attempt, (failing, ValueError('boom'))).start()
        if rank() == 2:
            hear('raised')
        e = attempt(barrier, 'next')
        if rank() < 2:
            gather('both', 2)
        if rank() == 0:
            tell('raised')
        gather('end')
        return e, attempt(barrier, 'on we go')

    zero, one, two = values(run(scenario, 3))
    for o in (one, two):
        assert_told(o[0], 0, 'boom')
    assert isinstance(zero[0], DDPError)
    assert [o[1] for o in (zero, one, two)] == [None] * 3


@pytest.mark.parametrize('met', [True, False], ids=['after a rendezvous', 'before any'])
def test_a_forked_child_is_told_that_it_cannot_meet_and_its_rank_goes_on(met):
    def scenario():
        if met:
            barrier('start')
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.write(write, repr(attempt(barrier, 'in the child', timeout=2)).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        return os.read(read, 10000).decode(), attempt(barrier, 'in the rank', timeout=12)

    for said, then in values(run(scenario, 2)):
        assert said.startswith('DDPError') and 'forked' in said and 'in the child' in said and then is None


def test_without_gloo_the_default_group_is_used_and_says_when_it_is_of_no_use_any_more():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]

    def scenario():
        dist.is_gloo_available = lambda: False
        barrier('x')
        healthy = agree(rank(), 'max'), broadcast('y' * 1000, src=1), run_on_main(lambda: {'z': 1})
        used = current_control().generation.group is dist.group.WORLD
        mismatch = attempt(barrier, 'a' if rank() else 'b')
        boom = attempt(failing) if rank() == 0 else attempt(barrier, 'waiting')
        after = attempt(barrier, 'broken now')
        new_group(port)
        return used, healthy, mismatch, boom, after, agree(rank(), 'max')

    for r, (used, healthy, mismatch, boom, after, again) in enumerate(values(run(scenario, 3))):
        assert used and healthy == (2, 'y' * 1000, {'z': 1}) and type(mismatch) is BarrierMismatchError and again == 2
        assert type(boom) is (RankFailedError if r else ValueError)
        assert type(after) is DDPError and 'gloo' in str(after) and 'initialise' in str(after)


# -- nodes


def two_nodes():  # four ranks, two per node
    ran = []

    def fetch():
        ran.append(1)
        return rank()

    def fetch_on_second():
        return fail() if rank() else 'fine'

    return dict(
        result=run_once_per_node(fetch),
        ran=len(ran),
        large=run_once_per_node(lambda: f'{rank()}' * 1000)[:1],
        local=is_local_main_process(),
        main=is_main_process(),
        writers=run_on_main(rank),
        failure=attempt(run_once_per_node, fetch_on_second),
        then=agree(rank(), 'max'),
    )


@pytest.mark.parametrize('told_by', ['the launcher', 'the hosts', 'the launcher, ranks dealt out in turn'])
def test_each_node_has_one_rank_that_fetches_and_all_have_one_that_writes(told_by):
    in_turn = 'in turn' in told_by
    node = [0, 1, 0, 1] if in_turn else [0, 0, 1, 1]

    def scenario():
        if told_by != 'the launcher':
            presence.host = lambda: f'node {node[rank()]}'  # else its LOCAL_RANK alone tells the nodes apart
        return two_nodes()

    local = {'the hosts': [None] * 4}.get(told_by, [0, 0, 1, 1] if in_turn else [0, 1, 0, 1])
    said = values(run(scenario, 4, env=lambda r: dict(LOCAL_RANK=local[r], LOCAL_WORLD_SIZE=2)))
    first = [node.index(o) for o in node]
    assert [o['result'] for o in said] == first and [int(o['large']) for o in said] == first
    assert [o['ran'] for o in said] == [int(r == first[r]) for r in range(4)] and [o['local'] for o in said] == [
        r == first[r] for r in range(4)
    ]
    assert (
        [o['main'] for o in said] == [True, False, False, False]
        and {o['writers'] for o in said} == {0}
        and {o['then'] for o in said} == {3}
    )
    second = max(first)
    for r, o in enumerate(said):
        if r == second:
            assert type(o['failure']) is ValueError
        else:
            assert_told(o['failure'], second, 'boom')

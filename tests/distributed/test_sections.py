"Code that is for one rank, or for one rank after the other, and what is refused in it."

import os, threading, time

import pytest

from fastai_ddp_callbacks import (
    BarrierInBranchError,
    RankFailedError,
    agree,
    all_gather,
    barrier,
    broadcast,
    main_process_first,
    no_collectives,
    rank,
    run_on_main,
)
from fastai_ddp_callbacks.distributed.sections import refuse_on_one_rank
from ranks import run, values


def attempt(f, *args):
    try:
        return f(*args)
    except Exception as e:
        return e


# -- main_process_first


def test_rank_0_leaves_the_block_before_the_others_enter_it_and_all_leave_the_end_together():
    def scenario():
        times = [time.monotonic()]
        with main_process_first('cache'):
            times.append(time.monotonic())
            time.sleep(0.3)
            times.append(time.monotonic())
        return times, time.monotonic()

    (zero, left), *others = values(run(scenario, 3))
    assert all(zero[2] <= entered for (_, entered, _), _ in others)
    assert left >= max(done for (*_, done), _ in others)


def test_each_rank_has_what_it_made_itself_even_if_it_cannot_be_pickled():
    def scenario():
        with main_process_first():
            made = threading.Lock(), rank()
        return made[1]

    assert values(run(scenario, 3)) == [0, 1, 2]


def test_what_rank_0_has_written_is_there_for_the_others(tmp_path):
    def scenario():
        with main_process_first('download'):
            found = (tmp_path / 'data').exists()
            if not found:
                time.sleep(0.2)
                (tmp_path / 'data').write_text('x')
        return found

    assert values(run(scenario, 3)) == [False, True, True]


@pytest.mark.parametrize('who', [0, 2])
def test_a_block_that_fails_on_one_rank_raises_on_all_and_all_can_meet_again(who):
    def scenario():
        entered = []

        def block():
            with main_process_first('cache'):
                entered.append(True)
                if rank() == who:
                    raise OSError('disk on fire')

        return attempt(block), len(entered), agree(rank(), 'max')

    for r, (error, entered, met) in enumerate(values(run(scenario, 3))):
        assert type(error) is (OSError if r == who else RankFailedError)
        assert 'disk on fire' in str(error)
        assert entered == (1 if who or r == 0 else 0)
        assert met == 2


def test_a_rank_that_dies_in_it_is_named():
    def scenario():
        barrier('start')
        with main_process_first('cache'):
            if rank() == 1:
                os._exit(1)

    zero, _ = run(scenario, 2)
    assert isinstance(zero.error, RankFailedError) and 'rank 1 died' in str(zero.error)


CALLS = dict(
    barrier=lambda: barrier('x'),
    agree=lambda: agree(1),
    broadcast=lambda: broadcast(1),
    all_gather=lambda: all_gather(1),
    run_on_main=lambda: run_on_main(int),
)


@pytest.mark.parametrize('name', CALLS)
def test_a_rendezvous_in_it_is_refused_in_one_process_too(name):
    with pytest.raises(BarrierInBranchError, match=rf'{name}.*main_process_first\(\).*one after the other'):
        with main_process_first():
            CALLS[name]()


def test_a_rendezvous_in_it_raises_on_all_ranks():
    def scenario():
        def block():
            with main_process_first('cache'):
                barrier('inside')

        return attempt(block), agree(rank(), 'max')

    (own, a), (other, b) = values(run(scenario, 2))
    assert type(own) is BarrierInBranchError
    assert type(other) is RankFailedError and "barrier('inside')" in str(other)
    assert (a, b) == (1, 1)


def test_in_run_on_main_it_is_a_block_like_any_other():
    def scenario():
        def inside():
            with main_process_first('cache'):
                barrier('skipped')
                return rank()

        return run_on_main(inside)

    assert values(run(scenario, 2)) == [0, 0]


# -- what all ranks have to take part in


def fit():
    refuse_on_one_rank('learn.fit')
    return 'trained'


def in_branch():
    with no_collectives() as on_main:
        return fit() if on_main else 'passed'


def one_by_one():
    with main_process_first():
        return fit()


SECTIONS = {
    'run_on_main': lambda: run_on_main(fit),
    'run_on_main within run_on_main': lambda: run_on_main(lambda: run_on_main(fit)),
    'no_collectives': in_branch,
    'main_process_first': one_by_one,
}


@pytest.mark.parametrize('name', SECTIONS)
def test_a_fit_where_the_other_ranks_do_not_come_is_refused_at_once_and_all_hear_of_it(name):
    call = SECTIONS[name]

    def scenario():
        return attempt(call), attempt(barrier, 'next') if 'collectives' in name else None, fit()

    (own, *_), (other, then, trained) = values(run(scenario, 2))
    assert type(own) is BarrierInBranchError
    assert 'rank 0: learn.fit is inside' in str(own) and name.split()[0] in str(own) and 'on all ranks' in str(own)
    heard = then if 'collectives' in name else other
    assert type(heard) is RankFailedError and 'learn.fit' in str(heard)
    assert trained == 'trained'


@pytest.mark.parametrize('name', SECTIONS)
def test_with_one_rank_a_fit_is_welcome_everywhere(name):
    assert SECTIONS[name]() == 'trained'
    assert values(run(SECTIONS[name], 1)) == ['trained']

"BatchFlag: what one rank sees in a batch, all ranks know in the next one, and nobody waits in between."

import os, pickle, signal, time

from fastai_ddp_callbacks import BarrierTimeoutError, RankFailedError, barrier, rank, propagate_failure, set_timeout
from fastai_ddp_callbacks.distributed.batch_flag import BatchFlag
from ranks import report, run, values


def test_all_ranks_see_in_the_next_batch_who_has_raised_the_flag():
    def scenario():
        flag = BatchFlag('stop')
        return [flag.exchange((rank(), batch) in ((1, 3), (2, 3))) for batch in range(5)], flag.read()

    assert values(run(scenario, 3)) == [([[], [], [], [], [1, 2]], [])] * 3


def test_the_last_batch_is_heard_at_the_end():
    def scenario():
        flag, other = BatchFlag('stop'), BatchFlag('save')
        return (
            [(flag.exchange(rank() == 1), other.exchange(rank() == 0)) for _ in range(1)],
            flag.read(),
            other.read(),
            flag.read(),
        )

    assert values(run(scenario, 2)) == [([([], [])], [1], [0], [])] * 2


def test_a_rank_goes_on_while_a_slower_one_is_still_in_its_batch():
    def scenario():
        flag = BatchFlag('stop')
        flag.exchange(False)  # all meet here
        barrier()
        if rank() == 1:
            time.sleep(2)
        start = time.monotonic()
        flag.exchange(False)
        went_on = time.monotonic() - start
        flag.exchange(False)
        return went_on < 1, time.monotonic() - start > 1

    assert values(run(scenario, 2)) == [(True, True), (True, False)]


def test_in_one_process_the_answer_comes_at_once():
    flag = BatchFlag('stop')
    assert (flag.exchange(False), flag.exchange(True), flag.read()) == ([], [0], [])


def test_a_flag_serves_the_next_fit_on_the_same_connections_and_a_pickled_one_is_as_new():
    def scenario():
        lines = []
        for _ in range(3):
            flag = pickle.loads(pickle.dumps(BatchFlag('stop')))
            for batch in range(3):
                flag.exchange(False)
            assert flag.read() == [] and pickle.loads(pickle.dumps(flag))._line is None
            lines.append(flag._line)
        return lines[0] is lines[1] is lines[2]

    assert values(run(scenario, 2)) == [True] * 2


def test_who_waits_for_a_rank_that_failed_or_was_killed_hears_of_it():
    def scenario(how):
        flag = BatchFlag('stop')
        if rank() == 1:
            flag.exchange(False)
            if how == 'kill':
                os.kill(os.getpid(), signal.SIGKILL)
            with propagate_failure():
                raise ValueError('boom on one')
        start = time.monotonic()
        try:
            [flag.exchange(False) for _ in range(4)]
        except RankFailedError as e:
            heard = str(e), time.monotonic() - start < 30
        time.sleep(2)  # rank 0 keeps the store in which the others look
        return heard

    for how, text in (('kill', 'rank 1 died'), ('raise', 'boom on one')):
        results = run(scenario, 3, how)
        for o in results[0], results[2]:
            assert o.ok and o.value[1] and text in o.value[0], report(results)


def test_who_does_not_come_in_time_is_named():
    def scenario():
        set_timeout(1)
        flag = BatchFlag('stop')
        flag.exchange(False)
        if rank() == 1:
            return time.sleep(4)
        try:
            [flag.exchange(False) for _ in range(3)]
        except BarrierTimeoutError as e:
            return e.missing, str(e)

    zero, _ = values(run(scenario, 2))
    assert zero[0] == [1] and "flag('stop'): waited 1 s for rank 1" in zero[1]

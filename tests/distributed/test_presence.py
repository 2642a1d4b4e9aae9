"Who is where, by a store, without any rank: what `Presence` lets others know, and what it makes of what others say."

import os, subprocess, sys

import pytest, torch.distributed as dist

from fastai_ddp_callbacks.distributed import presence
from fastai_ddp_callbacks.distributed.presence import Presence


@pytest.fixture
def store():
    return dist.HashStore()


@pytest.fixture
def child():
    "The number of a process that ends when the test does."
    with subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


class Gone:
    "A store whose server is gone."

    def __getattr__(self, name):
        raise RuntimeError('Connection reset by peer')


def of_process(pid, monkeypatch, store, rank, size):
    "The `Presence` that this process would have, had it that number."
    monkeypatch.setattr(presence.os, 'getpid', lambda: pid)
    try:
        return Presence(store, rank, size)
    finally:
        monkeypatch.undo()


def on_host(name, monkeypatch, store, rank, size):
    monkeypatch.setattr(presence, 'host', lambda: name)
    try:
        return Presence(store, rank, size)
    finally:
        monkeypatch.undo()


def test_ranks_of_one_host_know_each_other_in_order(store):
    ranks = [Presence(store, rank, 3) for rank in (2, 0, 1)]
    assert [[o.rank for o in one.neighbours()] for one in ranks] == [[0, 1, 2]] * 3


def test_ranks_of_other_hosts_are_no_neighbours(store, monkeypatch):
    ranks = [on_host(name, monkeypatch, store, rank, 4) for rank, name in enumerate('abab')]
    assert [[o.rank for o in one.neighbours()] for one in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_those_that_have_not_come_yet_are_not_taken_for_dead(store):
    assert Presence(store, 0, 2).dead() == []


def test_a_rank_whose_process_is_gone_is_dead(store, child, monkeypatch):
    me, _ = Presence(store, 0, 2), of_process(child.pid, monkeypatch, store, 1, 2)
    before = me.dead()
    child.kill()
    child.wait()
    assert (before, me.dead()) == ([], [1])


def test_a_rank_that_is_a_zombie_is_dead(store, child, monkeypatch):
    me, _ = Presence(store, 0, 2), of_process(child.pid, monkeypatch, store, 1, 2)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
    assert me.dead() == [1]


def test_another_process_that_has_got_the_number_of_a_rank_is_not_that_rank(store, monkeypatch):
    monkeypatch.setattr(presence, 'start_time', lambda pid: 1)
    other = Presence(store, 1, 2)
    monkeypatch.undo()
    assert Presence(store, 0, 2).dead() == [1] == other.dead()


def test_the_dead_are_known_without_the_store_once_all_have_come(store, child, monkeypatch):
    me, other = Presence(store, 0, 2), of_process(child.pid, monkeypatch, store, 1, 2)
    me.join(0), other.join(0)
    assert me.all_have_joined(0)
    me.store = Gone()
    child.kill()
    child.wait()
    assert me.dead() == [1]


def test_the_dead_among_those_that_were_seen_are_known_without_the_store(store, child, monkeypatch):
    me, _ = Presence(store, 0, 3), of_process(child.pid, monkeypatch, store, 1, 3)
    me.neighbours()
    me.store = Gone()
    child.kill()
    child.wait()
    assert me.dead() == [1]


def test_all_have_joined_when_each_rank_has_in_this_generation(store):
    a, b = (Presence(store, rank, 2) for rank in range(2))
    a.join(0), a.join(1), b.join(0)
    assert [a.all_have_joined(generation) for generation in range(3)] == [True, False, False]


def test_who_waits_at_a_spot_is_told_with_the_place_and_all_others_are_missing(store):
    ranks = [Presence(store, rank, 4) for rank in range(4)]
    ranks[0].announce('0/7', "barrier('x')")
    ranks[2].announce('0/7', "barrier('y')")
    ranks[3].announce('0/6', "barrier('w')")
    assert ranks[1].waiting('0/7') == {0: "barrier('x')", 2: "barrier('y')"}
    assert ranks[1].missing('0/7') == [1, 3]


def test_a_rank_that_waits_elsewhere_now_is_missing_where_it_waited_before(store):
    a, b = (Presence(store, rank, 2) for rank in range(2))
    b.announce('0/7', 'x')
    b.announce('0/8', 'y')
    assert (a.missing('0/7'), a.missing('0/8')) == ([0, 1], [0])


@pytest.mark.parametrize('place', ['', 'Überprüfung 🚀', '\udc80', 'x' * 20000])
def test_places_of_any_kind_are_told(store, place):
    me = Presence(store, 0, 1)
    me.announce('0/0', place)
    assert me.waiting('0/0') == {0: place}

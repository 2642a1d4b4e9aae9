"An object of the size of a model crosses the ranks, and no rank holds more than two copies of it."

import resource

import numpy as np, pytest, torch

from fastai_ddp_callbacks import all_gather, broadcast, is_main_process, rank, run_on_main, run_once_per_node
from ranks import run, values

SIZE = 1 << 27  # bytes


def peak():
    "The most memory that this process has had, in bytes."
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def make(kind):
    "An object of that size, whose making takes no more."
    if kind == 'bytes':
        return b'x' * SIZE
    if kind == 'array':
        return np.ones(SIZE, np.uint8)
    if kind == 'tensor':
        return torch.ones(SIZE // 4)
    return {
        'a': b'x' * (SIZE // 4),
        'c': bytearray(SIZE // 4),
        'b': [torch.ones(SIZE // 8, dtype=torch.bfloat16), np.ones(SIZE // 32)],
    }


CALLS = dict(
    broadcast=lambda kind: broadcast(make(kind) if is_main_process() else None),
    run_on_main=lambda kind: run_on_main(make, [kind]),
    run_once_per_node=lambda kind: run_once_per_node(make, [kind]),
)


@pytest.mark.parametrize('kind', ['bytes', 'array', 'tensor', 'dict'])
@pytest.mark.parametrize('call', CALLS)
def test_no_rank_holds_more_than_two_copies(call, kind):
    def scenario():
        broadcast('connected' * 1000)
        before = peak()
        got = CALLS[call](kind)
        return (peak() - before) / SIZE, type(got).__name__, got is not None

    for copies, name, there in values(run(scenario, 2)):
        assert copies < 2.2
        assert there and name == type(make(kind)).__name__


def test_what_arrives_can_be_written_to_and_is_each_rank_s_own():
    def scenario():
        got = broadcast({'array': np.ones(1000), 'tensor': torch.ones(1000), 'bytes': bytearray(1000)})
        got['array'][:] += rank()
        got['tensor'] += rank()
        got['bytes'][0] = rank()
        return got['array'].sum(), got['tensor'].sum().item(), got['bytes'][0]

    assert values(run(scenario, 3)) == [(1000.0 * (r + 1), 1000.0 * (r + 1), r) for r in range(3)]


KINDS = [
    torch.arange(6).view(2, 3).T,
    torch.ones(3, dtype=torch.bfloat16),
    torch.zeros(0),
    torch.tensor(2.5),
    torch.ones(2, 3)[:, 1],
    torch.tensor([True, False]),
    torch.tensor([1 + 2j]).conj(),
    torch.eye(3).to_sparse(),
    torch.nn.Parameter(torch.ones(2)),
    torch.nn.Linear(2, 2).state_dict(),
    torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
]


def test_tensors_of_any_kind_arrive_as_they_were():
    def scenario():
        return [str(broadcast(o if is_main_process() else None)) == str(o) for o in KINDS]

    assert values(run(scenario, 2)) == [[True] * len(KINDS)] * 2


def test_objects_of_different_sizes_are_gathered_as_they_were():
    def scenario():
        got = all_gather(np.full(10 ** (2 + rank()), rank(), np.uint8))
        return [(len(o), int(o.sum())) for o in got], got[rank()].flags.writeable

    assert values(run(scenario, 3)) == [([(100, 0), (1000, 1000), (10000, 20000)], True)] * 3

"Which files stay: the policy as a table of inputs and results, without a disk."

import pytest

from fastai_ddp_callbacks.checkpoint.retention import Policy, Saved, in_order, is_wanted, ranked, retain


def files(*values):
    "A file for each value, oldest first."
    return [Saved(f'{i}.pth', f'sum {i}', i, value, i + 1) for i, value in enumerate(values)]


TABLE = [  # policy, values of epochs 0, 1, ..., which is the best, protected; epochs that stay
    (Policy(), [3, 2, 1], 2, (), [0, 1, 2]),  # nothing is deleted without a policy
    (Policy(keep_best=1), [3, 2, 1], 2, (), [2]),
    (Policy(keep_best=1), [3, 1, 2], 1, (), [1, 2]),  # the newest stays in any case
    (Policy(keep_best=2), [5, 3, 4, 1, 2], 3, (), [3, 4]),
    (Policy(keep_best=3), [5, 3, 4, 1, 2], 3, (), [1, 3, 4]),
    (Policy(keep_last=1), [1, 2, 3], 0, (), [0, 2]),  # the best stays in any case
    (Policy(keep_last=3), [5, 3, 4, 1, 2], 3, (), [2, 3, 4]),
    (Policy(keep_best=3, keep_last=2), [5, 3, 4, 1, 2], 3, (), [1, 3, 4]),
    (Policy(keep_best=2, keep_last=2), [1, 2, 3, 4, 5], 0, (), [0, 1, 3, 4]),
    (Policy(lower=False, keep_best=1), [1, 3, 2], 1, (), [1, 2]),
    (Policy(lower=False, keep_best=2), [0.5, 0.7, 0.7, 0.6, 0.7], 1, (), [1, 2, 4]),  # of equals the older ones
    (Policy(keep_best=2, keep_last=2), [None, 3, None, 4, None], 1, (), [1, 3, 4]),  # without a value: the newest only
    (Policy(keep_best=1), [None, None], None, (), [1]),
    (Policy(keep_best=1), [2.0, 1.9], 0, (), [0, 1]),  # better by too little to count
    (Policy(keep_best=1), [9, 1, 2], 1, ('0.pth',), [0, 1, 2]),  # the file with which a run goes on
    (Policy(keep_best=1), [], None, (), []),
    (Policy(keep_best=9, keep_last=9), [3, 2, 1], 2, (), [0, 1, 2]),
]


@pytest.mark.parametrize('policy,values,best,protected,stay', TABLE, ids=str)
def test_the_policy_keeps_the_best_the_newest_and_what_is_protected(policy, values, best, protected, stay):
    all_files = files(*values)
    kept = retain(all_files, None if best is None else all_files[best], policy, protected)
    assert [f.epoch for f in kept.files] == stay
    assert sorted(kept.files + kept.to_delete) == sorted(all_files)


@pytest.mark.parametrize('policy,values,best,protected,stay', TABLE, ids=str)
def test_to_ask_again_changes_nothing(policy, values, best, protected, stay):
    all_files = files(*values)
    best = None if best is None else all_files[best]
    kept = retain(all_files, best, policy, protected)
    assert retain(kept.files, best, policy, protected) == (kept.files, [])


def test_the_best_comes_first_and_then_the_value_counts():
    all_files = files(3, None, 1.9, 2, 1.9)
    assert [f.epoch for f in ranked(all_files, all_files[3], Policy())] == [3, 2, 4, 0]
    assert [f.epoch for f in ranked(all_files, None, Policy(lower=False))] == [0, 3, 2, 4]


@pytest.mark.parametrize(
    'value,values,policy,wanted',
    [
        (2, [], Policy(), True),
        (2, [3], Policy(), True),
        (2, [2], Policy(), False),
        (2, [1, 3], Policy(keep_best=2), True),
        (3, [1, 3], Policy(keep_best=2), False),
        (3, [1, None], Policy(keep_best=2), True),
        (3, [2], Policy(lower=False), True),
    ],
)
def test_a_value_is_wanted_if_it_is_better_than_the_worst_of_those_to_keep(value, values, policy, wanted):
    assert is_wanted(value, values, policy) == wanted


def meta(time, epoch=0, **kwargs):
    return dict(checksum=f'sum of {time}', epoch=epoch, value=None, time=time, **kwargs)


def test_files_are_in_the_order_in_which_they_were_begun_whatever_the_clock_and_the_epochs_say():
    metas = {
        'old': meta(50, epoch=9),  # of version 0.1
        'older': meta(40, epoch=8),
        'first': meta(30, epoch=4, iteration=99, sequence=1),
        'second': meta(20, epoch=0, iteration=1, sequence=2),  # of the next fit, on a host with another clock
        'odd': meta(60, sequence='x'),
    }
    assert [saved.path for saved in in_order(metas)] == ['older', 'old', 'odd', 'first', 'second']

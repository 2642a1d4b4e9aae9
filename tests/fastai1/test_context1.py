"""fastai 1: DistributedDataParallel on any device and with any number of ranks, and a learner that is as it was
afterwards."""

import os, re, socket, subprocess, sys, time
from pathlib import Path

import pytest, torch.distributed as dist
from fastai.basics import num_distrib, rank_distrib
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

from fastai_ddp_callbacks import DDPSaveModelCallback, ddp_ctx, rank
from learners1 import Hook, digest, fit, learner, mae
from race1 import arguments
from ranks import run, values


def state(learn):
    return (
        type(learn.model).__name__,
        learn.data.train_dl,
        learn.data.valid_dl,
        list(learn.callbacks),
        hasattr(learn, 'distributed_trainer'),
    )


def look(learn, seen):
    "Notes what the learner is while it trains."

    def f(**_):
        seen.append(
            (
                isinstance(learn.model, DistributedDataParallel),
                isinstance(learn.data.train_dl.dl.sampler, DistributedSampler),
                rank_distrib(),
                num_distrib(),
            )
        )

    return Hook(learn, 'epoch_begin', f, late=True)


def test_inside_the_learner_is_distributed_and_afterwards_it_is_as_before(tmp_path):
    def scenario():
        learn, seen = learner(tmp_path, metrics=[mae]), []
        before = state(learn)
        fit(learn, look(learn, seen), DDPSaveModelCallback(learn, monitor='mae', mode='min'), n=1)
        return seen[0], before == state(learn), digest(learn.model)

    a, b = run(scenario, 2)
    assert values([a, b])[0] == ((True, True, 0, 2), True, a.value[2]) and b.value == (
        (True, True, 1, 2),
        True,
        a.value[2],
    )
    assert 'train_loss' in a.output and 'train_loss' not in b.output and 'Epoch' not in b.output


@pytest.mark.parametrize('event', ['train_begin', 'batch_end'])
def test_the_learner_is_restored_when_fit_raises_and_can_be_fitted_again(tmp_path, event):
    def scenario():
        learn = learner(tmp_path)
        before = state(learn)

        def boom(**_):
            raise ValueError('boom')

        try:
            fit(learn, Hook(learn, event, boom, late=True), n=1)
        except ValueError as e:
            error = str(e)
        restored = state(learn) == before
        fit(learn, DDPSaveModelCallback(learn), n=1)
        return error, restored, state(learn) == before, digest(learn.model)

    a, b = values(run(scenario, 2))
    assert a == b and a[:3] == ('boom', True, True)


def test_one_rank_trains_as_without_the_context(tmp_path):
    def scenario(inside):
        learn, seen = learner(tmp_path, metrics=[mae]), []
        if inside:
            fit(learn, look(learn, seen), n=2)
        else:
            learn.fit(2, 0.1, callbacks=[look(learn, seen)])
        return seen[0][:2], digest(learn.model)

    alone = values(run(scenario, 1, True, group=False))  # a launcher of one has set WORLD_SIZE
    assert values(run(scenario, 1, True)) == values(run(scenario, 1, False)) == alone


def test_the_group_is_made_where_a_launcher_has_set_the_stage(tmp_path):
    def scenario():
        assert not dist.is_initialized()
        learn, seen = learner(tmp_path), []
        fit(learn, look(learn, seen), n=1)
        return seen[0][0], dist.get_world_size(), dist.get_backend()

    assert values(run(scenario, 2, group=False)) == [(True, 2, 'gloo')] * 2


def test_ranks_are_those_of_the_group_where_no_launcher_has_set_the_environment(tmp_path):
    def scenario():
        learn, seen = learner(tmp_path, metrics=[mae]), []
        cb = DDPSaveModelCallback(learn)
        fit(learn, look(learn, seen), cb, n=1)
        return seen[0], [os.environ.get(o) for o in ('RANK', 'WORLD_SIZE')], cb.best

    a, b = values(run(scenario, 2, env=lambda r: dict(RANK=None, WORLD_SIZE=None, LOCAL_RANK=None)))
    assert a[0] == (True, True, 0, 2) and b[0] == (True, True, 1, 2) and a[1] == b[1] == [None] * 2 and a[2] == b[2]


@pytest.mark.parametrize('variables', [dict(RANK='1'), dict(WORLD_SIZE='2'), dict(RANK='1', WORLD_SIZE='2')])
def test_a_stray_environment_is_not_believed(tmp_path, monkeypatch, variables):
    for k in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
        monkeypatch.delenv(k, raising=False)
    for k, v in variables.items():
        monkeypatch.setenv(k, v)
    learn = learner(tmp_path, metrics=[mae])
    cb = DDPSaveModelCallback(learn)
    with pytest.warns(UserWarning, match='no process group'):
        fit(learn, cb, n=1)
    assert cb.last_saved_path.exists() and all(os.environ[k] == v for k, v in variables.items())


def test_validate_get_preds_and_lr_find_work_inside_on_all_ranks(tmp_path):
    def scenario():
        learn = learner(tmp_path, metrics=[mae])
        learn.callbacks.append(DDPSaveModelCallback(learn))
        before, weights = state(learn), digest(learn.model)
        with ddp_ctx(learn):
            loss = float(learn.validate()[0])
            preds = learn.get_preds()[0].shape[0]
            learn.lr_find(num_it=4)
            found = weights == digest(learn.model)
            learn.fit(1, 0.1)
        return loss, preds, found, state(learn) == before, digest(learn.model)

    a, b = values(run(scenario, 2))
    assert a == b and a[1:4] == (24, True, True)


# -- under the launcher that fastai 1's users have


@pytest.mark.parametrize('option', ['--local_rank=2', '--local-rank=2'])
def test_the_script_takes_both_spellings_of_the_launchers_option(option):
    assert arguments([option, 'f']).local_rank == 2


def test_under_the_launcher_no_rank_has_loaded_before_rank_0_has_saved(tmp_path):
    with socket.socket() as s:  # a free port
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k not in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')} | {
        'OMP_NUM_THREADS': '1'
    }
    out = subprocess.run(
        [
            sys.executable,
            '-m',
            'torch.distributed.launch',
            '--nproc_per_node=3',
            f'--master_port={port}',
            Path(__file__).with_name('race1.py'),
            tmp_path,
        ],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert out.returncode == 0, out.stdout + out.stderr
    lines = [o[o.index('RACE') :].split(maxsplit=3)[1:] for o in out.stdout.splitlines() if 'RACE' in o]
    when = {(what, int(r)): float(t) for r, t, what in lines}
    assert sorted(r for what, r in when if what == 'loaded') == [0, 1, 2] and [
        r for what, r in when if what == 'saved'
    ] == [0]
    assert all(t > when['saved', 0] for (what, _), t in when.items() if what == 'loaded')
    assert len({what for what, _ in when if what.startswith('weights')}) == 1


def test_a_context_within_a_context_changes_nothing(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        with ddp_ctx(learn):
            with ddp_ctx(learn):
                learn.fit(1, 0.1)
            learn.fit(1, 0.1)
        return digest(learn.model), type(learn.model).__name__, type(learn.data.train_dl.sampler).__name__

    a, b = values(run(scenario, 2))
    assert a == b and 'Distributed' not in a[1] + a[2]


def test_after_a_fit_one_line_says_which_rank_kept_the_others_waiting(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        fit(
            learn,
            DDPSaveModelCallback(learn),
            Hook(learn, 'epoch_end', lambda **_: time.sleep(1.2 * (rank() == 1))),
            n=1,
        )
        fit(learn, n=1)
        return hasattr(learn, 'ddp_watch')

    results = run(scenario, 2)
    assert values(results) == [False, False]
    told = [re.findall(r'rank 1 cost the other 1\..* % of this fit\), mostly at ', o.output) for o in results]
    assert list(map(len, told)) == [1, 0]


def test_lr_find_ends_together_though_the_loss_diverges_on_one_rank(tmp_path):
    def scenario():
        learn, calls = learner(tmp_path), []
        stock = learn.loss_func

        def diverges(o, y):
            calls.append(1)
            return stock(o, y) * (1e3 if rank() == 1 and len(calls) > 4 else 1)

        learn.loss_func = diverges
        before = digest(learn.model)
        with ddp_ctx(learn):
            learn.lr_find(num_it=24)
        return before == digest(learn.model)

    assert values(run(scenario, 2)) == [True, True]

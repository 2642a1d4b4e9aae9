"A training that is killed again and again, at moments that nobody has chosen, and that launchers start again."

import os, random, re, signal, subprocess, sys, threading, time
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from fastai.basics import Callback

from fastai_ddp_callbacks import DDPResumeCallback, DDPSaveModelCallback, barrier, ddp_ctx, rank, verify_checkpoint
from fastai_ddp_callbacks.checkpoint import hashing
from fastai_ddp_callbacks.training import loading
from learners import digest
from ranks import report, run, values
from resuming import Dies, files, killed, learner, start, table
from seeds import SEED
from test_launchers import free_port

KILLS = int(os.environ.get('CHAOS_KILLS', 30))  # more of them on request

# what rank 0 may be at: a step of a save, a load, a deletion or a lock, and about how many of them a fit has
STEPS = {
    'write': (hashing.HashingWriter, 'write', 300),
    'fsync': (os, 'fsync', 40),
    'replace': (os, 'replace', 20),
    'unlink': (os, 'unlink', 15),
    'link': (os, 'link', 2),
    'read': (loading, 'read_checkpoint', 2),
}


class Slow(Callback):
    "Gives the killer time."

    def before_batch(self):
        time.sleep(0.005)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step, n, before):
    "Die in the `n`th of these steps: before it is done, or as soon as it is."
    owner, name, _ = STEPS[step]
    f, calls = getattr(owner, name), count(1)

    def dying(*args, **kwargs):
        due = next(calls) == n
        if due and before:
            die()
        res = f(*args, **kwargs)
        if due:
            die()
        return res

    setattr(owner, name, dying)


def fit(folder, background, timers, step):
    "Fit on one rank, which dies after so many seconds if it has a timer; rank 0 at that step."
    barrier(
        'all are here'
    )  # who is killed before that is missed at the time limit only, where no launcher looks after the ranks
    if rank() in timers:
        timer = threading.Timer(timers[rank()], die)
        timer.daemon = True
        timer.start()
    if step and rank() == 0:
        die_at(*step)
    learn, saver = learner(folder), DDPSaveModelCallback(background=background)
    with ddp_ctx(learn):
        learn.fit_one_cycle(6, 0.1, cbs=[DDPResumeCallback(every_batches=2, background=background), saver, Slow()])
    return (
        digest(learn.model),
        saver.best,
        [list(map(float, o)) for o in learn.recorder.values],
        len(learn.recorder.losses),
    )


def moment(rng):
    "How the next try is to end: by a timer on one rank or on both, or in the midst of something on rank 0."
    if rng.random() < 0.5:
        name = rng.choice(list(STEPS))
        return {}, (name, rng.randint(1, STEPS[name][2]), rng.random() < 0.5)
    seconds = rng.uniform(0, 0.9)
    return rng.choice([{0: seconds}, {1: seconds}, {0: seconds, 1: seconds}]), None


@pytest.mark.begins_early
@pytest.mark.timeout(120 + 10 * KILLS)
def test_killed_at_random_moments_it_ends_as_if_nothing_had_happened(tmp_path):
    rng, kills, trainings = random.Random(SEED), 0, count()
    quiet = run(partial(fit, tmp_path / 'quiet', False, {}, None), 2)
    while kills < KILLS:
        folder, background, tries = tmp_path / str(next(trainings)), rng.random() < 0.5, []
        while True:
            tries.append(moment(rng) if kills < KILLS else ({}, None))
            results = run(partial(fit, folder, background, *tries[-1]), 2)
            story = f'SEED={SEED}, background={background}, tries: {tries}, kills before: {kills}'
            assert not any(o.hung for o in results), f'{story}\n{report(results)}'
            if not any(o.exitcode == -signal.SIGKILL for o in results):
                break
            kills += 1
        assert all(o.ok for o in results), f'{story}\n{report(results)}'
        assert values(results) == values(quiet), story
        assert table(results[0]) == table(quiet[0]), story
        left = files(folder)
        assert [re.sub(r'\d+', 'N', o) for o in left] == ['model.pth', 'resume_N.pth', 'resume_N_finished.pth'], (
            f'{story}\n{left}'
        )
        for o in left:
            verify_checkpoint(folder / 'models' / o)


# -- launchers


def launched(folder, *launcher, args=()):
    env = {**os.environ, 'HF_HOME': str(folder), 'OMP_NUM_THREADS': '1'}
    return subprocess.run(
        [sys.executable, *launcher, str(Path(__file__).parents[1] / 'resume_script.py'), str(folder), *args],
        env=env,
        text=True,
        capture_output=True,
        timeout=150,
    )


def torchrun(n, restarts):
    return (
        '-m',
        'torch.distributed.run',
        f'--nproc_per_node={n}',
        f'--max-restarts={restarts}',
        '--monitor-interval=0.2',
        '--master_port',
        free_port(),
    )


def result(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r'^ranks: (\d) epochs: (\d) weights: (\w+)$', done.stdout, re.M)


def test_torchrun_restarts_a_rank_that_was_killed_and_the_end_is_the_same(tmp_path):
    (tmp_path / 'killed').mkdir()
    done = launched(tmp_path / 'killed', *torchrun(2, 3), args=['--die', '2', '1'])
    weights = values(start(2, tmp_path / 'quiet', DDPSaveModelCallback()))[0]['weights']
    assert result(done) == [('2', '4', weights)]
    assert (tmp_path / 'killed/died').exists()
    assert 'Resuming after' in done.stdout


def test_started_again_with_fewer_ranks_it_goes_on_with_a_warning(tmp_path):
    killed(start(2, tmp_path, DDPSaveModelCallback(), Dies(1, 1), every_batches=1))
    done = launched(tmp_path, *torchrun(1, 0), args=['--resume', 'must'])
    ((ranks, epochs, _),) = result(done)
    assert (
        (ranks, epochs) == ('1', '4')
        and 'is resumed by 1' in done.stderr
        and 'Resuming after batch 2 of 4 in epoch 1' in done.stdout
    )

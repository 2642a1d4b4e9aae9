"Two jobs, one folder: the second is refused while the first one lives, and nothing that has died is in the way."

import copy, errno, json, os, pickle, signal, socket, subprocess, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest, torch
from fastai.basics import Callback, Datasets, Learner, load_learner, nn

from fastai_ddp_callbacks import DDPSaveModelCallback, barrier, ddp_ctx, rank, verify_checkpoint
from fastai_ddp_callbacks.checkpoint import lock
from fastai_ddp_callbacks.checkpoint.lock import Lock
from fastai_ddp_callbacks.process import start_time, host
from disks import disk
from learners import Records, learner
from ranks import run, values


def fit(learn, cb, n=2, cbs=()):
    with ddp_ctx(learn):
        learn.fit(n, 0.1, cbs=[cb, Records([3.0 - i for i in range(n)]), *cbs])
    return cb


def names(path):
    return sorted(str(o.relative_to(path / 'models')) for o in (path / 'models').rglob('*') if o.is_file())


def wait_for(path):
    end = time.monotonic() + 40
    while not path.exists():
        assert time.monotonic() < end, f'{path} does not come'
        time.sleep(0.01)


class Pause(Callback):
    "In the midst of a fit, until told to go on."

    order = 80

    def __init__(self, folder):
        self.folder = folder

    def after_epoch(self):
        if self.epoch or rank():
            return
        (self.folder / 'pid').write_text(str(os.getpid()))
        (self.folder / 'pid').rename(self.folder / 'training')
        wait_for(self.folder / 'go')


@contextmanager
def training(path, world_size=1, **kwargs):
    "Another job that trains during the block, and ends well after it. Gives the process number of its rank 0."
    signs = path / 'signs'
    signs.mkdir()

    def scenario():
        return fit(learner(path), DDPSaveModelCallback(**kwargs), cbs=[Pause(signs)]).best_path

    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run, scenario, world_size)
        try:
            wait_for(signs / 'training')
            yield int((signs / 'training').read_text())
        finally:
            (signs / 'go').touch()
        for o in values(job.result()):
            assert verify_checkpoint(o)['epoch'] == 1


def outcome(f, *args, **kwargs):
    try:
        return f(*args, **kwargs) and None
    except BaseException as e:
        return type(e).__name__, str(e)


def owner(**kwargs):
    "What a lock says, of a process that lives unless told otherwise."
    pid = os.getppid()
    return json.dumps(
        dict(dict(host=host(), name=socket.gethostname(), pid=pid, start=start_time(pid), job='none', id='0'), **kwargs)
    )


def gone():
    "A process number that was in use until now."
    child = subprocess.Popen(['true'])
    child.wait()
    return child.pid


@pytest.fixture
def file(tmp_path):
    "The lock of the default name."
    (tmp_path / 'models').mkdir()
    return tmp_path / 'models/.model.lock'


# -- another job that lives


@pytest.mark.parametrize('world_size', [1, 2])
def test_a_second_job_is_refused_on_all_its_ranks_before_training_and_does_not_disturb_the_first(tmp_path, world_size):
    def second():
        learn, trained = learner(tmp_path), []

        class Batches(Callback):
            def after_batch(self):
                trained.append(1)

        start = time.monotonic()
        said = outcome(fit, learn, DDPSaveModelCallback(), cbs=[Batches()])
        return said, len(trained), type(learn.model).__name__, time.monotonic() - start

    with training(tmp_path) as pid:
        before = names(tmp_path)
        for r, (said, trained, model, took) in enumerate(values(run(second, world_size))):
            assert said[0] == ('RankFailedError' if r else 'CheckpointInUseError')
            assert all(
                o in said[1]
                for o in (f'process {pid}', socket.gethostname(), str(tmp_path / 'models'), "'model'", 'another run')
            ), said
            assert not trained and model == 'RegModel' and took < 20
        assert names(tmp_path) == before == ['.model.lock', 'model.pth']
    assert names(tmp_path) == ['model.pth']


@pytest.mark.parametrize(
    'folder,settings',
    [
        ('models', dict(fname='other')),
        ('elsewhere', dict()),
        ('models', dict(fname='model-{epoch}')),
        ('models', dict(fname='sub/model')),
        ('models', dict(every_epoch=True)),
    ],
    ids=str,
)
def test_a_job_with_another_name_or_folder_trains_at_the_same_time(tmp_path, folder, settings):
    with training(tmp_path):
        learn = learner(tmp_path, model_dir=folder)
        cb = fit(learn, DDPSaveModelCallback(**settings))
        assert verify_checkpoint(cb.last_saved_path)['epoch'] == 1 and (tmp_path / 'models/.model.lock').exists()


def test_two_ways_to_one_folder_are_one_folder(tmp_path):
    (tmp_path / 'link').symlink_to(tmp_path / 'models')
    with training(tmp_path, fname='m-{epoch}'):
        learn = learner(tmp_path, model_dir='link')
        assert outcome(fit, learn, DDPSaveModelCallback(fname='m-{epoch}'))[0] == 'CheckpointInUseError'


def test_after_the_first_job_has_ended_the_second_may_have_the_name(tmp_path):
    with training(tmp_path):
        pass
    assert verify_checkpoint(fit(learner(tmp_path), DDPSaveModelCallback(), 3).best_path)['epoch'] == 2


# -- those that have died


def test_a_job_that_was_killed_is_not_in_the_way(tmp_path):
    def killed():
        class Kill(Callback):
            order = 80

            def after_epoch(self):
                os.kill(os.getpid(), signal.SIGKILL)

        fit(learner(tmp_path), DDPSaveModelCallback(), cbs=[Kill()])

    assert run(killed, 1)[0].exitcode == -signal.SIGKILL and names(tmp_path) == ['.model.lock', 'model.pth']

    def scenario():
        return fit(learner(tmp_path), DDPSaveModelCallback()).best

    assert values(run(scenario, 2)) == [2.0, 2.0] and names(tmp_path) == ['model.pth']


@pytest.mark.parametrize(
    'changes,seconds,refused',
    [
        (dict(), 0, True),
        (dict(), 3600, True),  # on this host its process counts, however long it has been silent
        (dict(pid=None), 0, False),
        (dict(start=1), 0, False),  # the number is now another process's
        (dict(host='deadbeef', name='other'), 0, True),
        (dict(host='deadbeef', name='other'), 40, True),
        (dict(host='deadbeef', name='other'), 70, False),
        (dict(host='deadbeef', name='other', pid=None), 0, True),  # the number says nothing of another host
        (dict(host='deadbeef', name='other'), -3600, True),
    ],
    ids=str,
)  # its clock goes ahead
def test_who_holds_a_name(tmp_path, file, changes, seconds, refused):
    if 'pid' in changes:
        changes = dict(changes, pid=gone())
    file.write_text(owner(**changes))
    then = time.time() - seconds
    os.utime(file, (then, then))
    before, said = file.read_text(), outcome(fit, learner(tmp_path), DDPSaveModelCallback())
    if refused:
        expected = json.loads(before)
        assert (
            said[0] == 'CheckpointInUseError'
            and f'process {expected["pid"]} on {expected["name"]}' in said[1]
            and str(file) in said[1]
        )
        assert file.read_text() == before and names(tmp_path) == ['.model.lock']
    else:
        assert said is None and names(tmp_path) == ['model.pth']


def test_a_job_that_its_launcher_restarts_on_another_host_goes_on_at_once(tmp_path, file, monkeypatch):
    file.write_text(owner(host='deadbeef', job='job 7'))
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'job 8')
    assert outcome(fit, learner(tmp_path), DDPSaveModelCallback())[0] == 'CheckpointInUseError'
    monkeypatch.setenv('TORCHELASTIC_RUN_ID', 'job 7')
    assert outcome(fit, learner(tmp_path), DDPSaveModelCallback()) is None


@pytest.mark.parametrize(
    'text',
    [
        '',
        'no JSON',
        'null',
        '[]',
        '7',
        '{}',
        '\0' * 9,
        '{"host": "%s"}',
        '{"host": "%s", "pid": "x", "start": null}',
        '{"host": "deadbeef", "name": null, "pid": null}',
    ],
)
def test_a_lock_that_cannot_be_read_holds_for_a_minute_at_most_and_is_told_clearly(file, text):
    def tried(seconds):
        file.write_text(text.replace('%s', host()))
        os.utime(file, (time.time() - seconds,) * 2)
        mine = Lock(file)
        said = outcome(mine.acquire)
        mine.release()
        return said

    ((fresh, old),) = values(run(lambda: (tried(0), tried(70)), 1, group=False, timeout=15))
    assert (
        fresh is None or fresh[0] == 'CheckpointInUseError' and str(file) in fresh[1] and 'process None' not in fresh[1]
    ), fresh
    assert old is None, old


def test_of_several_jobs_that_find_a_lock_of_the_dead_at_once_exactly_one_gets_it(tmp_path, file):
    def scenario():
        won = []
        for i in range(40):
            if rank() == 0:
                file.write_text(owner(pid=dead))
            mine = Lock(file)
            barrier('stale')
            said = outcome(mine.acquire)
            won.append(said is None)
            assert said is None or said[0] == 'CheckpointInUseError', said
            barrier('all have tried')
            mine.release()
            barrier('given back')
        return won

    dead = gone()
    results = values(run(scenario, 4))
    assert [sum(o) for o in zip(*results)] == [1] * 40 and names(tmp_path) == []


def test_a_job_that_is_slow_to_take_a_lock_of_the_dead_does_not_open_the_door_to_a_third(file):
    "Rank 1 finds it dead and takes its time. Meanwhile rank 0 takes it; then rank 2 comes."
    dead = gone()

    def scenario():
        def slow(move):
            def inner(*paths, **kwargs):
                pause = 0.3 if file in map(Path, paths) else 0
                time.sleep(pause)
                move(*paths, **kwargs)
                time.sleep(pause)

            return inner

        if rank() == 0:
            file.write_text(owner(pid=dead))
        if rank() == 1:
            os.rename, os.replace = slow(os.rename), slow(os.replace)
        mine = Lock(file)
        barrier('dead')
        time.sleep((0.15, 0, 0.45)[rank()])
        said = outcome(mine.acquire)
        barrier('all have tried')
        return said

    results = values(run(scenario, 3, timeout=30))
    assert results.count(None) == 1, results
    assert all(o is None or o[0] == 'CheckpointInUseError' for o in results)


# -- given back


@pytest.mark.parametrize('error', [None, ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize('attached', [False, True], ids=['given to fit', 'given to the learner'])
def test_a_fit_gives_the_name_back_however_it_ends(tmp_path, error, attached):
    class Fail(Callback):
        order = 80

        def after_epoch(self):
            assert names(tmp_path) == ['.model.lock', 'model.pth']
            if error:
                raise error('enough')

    learn, cb = learner(tmp_path), DDPSaveModelCallback()
    if attached:
        learn.add_cb(cb)
    cbs = [Fail()] if attached else [Fail(), cb]
    with ddp_ctx(learn) if attached else nullcontext():
        said = outcome(lambda: learn.fit(1, 0.1, cbs=cbs))
    assert (said and said[0]) == (error and error.__name__) and names(tmp_path) == ['model.pth']
    fit(learner(tmp_path), DDPSaveModelCallback())  # the same process again


@pytest.mark.parametrize('failing', [0, 1])
def test_a_job_of_which_one_rank_fails_gives_the_name_back(tmp_path, failing):
    def scenario():
        class Fail(Callback):
            order = 80

            def after_batch(self):
                if rank() == failing and self.epoch == 1:
                    raise ValueError('enough')

        said = outcome(fit, learner(tmp_path), DDPSaveModelCallback(), cbs=[Fail()])
        return said, names(tmp_path) if rank() == 0 else None

    results = values(run(scenario, 2))
    assert all(o[0] for o in results) and 'enough' in results[failing][0][1] and results[0][1] == ['model.pth']


ENDS = {  # of a process that holds a lock, and whether its file is left
    'pass': False,
    'sys.exit(3)': False,
    'raise ValueError': False,
    'del mine': False,
    'os._exit(0)': True,
    # a child is not the owner
    'if os.fork() == 0: sys.exit()\nos.wait(); assert os.path.exists(mine.path); os._exit(0)': True,
}
PROGRAM = '''
import os, sys
from fastai_ddp_callbacks.checkpoint.lock import Lock
folder, *ends = sys.argv[1:]
for i, end in enumerate(ends):
    if os.fork(): # one process imports, another one for each end
        os.wait()
        continue
    mine = Lock(os.path.join(folder, str(i), '.model.lock'))
    mine.acquire()
    assert os.path.exists(mine.path)
    exec(end)
    break
'''


@pytest.fixture(scope='module')
def ended(tmp_path_factory):
    "The files of locks, by how the processes ended that held them."
    folder = tmp_path_factory.mktemp('ended')
    for i in range(len(ENDS)):
        (folder / str(i)).mkdir()
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    subprocess.run([sys.executable, '-c', PROGRAM, str(folder), *ENDS], env=env, capture_output=True, timeout=100)
    return {end: folder / str(i) / '.model.lock' for i, end in enumerate(ENDS)}


@pytest.mark.parametrize('end,left', ENDS.items())
def test_a_process_gives_the_name_back_when_it_ends(ended, end, left):
    file = ended[end]
    assert file.exists() == left
    assert os.listdir(file.parent) == [file.name] * left
    Lock(file).acquire()


def test_a_lock_that_another_has_taken_meanwhile_is_left_to_it(file):
    mine = Lock(file)
    mine.acquire()
    file.write_text(owner())
    mine.release()
    assert file.exists()


# -- signs of life


def test_as_long_as_it_is_held_it_gives_signs_of_life_and_then_none(file, monkeypatch):
    monkeypatch.setattr(lock, '_BEAT', 0.02)
    mine = Lock(file := file.with_name('.beating.lock'))
    mine.acquire()

    def beats():
        os.utime(file, (1000, 1000))
        end = time.monotonic() + 5
        while file.stat().st_mtime < 2000 and time.monotonic() < end:
            time.sleep(0.01)
        return file.stat().st_mtime > 2000

    assert beats() and beats()
    mine.release()
    assert not file.exists()
    end = time.monotonic() + 5
    while any(o.name == f'lock of {file.name}' for o in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(o.name == f'lock of {file.name}' for o in threading.enumerate())


def test_a_disk_that_fails_for_a_moment_does_not_end_the_signs_of_life(file, monkeypatch):
    monkeypatch.setattr(lock, '_BEAT', 0.02)
    touch, failures = os.utime, []

    def fails_once(path, *args, **kwargs):
        if not failures:
            failures.append(1)
            raise OSError(errno.EIO, 'Input/output error')
        return touch(path, *args, **kwargs)

    mine = Lock(file)
    mine.acquire()
    touch(file, (1000, 1000))
    monkeypatch.setattr(os, 'utime', fails_once)
    end = time.monotonic() + 5
    while file.stat().st_mtime < 2000 and time.monotonic() < end:
        time.sleep(0.01)
    assert failures and file.stat().st_mtime > 2000
    mine.release()


# -- disks


def test_a_disk_without_hard_links_serves_too(tmp_path, file, monkeypatch):
    def no_links(*args, **kwargs):
        raise OSError(errno.EPERM, 'Operation not permitted')

    monkeypatch.setattr(os, 'link', no_links)
    fit(learner(tmp_path), DDPSaveModelCallback())
    assert names(tmp_path) == ['model.pth']
    file.write_text(owner())
    assert (
        outcome(fit, learner(tmp_path), DDPSaveModelCallback())[0] == 'CheckpointInUseError'
        and json.loads(file.read_text())['pid'] == os.getppid()
    )
    file.write_text(owner(pid=gone()))
    fit(learner(tmp_path), DDPSaveModelCallback())
    assert names(tmp_path) == ['model.pth']


def test_a_folder_that_may_only_be_read_is_told_by_name_on_all_ranks_before_training(tmp_path):
    folder = tmp_path / 'models'

    def scenario():
        trained = []

        class Batches(Callback):
            def after_batch(self):
                trained.append(1)

        return outcome(fit, learner(tmp_path), DDPSaveModelCallback(), cbs=[Batches()]), len(trained)

    with disk(folder, read_only=True) as mounted:
        if not mounted:
            folder.chmod(0o555)
        results = values(run(scenario, 2))
    for said, trained in results:
        assert said and str(folder) in said[1] and ('Read-only' in said[1] or 'denied' in said[1]) and not trained, said


# -- copies


class Midst(Callback):
    "In the midst of a fit."

    order = 80

    def after_epoch(self):
        self.learn.export('midst.pkl')
        store = self.learn.save_model._saver.store
        for o in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store)):
            assert (o.files, o.best) == (store.files, store.best)
            o.release()  # a copy does not hold it


def test_a_learner_can_be_exported_while_it_holds_a_name_and_the_copy_does_not_hold_it(tmp_path):
    data = Datasets(
        range(40),
        [lambda o: torch.tensor([float(o)]), lambda o: torch.tensor([2.0 * o])],
        splits=[range(30), range(30, 40)],
    )
    dls = data.dataloaders(bs=5, num_workers=0)
    seen = []

    class Look(Callback):
        order = 90

        def after_epoch(self):
            seen.append(names(tmp_path))

    learn = Learner(dls, nn.Linear(1, 1), nn.MSELoss(), path=tmp_path, cbs=[DDPSaveModelCallback(), Midst()])
    learn.fit(2, cbs=[Look()])
    assert [o for o in seen if '.model.lock' in o] == seen and len(seen) == 2 and names(tmp_path) == ['model.pth']
    learn.remove_cb(Midst)
    learn.export('after.pkl')
    for o in ('midst.pkl', 'after.pkl'):
        loaded = load_learner(tmp_path / o)
        assert loaded.save_model.last_saved_path == learn.save_model.best_path
        assert names(tmp_path) == ['model.pth']


@pytest.mark.parametrize('kind', ['pipe', 'dangling link'])
def test_what_is_no_lock_in_its_place_is_told_on_all_ranks_at_once(tmp_path, file, kind):
    os.mkfifo(file) if kind == 'pipe' else file.symlink_to('nowhere')

    def scenario():
        start = time.monotonic()
        return outcome(fit, learner(tmp_path), DDPSaveModelCallback()), time.monotonic() - start

    for r, (said, took) in enumerate(values(run(scenario, 2))):
        assert said[0] == ('RankFailedError' if r else 'CheckpointWriteError') and str(file) in said[1] and took < 30
    assert names(tmp_path) == [] and os.path.lexists(file)


def test_a_folder_of_links_to_that_of_a_killed_run_which_has_ended_since_is_one_to_train_in(tmp_path, file):
    file.symlink_to(tmp_path / 'gone/.model.lock')

    def scenario():
        return outcome(fit, learner(tmp_path), DDPSaveModelCallback())

    assert values(run(scenario, 2)) == [None, None] and names(tmp_path) == ['model.pth']

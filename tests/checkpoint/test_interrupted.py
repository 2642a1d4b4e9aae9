"Runs that were killed: what the next start takes over, sweeps, deletes, waits for; on the store alone."

import json, os, socket, time, warnings

import pytest, torch

from fastai_ddp_callbacks import CheckpointInUseError, read_metadata
from fastai_ddp_callbacks.checkpoint import lock
from fastai_ddp_callbacks.checkpoint.atomic import temporary_beside
from fastai_ddp_callbacks.checkpoint.lock import Lock
from fastai_ddp_callbacks.checkpoint.store import Store
from fastai_ddp_callbacks.process import host, start_time

STATE = {'a': torch.ones(3)}
DEAD = 2**22 + 1  # a number that no process has


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if path.is_file())


def epochs(saved):
    return [f.epoch for f in saved]


def make_store(folder, **kwargs):
    return Store(folder, 'm-{epoch}', keep_best=1, keep_last=1, **kwargs)


def save(store, epoch, value, delete=True):
    "What a callback does after an epoch; gives what was to be deleted."
    path = store.place(dict(epoch=epoch, value=value), store.replaced(epoch, value))
    saved = store.write(STATE, path, dict(epoch=epoch, value=value))
    best = store.best is None or value < store.best.value
    to_delete = store.add(saved, best)
    for old in to_delete if delete else ():
        store.disk.delete(old.path)
    return to_delete


def goes_on(folder, state, **kwargs):
    "A new store that goes on with the run of `state`, and the warning."
    store = make_store(folder, **kwargs)
    found = store.found_whole(state)
    resumed = store.resume(dict(state, monitor='valid_loss'), found, lambda a, b: a < b, float('inf'))
    return store, resumed


# -- which files count


def test_a_file_that_the_run_had_not_come_to_delete_is_deleted_when_it_goes_on(tmp_path):
    store = make_store(tmp_path)
    for epoch, value in enumerate([1.0, 2.0, 3.0]):
        save(store, epoch, value)
    save(store, 3, 4.0, delete=False)  # killed, or the disk said no, between the save and the deletion
    assert files(tmp_path) == ['m-0.pth', 'm-2.pth', 'm-3.pth']
    again, resumed = goes_on(tmp_path, store.state())
    assert files(tmp_path) == ['m-0.pth', 'm-3.pth']
    assert epochs(again.ranked()) == [0, 3] and resumed == (1.0, None)


def test_what_was_being_written_when_the_state_was_saved_counts_and_what_it_displaces_goes(tmp_path):
    store = make_store(tmp_path)
    save(store, 0, 1.0)
    save(store, 1, 2.0)
    write = store.begin(store.place(dict(epoch=2)), dict(epoch=2, value=3.0))
    state = store.state()
    write(STATE)  # and killed, before anybody has heard of it
    again, _ = goes_on(tmp_path, state)
    assert files(tmp_path) == ['m-0.pth', 'm-2.pth'] and epochs(again.files) == [0, 2] and not again.again


def test_what_was_being_written_and_is_better_is_the_best(tmp_path):
    store = make_store(tmp_path)
    save(store, 0, 2.0)
    write = store.begin(store.place(dict(epoch=1)), dict(epoch=1, value=1.0))
    state = store.state()
    write(STATE)
    again, resumed = goes_on(tmp_path, state)
    assert again.best.epoch == 1 and resumed.best == 1.0


def test_what_was_saved_after_the_state_is_kept_until_its_epoch_is_saved_again(tmp_path):
    store = make_store(tmp_path)
    save(store, 0, 1.0)
    save(store, 1, 2.0)
    state = store.state()
    save(store, 2, 3.0, delete=False)
    again, _ = goes_on(tmp_path, state)
    assert files(tmp_path) == ['m-0.pth', 'm-1.pth', 'm-2.pth'] and epochs(again.again) == [2]
    save(again, 2, 3.0)
    assert files(tmp_path) == ['m-0.pth', 'm-2.pth'] and epochs(again.files) == [0, 2]


def test_a_second_fit_counts_by_what_was_saved_later_although_its_epochs_begin_again(tmp_path):
    store = make_store(tmp_path)
    save(store, 0, 1.0)
    save(store, 9, 5.0)  # the first fit
    save(store, 0, 6.0)  # the second one
    again, _ = goes_on(tmp_path, store.state())
    save(again, 1, 7.0)
    assert [read_metadata(path)['value'] for path in sorted(tmp_path.glob('*.pth'))] == [1.0, 7.0]


def test_a_damaged_file_displaces_none(tmp_path):
    store = make_store(tmp_path)
    save(store, 0, 2.0)
    write = store.begin(store.place(dict(epoch=1)), dict(epoch=1, value=1.0))
    state = store.state()
    path = write(STATE).path
    data = bytearray(open(path, 'rb').read())
    data[100] ^= 1
    open(path, 'wb').write(data)
    with pytest.warns(UserWarning, match='m-1.pth is corrupt'):
        again, _ = goes_on(tmp_path, state)
    assert again.best.epoch == 0 and files(tmp_path) == ['m-0.pth', 'm-1.pth']


def test_if_the_best_is_lost_nothing_is_deleted_that_may_take_its_place(tmp_path):
    store = make_store(tmp_path)
    save(store, 0, 3.0)
    save(store, 1, 2.0, delete=False)
    save(store, 2, 1.0, delete=False)
    state = store.state()
    os.unlink(store.best.path)
    again, resumed = goes_on(tmp_path, state)
    assert files(tmp_path) == ['m-0.pth', 'm-1.pth'] and again.best.epoch == 1
    assert resumed.best == 2.0 and 'the best that is left, with 2.0' in resumed.warning


def test_a_state_of_version_0_1_goes_on(tmp_path):
    store = make_store(tmp_path)
    save(store, 0, 1.0)
    save(store, 1, 2.0)
    state = {k: v for k, v in store.state().items() if k not in ('sequence', 'under_way')}
    save(store, 2, 3.0)
    again, resumed = goes_on(tmp_path, state)
    assert epochs(again.files) == [0, 2] and epochs(again.again) == [2] and resumed == (1.0, None)


# -- killed before anything was there to go on with


def write_lock(path, pid=DEAD, start=1, seconds=0, **kwargs):
    owner = dict(host=host(), name=socket.gethostname(), pid=pid, start=start, job='none', id='0' * 16, run='r')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**owner, **kwargs}))
    os.utime(path, (time.time() - seconds,) * 2)


def killed_start(folder, *saves):
    "The files and the lock of a start that was killed after these saves."
    store = make_store(folder)
    store.prepare(1, 1)
    for epoch, value in saves:
        save(store, epoch, value)
    lock_file = store.locks[0].path
    owner = json.loads(lock_file.read_text())
    store.release()
    write_lock(lock_file, run=owner['run'])
    return store


def test_the_files_of_a_killed_start_are_replaced_if_it_would_have_gone_on(tmp_path):
    killed_start(tmp_path, (0, 1.0))
    (tmp_path / 'm-1.pth').write_text('mine')
    for _ in range(2):  # the second start is killed too
        store = make_store(tmp_path)
        store.prepare(1, 1)
        store.replace_killed_run()
        save(store, 0, 1.0)
        assert files(tmp_path) == ['.m-{epoch}.lock', 'm-0.pth', 'm-1.pth']
        assert store.best.epoch == 0 and read_metadata(store.best.path)['run'] == store.run
        run = json.loads(store.locks[0].path.read_text())['run']
        store.release()
        write_lock(store.locks[0].path, run=run)
    save(store, 1, 2.0)
    assert 'm-1-1.pth' in files(tmp_path)


def test_a_killed_start_is_known_although_another_saver_has_swept_its_lock(tmp_path):
    killed_start(tmp_path, (0, 1.0))
    other, store = Store(tmp_path, 'other'), make_store(tmp_path)
    other.prepare(1, 1)
    assert files(tmp_path) == ['.other.lock', 'm-0.pth']
    store.prepare(1, 1)
    store.replace_killed_run()
    save(store, 0, 1.0)
    store.release()
    other.release()
    assert files(tmp_path) == ['m-0.pth']


def test_the_files_of_another_killed_run_are_left_alone(tmp_path):
    killed_start(tmp_path, (0, 1.0))
    store = make_store(tmp_path)
    store.prepare(1, 1)
    save(store, 0, 1.0)
    assert files(tmp_path) == ['.m-{epoch}.lock', 'm-0-1.pth', 'm-0.pth']
    store.release()


# -- sweeping


def half_written(path):
    "What a killed process of this host leaves beside `path`."
    path.parent.mkdir(parents=True, exist_ok=True)
    name = temporary_beside(path).name.replace(f'-{os.getpid()}-', f'-{DEAD}-')
    path.with_name(name).write_text('half')


@pytest.mark.parametrize('fname', ['other', 'sub/other', '{epoch}/m', 'model'])
def test_the_next_start_in_a_folder_sweeps_what_killed_runs_have_left_and_nothing_else(tmp_path, fname):
    for name in 'model.pth', '0/model.pth', 'o/last.pth', '.model.lock':
        half_written(tmp_path / name)
    write_lock(tmp_path / '.{epoch}%model.lock')
    write_lock(tmp_path / 'sub/.gone.lock', host='deadbeef', name='other', seconds=3 * 24 * 3600)
    write_lock(tmp_path / '.living.lock', pid=os.getppid(), start=start_time(os.getppid()))
    write_lock(tmp_path / '.elsewhere.lock', host='deadbeef', name='other', seconds=3600)
    for name in '.poetry.lock', '.x.lock', 'o/.writing', 'o/.a.00000000-1-1-0000000000000000.writing':
        (tmp_path / name).write_text('{"pid": 1, "start": 1}' if name == '.x.lock' else 'theirs')
    (tmp_path / '.folder.lock').mkdir()
    (tmp_path / '.link.lock').symlink_to('.{epoch}%model.lock')
    os.mkfifo(tmp_path / '.pipe.lock')
    store = Store(tmp_path, fname)
    store.prepare(1, 1)
    store.release()
    theirs = ['.elsewhere.lock', '.living.lock', '.poetry.lock', '.x.lock', 'o/.writing']
    assert files(tmp_path) == sorted([*theirs, 'o/.a.00000000-1-1-0000000000000000.writing'])
    assert (tmp_path / '.link.lock').is_symlink() and (tmp_path / '.pipe.lock').exists()


def test_copies_for_a_second_name_that_was_never_given_are_swept(tmp_path, monkeypatch):
    def no_links(*args, **kwargs):
        raise OSError(1, 'Operation not permitted')

    monkeypatch.setattr(os, 'link', no_links)
    for _ in range(3):
        half_written(tmp_path / 'o/last.pth')
    save(make_store(tmp_path, last='o/last'), 0, 1.0)
    assert files(tmp_path) == ['m-0.pth', 'o/last.pth']


def test_to_sweep_follows_no_links_and_gives_up_in_a_tree_that_is_not_one_of_checkpoints(tmp_path, monkeypatch):
    from fastai_ddp_callbacks.checkpoint import disk

    half_written(tmp_path / 'else/model.pth')
    (tmp_path / 'models').mkdir()
    (tmp_path / 'models/link').symlink_to(tmp_path / 'else')
    monkeypatch.setattr(disk, '_MANY', 3)
    for i in range(9):
        half_written(tmp_path / f'models/{i}/m.pth')
    disk.Disk().sweep(tmp_path / 'models')
    assert len(files(tmp_path / 'else')) == 1 and len(files(tmp_path / 'models')) == 7


# -- a container that starts again


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, '_FRESH', 1.0)
    monkeypatch.setattr(lock, '_POLL', 0.05)


def other_container(path, **kwargs):
    write_lock(path, pid=1, host='deadbeef', **kwargs)


@pytest.mark.parametrize('seconds', [0.5, -3600])
def test_a_container_that_starts_again_waits_until_the_lock_of_the_one_before_is_old_enough(tmp_path, quick, seconds):
    other_container(tmp_path / 'lock', seconds=seconds)
    mine = Lock(tmp_path / 'lock', "'model' in models")
    with pytest.warns(UserWarning, match=f"'model' in models.*process 1 on {socket.gethostname()}.*waiting up to 1 s"):
        mine.acquire()
    assert json.loads((tmp_path / 'lock').read_text())['pid'] == os.getpid() and mine.killed_run == 'r'
    mine.release()


def test_it_is_refused_when_the_owner_refreshes_its_lock(tmp_path, quick, monkeypatch):
    other_container(tmp_path / 'lock')
    sleep = time.sleep

    def refreshed(seconds):
        os.utime(tmp_path / 'lock')
        sleep(seconds)

    monkeypatch.setattr(lock.time, 'sleep', refreshed)
    with pytest.warns(UserWarning, match='waiting'), pytest.raises(CheckpointInUseError, match='process 1 on'):
        Lock(tmp_path / 'lock').acquire()


@pytest.mark.parametrize(
    'kwargs', [dict(name='other'), dict(job='job 7', env='job 8'), dict(seconds=0, name=None)], ids=str
)
def test_another_host_s_lock_is_not_waited_for(tmp_path, quick, monkeypatch, kwargs):
    if env := kwargs.pop('env', None):
        monkeypatch.setenv('TORCHELASTIC_RUN_ID', env)
    other_container(tmp_path / 'lock', **kwargs)
    with warnings.catch_warnings(), pytest.raises(CheckpointInUseError):
        warnings.simplefilter('error')
        Lock(tmp_path / 'lock').acquire()

"Every call by which something is written fails in turn: the right error, earlier files whole, nothing left over."

import errno, json, os, pickle, warnings

import pytest, torch

from fastai_ddp_callbacks import read_checkpoint, verify_checkpoint, write_checkpoint
from fastai_ddp_callbacks.checkpoint.lock import Lock
from fastai_ddp_callbacks.checkpoint.store import Store, delete
from fastai_ddp_callbacks.process import host
from syscalls import can_fail, failing

pytestmark = pytest.mark.skipif(not can_fail(), reason='calls are made to fail on x86_64 only')

ERRORS = [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EINTR, None]  # None: a part is written
SOME = ERRORS if os.environ.get('EXHAUSTIVE') else [errno.ENOSPC, errno.EINTR, None]
OLD, NEW = {'a': torch.zeros(40_000)}, {'a': torch.ones(40_000)}


def outcome_of(f, report):
    "What `f` raises or warns of, into a file."

    def inner():
        raised = None
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            try:
                f()
            except Exception as e:
                raised = type(e).__name__, getattr(e, 'errno', None), str(e)
        report.write_bytes(pickle.dumps((raised, [str(w.message) for w in seen])))

    return inner


def each_call_fails(tmp_path, prepare, act, errors):
    "For each call of `act` and each error: the folder before, the call, the error, what was raised, the warnings."
    report = tmp_path / 'report'
    for error in errors:
        for at in range(200):
            folder = tmp_path / f'{error}-{at}'
            folder.mkdir()
            prepare(folder)
            failed = failing(outcome_of(lambda: act(folder), report), folder, at, error)
            raised, warned = pickle.loads(report.read_bytes())
            if failed is None:
                assert at > 0 and raised is None, 'there was nothing to fail'
                break
            yield folder, failed, error, raised, warned


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if not path.is_dir())


def value_of(path):
    verify_checkpoint(path)
    (value,) = read_checkpoint(path)[0]['a'].unique().tolist()
    return value


def is_retried(error):
    return error in (errno.EINTR, None)


def is_swept_later(call):
    "Whether it was the removal itself of what is left over."
    return call.name in ('unlink', 'unlinkat')


@pytest.mark.parametrize('error', ERRORS, ids=lambda e: errno.errorcode.get(e, 'part'))
def test_a_save_over_an_earlier_one(tmp_path, error):
    def prepare(folder):
        write_checkpoint(OLD, folder / 'sub/model.pth')

    def act(folder):
        write_checkpoint(NEW, folder / 'sub/model.pth')

    calls = set()
    for folder, call, error, raised, warned in each_call_fails(tmp_path, prepare, act, [error]):
        calls.add(call.name)
        left = [name for name in names(folder) if name != 'sub/model.pth']
        assert not left or is_swept_later(call), (call, left)
        value = value_of(folder / 'sub/model.pth')
        if raised:
            assert raised[:2] == ('CheckpointWriteError', error) and 'sub/model.pth' in raised[2], (call, raised)
            assert value == 0.0, call
        else:
            assert value == 1.0, call
            tolerated = call.name in ('fchmod', 'mkdir') or call.name == 'fsync' and warned
            assert is_retried(error) or tolerated, call
    if error == errno.EIO:
        assert {'openat', 'writev', 'fsync', 'rename', 'fchmod'} <= calls


@pytest.mark.parametrize('error', SOME, ids=lambda e: errno.errorcode.get(e, 'part'))
@pytest.mark.parametrize('links', [True, False], ids=['hard links', 'copies'])
def test_a_save_with_a_second_name(tmp_path, error, links):
    def no_links(*args, **kwargs):
        raise OSError(errno.EPERM, 'Operation not permitted')

    def save(folder, state, epoch):
        if not links:
            os.link = no_links  # in a process of its own, or put back below
        store = Store(folder, 'm-{epoch}', last='o/last')
        return store.write(state, store.place(dict(epoch=epoch)), dict(epoch=epoch, value=None))

    def prepare(folder):
        link = os.link
        save(folder, OLD, 0)
        os.link = link

    def act(folder):
        save(folder, NEW, 1)

    for folder, call, error, raised, warned in each_call_fails(tmp_path, prepare, act, [error]):
        found = names(folder)
        assert value_of(folder / 'm-0.pth') == 0.0
        assert set(found) <= {'m-0.pth', 'm-1.pth', 'o/last.pth'} or is_swept_later(call), (call, found)
        last = value_of(folder / 'o/last.pth')
        if raised:
            assert raised[:2] == ('CheckpointWriteError', error) and 'm-1.pth' in raised[2]
            assert last == 0.0 and 'm-1.pth' not in found
        else:
            assert value_of(folder / 'm-1.pth') == 1.0
            assert last == 1.0 or any('cannot have its second name' in w and 'o/last.pth' in w for w in warned)


@pytest.mark.parametrize('error', SOME, ids=lambda e: errno.errorcode.get(e, 'part'))
def test_a_deletion_by_retention(tmp_path, error):
    def save(store, epoch, value):
        saved = store.write(OLD, store.place(dict(epoch=epoch)), dict(epoch=epoch, value=value))
        for old in store.add(saved, best=epoch == 0):
            delete(old)

    def act(folder):
        store = Store(folder, 'm-{epoch}', keep_best=1, keep_last=1)
        for epoch in range(3):
            save(store, epoch, float(epoch))

    for folder, call, error, raised, warned in each_call_fails(tmp_path, lambda folder: None, act, [error]):
        found = names(folder)
        for name in found:
            if name.endswith('.pth'):
                verify_checkpoint(folder / name)
        if raised:
            assert raised[:2] == ('CheckpointWriteError', error), (call, raised)
        elif call.name == 'unlink' and call.paths[0].endswith('m-1.pth') and not is_retried(error):
            assert any('m-1.pth is no longer to be kept and could not be deleted' in w for w in warned)
            assert {'m-0.pth', 'm-1.pth', 'm-2.pth'} == set(found)
        else:
            assert {'m-0.pth', 'm-2.pth'} <= set(found)
            assert set(found) == {'m-0.pth', 'm-2.pth'} or is_swept_later(call), call


@pytest.mark.parametrize('error', SOME, ids=lambda e: errno.errorcode.get(e, 'part'))
@pytest.mark.parametrize('before', ['nothing', 'a dead run'])
def test_a_lock(tmp_path, error, before):
    def prepare(folder):
        (folder / 'note.txt').write_text('mine')
        if before == 'a dead run':
            owner = dict(host=host(), name='x', pid=2**22 + 1, start=1, id='0', run='r')
            (folder / '.m.lock').write_text(json.dumps(owner))

    def act(folder):
        lock = Lock(folder / '.m.lock', "'m'")
        lock.acquire()
        assert json.loads(lock.path.read_text())['pid'] == os.getpid()
        lock.record('another run')
        lock.release()

    for folder, call, error, raised, warned in each_call_fails(tmp_path, prepare, act, [error]):
        assert raised is None or raised[:2] == ('CheckpointWriteError', error) and '.m.lock' in raised[2], (
            call,
            raised,
        )
        again = Lock(folder / '.m.lock')
        again.acquire()  # whatever is left over is in nobody's way
        again.release()
        found = [name for name in names(folder) if name != 'note.txt']
        assert not found or is_swept_later(call), (call, found)
        assert (folder / 'note.txt').read_text() == 'mine'

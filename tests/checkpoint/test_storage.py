"A second storage for the store: one small class, here of memory."

import time

import pytest

from fastai_ddp_callbacks import CheckpointError
from fastai_ddp_callbacks.checkpoint.store import Store, delete


class NoLock:
    path = None
    killed_run = None

    def acquire(self):
        pass

    def record(self, run):
        pass

    def release(self):
        pass


class Memory:
    "The methods of `Disk`, on a dict."

    def __init__(self):
        self.files = {}

    def write(self, state, path, meta, progress=None):
        meta = dict(meta, time=time.time(), checksum=f'sum {len(self.files)} {meta["sequence"]}')
        self.files[path] = state, meta
        return meta

    def also_call(self, path, name):
        self.files[name] = self.files[path]

    def delete(self, path):
        del self.files[path]

    def metadata(self, path):
        return self.files[path][1]

    def verify(self, path):
        if path not in self.files:
            raise CheckpointError(f'{path} is gone', path)

    def list(self, folder):
        return [path for path in self.files if path.startswith(str(folder))]

    def is_taken(self, path):
        return str(path) in self.files

    def free(self, folder, path):
        return 1 << 40

    def lock(self, path, what, run):
        lock = NoLock()
        lock.path = path
        return lock

    def sweep(self, folder):
        pass


@pytest.mark.parametrize('last', [None, 'last'])
def test_a_run_is_saved_kept_and_goes_on_in_memory(tmp_path, last):
    memory = Memory()

    def make_store():
        return Store(tmp_path, 'm-{epoch}', keep_best=1, keep_last=1, last=last, disk=memory)

    store = make_store()
    store.prepare(1, 9)
    for epoch, value in enumerate([2.0, 1.0, 3.0, 4.0]):
        saved = store.write({}, store.place(dict(epoch=epoch)), dict(epoch=epoch, value=value))
        for old in store.add(saved, value < (store.best.value if store.best else 9)):
            delete(old, memory)
    again = make_store()
    found = again.found_whole(store.state())
    again.resume(store.state(), found, lambda a, b: a < b, float('inf'))
    store.release()
    assert [saved.epoch for saved in again.ranked()] == [1, 3] and again.best.epoch == 1
    assert sorted(path.removeprefix(f'{tmp_path}/') for path in memory.files) == sorted(
        ['m-1.pth', 'm-3.pth', *(['last.pth'] if last else [])]
    )
    assert not list(tmp_path.iterdir())

"Where torch lays a file out in a way that is not known here: saved by torch itself, with a warning."

import zipfile

import pytest, torch

from fastai_ddp_callbacks import read_checkpoint, read_metadata, verify_checkpoint, write_checkpoint
from fastai_ddp_callbacks.checkpoint import archive


@pytest.fixture(autouse=True)
def forget_what_is_known():
    archive._layout_is_known.cache_clear()
    yield
    archive._layout_is_known.cache_clear()


def state():
    return {'a': torch.arange(50_000.0), 'b': [torch.ones(3), torch.zeros(3)], 'c': 'text'}


def no_skip_data(m):
    m.delattr(torch.serialization, 'skip_data')


def other_seeks(m):
    m.setattr(archive._Frame, 'seek', lambda self, *args: (_ for _ in ()).throw(TypeError('seek(position)')))


def other_order(m):
    m.setattr(archive, '_framed', lambda state, framed=archive._framed: (lambda f, s: (f, s[::-1]))(*framed(state)))


def other_gaps(m):
    seek = archive._Frame.seek
    m.setattr(archive._Frame, 'seek', lambda self, size, whence: seek(self, size + 64, whence))


def other_whence(m):
    seek = archive._Frame.seek
    m.setattr(archive._Frame, 'seek', lambda self, size, whence: seek(self, size, 0))


def no_persistent_ids(m):
    m.setattr(archive, '_noting', lambda noted: __import__('pickle').Pickler)


CHANGES = [no_skip_data, other_seeks, other_order, other_gaps, other_whence, no_persistent_ids]


@pytest.mark.parametrize('change', CHANGES, ids=lambda f: f.__name__)
def test_a_save_is_made_by_torch_with_a_warning_and_has_its_checksum(tmp_path, monkeypatch, change):
    path = tmp_path / 'm.pth'
    change(monkeypatch)
    with pytest.warns(UserWarning, match='lays files out in a way that is not known.*Update this package'):
        meta = write_checkpoint(state(), path, {'epoch': 3})
    found, read = read_checkpoint(path)
    assert verify_checkpoint(path)['checksum'] == meta['checksum'] and read['epoch'] == 3
    assert torch.equal(found['a'], state()['a']) and [t.tolist() for t in found['b']] == [[1.0] * 3, [0.0] * 3]
    assert zipfile.ZipFile(path).testzip() is None  # with torch's own checksums too
    assert torch.load(path)['c'] == 'text'


def test_an_end_that_is_not_known_gives_a_file_without_a_checksum_and_says_so(tmp_path, monkeypatch):
    no_skip_data(monkeypatch)
    monkeypatch.setattr(archive, '_END_MAGIC', b'PK\7\7')
    with pytest.warns(UserWarning, match='no checksum and no metadata'):
        assert write_checkpoint(state(), tmp_path / 'm.pth')['checksum'] is None
    monkeypatch.undo()
    assert read_metadata(tmp_path / 'm.pth') is None and torch.load(tmp_path / 'm.pth')['c'] == 'text'


def test_the_layout_of_this_torch_is_known():
    assert archive._layout_is_known()


@pytest.mark.parametrize('alignment', [64, 4096])
def test_storages_that_are_aligned_otherwise_are_written_as_ever(tmp_path, alignment):
    config = pytest.importorskip('torch.utils.serialization').config
    with config.patch('save.storage_alignment', alignment):
        write_checkpoint(state(), tmp_path / 'm.pth')
    assert torch.equal(read_checkpoint(tmp_path / 'm.pth')[0]['a'], state()['a'])


def test_a_file_without_a_checksum_is_never_deleted(tmp_path):
    from fastai_ddp_callbacks.checkpoint.store import Saved, delete

    torch.save({}, tmp_path / 'm.pth')
    with pytest.warns(UserWarning, match='not deleted'):
        delete(Saved(str(tmp_path / 'm.pth'), None, 0, None))
    assert (tmp_path / 'm.pth').exists()

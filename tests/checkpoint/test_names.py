"Names of files and locks: one for each file, however it was spelled, and none that a disk does not take."

import os

import pytest, torch

from fastai_ddp_callbacks import CheckpointInUseError, read_checkpoint, read_metadata, write_checkpoint
from fastai_ddp_callbacks.checkpoint.store import Store, check_name

STATE = {'a': torch.ones(3)}


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob('*') if not path.is_dir() or path.is_symlink())


def save(store, epoch=0, value=1.0, over=()):
    path = store.place(dict(epoch=epoch, value=value), over)
    return store.write(STATE, path, dict(epoch=epoch, value=value))


def in_a_process_of_its_own(f):
    "The name of what `f` raises in a forked process, which sees this one's locks as another run's; '' for nothing."
    r, w = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            f()
            os.write(w, b'-')
        except BaseException as e:
            os.write(w, type(e).__name__.encode())
        finally:
            os._exit(0)
    os.close(w)
    with open(r, 'rb') as out:
        said = out.read().decode()
    os.waitpid(pid, 0)
    return said.strip('-')


SPELLED = [  # (folder, fname) of two runs, and whether they write the same files
    (('models', 'model'), ('models', './model'), True),
    (('models', 'model'), ('models', 'x/../model'), True),
    (('models', 'sub/model'), ('models/sub', 'model'), True),
    (('models', 'sub//model'), ('models/./sub', './model'), True),
    (('models', '{epoch}/m'), ('models', './{epoch}/m'), True),
    (('models', 'a/{epoch}/m'), ('models/a', '{epoch}/m'), True),
    (('models', 'model'), ('link', 'model'), True),
    (('models', 'model'), ('models', 'model2'), False),
    (('models', 'a/b'), ('models', 'a%b'), False),
    (('models', 'sub/model'), ('models', 'model'), False),
]


@pytest.mark.parametrize('first,second,is_same', SPELLED, ids=str)
def test_two_spellings_of_one_file_are_one_and_the_second_run_is_refused(tmp_path, first, second, is_same):
    (tmp_path / 'models').mkdir()
    (tmp_path / 'link').symlink_to('models')
    one, other = (Store(tmp_path / folder, fname) for folder, fname in (first, second))
    one.prepare(1, 1)
    said = in_a_process_of_its_own(lambda: other.prepare(1, 1))
    assert said == (CheckpointInUseError.__name__ if is_same else '')
    same_file = os.path.realpath(one.place(dict(epoch=0))) == os.path.realpath(other.place(dict(epoch=0)))
    assert same_file == is_same
    one.release()


LONG = ['x' * 251, 'x' * 250, '長' * 83, '🙂' * 62, 'x' * 243 + '{epoch}', 'a/' + 'y' * 251]


@pytest.mark.parametrize('fname', LONG, ids=lambda fname: f'{fname[:3]}{len(fname)}')
@pytest.mark.parametrize('last', [None, 'l' * 251])
def test_any_name_that_the_disk_takes_is_saved_locked_and_given_back(tmp_path, fname, last):
    store = Store(tmp_path, fname, keep_best=2, last=last)
    store.prepare(1, 1)
    saved = save(store)
    assert read_metadata(saved.path)['epoch'] == 0
    assert any(name.endswith('.lock') for name in names(tmp_path))
    store.release()
    assert all(name.endswith('.pth') for name in names(tmp_path))


def test_long_names_that_begin_alike_have_locks_of_their_own(tmp_path):
    one, other = (Store(tmp_path, 'x' * 250 + end) for end in 'ab')
    one.prepare(1, 1)
    other.prepare(1, 1)
    assert len(names(tmp_path)) == 2
    one.release()
    other.release()


def test_a_name_that_is_too_long_says_so(tmp_path):
    with pytest.raises(OSError, match='File name too long.*shorter name'):
        write_checkpoint(STATE, tmp_path / ('x' * 300))


def test_a_long_name_that_is_taken_gets_a_number_all_the_same(tmp_path):
    store = Store(tmp_path, '長' * 80 + '{epoch}')
    paths = [save(store, epoch=0).path for _ in range(12)]
    assert len(set(paths)) == 12 and len(names(tmp_path)) == 12


@pytest.mark.parametrize('kind', ['file', 'folder', 'dangling link', 'link', 'ring', 'fifo'])
def test_a_name_at_which_something_is_is_not_used_where_several_files_are_kept(tmp_path, kind):
    place = tmp_path / 'm-0.pth'
    (tmp_path / 'else').mkdir()
    target = tmp_path / 'else/target.pth'
    if kind == 'link':
        target.write_text('mine')
    make = {
        'file': lambda: place.write_text('mine'),
        'folder': place.mkdir,
        'dangling link': lambda: place.symlink_to(target),
        'link': lambda: place.symlink_to(target),
        'ring': lambda: place.symlink_to(place.name),
        'fifo': lambda: os.mkfifo(place),
    }
    make[kind]()
    before = os.lstat(place)
    store = Store(tmp_path, 'm-{epoch}', keep_best=1)
    saved = save(store)
    assert saved.path == str(tmp_path / 'm-0-1.pth')
    assert store.add(saved, True) == []
    assert os.lstat(place) == before
    assert target.exists() == (kind == 'link')


def test_a_link_in_the_place_of_a_plain_name_is_replaced_and_what_it_leads_to_is_left(tmp_path):
    a, b = tmp_path / 'a', tmp_path / 'b'
    save(Store(a, 'model'))
    theirs = (a / 'model.pth').read_bytes()
    b.mkdir()
    (b / 'model.pth').symlink_to(a / 'model.pth')  # as `cp -rs a b` makes
    saved = save(Store(b, 'model'), epoch=7)
    assert (a / 'model.pth').read_bytes() == theirs
    assert not (b / 'model.pth').is_symlink()
    assert read_checkpoint(saved.path)[1]['epoch'] == 7


@pytest.mark.parametrize('fname', ['m-{epoch}', './m-{epoch}', 'x/../m-{epoch}', 'x//m', 'm-{f1.score:.2f}', 'a{{b}}'])
def test_names_that_can_be_made_are_accepted(fname):
    check_name(fname, {'epoch': 0, 'f1.score': 0.5})


def test_braces_of_a_name_stay_braces_in_the_lock(tmp_path):
    store = Store(tmp_path, 'a{{b}}')
    store.prepare(1, 1)
    assert save(store).path == str(tmp_path / 'a{b}.pth')
    store.release()

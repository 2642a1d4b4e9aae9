"What is no file where we expect one: pipes, links, folders, devices. Nobody waits for them, follows or removes them."

import json, os, pickle, random, re, socket, stat, warnings

import pytest, torch

from fastai_ddp_callbacks import (
    CheckpointError,
    CheckpointWriteError,
    read_checkpoint,
    read_metadata,
    verify_checkpoint,
    write_checkpoint,
)
from fastai_ddp_callbacks.checkpoint.lock import Lock
from fastai_ddp_callbacks.checkpoint.store import Store
from fastai_ddp_callbacks.cli import main

pytestmark = pytest.mark.timeout(60)  # to open a pipe would take for ever
STATE = {'a': torch.ones(9)}


def make_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # its name may not be long
    try:
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path.name)
    finally:
        os.chdir(here)


def make_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip('this user makes no devices')


KINDS = {
    'folder': lambda path: path.mkdir(),
    'pipe': os.mkfifo,
    'socket': make_socket,
    'device': make_device,
    'dangling link': lambda path: path.symlink_to('nowhere'),
    'ring of links': lambda path: path.symlink_to(path.name),
    'link to a device': lambda path: path.symlink_to('/dev/zero'),
    'link to a folder': lambda path: path.symlink_to('/tmp'),
    'link to a pipe': lambda path: (os.mkfifo(path.with_name('pipe')), path.symlink_to('pipe')),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def shown(path):
    status = os.lstat(path)
    return status.st_mode, status.st_ino, os.readlink(path) if path.is_symlink() else None


@pytest.mark.parametrize('read', [read_metadata, verify_checkpoint, read_checkpoint], ids=lambda f: f.__name__)
def test_what_is_no_file_is_refused_by_name_when_it_is_read(tmp_path, kind, read):
    path = tmp_path / 'model.pth'
    KINDS[kind](path)
    before = shown(path)
    with pytest.raises(CheckpointError, match=re.escape(f'{path} could not be read: ')) as e:
        read(path)
    assert e.value.path == str(path) and shown(path) == before


@pytest.mark.parametrize('path', ['a\0b', '', '\udce4\udc80', 'x' * 5000, 'a/' * 3000])
@pytest.mark.parametrize('read', [read_metadata, verify_checkpoint, read_checkpoint], ids=lambda f: f.__name__)
def test_a_name_that_no_file_can_have_is_refused(path, read):
    with pytest.raises(CheckpointError, match='could not be read'):
        read(path)


@pytest.mark.parametrize('command', ['ls', 'verify'])
def test_the_commands_pass_over_it_or_name_it(tmp_path, kind, command, capsys):
    write_checkpoint(STATE, tmp_path / 'whole.pth')
    KINDS[kind](tmp_path / 'model.pth')
    main([command, str(tmp_path)])
    assert 'whole.pth' in capsys.readouterr().out


def test_a_folder_or_a_device_is_not_written_over(tmp_path, kind):
    path = tmp_path / 'model.pth'
    KINDS[kind](path)
    before = shown(path)
    if kind in ('folder', 'device'):
        with pytest.raises(CheckpointWriteError, match='Is a (directory|device).*(remove|Remove)'):
            Store(tmp_path, 'model').write(STATE, path, dict(epoch=0, value=None))
        assert shown(path) == before
    else:
        Store(tmp_path, 'model').write(STATE, path, dict(epoch=0, value=None))
        assert verify_checkpoint(path)['epoch'] == 0 and not path.is_symlink()
    assert [name for name in os.listdir(tmp_path) if name.endswith('.writing')] == []


def test_a_second_name_takes_the_place_of_no_folder(tmp_path, kind):
    last = tmp_path / 'last.pth'
    KINDS[kind](last)
    before = shown(last)
    store = Store(tmp_path, 'm-{epoch}', last='last')
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        store.write(STATE, store.place(dict(epoch=0)), dict(epoch=0, value=None))
    if kind == 'folder':
        assert 'cannot have its second name' in str(seen[0].message) and shown(last) == before
    else:
        assert not seen and verify_checkpoint(last)['epoch'] == 0


def test_a_run_looks_for_its_files_past_it(tmp_path, kind):
    KINDS[kind](tmp_path / 'm-0.pth')
    store = Store(tmp_path, 'm-{epoch}', keep_best=1)
    store.prepare(1, 1)
    saved = store.write(STATE, store.place(dict(epoch=0)), dict(epoch=0, value=1.0))
    store.add(saved, True)
    before = shown(tmp_path / 'm-0.pth')
    assert store.found_whole(store.state()) == [saved]
    assert saved.path.endswith('m-0-1.pth') and shown(tmp_path / 'm-0.pth') == before
    store.release()


def test_in_the_place_of_a_lock_it_is_an_error_at_once_that_names_it(tmp_path, kind):
    path = tmp_path / '.m.lock'
    KINDS[kind](path)
    before = shown(path)
    if kind == 'ring of links':  # it leads to what is called like a lock
        Lock(path).acquire()
        return
    with pytest.raises(CheckpointWriteError, match=re.escape(f'{path} could not be written: ')) as e:
        Lock(path, "'m'").acquire()
    assert 'reserves the name' in str(e.value) and shown(path) == before
    assert [name for name in os.listdir(tmp_path) if name.endswith('.writing')] == []


@pytest.mark.parametrize('there', ['gone', 'dead', 'running'])
def test_a_link_to_the_lock_of_the_folder_that_was_copied_is_in_nobody_s_way(tmp_path, there):
    a, b = tmp_path / 'a', tmp_path / 'b'
    a.mkdir()
    b.mkdir()
    theirs = Lock(a / '.m.lock')
    if there == 'running':
        theirs.acquire()
    if there == 'dead':
        (a / '.m.lock').write_text('{}')
    (b / '.m.lock').symlink_to(a / '.m.lock')  # as `cp -rs a b` makes
    mine = Lock(b / '.m.lock')
    mine.acquire()
    assert json.loads((b / '.m.lock').read_text())['pid'] == os.getpid() and not (b / '.m.lock').is_symlink()
    mine.release()
    assert (a / '.m.lock').exists() == (there != 'gone') and not list(b.iterdir())
    theirs.release()


ODD_LOCKS = [
    '{"host": "%s", "pid": -1, "start": 0}',
    '{"host": "%s", "pid": 0, "start": 0}',
    '{"host": "%s", "pid": 1e400, "start": 1}',
    '{"host": "%s", "pid": ' + '9' * 4000 + ', "start": 1}',
    '{"host": ["x"], "name": {}, "pid": 1, "start": 1, "job": [], "run": {"a": []}, "id": 7}',
    '[' * 50_000,
    '{"host": "deadbeef", "name": "\\u001b[31m", "pid": 1, "start": 1}',
    'x' * (1 << 20),
]


@pytest.mark.parametrize('text', ODD_LOCKS, ids=lambda text: text[:40])
@pytest.mark.parametrize('seconds', [0, 1e6])
def test_whatever_a_lock_says_it_is_refused_or_taken_over(tmp_path, text, seconds):
    from fastai_ddp_callbacks.process import host

    path = tmp_path / '.m.lock'
    path.write_text(text.replace('%s', host()))
    now = os.stat(path).st_mtime
    os.utime(path, (now - seconds,) * 2)
    mine = Lock(path)
    if seconds:
        mine.acquire()
        mine.release()
        assert not path.exists()
    else:
        with pytest.raises(CheckpointError, match='in use') as e:
            mine.acquire()
        assert str(e.value).isprintable()


@pytest.mark.parametrize('mode', [0o600, 0o640, 0o604, 0o666])
def test_a_lock_has_the_mode_of_other_files(tmp_path, monkeypatch, mode):
    def no_links(*args, **kwargs):
        raise OSError(1, 'Operation not permitted')

    before = os.umask(0o777 & ~mode)
    try:
        for name in 'a', 'b':
            mine = Lock(tmp_path / name)
            mine.acquire()
            assert stat.S_IMODE(os.stat(tmp_path / name).st_mode) == mode
            mine.release()
            monkeypatch.setattr(os, 'link', no_links)
    finally:
        os.umask(before)


# -- thousands of mutated files

SEED = int(os.environ.get('MUTATION_SEED', 14))
MUTANTS = int(os.environ.get('MUTANTS', 300))  # more of them on request


def mutated(data, chance):
    "Some bytes changed, cut out, doubled, moved or replaced, most often where the structure is."
    data = bytearray(data)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        size = len(data)
        at = chance.choice([chance.randrange(size), size - 1 - chance.randrange(min(600, size)), chance.randrange(99)])
        length = chance.choice([1, 1, 2, 4, 8, 30, 200])
        piece = bytes(data[at : at + length])
        how = chance.randrange(6)
        if how == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            data[at : at + length] = chance.randbytes(len(piece))
        elif how == 2:
            del data[at : at + length]
        elif how == 3:
            data[at:at] = piece * chance.choice([1, 2, 50])
        elif how == 4:
            data[at : at + length] = bytes([chance.choice([0, 0xFF, 0x7F, 0x80])]) * len(piece)
        else:
            to = chance.randrange(size)
            data[to : to + length] = piece
        if not data:
            data = bytearray(b'\0')
    return bytes(data)


@pytest.mark.timeout(120 + MUTANTS // 5)
def test_no_mutated_file_harms_who_verifies_lists_shows_or_loads_it(tmp_path, capsys):
    path = tmp_path / 'model.pth'
    state = {'model': {'w': torch.arange(6.0), 'b': torch.ones(2)}, 'opt': [{'lr': 0.1}]}
    meta = dict(epoch=3, monitor='valid_loss', value=0.25, run='a1', name='model.pth', metrics={'accuracy': 0.5})
    write_checkpoint(state, path, meta)
    ours = path.read_bytes()
    torch.save(state, path)
    stock = path.read_bytes()
    chance = random.Random(SEED)
    print(f'MUTATION_SEED={SEED}')
    for i in range(MUTANTS):
        whole = chance.choice([ours, ours, stock])
        data = mutated(whole, chance)
        path.write_bytes(data)
        if data != ours:
            look_at(path, i, is_ours=whole is ours)
        capsys.readouterr()


def look_at(path, i, is_ours):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        for verify in True, False:
            try:
                read_checkpoint(path, verify=verify)
            except CheckpointError as e:
                assert str(path) in str(e), i
            else:
                assert not (verify and is_ours and read_metadata(path)), f'mutant {i} was loaded as whole'
        for command, place in ('ls', path.parent), ('verify', path), ('show', path):
            for more in [], ['--json']:
                assert main([command, str(place), *more]) in (0, 1), i


def test_the_commands_escape_whatever_metadata_say(tmp_path, capsys):
    odd = {'\x1b[2J': '\x1b]0;x\a', 'epoch': '\r\n' * 9, 'metrics': {'a\nb': 1, '': float('nan')}, 'deep': [[{}]]}
    write_checkpoint(STATE, tmp_path / 'm.pth', odd)
    assert main(['show', str(tmp_path / 'm.pth')]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines()) and '\r' not in out


def test_show_prints_metrics_line_by_line(tmp_path, capsys):
    write_checkpoint(STATE, tmp_path / 'm.pth', dict(metrics={'valid_loss': 0.25, 'top 5': 1.0}))
    main(['show', str(tmp_path / 'm.pth')])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:4] == ['  metrics', '    valid_loss  0.25', "    'top 5'     1.0"]


def test_a_checkpoint_is_read_and_pickled_as_before(tmp_path):
    store = Store(tmp_path, 'm')
    assert pickle.loads(pickle.dumps(store)).run == store.run

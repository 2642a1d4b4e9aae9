"The commands that look at checkpoints: what they show, what they refuse, and that no file can harm who looks at it."

import io, json, os, pickle, re, subprocess, sys, time

import pytest, torch, xxhash

from fastai_ddp_callbacks.checkpoint import archive as checkpoint
from fastai_ddp_callbacks.checkpoint.atomic import temporary_beside
from fastai_ddp_callbacks.commands import files
from fastai_ddp_callbacks.commands.output import format_age, format_size
from fastai_ddp_callbacks.checkpoint.file import read_metadata, verify_checkpoint, write_checkpoint
from fastai_ddp_callbacks.cli import main


def saved(path, n=1000, **meta):
    write_checkpoint({'w': torch.ones(n)}, path, meta)
    return path


def model(folder, epoch, **meta):
    return saved(
        folder / f'model_{epoch}.pth',
        **dict(run='a1b2c3d4e5f6', epoch=epoch, monitor='valid_loss', value=1 / (epoch + 1)),
        **meta,
    )


def with_text(path, text):
    "A checkpoint that is whole and has `text` where its metadata were: what a hostile writer can make."
    torch.save({'w': torch.ones(10)}, path)
    body, seal = path.read_bytes()[:-2], checkpoint._FOOTER
    head = seal.pack(checkpoint._MAGIC, checkpoint.FORMAT, len(text), b'')[:-16]
    data = body + (len(text) + seal.size).to_bytes(2, 'little') + text + head
    path.write_bytes(data + xxhash.xxh3_128(data).digest())
    return path


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    return path


def stock(path):
    torch.save({'w': torch.ones(10)}, path)
    return path


@pytest.fixture
def told(capsys):
    "Exit status, standard output, error output of a command."

    def told(*args):
        try:
            status = main([str(o) for o in args])
        except SystemExit as e:
            status = e.code
        return status, *capsys.readouterr()

    return told


def table(out):
    "The rows of a table as dicts."
    head, *rows = [re.split('  +', o.strip()) for o in out.splitlines()]
    return [dict(zip(head, o)) for o in rows]


# -- ls


def test_ls_shows_what_a_checkpoint_is(told, tmp_path):
    path = model(tmp_path, 3)
    status, out, _ = told('ls', tmp_path)
    assert status == 0
    (row,) = table(out)
    assert (row.pop('size'), row.pop('age')[-1]) == (format_size(path.stat().st_size), 's')
    assert row == dict(name='model_3.pth', epoch='3', monitor='valid_loss', value='0.25', run='a1b2c3d4', state='whole')


def test_ls_orders_by_the_time_of_saving_and_not_by_name_or_date_of_the_file(told, tmp_path):
    for epoch in 9, 10, 2:
        os.utime(model(tmp_path, epoch), (10 * epoch, 10 * epoch))  # as a copy may leave them
    assert [o['epoch'] for o in table(told('ls', tmp_path)[1])] == ['9', '10', '2']


def test_a_file_without_metadata_takes_its_place_by_its_date(told, tmp_path):
    new, old = stock(tmp_path / 'new.pth'), stock(tmp_path / 'old.pth')
    model(tmp_path, 1)
    os.utime(old, (1e9, 1e9))
    os.utime(new, (2e9, 2e9) if time.time() < 1.9e9 else (1e10, 1e10))
    rows = table(told('ls', tmp_path)[1])
    assert [(o['name'], o['state']) for o in rows] == [
        ('old.pth', 'no checksum'),
        ('model_1.pth', 'whole'),
        ('new.pth', 'no checksum'),
    ]


def test_ls_looks_into_the_folders_in_the_folder(told, tmp_path):
    saved(tmp_path / 'a' / 'b' / 'deep.pth')
    assert table(told('ls', tmp_path)[1])[0]['name'] == os.path.join('a', 'b', 'deep.pth')


def test_ls_lists_neither_temporary_files_nor_others_nor_what_is_no_file(told, tmp_path):
    model(tmp_path, 1)
    temporary_beside(tmp_path / 'model_2.pth').touch()
    (tmp_path / 'notes.txt').write_text('')
    (tmp_path / 'folder.pth').mkdir()
    os.mkfifo(tmp_path / 'pipe.pth')  # to open it would take for ever
    assert [o['name'] for o in table(told('ls', tmp_path)[1])] == ['model_1.pth']


def test_a_file_with_two_names_is_read_once_and_both_are_shown(told, tmp_path, monkeypatch):
    os.link(model(tmp_path, 3), tmp_path / 'last.pth')
    (tmp_path / 'best.pth').symlink_to('model_3.pth')
    read = []
    monkeypatch.setattr(
        files, 'verify_checkpoint', lambda path, *args: read.append(path) or verify_checkpoint(path, *args)
    )
    assert [(o['name'], o['state']) for o in table(told('ls', tmp_path)[1])] == [
        ('model_3.pth', 'whole'),
        ('last.pth', 'whole (= model_3.pth)'),
        ('best.pth', 'whole (= model_3.pth)'),
    ]
    assert len(read) == 1


def test_ls_says_what_is_damaged_and_how_and_its_exit_status_is_1(told, tmp_path):
    flip(model(tmp_path, 1), 700)
    data = model(tmp_path, 2).read_bytes()
    (tmp_path / 'model_2.pth').write_bytes(data[:800])
    model(tmp_path, 3)
    status, out, _ = told('ls', tmp_path)
    assert status == 1
    assert {o['name']: o['state'] for o in table(out)} == {
        'model_1.pth': 'damaged: its bytes do not match its checksum',
        'model_3.pth': 'whole',
        'model_2.pth': 'damaged: it has 800 bytes and does not end as a checkpoint does',
    }
    assert table(out)[0]['epoch'] == '1'  # the end of this one is whole


def test_a_file_of_a_newer_format_is_told_as_such_or_as_damaged_since_one_flipped_bit_may_look_like_it(told, tmp_path):
    path = model(tmp_path, 1)
    flip(path, path.stat().st_size - checkpoint._FOOTER.size + 9)
    status, out, _ = told('ls', tmp_path)
    assert (
        status == 1
        and table(out)[0]['state'] == 'newer or damaged: of format 257, this version of the package reads up to 1'
    )


def test_a_link_to_nowhere_is_shown(told, tmp_path):
    (tmp_path / 'last.pth').symlink_to('gone.pth')
    (tmp_path / 'ring.pth').symlink_to('ring.pth')
    status, out, _ = told('ls', tmp_path)
    assert status == 1
    assert all(o['age'].endswith('s') for o in table(out))  # that of the link
    assert {o['name']: o['state'] for o in table(out)} == {
        'last.pth': 'unreadable: No such file or directory',
        'ring.pth': 'unreadable: Too many levels of symbolic links',
    }


def test_a_checkpoint_that_is_deleted_while_ls_reads_is_left_out(told, tmp_path, monkeypatch):
    for epoch in 1, 2:
        model(tmp_path, epoch)

    def read(path):
        (tmp_path / 'model_2.pth').unlink(missing_ok=True)
        return read_metadata(path)

    monkeypatch.setattr(files, 'read_metadata', read)
    status, out, _ = told('ls', tmp_path)
    assert status == 0 and [o['name'] for o in table(out)] == ['model_1.pth']


def test_a_folder_that_cannot_be_read_is_shown(told, tmp_path, monkeypatch):
    model(tmp_path, 1)
    (tmp_path / 'closed').mkdir()
    scandir = os.scandir

    def closed(path):
        if str(path).endswith('closed'):
            raise PermissionError(13, 'Permission denied', path)
        return scandir(path)

    monkeypatch.setattr(os, 'scandir', closed)
    status, out, _ = told('ls', tmp_path)
    assert status == 1 and ('closed', 'unreadable: Permission denied') in [(o['name'], o['state']) for o in table(out)]


def test_an_empty_folder_says_so(told, tmp_path):
    assert told('ls', tmp_path)[:2] == (0, f'No checkpoints (*.pth) in {tmp_path}.\n')
    assert told('ls', tmp_path, '--json') == (0, '[]\n', '')


def test_where_there_is_nothing_to_verify_the_exit_status_is_1(told, tmp_path):
    assert told('verify', tmp_path) == (1, f'No checkpoints (*.pth) in {tmp_path}.\n', 'Nothing has been verified.\n')
    assert told('verify', tmp_path, '--json') == (1, '[]\n', 'Nothing has been verified.\n')
    assert told('verify', tmp_path, stock(tmp_path.parent / 'stock.pth'))[::2] == (0, '')


def test_the_help_of_verify_says_what_each_exit_status_means(told):
    text = ' '.join(told('verify', '--help')[1].split())
    for o in 'status is 0 if', 'no checksum', '1 if a file is damaged', 'nothing to verify', '2 if':
        assert o in text


# -- verify


def test_verify_has_a_line_for_each_file_and_folder(told, tmp_path):
    whole, other, inside = model(tmp_path, 1), stock(tmp_path / 'stock.pth'), model(tmp_path / 'more', 2)
    assert told('verify', other, whole, tmp_path / 'more')[:2] == (
        0,
        f'{other}: no checksum\n{whole}: whole\n{inside}: whole\n',
    )


def test_verify_ends_with_1_if_one_of_many_is_damaged(told, tmp_path):
    good, bad = model(tmp_path, 1), flip(model(tmp_path, 2), 700)
    assert told('verify', bad, good)[:2] == (1, f'{bad}: damaged: its bytes do not match its checksum\n{good}: whole\n')


def test_verify_reads_what_is_named_twice_once(told, tmp_path):
    path = model(tmp_path, 1)
    assert told('verify', path, tmp_path, path)[1] == f'{path}: whole\n'


def test_verify_finds_any_flipped_byte_of_the_end_and_some_of_the_rest(told, tmp_path):
    path = saved(tmp_path / 'model.pth', 30)
    size = path.stat().st_size
    for at in {*range(0, size, 37), *range(size - 60, size)}:
        flip(path, at)
        assert told('verify', path)[0] == 1, at
        flip(path, at)
    assert told('verify', path)[0] == 0


@pytest.mark.parametrize('command', ['verify', 'show'])
def test_a_file_that_was_asked_for_and_is_deleted_meanwhile_is_told(command, told, tmp_path, monkeypatch):
    path = model(tmp_path, 1)

    def read(path):
        os.unlink(path)
        return read_metadata(path)

    monkeypatch.setattr(files, 'read_metadata', read)
    status, out, _ = told(command, path)
    assert status == 1 and out.startswith(f'{path}: unreadable: No such file or directory')


def test_progress_is_shown_on_a_terminal_and_wiped(told, tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for o in 'a', 'b':
        saved(tmp_path / f'{o}.pth', 5_000_000)
    os.link(tmp_path / 'a.pth', tmp_path / 'again-a.pth')
    assert told('verify', tmp_path)[2] == ''
    with monkeypatch.context() as m:
        m.setattr(sys, 'stderr', Terminal())
        out, err = told('verify', tmp_path)[1], sys.stderr.getvalue()
    assert out.count('\n') == 3 and '\r' not in out
    assert re.findall(r'\[([# ]{30})\] +(\d+)% of 40.0 MB', err) == [
        ('#' * n + ' ' * (30 - n), part) for n, part in ((12, '42'), (14, '50'), (27, '92'), (29, '100'))
    ]
    assert err.endswith(' ' * 60 + '\r')


def test_verify_checkpoint_tells_how_far_it_is(tmp_path):
    seen, path = [], saved(tmp_path / 'model.pth', 10_000_000)
    verify_checkpoint(path, lambda *args: seen.append(args))
    total = path.stat().st_size - 16
    assert seen == [(1 << 24, total), (1 << 25, total), (total, total)]


# -- show


def test_show_prints_the_metadata_under_the_state(told, tmp_path):
    path = saved(tmp_path / 'model.pth', epoch=3, monitor='valid_loss', value=0.12)
    meta = read_metadata(path)
    status, out, _ = told('show', path)
    assert status == 0
    assert out.splitlines() == [
        f'{path}: whole, {format_size(path.stat().st_size)}',
        '  epoch     3',
        '  monitor   valid_loss',
        '  value     0.12',
        '  format    1',
        f"  time      {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(meta['time']))}",
        f'  torch     {torch.__version__}',
        f"  checksum  {meta['checksum']}",
    ]


def test_show_says_that_a_stock_file_has_no_metadata(told, tmp_path):
    path = stock(tmp_path / 'stock.pth')
    status, out, _ = told('show', path)
    assert (
        status == 0
        and out.startswith(f'{path}: no checksum, ')
        and out.endswith('  no metadata: this package did not write it\n')
    )


def test_show_of_a_damaged_file_says_so_whatever_its_metadata_claim(told, tmp_path):
    path = flip(saved(tmp_path / 'model.pth', state='whole'), 700)
    status, out, _ = told('show', path)
    assert status == 1
    assert (
        out.splitlines()[0].startswith(f'{path}: damaged: its bytes do not match its checksum, ')
        and '  state     whole' in out.splitlines()
    )


# -- JSON


def test_json_holds_what_the_text_says_and_is_valid(told, tmp_path):
    path = saved(tmp_path / 'model.pth', epoch=3, value=float('nan'), low=-float('inf'))
    os.link(path, tmp_path / 'm.pth')

    def refuse(o):
        raise ValueError(o)

    def loaded(*args):
        return json.loads(told(*args, '--json')[1], parse_constant=refuse)

    shown = loaded('show', path)
    assert (shown['name'], shown['state'], shown['reason'], shown['same_as']) == (str(path), 'whole', None, None)
    assert (shown['size'], shown['time']) == (path.stat().st_size, shown['metadata']['time'])
    assert [shown['metadata'][o] for o in ('epoch', 'value', 'low', 'checksum')] == [
        3,
        None,
        None,
        read_metadata(path)['checksum'],
    ]
    assert loaded('verify', path) == [shown]
    assert loaded('ls', tmp_path) == [dict(shown, name='model.pth'), dict(shown, name='m.pth', same_as='model.pth')]


def test_json_tells_damage_too(told, tmp_path):
    stock(tmp_path / 'stock.pth').write_bytes(b'PK short')
    status, out, _ = told('ls', tmp_path, '--json')
    (found,) = json.loads(out)
    assert (
        status == 1
        and (found['state'], found['metadata']) == ('damaged', None)
        and found['reason'].startswith('it has 8 bytes')
    )


# -- wrong usage


@pytest.mark.parametrize('command', ['ls', 'verify', 'show'])
def test_a_missing_path_is_named_and_the_exit_status_is_2(command, told, tmp_path):
    status, out, err = told(command, tmp_path / 'no\x1b[31mne')
    assert (status, out) == (2, '') and "no\\x1b[31mne': No such file or directory" in err and '\x1b' not in err


def test_what_is_no_file_or_no_folder_is_refused(told, tmp_path):
    os.mkfifo(tmp_path / 'pipe')
    path = model(tmp_path, 1)
    for args, reason in (
        (('ls', path), 'is not a folder'),
        (('show', tmp_path), 'is not a file'),
        (('verify', path, tmp_path / 'pipe'), 'is not a file or a folder'),
    ):
        status, out, err = told(*args)
        assert (status, out) == (2, '') and reason in err


# -- odd names, odd metadata

HOSTILE = 'a\x1b[2J\x1b]0;owned\x07\n\r\u202e\x9b é.pth'


@pytest.mark.parametrize('command', ['ls', 'verify', 'show'])
def test_neither_a_name_nor_metadata_can_steer_the_terminal(command, told, tmp_path):
    name = os.fsdecode(os.fsencode(HOSTILE)[:-4] + b'\xff.pth')  # and no UTF-8
    path = tmp_path / name
    with_text(path, json.dumps({'epoch': HOSTILE, 'monitor': '\ud800', 'run': HOSTILE, HOSTILE: HOSTILE}).encode())
    status, out, _ = told(command, tmp_path if command == 'ls' else path)
    assert status == 0 and out.replace('\n', '').isprintable()
    assert repr(name)[1:-1] in out
    assert len(out.splitlines()) == dict(ls=2, verify=1, show=6)[command]
    assert json.loads(told(command, path.parent if command == 'ls' else path, '--json')[1])


def test_odd_characters_do_not_shift_the_columns(told, tmp_path):
    for name in 'plain', '\x1b\x1b\x1b':
        saved(tmp_path / f'{name}.pth', epoch=1)
    assert len({o.index('whole') for o in told('ls', tmp_path)[1].splitlines()[1:]}) == 1


def test_whatever_else_is_printed_is_escaped_too(capsys):
    files._print('is\x1b[31m a\nlie')
    assert capsys.readouterr().out == 'is\\x1b[31m a\\nlie\n'


def test_a_name_with_spaces_adds_no_columns(told, tmp_path):
    flip(saved(tmp_path / 'model.pth  3  whole' / 'x.pth'), 700)
    assert "'model.pth  3  whole/x.pth'  " in told('ls', tmp_path)[1]


@pytest.mark.parametrize(
    'meta',
    [
        dict(epoch='three', monitor=None, value=None, run=None, time=None),
        dict(epoch=[1, [2]], monitor={'a': 1}, value=float('nan'), run=7, time='now'),
        dict(epoch=10**400, monitor='m' * 3000, value=1e300, run='', time=float('nan')),
        dict(epoch=True, monitor='', value='0.1', run=[], time=1e300),
        dict(time=-float('inf')),
        dict(time=10**400),
        dict(time=-5),
        dict(time=1e10),
        dict(resume='x', n_epoch='a\n', epoch=2, batch=0, finished=False),
    ],
)
def test_metadata_of_odd_types_are_shown_as_they_are(meta, told, tmp_path):
    path = with_text(tmp_path / 'odd.pth', json.dumps(meta).encode())
    for args in (
        ('ls', tmp_path),
        ('verify', path),
        ('show', path),
        ('ls', tmp_path, '--json'),
        ('show', path, '--json'),
    ):
        assert told(*args)[0] == 0
    assert all(len(o) < 200 for o in told('ls', tmp_path)[1].splitlines())


@pytest.mark.parametrize(
    'text',
    [
        b'',
        b'7',
        b'null',
        b'"text"',
        b'\xff\xfe',
        b'{"a":',
        b'[]',
        b'[1]',
        b'[[1, 2]]',
        b'{"a":' + b'9' * 9999 + b'}',
        b'[' * 65000,
    ],
)
def test_metadata_that_are_none_make_a_damaged_file(text, told, tmp_path):
    path = with_text(tmp_path / 'odd.pth', text)
    for args in ('ls', tmp_path), ('verify', path), ('show', path), ('show', path, '--json'):
        assert told(*args)[0] == 1


def test_metadata_nested_to_any_depth_crash_nothing(told, tmp_path):
    for depth in [*range(700, 1001, 5), 5000, 30000]:
        path = with_text(tmp_path / 'deep.pth', b'{"epoch":' + b'[' * depth + b']' * depth + b'}')
        for args in ('ls', tmp_path), ('show', path), ('show', path, '--json'):
            assert told(*args)[0] in (0, 1)


def test_output_in_a_poor_encoding_is_escaped(tmp_path, monkeypatch):
    saved(tmp_path / 'modèle.pth')
    raw = io.BytesIO()
    monkeypatch.setattr(sys, 'stdout', io.TextIOWrapper(raw, 'ascii'))
    assert main(['ls', str(tmp_path)]) == 0
    assert b'mod\\xe8le.pth' in raw.getvalue()


@pytest.mark.parametrize(
    'n, text',
    [(0, '0 B'), (999, '999 B'), (1000, '1.0 kB'), (12_345_678, '12.3 MB'), (999_960, '1.0 MB'), (5e15, '5000.0 TB')],
)
def test_sizes_are_for_humans(n, text):
    assert format_size(n) == text


@pytest.mark.parametrize(
    'seconds, text', [(0, '0 s'), (59.9, '59 s'), (330, '5 min'), (3600, '1 h'), (3.9 * 86400, '3 d'), (-86400, '-1 d')]
)
def test_ages_are_for_humans(seconds, text):
    assert format_age(seconds) == text


# -- processes


def python(*args, **kwargs):
    return subprocess.Popen(
        [sys.executable, *map(str, args)], text=True, stderr=subprocess.PIPE, **{'stdout': subprocess.PIPE, **kwargs}
    )


def test_the_command_runs_as_a_program(tmp_path):
    flip(model(tmp_path, 1), 700)
    process = python('-m', 'fastai_ddp_callbacks.cli', 'verify', tmp_path)
    assert process.communicate(timeout=120) == (
        f"{tmp_path / 'model_1.pth'}: damaged: its bytes do not match its checksum\n",
        '',
    )
    assert process.returncode == 1


def test_a_reader_that_has_gone_leaves_no_traceback(tmp_path):
    model(tmp_path, 1)
    read, write = os.pipe()
    os.close(read)
    try:
        process = python('-m', 'fastai_ddp_callbacks.cli', 'ls', tmp_path, stdout=write)
    finally:
        os.close(write)
    assert process.communicate(timeout=120)[1] == '' and process.returncode == 141


@pytest.mark.parametrize('command', ['ls', 'verify', 'show'])
def test_output_that_cannot_be_written_is_told_in_one_line(tmp_path, command):
    path = model(tmp_path, 1)
    with open('/dev/full', 'w') as full:
        process = python(
            '-m', 'fastai_ddp_callbacks.cli', command, path if command == 'show' else tmp_path, stdout=full
        )
    assert (
        process.communicate(timeout=120)[1] == 'fastai-ddp: the output cannot be written: No space left on device\n'
        and process.returncode == 2
    )


def test_other_errors_of_the_system_are_not_taken_for_one_of_the_output(tmp_path, monkeypatch, told):
    def fails(*_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(files, '_examined', fails)
    with pytest.raises(OSError):
        told('ls', tmp_path)


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, 'w')


SPY = """
import os, sys, torch
from fastai_ddp_callbacks.cli import main
seen = []
sys.addaudithook(lambda event, args: seen.append(event) if event == 'pickle.find_class' else None)
folder = sys.argv[1]
for command in 'ls', 'verify':
    for more in [], ['--json']: main([command, folder, *more])
for name in 'ours', 'stock', 'bare':
    for more in [], ['--json']: main(['show', f'{folder}/{name}.pth', *more])
print('unpickled:', bool(seen))
print('executed:', os.path.exists(f'{folder}/executed'))
print('fastai:', any(o.partition('.')[0] in ('fastai', 'fastcore', 'IPython') for o in sys.modules))
torch.load(f'{folder}/stock.pth', weights_only=False)
print('unpickled by torch.load:', bool(seen))
"""


def test_nothing_is_unpickled_and_fastai_is_not_imported(tmp_path):
    marker = tmp_path / 'executed'
    torch.save({'w': Trap(str(marker))}, tmp_path / 'stock.pth')
    (tmp_path / 'bare.pth').write_bytes(pickle.dumps([Trap(str(marker)), 'x' * 100]))
    data, seal = (tmp_path / 'stock.pth').read_bytes(), checkpoint._FOOTER
    data = (
        data[:-2]
        + (2 + seal.size).to_bytes(2, 'little')
        + b'{}'
        + seal.pack(checkpoint._MAGIC, checkpoint.FORMAT, 2, b'')[:-16]
    )
    (tmp_path / 'ours.pth').write_bytes(data + xxhash.xxh3_128(data).digest())
    process = python('-c', SPY, tmp_path)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    # the last line: the trap works, for who falls into it
    assert (
        out.splitlines()[-4:]
        == ['unpickled: False', 'executed: False', 'fastai: False', 'unpickled by torch.load: True']
        and marker.exists()
    )


def test_ctrl_c_ends_quietly(tmp_path, monkeypatch, told):
    def interrupted(*_):
        raise KeyboardInterrupt

    path = model(tmp_path, 1)
    monkeypatch.setattr(files, 'verify_checkpoint', interrupted)
    assert told('verify', path) == (130, '', '')


def test_show_tells_where_a_fit_would_go_on(tmp_path, capsys):
    meta = dict(resume='resume', sequence=3, epoch=2, batch=0, n_iter=10, n_epoch=5, iteration=20, finished=False)
    write_checkpoint({'model': {}}, tmp_path / 'a.pth', meta)
    write_checkpoint({'model': {}}, tmp_path / 'b.pth', dict(meta, batch=4))
    write_checkpoint({'model': {}}, tmp_path / 'c.pth', dict(resume='resume'))
    for name, text in (('a', 'after 2 of 5 epochs'), ('b', 'after batch 4 of 10 in epoch 2'), ('c', 'does not say')):
        assert main(['show', str(tmp_path / f'{name}.pth')]) == 0 and text in capsys.readouterr().out

"""One checkpoint file, on real disks: killed, cut, flipped, without room, read while it is replaced, and by stock
fastai."""

import collections, ctypes, errno, os, random, re, resource, signal, stat, struct, sys, time, warnings, zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count

import numpy as np, pytest, torch
from fastai.callback.schedule import fit_one_cycle  # noqa: F401 (patches Learner)
from torch import nn

from fastai_ddp_callbacks import (
    CheckpointError,
    CheckpointWriteError,
    CorruptCheckpointError,
    MismatchedCheckpointError,
    load_model_state,
    model_state,
    read_checkpoint,
    read_metadata,
    verify_checkpoint,
    write_checkpoint,
)
from fastai_ddp_callbacks.checkpoint import hashing
from fastai_ddp_callbacks.checkpoint.state import to_builtin
from learners import digest, learner
from ranks import run, values
from seeds import SEED
from syscalls import traced

TEMPORARY = re.compile(r'\.model\.pth\.[0-9a-f]{8}-\d+-\d+-[0-9a-f]{16}\.writing')
NOISE = random.Random(SEED)  # where kills, cuts and flips fall


@pytest.fixture(autouse=True)
def the_same_noise():
    "Whatever ran before in this process."
    NOISE.seed(SEED)


def write_version(path, v, n=50_000):
    return write_checkpoint({'a': torch.full((n,), v), 'b': torch.full((9,), v)}, path, {'version': v})


def read_version(path):
    "The version in the file, which must be the same wherever one looks."
    state, meta = read_checkpoint(path)
    seen = {meta['version'], *state['a'].unique().tolist(), *state['b'].tolist()}
    assert len(seen) == 1, seen
    return seen.pop()


def small_model():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    "Of what is given to the system at once, so that a small file has many."
    monkeypatch.setattr(hashing, '_PIECE', 1 << 15)
    monkeypatch.setattr(hashing, '_PART', 1 << 16)


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'model.pth'


@pytest.fixture
def saved(path):
    "A small checkpoint of a model."
    write_checkpoint(model_state(small_model()), path, {'epoch': 3})
    return path


# -- killed


def fork(f):
    "A process that calls `f`; it does not outlive this one."
    pid = os.fork()
    if pid:
        return pid
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # when the parent dies
    try:
        f()
    finally:
        os._exit(1)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


KILLS = int(os.environ.get('KILLS', 100))  # more of them on request


@pytest.mark.begins_early
@pytest.mark.timeout(120 + KILLS)
def test_a_save_killed_at_any_moment_leaves_one_whole_version_and_the_next_save_tidies_up(path):
    def save_on(start, ack):
        "Saves version after version until it is killed; tells that it begins, and each version that is done."
        os.write(ack, struct.pack('<q', start - 1))
        for v in count(start):
            write_version(path, v)
            os.write(ack, struct.pack('<q', v))

    def scenario():
        times = [time.monotonic(), *((write_version(path, v), time.monotonic())[1] for v in range(9))]
        save, last, half = min(b - a for a, b in zip(times, times[1:])), 8, 0
        for i in range(KILLS):
            if gone := i % 10 == 9:
                path.unlink()  # the first save of all may be killed too
            r, w = os.pipe()
            pid = fork(lambda: save_on(last + 1, w))
            os.close(w)
            with open(r, 'rb') as f:
                f.read(8)
                time.sleep(NOISE.uniform(0, 4 * save))
                kill(pid)
                acks = [v for (v,) in struct.iter_unpack('<q', f.read())]
            left = [o for o in os.listdir(path.parent) if o != path.name]
            assert len(left) <= 1 and all(map(TEMPORARY.fullmatch, left)), left
            half += len(left)
            if acks:
                last, gone = acks[-1], False
            if not gone or path.exists():
                verify_checkpoint(path)
                assert read_version(path) in ((last + 1,) if gone else (last, last + 1))
            last += 2
            write_version(path, last)
            assert os.listdir(path.parent) == [path.name]
        return half

    (half,) = values(run(scenario, 1, group=False, timeout=60 + KILLS))
    assert half > KILLS // 20  # the kills did fall into saves


def test_a_save_removes_what_dead_writers_left_and_no_other_file(path):
    def beside():
        return {o for o in os.listdir(path.parent) if o != path.name}

    def scenario():
        pid = fork(lambda: [write_version(path, 1, 3_000_000) for _ in count()])
        while not (living := beside()):  # stop it in the middle of a save
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.002)
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)
        host, number, start = re.search(r'([0-9a-f]{8})-(\d+)-(\d+)-\w{16}\.writing$', *living).groups()

        def name(of='model.pth', host=host, pid=2**22 + 1, start=start, token='0123456789abcdef'):
            return f'.{of}.{host}-{pid}-{start}-{token}.writing'

        dead = {
            name(),
            name(of='other'),
            name(pid=number, start=int(start) - 1),
        }  # no such process; its number is another's by now
        ours, folder = name(pid=number), name(token='f' * 16)
        theirs = {
            name(host='0' * 8),
            name()[1:],
            name() + '.bak',
            name(token='x'),
            name(pid='x'),
            '.model.pth.writing',
            'last.pth',
        }
        for o in {*dead, *theirs, ours}:
            (path.parent / o).write_text('mine')
        (path.parent / folder).mkdir()
        write_version(path, 2)
        assert beside() == theirs | {folder, ours, *living}
        kill(pid)
        write_version(path, 3)
        assert beside() == theirs | {folder} and read_version(path) == 3

    values(run(scenario, 1, group=False))


# -- damaged


@contextmanager
def unchanged(model):
    before = digest(model)
    yield model
    assert digest(model) == before


def refused(path, model, error=CheckpointError):
    with pytest.raises(error, match=re.escape(str(path))) as e:
        load_model_state(model, read_checkpoint(path)[0], path)
    assert e.value.path == str(path)


def test_a_file_cut_at_any_length_is_refused_by_name(saved):
    whole = saved.read_bytes()
    with unchanged(small_model()) as model:
        for n in range(len(whole)):  # the end record, our footer and every class of length between are among them
            saved.write_bytes(whole[:n])
            refused(saved, model)
            with pytest.raises(CheckpointError, match='model.pth'):
                read_metadata(saved)
        saved.write_bytes(whole + b'\0')
        refused(saved, model)


def test_any_flipped_byte_is_refused_by_name(saved):
    whole = saved.read_bytes()
    with unchanged(small_model()) as model:
        for i in range(len(whole)):  # the magic of our footer is among them
            saved.write_bytes(whole[:i] + bytes([whole[i] ^ NOISE.randrange(1, 256)]) + whole[i + 1 :])
            refused(saved, model)
            with pytest.raises(CheckpointError, match='model.pth'):
                verify_checkpoint(saved)
    saved.write_bytes(whole)
    load_model_state(model, read_checkpoint(saved)[0])


def test_one_flipped_byte_or_a_cut_anywhere_in_a_large_file_is_refused(path):
    write_version(path, 1, 1_000_000)
    size = path.stat().st_size
    with open(path, 'r+b', buffering=0) as f, unchanged(small_model()) as model:
        for i in sorted(NOISE.sample(range(size), 300)):
            (byte,) = os.pread(f.fileno(), 1, i)
            os.pwrite(f.fileno(), bytes([byte ^ NOISE.randrange(1, 256)]), i)
            refused(path, model, CorruptCheckpointError)
            os.pwrite(f.fileno(), bytes([byte]), i)
        assert read_version(path) == 1
        for i in sorted(NOISE.sample(range(size), 50), reverse=True):
            f.truncate(i)
            refused(path, model)


def test_a_missing_file_and_a_folder_are_named(saved):
    with pytest.raises(CheckpointError, match='none.pth.*No such file'):
        read_checkpoint(saved.parent / 'none.pth')
    with pytest.raises(CheckpointError, match='directory'):
        read_checkpoint(saved.parent)


def test_another_file_than_the_one_that_is_meant_is_refused(path):
    mine = write_version(path, 1)['checksum']
    assert read_checkpoint(path, checksum=mine)[1]['checksum'] == mine
    write_version(path, 2)
    with pytest.raises(CheckpointError, match='model.pth.*something else'):
        read_checkpoint(path, checksum=mine)


# -- no room


@contextmanager
def largest_file(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield errno.EFBIG
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(folder, size):
    "A disk of so many bytes; where we may not mount one, no file may grow past as many. Gives the error to expect."
    libc, name = ctypes.CDLL(None), os.fsencode(folder)
    if libc.mount(b'tmpfs', name, b'tmpfs', 0, b'size=%d' % size):
        with largest_file(size // 2):
            yield errno.EFBIG
    else:
        try:
            yield errno.ENOSPC
        finally:
            assert libc.umount2(name, 2) == 0


def fails_to_write(path, expected, n):
    with pytest.raises(CheckpointWriteError, match=re.escape(str(path))) as e:
        write_version(path, 2, n)
    assert e.value.errno == expected and e.value.path == str(path)


def test_a_full_disk_is_told_by_file_and_leaves_the_old_checkpoint_and_nothing_else(tmp_path):
    with small_disk(tmp_path, 2 << 20) as expected:
        path = tmp_path / 'model.pth'
        write_version(path, 1)
        for n in (300_000, 420_000, 1_000_000):
            fails_to_write(path, expected, n)
            assert os.listdir(tmp_path) == ['model.pth'] and read_version(path) == 1
        fails_to_write(tmp_path / 'new.pth', expected, 1_000_000)
        write_version(path, 2)
        assert os.listdir(tmp_path) == ['model.pth'] and read_version(path) == 2


def test_a_write_error_at_any_byte_of_the_file_is_told_and_tidied_up(path):
    write_version(path, 1)
    size = path.stat().st_size
    for limit in (
        *range(0, 400, 7),
        *NOISE.sample(range(size), 30),
        *range(size - 900, size - 40, 9),
    ):  # the time of day takes a few bytes more or less
        with largest_file(limit) as expected:
            fails_to_write(path, expected, 50_000)
        assert os.listdir(path.parent) == ['model.pth']
    assert read_version(path) == 1


def test_a_place_that_cannot_be_written_is_told_by_name(tmp_path):
    (tmp_path / 'file').write_text('mine')
    (tmp_path / 'folder').mkdir()
    for o in (tmp_path / 'file/model.pth', tmp_path / 'folder'):
        with pytest.raises(CheckpointWriteError, match=re.escape(str(o))):
            write_version(o, 1)
    assert sorted(os.listdir(tmp_path)) == ['file', 'folder'] and not os.listdir(tmp_path / 'folder')


# -- what the system is asked for


def calls_of(f):
    (calls,) = values(run(lambda: traced(f), 1, group=False))
    return calls


def test_a_save_writes_each_byte_once_then_syncs_the_file_renames_it_and_syncs_the_folder(path):
    write_version(path, 1)
    calls = [o for o in calls_of(lambda: write_version(path, 2)) if str(path.parent) in ''.join(o.paths)]
    temporary = next(o.paths[0] for o in calls if o.paths[0] != str(path.parent))
    assert TEMPORARY.fullmatch(os.path.basename(temporary))
    on_disk = [(o.name, *o.paths) for o in calls if 'sync' in o.name or 'rename' in o.name or 'write' in o.name]
    first = on_disk.index(('fsync', temporary))
    assert {o[0] for o in on_disk[:first]} <= {'write', 'writev', 'pwrite64', 'sync_file_range'} and {
        o[1] for o in on_disk[:first]
    } == {temporary}
    assert on_disk[first:] == [('fsync', temporary), ('rename', temporary, str(path)), ('fsync', str(path.parent))]
    assert sum(o.result for o in calls if 'write' in o.name) == path.stat().st_size
    assert not any(
        o.name in ('read', 'pread64', 'mmap', 'sendfile', 'copy_file_range') for o in calls
    )  # nothing is read back


def written(monkeypatch, path, part=lambda memories: memories):
    """How many bytes each system call took of a save, which gives the system only `part` of the memories that it is
    given."""
    sizes, writev = [], os.writev
    with monkeypatch.context() as patch:
        patch.setattr(os, 'writev', lambda fd, memories: sizes.append(writev(fd, part(memories))) or sizes[-1])
        write_version(path, 1)
    assert read_version(path) == 1 and sum(sizes) == path.stat().st_size
    return sizes


def test_the_system_gets_pieces_of_one_size_however_large_or_small_the_tensors(monkeypatch, path):
    *pieces, end, checksum = written(monkeypatch, path)
    assert set(pieces) == {1 << 15} and end <= 1 << 15 and checksum == 16
    monkeypatch.undo()  # pieces as they are
    *pieces, end, checksum = written(monkeypatch, path)
    assert not pieces and end < 1 << 20


def test_a_system_that_takes_a_part_gets_the_rest(monkeypatch, path):
    assert len(written(monkeypatch, path, lambda memories: memories[:1])) > 12
    assert max(written(monkeypatch, path, lambda memories: [memories[0][:999]])) == 999


def test_a_new_checkpoint_takes_the_page_cache_of_the_old_one_part_by_part(monkeypatch, path):
    asked, advise = [], os.posix_fadvise

    def watched(fd, *args):
        asked.append((os.readlink(f'/proc/self/fd/{fd}'), *args))
        return advise(fd, *args)

    monkeypatch.setattr(os, 'posix_fadvise', watched)
    write_version(path, 1)
    assert not asked
    write_version(path, 2)
    starts = range(0, path.stat().st_size, 1 << 16)
    assert len(starts) > 2 and asked == [(str(path), o, 1 << 16, os.POSIX_FADV_DONTNEED) for o in starts]
    path.unlink()
    os.mkfifo(path)  # to open one waits for who writes into it
    write_version(path, 3)
    assert read_version(path) == 3


def test_who_reads_the_old_checkpoint_goes_on_reading_it(path):
    write_version(path, 1)
    state, _ = read_checkpoint(path)
    write_version(path, 2)
    assert state['a'].unique().tolist() == [1] and read_version(path) == 2


def all_kinds():
    big = torch.randn(50_000)
    return {
        'big': big,
        'part': big[9:99],
        'again': [big],
        'turned': torch.randn(3, 4).T,
        'param': nn.Parameter(torch.ones(2)),
        'none': torch.zeros(0),
        'one': torch.tensor(1.0),
        'sparse': torch.eye(3).to_sparse(),
        'rows': torch.eye(3).to_sparse_csr(),
        'plain': [1, 2.5, 'text', b'bytes', None, (True, torch.float16)],
        **{str(o): torch.ones(5, dtype=o) for o in (torch.bool, torch.bfloat16, torch.complex64, torch.int8)},
        'many': [torch.randn(i) for i in range(200)],
    }


@pytest.mark.parametrize(
    'make',
    [
        all_kinds,
        lambda: dict(all_kinds(), quantized=torch.quantize_per_tensor(torch.randn(9), 0.1, 3, torch.quint8)),
        dict,
    ],
    ids=['all', 'quantized', 'empty'],
)
def test_the_file_is_what_torch_saves_byte_for_byte_but_for_its_checksums_and_our_comment(path, make):
    state = make()
    write_checkpoint(state, path)
    torch.save(state, stock := path.with_name('archive.pth'))
    ours, theirs = zipfile.ZipFile(path), zipfile.ZipFile(stock)
    assert [(o.filename, o.header_offset, o.file_size) for o in ours.infolist()] == [
        (o.filename, o.header_offset, o.file_size) for o in theirs.infolist()
    ]
    with open(path, 'rb') as a, open(stock, 'rb') as b:
        for o in theirs.infolist():
            if o.filename.endswith('serialization_id'):
                continue  # made of the checksums
            start, n = o.header_offset + 30 + len(o.filename), o.file_size + 64
            for f in (a, b):
                f.seek(start)
            assert a.read(n)[:-64] == b.read(n)[:-64], o.filename


def test_metadata_are_read_without_the_weights(path):
    write_version(path, 1, 1_000_000)
    calls = calls_of(lambda: read_metadata(path))
    assert sum(o.result for o in calls if o.name in ('read', 'pread64') and o.paths == (str(path),)) < 1 << 17
    assert not any(o.name == 'mmap' and o.paths == (str(path),) for o in calls)


def test_a_new_file_has_the_mode_of_the_umask_and_a_replaced_one_keeps_its_own(path):
    before = os.umask(0o027)
    try:
        write_version(path, 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.chmod(0o604)
    write_version(path, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_save_to_a_link_replaces_what_it_points_to(tmp_path):
    (tmp_path / 'disk').mkdir()
    target, link = tmp_path / 'disk/model.pth', tmp_path / 'link.pth'
    link.symlink_to('disk/model.pth')
    for v in (1, 2):  # a dangling link, and one to a file
        write_version(link, v)
        assert link.is_symlink() and read_version(target) == v
    assert sorted(os.listdir(tmp_path)) == ['disk', 'link.pth'] and os.listdir(tmp_path / 'disk') == ['model.pth']


# -- together


def test_readers_get_one_whole_version_while_the_file_is_replaced_a_hundred_times(path):
    write_version(path, 0)

    def read_on():
        seen, done = [0], path.with_name('done')
        while not done.exists():
            seen.append(read_version(path))
            assert seen[-1] >= seen[-2]
        return len(set(seen))

    def scenario():
        if os.environ['RANK'] == '0':  # the one writer
            for v in range(1, 101):
                write_version(path, v)
            path.with_name('done').touch()
            return
        return in_threads(2, lambda _: read_on())

    for seen in values(run(scenario, 3, group=False))[1:]:
        assert len(seen) == 2 and min(seen) > 3


def in_threads(n, f):
    "Calls `f(i)` in n threads that take turns as often as can be; raises what they raised."
    sys.setswitchinterval(1e-6)
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(f, range(n)))


def test_saves_in_several_threads_disturb_neither_each_other_nor_those_of_torch(tmp_path):
    def save(i):
        for v in range(50):
            if i:
                write_version(tmp_path / f'{i}.pth', v, 99)
            else:
                torch.save({'a': torch.full((99,), v)}, tmp_path / '0.pth')
            assert torch.load(tmp_path / f'{i}.pth')['a'].tolist() == [v] * 99

    in_threads(4, save)


def test_loads_in_several_threads_allow_what_they_need_and_forget_nothing_that_the_user_allowed(tmp_path):
    torch.save({'opt': [np.float64(i) for i in range(200)]}, path := tmp_path / 'stock.pth')

    def scenario():
        warnings.simplefilter('ignore')  # that it cannot be verified
        torch.serialization.add_safe_globals([np.dtype, collections.Counter])
        before = set(torch.serialization.get_safe_globals())
        in_threads(4, lambda _: [read_checkpoint(path)[0]['opt'][7] for _ in range(50)])
        return set(torch.serialization.get_safe_globals()) == before

    assert values(run(scenario, 1, group=False)) == [True]


# -- models


def test_weights_go_from_any_wrapper_to_any_other_under_plain_names(tmp_path):
    def scenario():
        wrapped = dict(
            plain=lambda m: m,
            ddp=nn.parallel.DistributedDataParallel,
            parallel=nn.DataParallel,
            compiled=torch.compile,
            ddp_of_compiled=lambda m: nn.parallel.DistributedDataParallel(torch.compile(m)),
            part=lambda m: nn.Sequential(torch.compile(m[0]), m[1]),
            compiled_ddp=lambda m: torch.compile(nn.parallel.DistributedDataParallel(m)),
        )
        for name, wrap in wrapped.items():
            torch.manual_seed(len(name))
            source = wrap(small_model())
            write_checkpoint(model_state(source), path := tmp_path / f'{name}.pth')
            state = read_checkpoint(path)[0]
            assert list(state) == list(small_model().state_dict()), name
            for to in wrapped.values():
                for o in (state, source.state_dict()):  # a file of stock torch may have the wrapper's names
                    load_model_state(target := to(small_model()), o, path)
                    assert digest(target) == digest(source)

    values(run(scenario, 1))


def test_a_file_that_does_not_fit_names_the_first_keys_and_leaves_the_model_as_it_was(saved):
    state = read_checkpoint(saved)[0]
    for o, said in (
        (nn.Sequential(nn.Linear(3, 2)), r'not in the model: 1\.weight, 1\.bias, 1\.running_mean and 2 more'),
        (nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1)), r'missing: 2\.weight, 2\.bias'),
        (
            nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)),
            r'0\.weight \(\(2, 3\) in the file, \(2, 4\) in the model\)',
        ),
    ):
        with unchanged(o), pytest.raises(MismatchedCheckpointError, match=f'model.pth.*{said}') as e:
            load_model_state(o, state, saved)
        assert e.value.path == str(saved)


def test_a_stock_file_with_its_optimizer_loads_and_says_that_it_cannot_be_verified(tmp_path):
    learn = learner(tmp_path)
    learn.fit_one_cycle(1)
    path = learn.save('x', with_opt=True)
    assert verify_checkpoint(path) is None and read_metadata(path) is None
    with pytest.warns(UserWarning, match='x.pth.*without verification'):
        state, meta = read_checkpoint(path)
    assert meta is None
    other = learner(tmp_path)
    load_model_state(other.model, state['model'], path)
    other.create_opt()
    other.opt.load_state_dict(state['opt'])
    assert digest(other.model) == digest(learn.model)
    assert [o['grad_avg'].tolist() for o in other.opt.state_dict()['state']] == [
        o['grad_avg'].tolist() for o in learn.opt.state_dict()['state']
    ]
    path.write_bytes(path.read_bytes()[:-1])
    refused(path, other.model)


def test_a_checkpoint_with_an_optimizer_is_one_that_stock_fastai_loads(tmp_path):
    learn, other = learner(tmp_path), learner(tmp_path)
    learn.fit_one_cycle(1)
    path = tmp_path / 'models/x.pth'
    write_checkpoint({'model': model_state(learn.model), 'opt': to_builtin(learn.opt.state_dict())}, path)
    assert torch.load(path, weights_only=True).keys() == {'model', 'opt'}
    other.create_opt()
    other.load('x', with_opt=True)
    assert digest(other.model) == digest(learn.model) and other.opt.hypers[0]['lr'] == learn.opt.hypers[0]['lr']

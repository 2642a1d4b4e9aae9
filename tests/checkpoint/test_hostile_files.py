"""Files made to harm who reads them: planted code, bombs, lies, and thousands of mutations. Nothing runs, memory
stays small, errors are ours."""

import functools, os, pickle, re, resource, signal, struct, subprocess, sys, warnings, zipfile
from collections import defaultdict, namedtuple

import numpy as np, pytest, torch, xxhash
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from fastai_ddp_callbacks import (
    CheckpointError,
    CorruptCheckpointError,
    MismatchedCheckpointError,
    NewerCheckpointError,
    UnsafeCheckpointError,
    load_model_state,
    model_state,
    read_checkpoint,
    read_metadata,
    verify_checkpoint,
    write_checkpoint,
)
from learners import digest
from ranks import run, values


@pytest.fixture
def path(tmp_path):
    return tmp_path / 'model.pth'


def small_model():
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def stock(path, state, **kwargs):
    torch.save(state, path, **kwargs)
    return path


def seal(path, meta=b'{}', version=1):
    "End any zip file as this package ends its own: the format, written down a second time."
    body = (
        path.read_bytes()[:-2]
        + struct.pack('<H', len(meta) + 28)
        + meta
        + struct.pack('<8sHH', b'fastaiDC', version, len(meta))
    )
    path.write_bytes(body + xxhash.xxh3_128_digest(body))


def read_quietly(path, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # that it cannot be verified
        return read_checkpoint(path, **kwargs)[0]


# -- planted code


class Calls:
    "Pickles as a call of `f`, which is made when it is loaded without care."

    def __init__(self, f, *args):
        self.call = f, args

    def __reduce__(self):
        return self.call


SHELL = Calls(os.system, 'touch ran')
Pair = namedtuple('Pair', 'a b')
PLANTED = dict(
    bare=SHELL,
    nested={'model': {'weight': torch.zeros(2)}, 'opt': {'state': [{'x': (1, [SHELL])}]}},
    key={SHELL: 1},
    evaluated=Calls(eval, 'open("ran", "w")'),
    process=Calls(subprocess.Popen, ['touch', 'ran']),
    partial=Calls(functools.partial(os.system, 'touch ran')),
    opened=Calls(open, 'ran', 'w'),
    numpy=Calls(np.save, 'ran', 1),
    another_file=Calls(functools.partial(torch.load, 'planted', weights_only=False)),
    module=nn.Linear(1, 1),
)


@pytest.mark.parametrize('name', PLANTED)
@pytest.mark.parametrize('form', ['stock', 'sealed', 'old', 'pickle'])
def test_planted_code_is_refused_and_never_runs(path, monkeypatch, name, form):
    monkeypatch.chdir(path.parent)
    torch.save(SHELL, 'planted')
    if form == 'pickle':
        path.write_bytes(pickle.dumps(PLANTED[name]))
    else:
        stock(path, PLANTED[name], _use_new_zipfile_serialization=form != 'old')
    if form == 'sealed':
        seal(path)
    with pytest.raises(UnsafeCheckpointError, match=re.escape(str(path))):
        read_quietly(path)
    assert not os.path.exists('ran')


@pytest.mark.parametrize(
    'o',
    [
        nn.Linear(1, 1),
        {'model': {'x': [np.float32(1)]}},
        {'opt': (1, {2: SHELL})},
        {SHELL: 1},
        [signal.SIGINT],
        defaultdict(list),
        Pair(1, 2),
        b'',
        1 << 2040,
    ],
    ids=lambda o: type(o).__name__,
)
def test_what_would_be_refused_when_read_is_not_written(path, o):
    write_checkpoint({'x': 1}, path)
    with pytest.raises(UnsafeCheckpointError, match='model.pth'):
        write_checkpoint(o, path)
    assert read_checkpoint(path)[0] == {'x': 1} and os.listdir(path.parent) == ['model.pth']


PLAIN = [
    b'\xff\0',
    '',
    '\ud800',
    (1 << 2031) - 1,
    -(1 << 64),
    1j,
    1e-300,
    float('inf'),
    True,
    None,
    (),
    [],
    {},
    (1, (2, [3])),
    {(1, 2): {None: 'a'}},
    torch.float16,
    torch.device('cuda:1'),
    torch.Size([2]),
    [[[[]]]],
]


def test_plain_values_come_back_as_they_were(path):
    write_checkpoint(PLAIN, path)
    assert repr(read_checkpoint(path)[0]) == repr(PLAIN)


# -- bombs


def megabytes(start, unit, end, n=1200):
    return [start, *[unit * ((1 << 20) // len(unit))] * n, end]


def repack(path, packed='', pkl=None, data=None):
    "Other contents for the pickle or a tensor of an archive, as lists of bytes; deflated, where `packed` says so."
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_name('new'), 'w', compresslevel=1) as new:
        for name in old.namelist():
            kind = 'pkl' if name.endswith('data.pkl') else 'data' if name.endswith('data/1') else ''
            new.compression = zipfile.ZIP_DEFLATED if kind and kind == packed else zipfile.ZIP_STORED
            with new.open(name, 'w', force_zip64=True) as f:
                for part in {'pkl': pkl, 'data': data}.get(kind) or [old.read(name)]:
                    f.write(part)
    os.replace(path.with_name('new'), path)


def listed(whole):
    "Where an archive's list of contents tells of each part."
    at = [m.start() for m in re.finditer(b'PK\1\2', whole)]
    return {
        bytes(whole[i + 46 : i + 46 + struct.unpack_from('<H', whole, i + 28)[0]]).split(b'/', 1)[1].decode(): i
        for i in at
    }


def lying_sizes(path):
    whole = bytearray(path.read_bytes())
    struct.pack_into('<II', whole, listed(whole)['data/1'] + 20, 1 << 31, 1 << 31)
    path.write_bytes(whole)


def two_lists(path, zip64):
    """A packed pickle in the list that the offsets tell, an innocent list right before the end record: readers
    differ in which they take."""
    repack(path, 'pkl', pkl=megabytes(b'\x80\x02', b'N0', b'N.', 400))
    whole = bytearray(path.read_bytes())
    start, end, n = min(listed(whole).values()), whole.rindex(b'PK\5\6'), len(listed(whole))
    innocent = bytearray(whole[start:end])
    for i in listed(innocent).values():
        struct.pack_into('<H', innocent, i + 10, 0), struct.pack_into('<II', innocent, i + 20, 1, 1)

    def end64(offset):
        return struct.pack('<4sQHHIIQQQQ', b'PK\6\6', 44, 45, 45, 0, 0, n, n, len(innocent), offset)

    if zip64:
        tail = (
            end64(start)
            + innocent
            + end64(end + 56)
            + struct.pack('<4sIQI', b'PK\6\7', 0, end, 1)
            + struct.pack('<4sHHHHIIH', b'PK\5\6', 0, 0, n, n, 2**32 - 1, 2**32 - 1, 0)
        )
    else:
        tail = innocent + whole[end:]
    path.write_bytes(whole[:end] + tail)


def replace(path, *pairs):
    data = path.read_bytes()
    for a, b in pairs:
        assert a in data
        data = data.replace(a, b)
    path.write_bytes(data)


N, HUGE = 123456, 1 << 30
BOMBS = dict(
    pickle=lambda o: repack(o, 'pkl', pkl=megabytes(b'\x80\x02', b'N0', b'N.')),
    tensor=lambda o: repack(o, 'data', data=megabytes(b'', b'\0', b'')),
    lying_sizes=lying_sizes,
    two_lists=lambda o: two_lists(o, False),
    two_lists_zip64=lambda o: two_lists(o, True),
    bytearray=lambda o: stock(o, {'bias': Calls(bytearray, 1 << 31)}),
    number=lambda o: stock(o, {'bias': Calls(np._core.multiarray.scalar, Calls(np.dtype, 'V2000000000'))}),
    stride_0=lambda o: stock(o, {'weight': torch.zeros(1, 1), 'bias': torch.zeros(1).expand(1 << 40)}),
    larger_than_its_bytes=lambda o: replace(o, (struct.pack('<i', N), struct.pack('<i', HUGE))),
    empty_storage=lambda o: stock(o, {'bias': Calls(torch.FloatStorage, 1 << 29)}),
    depth=lambda o: repack(o, pkl=[b'\x80\x02}X\4\0\0\0bias' + b'N' + b'\x85' * 10**6 + b's.']),
    marks=lambda o: o.write_bytes(b'\x80\x02' + b'(' * (1 << 20) + b'.'),
    long_text=lambda o: o.write_bytes(b'\x80\x02X\xff\xff\xff\xff' + b'x' * 100),
    long_bytes=lambda o: o.write_bytes(b'\x80\x02\x8e' + struct.pack('<Q', 1 << 40) + b'x' * 100),
    old_form=lambda o: replace(
        stock(o, {'bias': torch.zeros(N)}, _use_new_zipfile_serialization=False),
        (struct.pack('<q', N), struct.pack('<q', HUGE)),
        (struct.pack('<i', N), struct.pack('<i', HUGE)),
    ),
)


@pytest.mark.parametrize('name', BOMBS)
def test_a_file_that_unpacks_to_gigabytes_is_refused_in_little_memory(path, name):
    BOMBS[name](stock(path, {'weight': torch.zeros(1, 1), 'bias': torch.zeros(N)}))

    def scenario():
        "By how many MB the peak of memory grows when the file is read, and what is said."
        with open('/proc/self/statm') as f:
            pages = int(f.read().split()[0])
        resource.setrlimit(
            resource.RLIMIT_AS, (pages * resource.getpagesize() + (3 << 30),) * 2
        )  # if this goes wrong, the machine is to live on
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(CheckpointError) as e:
            load_model_state(nn.Linear(1, 1), read_quietly(path), path)
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, str(e.value)

    ((grew, said),) = values(run(scenario, 1, group=False))
    assert grew < 300 and str(path) in said


# -- lies


@pytest.mark.parametrize(
    'meta',
    [b'[', b'[1]', b'\xff', b'[' * 60_000, b'{"a":' * 10_000, b'9' * 60_000, b'null', b'""'],
    ids=lambda o: repr(o[:5]),
)
def test_metadata_that_are_none_are_refused(path, meta):
    seal(stock(path, {}), meta)
    for f in (read_checkpoint, verify_checkpoint, read_metadata):
        with pytest.raises(CorruptCheckpointError, match='model.pth'):
            f(path)


def test_a_newer_format_says_so(path):
    seal(stock(path, {}), version=2)
    for f in (read_checkpoint, verify_checkpoint, read_metadata):
        with pytest.raises(NewerCheckpointError, match='model.pth.*format 2.*update'):
            f(path)


def test_a_file_sealed_by_the_written_down_format_is_one_of_ours(path):
    seal(stock(path, {'x': torch.ones(2)}), b'{"epoch": 3}')
    state, meta = read_checkpoint(path)
    assert state['x'].tolist() == [1, 1] and meta['epoch'] == 3


@pytest.mark.parametrize('state', [None, [1], 3, torch.zeros(2), 'weight', {1: torch.zeros(2)}], ids=repr)
def test_what_is_no_state_of_a_model_does_not_fit(state):
    with pytest.raises(MismatchedCheckpointError, match='x.pth'):
        load_model_state(small_model(), state, 'x.pth')


ODD = dict(
    text=lambda: 'x',
    none=lambda: None,
    list=lambda: [1.0, 2.0],
    number=lambda: 1.0,
    meta=lambda: torch.zeros(2, device='meta'),
    sparse=lambda: torch.zeros(2).to_sparse(),
    complex=lambda: torch.zeros(2, dtype=torch.complex64),
)


@pytest.mark.parametrize('name', ODD)
def test_a_value_that_is_no_plain_tensor_does_not_fit_and_changes_nothing(name):
    model = small_model()
    before, state = digest(model), dict(model_state(small_model()), **{'1.running_var': ODD[name]()})
    with pytest.raises(MismatchedCheckpointError, match=r'x.pth.*1\.running_var'):
        load_model_state(model, state, 'x.pth')
    assert digest(model) == before


# -- mutations

SPIED = {
    'os.system',
    'os.exec',
    'os.posix_spawn',
    'os.fork',
    'subprocess.Popen',
    'pickle.find_class',
    'os.remove',
    'os.rename',
}


def fuzz(path, times, verify):
    "Mutated files, most of them in the pickle; in a process of their own, so that a crash of it is seen as one."

    def scenario():
        whole, noticed, mutated = path.read_bytes(), [], path.with_name('mutated.pth')
        sys.addaudithook(lambda event, _: noticed.append(event) if event in SPIED else None)
        pickled = whole.index(b'\x80\x02')
        place = st.integers(0, len(whole) - 1) | st.integers(pickled, min(pickled + 500, len(whole) - 1))
        edit = st.tuples(place, st.just(1), st.binary(min_size=1, max_size=1)) | st.tuples(
            place, st.integers(0, 9), st.binary(max_size=9)
        )

        @settings(
            max_examples=times, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
        )
        @given(st.lists(edit, min_size=1, max_size=4))
        def read(edits):
            data = whole
            for at, gone, new in edits:
                data = data[:at] + new + data[at + gone :]
            if data == whole:
                return
            mutated.write_bytes(data)
            noticed.clear()
            try:
                load_model_state(small_model(), read_quietly(mutated, verify=verify), mutated)
            except CheckpointError as e:
                assert str(mutated) in str(e)
            else:
                assert not verify  # numbers may differ, where no checksum is compared
            assert not noticed

        read()

    values(run(scenario, 1, group=False, timeout=120))


TIMES = int(os.environ.get('FUZZ', 400))  # more of them on request


def test_no_mutation_of_a_checkpoint_is_ever_loaded(path):
    write_checkpoint(model_state(small_model()), path)
    fuzz(path, TIMES, verify=True)


def test_a_mutated_checkpoint_read_unverified_runs_nothing_and_raises_our_errors_only(path):
    write_checkpoint(model_state(small_model()), path)
    fuzz(path, TIMES, verify=False)


@pytest.mark.parametrize('new_form', [True, False])
def test_a_mutated_file_of_torch_runs_nothing_and_raises_our_errors_only(path, new_form):
    fuzz(stock(path, model_state(small_model()), _use_new_zipfile_serialization=new_form), TIMES, verify=False)

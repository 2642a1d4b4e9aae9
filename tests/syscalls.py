"""What a function asks of the system, call by call, seen from outside: `traced(f)` runs `f()` in a forked process under
ptrace and returns its calls on files in order. Linux on x86_64 or arm64."""

from __future__ import annotations
import ctypes, os, platform, signal, traceback
from dataclasses import dataclass

_X86 = dict(
    read=0,
    write=1,
    mmap=9,
    pread64=17,
    writev=20,
    pwrite64=18,
    sendfile=40,
    fsync=74,
    fdatasync=75,
    ftruncate=77,
    rename=82,
    link=86,
    unlink=87,
    fchmod=91,
    openat=257,
    unlinkat=263,
    renameat=264,
    linkat=265,
    sync_file_range=277,
    pwritev=296,
    renameat2=316,
    copy_file_range=326,
)
_ARM = dict(
    unlinkat=35,
    linkat=37,
    renameat=38,
    ftruncate=46,
    fchmod=52,
    openat=56,
    read=63,
    write=64,
    writev=66,
    pread64=67,
    pwrite64=68,
    pwritev=70,
    sendfile=71,
    fsync=82,
    fdatasync=83,
    sync_file_range=84,
    mmap=222,
    renameat2=276,
    copy_file_range=285,
)
_CALLS = {v: k for k, v in (_X86 if platform.machine() == 'x86_64' else _ARM).items()}
_PATHS = dict(
    rename=(0, 1),
    link=(0, 1),
    unlink=(0,),
    openat=(1,),
    unlinkat=(1,),
    renameat=(1, 3),
    linkat=(1, 3),
    renameat2=(1, 3),
)  # which arguments
_TRACEME, _SYSCALL, _SETOPTIONS, _SYSCALL_INFO = 0, 24, 0x4200, 0x420E
_SYSGOOD, _EXITKILL = 1, 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes, _libc.ptrace.restype = (
    [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p],
    ctypes.c_long,
)


class _Info(ctypes.Structure):
    "What the kernel tells of a call: on entry (op 1) its number and arguments, on exit (op 2) `nr` is the result."

    _fields_ = [
        ('op', ctypes.c_uint8),
        ('arch', ctypes.c_uint32),
        ('ip', ctypes.c_uint64),
        ('sp', ctypes.c_uint64),
        ('nr', ctypes.c_int64),
        ('args', ctypes.c_uint64 * 6),
    ]


@dataclass
class Call:
    "One call: `paths` are the files it names, or the one that its descriptor stands for."

    name: str
    paths: tuple
    result: int | None = None


def _ptrace(request, pid, addr=None, data=None):
    if _libc.ptrace(request, pid, addr, data) < 0:
        raise OSError(ctypes.get_errno(), f'ptrace: {os.strerror(ctypes.get_errno())}')


def _text(pid, address):
    with open(f'/proc/{pid}/mem', 'rb', buffering=0) as f:
        f.seek(address)
        return os.fsdecode(f.read(4096).split(b'\0')[0])  # what is mapped of it


def _descriptor(pid, fd):
    try:
        return os.readlink(f'/proc/{pid}/fd/{fd}')
    except FileNotFoundError:
        return ''  # memory without a file


def _call(pid, info):
    name, args = _CALLS[info.nr], [ctypes.c_int(o).value for o in info.args]
    return Call(
        name,
        tuple(_text(pid, info.args[i]) for i in _PATHS[name])
        if name in _PATHS
        else (_descriptor(pid, args[4 if name == 'mmap' else 0]),),
    )


def _child(f):
    try:
        _ptrace(_TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        f()
    except BaseException:
        traceback.print_exc()
    else:
        os._exit(0)
    os._exit(1)


def traced(
    f,  # called without arguments
):  # list of `Call`
    pid = os.fork()
    if not pid:
        _child(f)
    calls, now = [], None
    for info in _stops(pid):
        if info.op == 1 and info.nr in _CALLS:
            calls.append(now := _call(pid, info))
        elif info.op == 2 and now:
            now.result, now = info.nr, None
    return calls


def _stops(pid):
    "What the kernel tells at the entry and the exit of each call, while the process stands still."
    info = _Info()
    os.waitpid(pid, 0)
    _ptrace(_SETOPTIONS, pid, None, _SYSGOOD | _EXITKILL)
    sent = 0
    while True:
        _ptrace(_SYSCALL, pid, None, sent)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            break
        sent = 0 if os.WSTOPSIG(status) == signal.SIGTRAP | 0x80 else os.WSTOPSIG(status)
        if not sent:
            _ptrace(_SYSCALL_INFO, pid, ctypes.sizeof(info), ctypes.addressof(info))
            yield info
    assert status == 0, f'the traced process ended with status {status}'


# -- calls that fail

_CHANGING = dict(_X86, mkdir=83, utimensat=280, flock=73)  # what changes a disk, and `openat` if it makes a file
for _name in 'read', 'mmap', 'pread64', 'sync_file_range', 'flock':
    _CHANGING.pop(_name)
_POKEUSER, _RAX, _RDX, _ORIG_RAX = 6, 80, 96, 120  # offsets of registers, x86_64
_CREATES = os.O_CREAT | os.O_TRUNC


def can_fail() -> bool:
    return platform.machine() == 'x86_64'


def failing(
    f,  # called without arguments in a forked process
    folder,  # calls that change something in here count
    at,  # the number of the call that fails, from 0
    error,  # errno; None for a call that writes a part of what it is given, and reports that
):  # the `Call` that failed; None if there were fewer
    pid = os.fork()
    if not pid:
        _child(f)
    numbers = {v: k for k, v in _CHANGING.items()}
    seen, failed, pending = 0, None, False
    for info in _stops(pid):
        if info.op == 2 and pending:
            pending = False
            _ptrace(_POKEUSER, pid, _RAX, -error)
        if info.op != 1 or failed or info.nr not in numbers:
            continue
        call = _named(pid, info, numbers[info.nr])
        if call is None or not any(path.startswith(str(folder)) for path in call.paths):
            continue
        if seen == at:
            failed = call
            if error is None:
                if call.name in ('write', 'writev', 'pwrite64') and info.args[2] > 1:
                    _ptrace(_POKEUSER, pid, _RDX, info.args[2] // 2)
            else:
                pending = True
                _ptrace(_POKEUSER, pid, _ORIG_RAX, -1)
        seen += 1
    return failed


def _named(pid, info, name):
    "The call with the files it names; None if it changes nothing."
    if name == 'openat' and not info.args[2] & _CREATES:
        return None
    if name == 'mkdir':
        return Call(name, (_text(pid, info.args[0]),))
    if name == 'utimensat':
        return Call(name, (_text(pid, info.args[1]) if info.args[1] else '',))
    return _call(pid, info)

"The commands that look at files of checkpoints: `ls`, `verify`, `show`. They read bytes and metadata, and unpickle nothing."

from __future__ import annotations
import argparse, json, os, stat, sys, time
from contextlib import suppress

from ..checkpoint.file import read_metadata, verify_checkpoint
from ..errors import CheckpointError, CorruptCheckpointError, NewerCheckpointError
from ..training.resume_files import progress

__all__ = ['ls_arguments', 'ls', 'verify_arguments', 'verify', 'show_arguments', 'show']


# -- the commands


def ls_arguments(parser):
    _arguments(parser, 'dir', _folder, 'folder to look in, with the folders in it')


def verify_arguments(parser):
    _arguments(parser, 'path', _file_or_folder, 'file, or folder with files', nargs='+')


def show_arguments(parser):
    _arguments(parser, 'path', _file, 'file to look at')


def ls(args) -> int:
    "A table of the checkpoints in a folder, oldest first; gives the exit status."
    found = sorted(_examined(_inside(args.dir), lambda o: os.path.relpath(o, args.dir)), key=lambda o: o['time'])
    if args.json:
        _print_json(found)
    elif found:
        _print_table([_COLUMNS, *map(_row, found)])
    else:
        _print(_NONE.format(_word(args.dir)))
    return _status(found)


def verify(args) -> int:
    "A line for each file, as soon as it is read; gives the exit status."
    files, found = {}, []
    for path in args.path:
        inside = _inside(path) if os.path.isdir(path) else {path: None}
        if not inside and not args.json:
            _print(_NONE.format(_word(path)))
        files.update(inside)
    for o in _examined(files, named=args.path):
        found.append(o)
        if not args.json:
            _print(f"{_word(o['name'])}: {_state(o)}")
    if args.json:
        _print_json(found)
    if not found:
        print('Nothing has been verified.', file=sys.stderr)
    return _status(found) if found else 1


def show(args) -> int:
    "What a file says of itself; gives the exit status."
    (o,) = _examined({args.path: None}, named=[args.path])
    if args.json:
        _print_json(o)
    else:
        _print(f"{_word(o['name'])}: {_state(o)}, {_size(o['size'])}")
        meta = o['metadata'] or {}  # a step to the right of the state, which only we may tell
        if meta.get('resume') and o['state'] == 'whole':
            _print(f'  a fit goes on with it after {_progress(meta)}')
        if not meta:
            _print('  no metadata' + (': this package did not write it' if o['state'] == 'no checksum' else ''))
        width = min(max((len(_word(k)) for k in meta), default=0), 20)
        for k, v in meta.items():
            _print(f'  {_word(k):<{width}}  {_clock(v) if k == "time" and _is_time(v) else _word(v)}')
    return _status([o])


def _progress(meta):
    told = all(type(meta.get(k)) is int for k in ('epoch', 'n_epoch', 'batch', 'n_iter')) and 'finished' in meta
    return progress(meta) if told else 'a moment that it does not say'


_NONE = 'No checkpoints (*.pth) in {}.'


def _status(found):
    return 0 if all(o['state'] in ('whole', 'no checksum') for o in found) else 1


# -- looking


def _inside(folder):
    "{path: None} of the checkpoints in a folder, and {path: error} of the folders in it that cannot be read; oldest first."
    files = {}
    for root, _, names in os.walk(folder, onerror=lambda e: files.update({e.filename: e})):
        files.update({os.path.join(root, o): None for o in names if o.endswith('.pth')})
    stats = {o: _stat(o) for o in files}

    def order(o):  # of several names for one file, the most telling first
        return (stats[o].st_mtime if stats[o] else 0, os.path.islink(o), -len(os.path.basename(o)), o)

    def may_be_read(o):
        return (
            files[o] or not stats[o] or stat.S_IFMT(stats[o].st_mode) in (stat.S_IFREG, stat.S_IFLNK)
        )  # a pipe would block

    return {o: files[o] for o in sorted(files, key=order) if may_be_read(o)}


def _stat(path):
    "Of the file, or of a link to nowhere; None if there is neither, and the reason is told when it is opened."
    with suppress(OSError):
        return os.stat(path)
    with suppress(OSError):
        return os.lstat(path)


def _examined(
    files,  # {path: None, or the error that there was}
    name=str,  # of a path, for the reader
    named=(),  # paths that were asked for; another one that is gone by now was deleted by a running job, and is left out
):
    "What there is to say about each file, in turn. A file with several names is read once."
    stats = {o: _stat(o) for o in files}
    ids = {o: (s.st_dev, s.st_ino) if s else o for o, s in stats.items()}
    bar, first = _Bar(sum({ids[o]: s.st_size for o, s in stats.items() if s}.values())), {}
    for path, error in files.items():
        if ids[path] in first:
            yield dict(first[ids[path]], name=name(path), same_as=first[ids[path]]['name'])
        elif seen := ('unreadable', error.strerror, None) if error else _examine(path, bar, path in named):
            size, mtime = (stats[path].st_size, stats[path].st_mtime) if stats[path] else (0, 0)
            bar.end(size)
            state, reason, meta = seen
            when = meta['time'] if meta and _is_time(meta.get('time')) else mtime
            first[ids[path]] = dict(
                name=name(path), state=state, reason=reason, same_as=None, size=size, time=when, metadata=meta
            )
            yield first[ids[path]]


def _examine(path, progress, needed):
    "(state, reason, metadata) of a file; None if it is gone and not needed."
    meta = None
    try:
        meta = read_metadata(path)  # a damaged file may have them too
        meta = verify_checkpoint(path, progress)  # those of the very file that was verified
        json.dumps([[[meta]]])  # deeper than any use of them here
        return 'no checksum' if meta is None else 'whole', None, meta
    except RecursionError:
        return 'damaged', 'its metadata are nested too deeply', None
    except (CheckpointError, OSError) as e:
        if not needed and isinstance(e.__cause__ or e, FileNotFoundError) and not os.path.lexists(path):
            return None
        text = str(e).removeprefix(f'{path} ').removeprefix('is ').split('. ')[0].rstrip('.')
        if isinstance(e, NewerCheckpointError):
            return 'newer or damaged', text.split(':')[0], meta
        return 'damaged' if isinstance(e, CorruptCheckpointError) else 'unreadable', text.split(': ', 1)[-1], meta


# -- what the reader gets

_COLUMNS = ('name', 'epoch', 'monitor', 'value', 'size', 'age', 'run', 'state')


def _row(o):
    meta = o['metadata'] or {}
    return (
        _word(o['name']),
        *(_word(meta.get(k), 24) for k in _COLUMNS[1:4]),
        _size(o['size']),
        _age(time.time() - o['time']),
        _word(meta['run'][:8] if isinstance(meta.get('run'), str) else meta.get('run'), 8),
        _state(o),
    )


def _print_table(rows):
    widths = [max(map(len, o)) for o in zip(*rows)]
    for row in rows:
        _print('  '.join(f'{o:{"><"[k not in ("size", "age")]}{w}}' for k, o, w in zip(_COLUMNS, row, widths)).rstrip())


def _state(o):
    return (
        o['state']
        + (f": {o['reason']}" if o['reason'] else '')
        + (f" (= {_word(o['same_as'])})" if o['same_as'] else '')
    )


def _word(o, limit=None):
    "One word of a line, whatever it is: who named a file or wrote its metadata can neither add columns nor steer the terminal."
    if o is None:
        return '-'
    text = o if isinstance(o, str) else (f'{o:.6g}' if limit else repr(o)) if isinstance(o, float) else json.dumps(o)
    if limit and len(text) > limit:
        text = text[: limit - 1] + '…'
    return text if text and text.isprintable() and ' ' not in text else repr(text)


def _print(line):
    "Escapes what is not printable, or not in the terminal's encoding."
    encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
    line = ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in line)
    print(line.encode(encoding, 'backslashreplace').decode(encoding))


def _print_json(o):
    print(json.dumps(json.loads(json.dumps(o), parse_constant=lambda _: None)))  # there is no NaN in JSON


def _size(n):
    for unit in 'B', 'kB', 'MB', 'GB', 'TB':
        if n < 999.95 or unit == 'TB':
            return f'{n} B' if unit == 'B' else f'{n:.1f} {unit}'
        n /= 1000


def _age(seconds):
    for unit, length in ('d', 86400), ('h', 3600), ('min', 60):
        if abs(seconds) >= length:
            return f'{int(seconds / length)} {unit}'
    return f'{int(seconds)} s'


def _clock(t):
    return time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(t))


def _is_time(o):
    return isinstance(o, (int, float)) and not isinstance(o, bool) and 0 <= o < 1e11


class _Bar:
    "How much of all files has been read, where standard error is a terminal."

    def __init__(self, total):
        self.total, self.before, self.shown = max(total, 1), 0, bool(sys.stderr and sys.stderr.isatty())

    def __call__(self, done, _):
        part = min((self.before + done) / self.total, 1)
        self._draw(f'[{"#" * int(30 * part):<30}] {part:4.0%} of {_size(self.total)}')

    def end(self, size):
        self.before += size
        self._draw(' ' * 60 + '\r')

    def _draw(self, text):
        if self.shown:
            print('\r' + text, end='', file=sys.stderr, flush=True)


# -- arguments


def _arguments(parser, name, kind, text, **kwargs):
    parser.add_argument(name, type=kind, metavar=name.upper(), help=text, **kwargs)
    parser.add_argument('--json', action='store_true', help='print JSON')


def _argument(*kinds):
    def check(text):
        try:
            kind = stat.S_IFMT(os.stat(text).st_mode)
        except OSError as e:
            raise argparse.ArgumentTypeError(f'{text!r}: {e.strerror}') from e
        if kind not in kinds:
            raise argparse.ArgumentTypeError(f'{text!r} is not a {" or a ".join(_KINDS[o] for o in kinds)}')
        return text

    return check


_KINDS = {stat.S_IFREG: 'file', stat.S_IFDIR: 'folder'}
_file, _folder, _file_or_folder = _argument(stat.S_IFREG), _argument(stat.S_IFDIR), _argument(*_KINDS)

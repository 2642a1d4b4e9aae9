"""The commands that look at files of checkpoints: `ls`, `verify`, `show`. They read bytes and metadata, and unpickle
nothing."""

from __future__ import annotations
import argparse, json, os, stat, sys, time
from collections.abc import Iterator
from contextlib import suppress

from ..checkpoint.file import read_metadata, verify_checkpoint
from ..errors import CheckpointError, CorruptCheckpointError, NewerCheckpointError
from ..training.resume_files import progress
from .output import (
    ReadingBar,
    format_age,
    format_size,
    format_time,
    is_time,
    print_json,
    print_line,
    print_table,
    word,
)

__all__ = ['ls_arguments', 'ls', 'verify_arguments', 'verify', 'show_arguments', 'show']

_print, _print_json, _size = print_line, print_json, format_size  # as `doctor` and `diagnosis` import them


# -- the commands


def ls_arguments(parser) -> None:
    _arguments(parser, 'dir', _folder, 'folder to look in, with the folders in it')


def verify_arguments(parser) -> None:
    _arguments(parser, 'path', _file_or_folder, 'file, or folder with files', nargs='+')


def show_arguments(parser) -> None:
    _arguments(parser, 'path', _file, 'file to look at')


def ls(args) -> int:
    "A table of the checkpoints in a folder, oldest first; returns the exit status."
    found = list(_examined(_inside(args.dir), lambda path: os.path.relpath(path, args.dir)))
    found.sort(key=lambda seen: seen['time'])
    if args.json:
        print_json(found)
    elif found:
        print_table([_COLUMNS, *map(_row, found)], to_the_right=('size', 'age'))
    else:
        print_line(_NONE.format(word(args.dir)))
    return _status(found)


def verify(args) -> int:
    "A line for each file, as soon as it is read; returns the exit status."
    files = {}
    found = []
    for path in args.path:
        inside = _inside(path) if os.path.isdir(path) else {path: None}
        if not inside and not args.json:
            print_line(_NONE.format(word(path)))
        files.update(inside)
    for seen in _examined(files, named=args.path):
        found.append(seen)
        if not args.json:
            print_line(f"{word(seen['name'])}: {_state(seen)}")
    if args.json:
        print_json(found)
    if not found:
        print('Nothing has been verified.', file=sys.stderr)
    return _status(found) if found else 1


def show(args) -> int:
    "What a file says of itself; returns the exit status."
    (seen,) = _examined({args.path: None}, named=[args.path])
    if args.json:
        print_json(seen)
        return _status([seen])
    print_line(f"{word(seen['name'])}: {_state(seen)}, {format_size(seen['size'])}")
    for line in _described(seen):
        print_line(f'  {line}')  # a step to the right of the state, which only we may print
    return _status([seen])


def _described(seen) -> Iterator[str]:
    meta = seen['metadata'] or {}
    if meta.get('resume') and seen['state'] == 'whole':
        yield f'a fit goes on with it after {_progress(meta)}'
    if not meta:
        yield 'no metadata' + (': this package did not write it' if seen['state'] == 'no checksum' else '')
    width = _width(meta)
    for k, v in meta.items():
        if k == 'time' and is_time(v):
            yield f'{word(k):<{width}}  {format_time(v)}'
        elif isinstance(v, dict) and v:  # as the metrics; deeper ones stay on their line
            yield word(k)
            yield from (f'  {word(name):<{_width(v)}}  {word(value)}' for name, value in v.items())
        else:
            yield f'{word(k):<{width}}  {word(v)}'


def _width(names):
    return min(max((len(word(name)) for name in names), default=0), 20)


def _progress(meta):
    is_complete = all(type(meta.get(k)) is int for k in ('epoch', 'n_epoch', 'batch', 'n_iter')) and 'finished' in meta
    return progress(meta) if is_complete else 'a moment that it does not say'


_NONE = 'No checkpoints (*.pth) in {}.'


def _status(found):
    return 0 if all(seen['state'] in ('whole', 'no checksum') for seen in found) else 1


# -- looking


def _inside(folder):
    """{path: None} of the checkpoints in a folder, and {path: error} of the folders in it that cannot be read; oldest
    first."""
    files = {}
    for root, _, names in os.walk(folder, onerror=lambda e: files.update({e.filename: e})):
        files.update({os.path.join(root, name): None for name in names if name.endswith('.pth')})
    stats = {path: _stat(path) for path in files}

    def order(path):  # of several names for one file, the most telling first
        mtime = stats[path].st_mtime if stats[path] else 0
        return mtime, os.path.islink(path), -len(os.path.basename(path)), path

    def may_be_read(path):
        if files[path] or not stats[path]:
            return True
        return stat.S_IFMT(stats[path].st_mode) in (stat.S_IFREG, stat.S_IFLNK)  # a pipe would block

    return {path: files[path] for path in sorted(files, key=order) if may_be_read(path)}


def _stat(path):
    "Of the file, or of a link to nowhere; None if there is neither, and the reason is told when it is opened."
    with suppress(OSError):
        return os.stat(path)
    with suppress(OSError):
        return os.lstat(path)


def _examined(
    files,  # {path: None, or the error that there was}
    name=str,  # of a path, for the reader
    named=(),  # paths that were asked for; of the others those that a running job has deleted by now are left out
):
    "What there is to say about each file, in turn. A file with several names is read once."
    stats = {path: _stat(path) for path in files}
    ids = {path: (s.st_dev, s.st_ino) if s else path for path, s in stats.items()}
    sizes = {ids[path]: s.st_size for path, s in stats.items() if s}
    bar = ReadingBar(sum(sizes.values()))
    first = {}
    for path, error in files.items():
        known = first.get(ids[path])
        if known:
            yield dict(known, name=name(path), same_as=known['name'])
            continue
        seen = ('unreadable', error.strerror, None) if error else _examine(path, bar, path in named)
        if seen:
            size = stats[path].st_size if stats[path] else 0
            mtime = stats[path].st_mtime if stats[path] else 0
            bar.end(size)
            first[ids[path]] = _record(name(path), seen, size, mtime)
            yield first[ids[path]]


def _record(name, seen, size, mtime):
    state, reason, meta = seen
    when = meta['time'] if meta and is_time(meta.get('time')) else mtime
    return dict(name=name, state=state, reason=reason, same_as=None, size=size, time=when, metadata=meta)


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


def _row(seen):
    meta = seen['metadata'] or {}
    run = meta.get('run')
    return (
        word(seen['name']),
        *(word(meta.get(k), 24) for k in ('epoch', 'monitor', 'value')),
        format_size(seen['size']),
        format_age(time.time() - seen['time']),
        word(run[:8] if isinstance(run, str) else run, 8),
        _state(seen),
    )


def _state(seen):
    reason = f": {seen['reason']}" if seen['reason'] else ''
    same = f" (= {word(seen['same_as'])})" if seen['same_as'] else ''
    return seen['state'] + reason + same


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
            wanted = ' or a '.join(_KINDS[kind] for kind in kinds)
            raise argparse.ArgumentTypeError(f'{text!r} is not a {wanted}')
        return text

    return check


_KINDS = {stat.S_IFREG: 'file', stat.S_IFDIR: 'folder'}
_file = _argument(stat.S_IFREG)
_folder = _argument(stat.S_IFDIR)
_file_or_folder = _argument(*_KINDS)

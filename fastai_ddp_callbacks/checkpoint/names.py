"The names of files: templates with fields, numbers for what is there already, and the longest that a disk takes."

from __future__ import annotations
import os, string
from pathlib import Path

import xxhash

__all__ = ['Template', 'check_name', 'lock_name', 'numbered']

_LONGEST = 255  # bytes of one name, on the disks in use today


class _Formatter(string.Formatter):
    "`str.format` whose fields are names and nothing else, so that a column may be called `f1.score`."

    def get_field(self, name, args, kwargs):
        return kwargs[name], name


_formatter = _Formatter()


class Template:
    "A name without suffix that may have fields: 'model-{epoch}-{accuracy:.3f}'."

    def __init__(
        self,
        text: str | Path,  # which may have folders in it; './a' and 'x/../a' are 'a'
    ):
        self.text = os.path.normpath(str(text))
        self.fields = [field for _, field, _, _ in _formatter.parse(self.text) if field is not None]

    def with_epoch(self) -> Template:
        "With the number of the epoch, unless there are fields already."
        return self if self.fields else Template(f'{self.text}_{{epoch}}')

    def folder(self) -> str:
        "The folders of all files that it names: the part before the first field. Relative, or '' for none."
        fixed = next((text for text, *_ in _formatter.parse(self.text)), '')
        return os.path.dirname(fixed)

    def format(
        self,
        values: dict,  # of the fields, by name; None stands for no number
    ) -> str:
        "The name of one file. A value may be text with a slash in it: folders come from the template only."
        return _formatter.vformat(self.text, (), {k: _clean(v) for k, v in values.items()})


def _clean(value):
    if isinstance(value, str):
        return value.replace('/', '-').replace('\0', '')
    return float('nan') if value is None else value


def check_name(
    fname: str | Path,  # the name of a file, which may have fields
    fields: dict,  # what they may be, and values of the right types
) -> None:
    "`ValueError` if the name cannot be made."
    try:
        Template(fname).format(fields)
    except (ValueError, KeyError, IndexError, TypeError) as e:
        why = f'there is no {e.args[0]}' if isinstance(e, KeyError) else e
        raise ValueError(
            f'fname={str(fname)!r} makes no name: {why}. Fields are {", ".join(fields)}; a brace that is none is '
            'doubled.'
        ) from e


def lock_name(
    path: str | Path,  # what is reserved: a file without suffix, whose name may have fields
    folder: str | Path,  # where the lock is; a part of `path`
) -> str:
    "One name for each file or template that two runs must not share, however it was spelled."
    name = os.path.relpath(path, folder).replace('/', '%')
    if len(os.fsencode(f'.{name}.lock')) > _LONGEST:
        name = f'{_cut(name, 200)}~{xxhash.xxh3_64_hexdigest(os.fsencode(name))}'
    return f'.{name}.lock'


def numbered(
    path: Path,  # the name that one would like, with suffix
    is_taken,  # function from path to whether it must not be used
) -> Path:
    "`path`, or the first of `path-1`, `path-2`, ... that is free."
    free = path
    n = 0
    while is_taken(free):
        n += 1
        end = f'-{n}{path.suffix}'
        free = path.with_name(_cut(path.name.removesuffix(path.suffix), _LONGEST - len(os.fsencode(end))) + end)
    return free


def _cut(text, size):
    "The beginning of a text that has at most so many bytes."
    return os.fsencode(text)[:size].decode(errors='ignore')

"""What the commands print: lines, tables, sizes, ages and JSON, that nobody who names a file can steer the terminal
with."""

from __future__ import annotations
import json, sys, time
from collections.abc import Sequence

__all__ = [
    'print_line',
    'print_json',
    'print_table',
    'word',
    'format_size',
    'format_age',
    'format_time',
    'is_time',
    'ReadingBar',
]


def print_line(
    text: str,  # one line, which may hold anything
) -> None:
    "Print a line with escapes for what is not printable, or not in the terminal's encoding."
    encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
    text = ''.join(c if c.isprintable() else c.encode('unicode_escape').decode() for c in text)
    print(text.encode(encoding, 'backslashreplace').decode(encoding))


def print_json(
    value,  # what JSON can hold
) -> None:
    "Print one line of JSON, in which there is no NaN."
    print(json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None)))


def print_table(
    rows: Sequence[Sequence[str]],  # the first one has the titles
    to_the_right: Sequence[str] = (),  # titles of the columns that are aligned to the right
) -> None:
    "Print a table with two blanks between its columns."
    titles = rows[0]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [
            cell.rjust(width) if title in to_the_right else cell.ljust(width)
            for title, cell, width in zip(titles, row, widths)
        ]
        print_line('  '.join(cells).rstrip())


def word(
    value,  # what JSON can hold
    limit: int | None = None,  # of characters; numbers are rounded then
) -> str:
    "One word of a line, whatever it is: who named a file or wrote its metadata can neither add columns nor lines."
    if value is None:
        return '-'
    if isinstance(value, float):
        text = f'{value:.6g}' if limit else repr(value)
    else:
        text = value if isinstance(value, str) else json.dumps(value)
    if limit and len(text) > limit:
        text = text[: limit - 1] + '…'
    return text if text and text.isprintable() and ' ' not in text else repr(text)


def format_size(
    size: float,  # bytes
) -> str:
    "As '12.3 MB'."
    for unit in 'B', 'kB', 'MB', 'GB':
        if size < 999.95:
            return f'{size} B' if unit == 'B' else f'{size:.1f} {unit}'
        size /= 1000
    return f'{size:.1f} TB'


def format_age(
    seconds: float,
) -> str:
    "As '3 min', rounded towards nothing."
    for unit, length in ('d', 86400), ('h', 3600), ('min', 60):
        if abs(seconds) >= length:
            return f'{int(seconds / length)} {unit}'
    return f'{int(seconds)} s'


def format_time(
    seconds: float,  # since 1970
) -> str:
    "Date and time of day, here."
    return time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))


def is_time(
    value,  # what a file says of itself
) -> bool:
    "Whether it can be a number of seconds since 1970."
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e11


class ReadingBar:
    """How much of all files has been read, where standard error is a terminal. It is there at once and is wiped when a
    file's line is printed, which tqdm's and fastprogress's bars are not."""

    def __init__(
        self,
        total: int,  # bytes of all files
    ):
        self.total = max(total, 1)
        self.before = 0  # bytes of the files that have been read
        self.is_shown = bool(sys.stderr and sys.stderr.isatty())

    def __call__(
        self,
        done: int,  # bytes of the file that is being read
        size: int,  # bytes of it in all
    ) -> None:
        part = min((self.before + done) / self.total, 1)
        self._draw(f'[{"#" * int(30 * part):<30}] {part:4.0%} of {format_size(self.total)}')

    def end(
        self,
        size: int,  # bytes of a file that has been read
    ) -> None:
        "Wipe it."
        self.before += size
        self._draw(' ' * 60 + '\r')

    def _draw(self, text):
        if self.is_shown:
            print('\r' + text, end='', file=sys.stderr, flush=True)

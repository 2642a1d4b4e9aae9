"""Write `docs/api.md`: every public name, with its docstring, its parameters, and its example.

    python docs/make.py      # or `python docs/make.py -`, which prints it

What is said comes from the code. The examples are the bodies of the functions in `examples.py`, by name."""

from __future__ import annotations
import inspect, sys, textwrap, warnings
from pathlib import Path

warnings.filterwarnings('ignore', module='torch|tqdm')
import fastai.basics  # noqa: F401
from fastcore.docments import docments

import examples, fastai_ddp_callbacks
from fastai_ddp_callbacks import patch

HEAD = '''# Every name

`from fastai_ddp_callbacks import` any of these. Made from the code by `docs/make.py`.

Each example runs as it stands in a script that has a `learn`, a `Learner` with the metric `accuracy` (and an
`other_model` of another shape): with `python`, or, where it says `2 ranks`, with `torchrun --nproc_per_node=2`.
It makes the process group, or `ddp_ctx` does. In a script of yours, do that once, at the beginning.
'''
SECTIONS = dict(  # by folder or file of the package: title, and what the part is about
    fastai2=('Train', 'Callbacks for fastai. Under fastai 1 the same names are callbacks for its events.'),
    patch=('Stock names', 'For a script that is not to be changed otherwise. Needs fastai.'),
    distributed=('Ranks that meet', 'Needs torch only. All ranks call these, in the same order.'),
    timeline=('Who waited for whom', 'The first three need torch only.'),
    checkpoint=('Files', 'Needs torch only, and no process group: whoever calls one of these reads or writes.'),
    errors=('Errors', 'Those of ranks are `DDPError`, those of files `CheckpointError`.'),
)
LEARNER = ('ddp_timeline', 'plot_ddp_timeline')  # what `Learner` has more
_EMPTY = inspect.Parameter.empty


def part_of_page(public):
    "The folder or file of the package in which a public name is."
    return public.__module__.split('.')[1]


def prose(public):
    "The docstring: each paragraph in one line, which may break anywhere, as Markdown does."
    return '\n\n'.join(' '.join(paragraph.split()) for paragraph in inspect.getdoc(public).split('\n\n'))


def call(name, f):
    "How it is called, without types."

    def argument(p):
        return ('**' if p.kind == p.VAR_KEYWORD else '') + p.name + ('' if p.default is _EMPTY else f'={p.default!r}')

    return f"{name}({', '.join(argument(p) for p in parameters(f).values())})"


def parameters(f):
    "Its own: those that it passes on are another library's."
    code = getattr(inspect.unwrap(f), '__code__', None)
    if code is None or not f.__module__.startswith('fastai_ddp_callbacks'):
        return {}  # inherited: none of its own
    own = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - {'self'}
    found = {name: p for name, p in inspect.signature(f).parameters.items() if name in own}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        found['kwargs'] = inspect.Parameter('kwargs', inspect.Parameter.VAR_KEYWORD)
    return found


def cell(text):
    return str(text).replace('|', '\\|')


def table(f):
    "What each parameter is, and what is returned."
    docs = docments(f, full=True, returns=True)
    rows = [
        (f'`{name}`', '' if p.default is _EMPTY else f'`{p.default!r}`', docs[name]['docment'])
        for name, p in parameters(f).items()
        if docs.get(name, {}).get('docment')
    ]
    if docs.get('return') and docs['return']['docment']:
        rows.append(('returns', '', docs['return']['docment']))
    if not rows:
        return ''
    body = ''.join(f'| {name} | {default} | {cell(" ".join(text.split()))} |\n' for name, default, text in rows)
    return f'\n| parameter | default | what it is |\n|---|---|---|\n{body}'


def example(name):
    "The example of a name, as a script may have it: with what makes the process group, if it is for two ranks."
    f = getattr(examples, name)
    lines = inspect.getsource(f).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith('def ')) + 1
    body = textwrap.dedent('\n'.join(lines[first:])).strip()
    if not getattr(f, 'two', False):
        return f'\n```python\n{body}\n```\n'
    return f'\n```python 2 ranks\n{body if "ddp_ctx(" in body else with_group(body)}\n```\n'


def with_group(
    body,  # code that begins with imports
):
    "The same, with what makes the process group below the imports."
    lines = body.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith(('import ', 'from ')))
    imports = ['import torch.distributed as dist', *lines[:end]]
    return '\n'.join([*imports, '', 'dist.init_process_group()', *lines[end:]])


def section(name, public, title=None):
    "What the page has on one name."
    if not isinstance(public, type):
        f = public
    elif issubclass(public, Exception):
        f = None
    else:
        f = public.__init__
    how = f'\n`{call(title or name, f)}`\n' if f else f'\nA `{public.__mro__[1].__name__}`.\n'
    return f'\n### `{name}`\n{how}\n{prose(public)}\n{table(f) if f else ""}{example(name)}'


def page():
    found = {part: [] for part in SECTIONS}
    former = {part: [] for part in SECTIONS}
    for name in fastai_ddp_callbacks.__all__:
        public = getattr(fastai_ddp_callbacks, name)
        if public.__name__ == name:
            found[part_of_page(public)].append(section(name, public))
        else:
            former[part_of_page(public)].append(f'`{name}` is now `{public.__name__}`')
    for name in LEARNER:
        found['timeline'].append(section(name, getattr(fastai.basics.Learner, name), f'learn.{name}'))
    names = ', '.join(f'`{name}`' for name in patch.__all__)
    about = prose(patch).split(':')[0]
    found['patch'].append(f'\n### `fastai_ddp_callbacks.patch`\n\n{about}: {names}.\n{example("patch")}')
    parts = [HEAD]
    for part, (title, about) in SECTIONS.items():
        parts += [f'\n## {title}\n\n{about} In `fastai_ddp_callbacks.{part}`.\n', *found[part]]
        if former[part]:
            parts.append(f"\nFormer names, which work until 0.3: {', '.join(former[part])}.\n")
    return ''.join(parts)


if __name__ == '__main__':
    if sys.argv[1:] == ['-']:
        sys.stdout.write(page())
    else:
        Path(__file__).with_name('api.md').write_text(page())

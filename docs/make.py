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
SECTIONS = dict(  # by folder or file of the package
    fastai2='Train',
    patch='Stock names',
    distributed='Ranks that meet',
    timeline='Who waited for whom',
    checkpoint='Files',
    errors='Errors',
)
LEARNER = ('ddp_timeline', 'plot_ddp_timeline')  # what `Learner` has more
_EMPTY = inspect.Parameter.empty


def part_of_page(o):
    "The part of the page where a public name stands."
    return SECTIONS[o.__module__.split('.')[1]]


def prose(o):
    "The docstring: a first paragraph that may break anywhere, as Markdown does."
    return '\n\n'.join(' '.join(p.split()) for p in inspect.getdoc(o).split('\n\n'))


def call(name, f):
    "How it is called, without types."

    def told(p):
        return ('**' if p.kind == p.VAR_KEYWORD else '') + p.name + ('' if p.default is _EMPTY else f'={p.default!r}')

    return f"{name}({', '.join(told(p) for p in parameters(f).values())})"


def parameters(f):
    "Its own: those that it passes on are another library's."
    code = getattr(inspect.unwrap(f), '__code__', None)
    if code is None or not f.__module__.startswith('fastai_ddp_callbacks'):
        return {}  # inherited: none of its own
    own = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - {'self'}
    res = {k: v for k, v in inspect.signature(f).parameters.items() if k in own}
    return (
        {**res, 'kwargs': inspect.Parameter('kwargs', inspect.Parameter.VAR_KEYWORD)}
        if code.co_flags & inspect.CO_VARKEYWORDS
        else res
    )


def cell(text):
    return str(text).replace('|', '\\|')


def table(f):
    "What each parameter is, and what is given back."
    told = docments(f, full=True, returns=True)
    rows = [
        (f'`{k}`', p.default, told[k]['docment']) for k, p in parameters(f).items() if told.get(k, {}).get('docment')
    ]
    if told.get('return') and told['return']['docment']:
        rows.append(('gives', _EMPTY, told['return']['docment']))
    if not rows:
        return ''
    body = ''.join(
        f'| {k} | {"" if d is _EMPTY else f"`{d!r}`"} | {cell(" ".join(text.split()))} |\n' for k, d, text in rows
    )
    return f'\n| parameter | default | what it is |\n|---|---|---|\n{body}'


def example(name):
    f = getattr(examples, name)
    lines = inspect.getsource(f).splitlines()
    body = textwrap.dedent('\n'.join(lines[next(i for i, o in enumerate(lines) if o.startswith('def ')) + 1 :]))
    if not getattr(f, 'two', False):
        return f'\n```python\n{body.strip()}\n```\n'
    return f'\n```python 2 ranks\n{body.strip() if "ddp_ctx(" in body else with_group(body.strip())}\n```\n'


def with_group(
    body,  # code that begins with imports
):
    "The same, with what makes the process group below the imports."
    lines = body.splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith(('import ', 'from ')))
    imports = ['import torch.distributed as dist', *lines[:end]]
    return '\n'.join([*imports, '', 'dist.init_process_group()', *lines[end:]])


def section(name, o, title=None):
    if isinstance(o, type):
        f = o.__init__ if not issubclass(o, Exception) else None
    else:
        f = o
    how = f'\n`{call(title or name, f)}`\n' if f else f'\nA `{o.__mro__[1].__name__}`.\n'
    return f'\n### `{name}`\n{how}\n{prose(o)}\n{table(f) if f else ""}{example(name)}'


def page():
    found, aliases = {}, {}
    for name in fastai_ddp_callbacks.__all__:
        o = getattr(fastai_ddp_callbacks, name)
        if o.__name__ == name:
            found.setdefault(part_of_page(o), []).append(section(name, o))
        else:
            aliases.setdefault(part_of_page(o), []).append(f'`{name}` is now `{o.__name__}`')
    for name in LEARNER:
        found[SECTIONS['timeline']].append(section(name, getattr(fastai.basics.Learner, name), f'learn.{name}'))
    for part, lines in aliases.items():
        found[part].append(f"\nFormer names, which work until 0.3: {', '.join(lines)}.\n")
    names = ', '.join(f'`{o}`' for o in patch.__all__)
    about = prose(patch).split(':')[0]
    found[SECTIONS['patch']] = [f'\n### `fastai_ddp_callbacks.patch`\n\n{about}: {names}.\n{example("patch")}']
    return HEAD + ''.join(f'\n## {o}\n' + ''.join(found[o]) for o in dict.fromkeys(SECTIONS.values()))


if __name__ == '__main__':
    if sys.argv[1:] == ['-']:
        sys.stdout.write(page())
    else:
        Path(__file__).with_name('api.md').write_text(page())

"""Whatever the README and the pages in `docs/` show has been run.

A block that begins with ```python runs in one process, with ```python 2 ranks on two; a block of the README always on
two. Each has a folder of its own, a `learn` and an `other_model`. One with ```python notebook is a program. Where a
```text block follows, the ranks fail with that text."""

from __future__ import annotations
import ast, inspect, os, re, signal, subprocess, sys, time
from pathlib import Path

import fastai.basics  # noqa: F401 (the ranks have it from their server; the names in `__all__` need it here)
import pytest

import fastai_ddp_callbacks
from ranks import report, run, values

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md'))]
_BLOCK = re.compile(r'^```python(?: (\d) ranks)?\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?', re.MULTILINE | re.DOTALL)


def blocks(page):
    "(line, ranks, code, text of the error) of each block of a page."
    text = page.read_text()
    return [
        (text[: o.start()].count('\n') + 1, int(o[1] or (2 if page.name == 'README.md' else 1)), o[2], o[3])
        for o in _BLOCK.finditer(text)
    ]


def given(page):
    "What a block finds; in the README, whose first block has the imports for all, our names too."
    from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner, accuracy, nn, set_seed, tensor
    from sklearn.datasets import load_digits
    from torch.utils.data import TensorDataset

    set_seed(1)
    digits = load_digits(n_class=4)
    x, y = tensor(digits.data).float() / 16, tensor(digits.target)
    dls = DataLoaders.from_dsets(
        TensorDataset(x[:256], y[:256]), TensorDataset(x[256:384], y[256:384]), bs=32, num_workers=0, device='cpu'
    )
    learn = Learner(dls, nn.Sequential(nn.Linear(64, 4)), loss_func=CrossEntropyLossFlat(), metrics=accuracy, path='.')
    learn.remove_cbs(list(learn.cbs.filter(lambda o: o.name == 'progress')))  # no bars
    names = {o: getattr(fastai_ddp_callbacks, o) for o in fastai_ddp_callbacks.__all__ if page == 'README.md'}
    return dict(
        names,
        learn=learn,
        other_model=nn.Linear(64, 5),
        download=lambda: 'data',
        disk_is_full=lambda: False,
        __name__='__main__',
    )


def execute(code, folder, name):
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    exec(compile(code, name, 'exec'), given(name))


def run_together(todo, folder, name):
    "Scenario: each block in turn."
    from fastai_ddp_callbacks import all_or_none

    for line, code in todo:
        with all_or_none(f'{name}:{line}'):
            execute('\n' * line + code, f'{folder}/{line}', name)


def run_failing(code, folder, ranks):
    "Scenario: a block that fails. A rank that has failed lives on for a while, as ranks do, until the others have too."
    from fastai_ddp_callbacks import rank

    try:
        execute(code, folder, 'train.py')
    finally:
        Path(folder, f'{rank()}.ended').touch()
        end = time.monotonic() + 4
        while len(list(Path(folder).glob('*.ended'))) < ranks and time.monotonic() < end:
            time.sleep(0.02)


def failures(ranks, code, folder):
    "What each rank fails with, as a page tells it: paths and tracebacks are left out."
    results = run(run_failing, ranks, code, str(folder), ranks)

    def told(o):
        if o.error is None:
            return 'was killed' if o.exitcode == -9 else f'did not fail\n{report(results)}'
        return f'{type(o.error).__name__}: {plain(str(o.error))}'

    said = [told(o) for o in results]
    if len({*said}) == 1:
        return said[0] + '\n'
    return ''.join(f'rank {r}: {o}\n' for r, o in enumerate(said))


def plain(text):
    text = re.sub(r'^Exception occured in .*\n\s*', '', text.split('\n\n')[0])  # that is fastai's
    text = re.sub(r'(?<![\w.])(/[\w.+-]+)+/', '', text)  # folders
    text = re.sub(r' The network said: [^\n]*', '', text)
    text = re.sub(r'on [\w.-]+\), which would', 'on node1), which would', text)
    return re.sub(r'run code \(.*\)\. If', 'run code. If', text).rstrip()


def comparable(text):
    return re.sub(r'[0-9a-f]{16}|\d+', '0', text)


def test_there_are_pages_and_blocks():
    assert len(PAGES) > 5 and all(blocks(o) for o in PAGES if o.name in ('README.md', 'api.md', 'when-it-hangs.md'))


@pytest.mark.parametrize(
    'page,ranks',
    [
        pytest.param(page, n, id=f'{page.name}-{n}')
        for page in PAGES
        for n in (1, 2)
        if any((o[1], o[3]) == (n, None) for o in blocks(page))
    ],
)
def test_the_blocks_of_a_page_run(page, ranks, tmp_path):
    todo = [(line, code) for line, n, code, error in blocks(page) if (n, error) == (ranks, None)]
    values(run(run_together, ranks, todo, str(tmp_path), page.name))


@pytest.mark.parametrize(
    'page,line,ranks,code,text',
    [pytest.param(page, *o, id=f'{page.name}:{o[0]}') for page in PAGES for o in blocks(page) if o[3]],
)
def test_a_block_fails_with_the_text_below_it(page, line, ranks, code, text, tmp_path):
    assert comparable(failures(ranks, code, tmp_path)) == comparable(text)


COMMANDS = 'cli.py', 'commands', 'demo'  # they say it in a terminal, to who has just called them
INTERNAL = (
    'AttributeError',
    'UnpicklingError',
)  # of `hasattr`; for the reader of checkpoints, which makes an error of ours of it


WARN = 'warnings.warn', 'warn_user', 'refuse'  # the last one raises


def message(node):
    "The call that has the text of what is raised or warned of, or None."
    call = node.exc if isinstance(node, ast.Raise) else node
    if not isinstance(call, ast.Call):
        return None
    warns = ast.unparse(call.func) in WARN or any(o.arg == 'warn' for o in call.keywords)
    raises = isinstance(node, ast.Raise) and ast.unparse(call.func) not in INTERNAL
    return call if warns or raises else None


def messages():
    "(file and line, constant parts) of each text that is raised, or told as a warning."
    package = ROOT / 'fastai_ddp_callbacks'
    for file in sorted(package.rglob('*.py')):
        if file.relative_to(package).parts[0] in COMMANDS:
            continue
        for call in filter(None, map(message, ast.walk(ast.parse(file.read_text())))):
            constants = [o.value for text in call.args[:2] for o in ast.walk(text) if isinstance(o, ast.Constant)]
            parts = [o for o in constants if isinstance(o, str)]
            if any(len(o.split()) > 1 for o in parts):
                yield f'{file.name}:{call.lineno}', parts


def test_whatever_is_raised_or_warned_of_has_an_entry():
    page = (ROOT / 'docs/when-it-hangs.md').read_text()

    def told(parts):
        return any(len(o.split()) > 2 and o.strip() in page for c in parts for o in re.split(r'[.:;,()]\s*', c))

    assert len([*messages()]) > 100
    assert not [(place, parts) for place, parts in messages() if not told(parts)]
    assert not [o for o in fastai_ddp_callbacks.errors.__all__ if f'`{o}`' not in page]


BEFORE = f'''
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}, {str(ROOT / 'tests' / 'docs')!r}]
from test_docs import given

def make_learner():
    assert (torch.randn(10**6)*2).sum().isfinite() # as large as torch's threads take it up
    return given('')['learn']

make_learner().fit(1)
'''


def test_the_notebook_of_the_readme_trains_on_two_ranks_after_a_fit_in_one_process(tmp_path):
    (code,) = re.findall(r'^```python notebook\n(.*?)^```$', (ROOT / 'README.md').read_text(), re.MULTILINE | re.DOTALL)
    imports, train, rest = code.partition('\ndef train')
    (tmp_path / 'notebook.py').write_text(imports + BEFORE + train + rest)
    env = {k: v for k, v in os.environ.items() if k != 'OMP_NUM_THREADS'}
    with subprocess.Popen(
        [sys.executable, 'notebook.py'],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as p:
        try:
            said, _ = p.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)  # the ranks too
            raise
    assert p.returncode == 0, said
    assert said.count('Better model found at epoch 0') == 1 and (tmp_path / 'models' / 'model.pth').exists()


def test_the_api_page_is_what_the_code_says():
    def scenario():
        sys.path.insert(0, str(ROOT / 'docs'))
        import make

        return make.page()

    (made,) = values(run(scenario, 1, group=False))
    assert (ROOT / 'docs/api.md').read_text() == made, 'run docs/make.py'


def test_every_public_name_has_a_section_and_an_example():
    sections = dict(
        re.findall(r'^### `(\w+)`\n(.*?)(?=^##|\Z)', (ROOT / 'docs/api.md').read_text(), re.MULTILINE | re.DOTALL)
    )
    current = {o for o in fastai_ddp_callbacks.__all__ if o not in aliases()}
    assert sections.keys() >= current
    assert not [o for o in current if not re.search(rf'```python.*\b{o}\b', sections[o], re.DOTALL)]


def aliases():
    "Former names that still work, each with the name that it has now."
    named = {o: getattr(fastai_ddp_callbacks, o).__name__ for o in fastai_ddp_callbacks.__all__}
    return {former: name for former, name in named.items() if former != name}


def test_a_former_name_has_a_line_that_tells_its_present_one():
    page = (ROOT / 'docs/api.md').read_text()
    assert not [former for former, name in aliases().items() if f'`{former}` is now `{name}`' not in page]


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        links = re.findall(r'\]\(([^)#]+?)(?:#[^)]*)?\)', page.read_text())
        assert not [o for o in links if not o.startswith('http') and not (page.parent / o).exists()], page


def test_the_tables_of_arguments_are_those_of_the_callbacks():
    text = (ROOT / 'docs/from-stock-to-ours.md').read_text().split('## Arguments, fastai 1')[0]
    tracker = {'monitor', 'comp', 'min_delta', 'reset_on_fit', 'reduce'}
    for name, section in re.findall(r'^### `(DDP\w+)`\n(.*?)(?=^##|\Z)', text, re.MULTILINE | re.DOTALL):
        rows = re.findall(r'^\|([^|]*`[^|]*)\|([^|]*)\|', section, re.MULTILINE)
        told = {o for names, _ in rows for o in re.findall(r'`(\w+)`', names)}
        f = getattr(fastai_ddp_callbacks, name).__init__
        has = {
            k: p.default
            for k, p in inspect.signature(f).parameters.items()
            if k not in ('self', 'kwargs') and 'fastai_ddp_callbacks' in f.__module__
        }
        assert told == has.keys(), name
        assert tracker <= told or not tracker & told, name
        assert not {
            k: v
            for names, v in rows
            if v.strip()
            for k in re.findall(r'`(\w+)`', names)
            if v.strip() != f'`{has[k]!r}`'
        }, name

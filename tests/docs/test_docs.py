"""Whatever the README and the pages in `docs/` show has been run.

A block that begins with ```python runs in one process, with ```python 2 ranks on two, as does a block of the README. It
is run as somebody runs it who has pasted it below a learner: `learn` and `other_model` are there and no other name, and
there is no process group, but what torchrun sets. Each has a folder of its own. One with ```python notebook is a
program. Where a ```text block follows, the ranks fail with that text."""

from __future__ import annotations
import ast, inspect, os, re, signal, socket, subprocess, sys, time
from pathlib import Path

import fastai.basics  # noqa: F401 (the ranks have it from their server; the names in `__all__` need it here)
import pytest

import fastai_ddp_callbacks
from ranks import report, run, values

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / 'README.md', *sorted((ROOT / 'docs').glob('*.md')), ROOT / 'CONTRIBUTING.md']
_BLOCK = re.compile(r'^```python(?: (\d) ranks)?\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?', re.MULTILINE | re.DOTALL)
_LAUNCHER = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'


def blocks(page):
    "(line, ranks, code, text of the error) of each block of a page."
    text = page.read_text()
    return [
        (
            text[: found.start()].count('\n') + 1,
            int(found[1] or (2 if page.name == 'README.md' else 1)),
            *found.group(2, 3),
        )
        for found in _BLOCK.finditer(text)
    ]


def own_learner():
    "The names that a block finds."
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
    learn.remove_cbs(list(learn.cbs.filter(lambda cb: cb.name == 'progress')))  # no bars
    return dict(learn=learn, other_model=nn.Linear(64, 5), __name__='__main__')


def execute(code, folder, name):
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    exec(compile(code, name, 'exec'), own_learner())


def launched(ranks):
    "What else torchrun sets; nothing in one process, which `python train.py` starts."
    return lambda rank: dict.fromkeys(_LAUNCHER) if ranks == 1 else {'TORCHELASTIC_RUN_ID': 'none'}


def run_each(todo, folder, name):
    "Scenario: each block in turn, as if its ranks had just been started."
    import torch.distributed as dist

    for line, code, port in todo:
        if 'MASTER_PORT' in os.environ:
            os.environ['MASTER_PORT'] = str(port)
        execute('\n' * line + code, f'{folder}/{line}', name)
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()


def free_ports(count):
    "Ports that nobody uses, of which the system has not given one twice."
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(('127.0.0.1', 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def run_failing(code, folder, ranks):
    "Scenario: a block that fails. A rank that has failed lives on for a while, as ranks do, until the others have too."
    rank = int(os.environ.get('RANK', 0))
    try:
        execute(code, folder, 'train.py')
    finally:
        Path(folder, f'{rank}.ended').touch()
        end = time.monotonic() + 4
        while len(list(Path(folder).glob('*.ended'))) < ranks and time.monotonic() < end:
            time.sleep(0.02)


def failures(ranks, code, folder):
    "What each rank fails with, as a page tells it: paths and tracebacks are left out."
    results = run(run_failing, ranks, code, str(folder), ranks, env=launched(ranks), group=False)

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
    chosen = [(line, code) for line, n, code, error in blocks(page) if (n, error) == (ranks, None)]
    todo = [(line, code, port) for (line, code), port in zip(chosen, free_ports(len(chosen)))]
    values(run(run_each, ranks, todo, str(tmp_path), page.name, env=launched(ranks), group=False))


@pytest.mark.parametrize(
    'page,line,ranks,code,text',
    [pytest.param(page, *o, id=f'{page.name}:{o[0]}') for page in PAGES for o in blocks(page) if o[3]],
)
def test_a_block_fails_with_the_text_below_it(page, line, ranks, code, text, tmp_path):
    assert comparable(failures(ranks, code, tmp_path)) == comparable(text)


COMMANDS = 'cli.py', 'commands', 'demo'  # they print in a terminal, for who has just called them
# of `hasattr`; for the reader of checkpoints, which makes an error of ours of it
INTERNAL = 'AttributeError', 'UnpicklingError'


def message_of(node):
    "The call that makes the text which a statement raises or warns of; None if it does neither."
    if isinstance(node, ast.Raise):
        call = node.exc
    elif isinstance(node, ast.Call) and (
        ast.unparse(node).endswith('warn=True)') or ast.unparse(node.func) in ('warnings.warn', 'warn_user')
    ):
        call = node
    else:
        return None
    is_text = isinstance(call, ast.Call) and call.args and ast.unparse(call.func) not in INTERNAL
    return call if is_text else None


def texts_in(node):
    return [c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str)]


def phrases(texts):
    "Parts of these texts that a reader would search for."
    parts = [part.strip() for text in texts for part in re.split(r'[.:;,()]\s*', text)]
    return [part for part in parts if len(part.split()) > 2]


def texts_given_to(function):
    "All texts in a function that could be a part of its message."
    docstring = function.body[0] if ast.get_docstring(function) else None
    return [text for statement in function.body if statement is not docstring for text in texts_in(statement)]


def messages():
    "(file and line, phrases) of each text that is raised or warned of. Where it has no words, those of its function."
    package = ROOT / 'fastai_ddp_callbacks'
    for file in sorted(package.rglob('*.py')):
        if file.relative_to(package).parts[0] in COMMANDS:
            continue
        tree = ast.parse(file.read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for node in ast.walk(tree):
            call = message_of(node)
            if call is None or not any(' ' in text for text in texts_in(call.args[0])):
                continue
            around = [f for f in functions if f.lineno <= node.lineno <= f.end_lineno]
            found = phrases(texts_in(call.args[0])) or phrases(texts_given_to(around[0]) if around else [])
            yield f'{file.name}:{node.lineno}', found


def test_whatever_is_raised_or_warned_of_has_an_entry():
    page = (ROOT / 'docs/when-it-hangs.md').read_text()
    assert len([*messages()]) > 60
    assert not [(place, found) for place, found in messages() if not any(phrase in page for phrase in found)]


def test_every_error_has_an_entry():
    page = (ROOT / 'docs/when-it-hangs.md').read_text()
    assert not [name for name in fastai_ddp_callbacks.errors.__all__ if f'`{name}`' not in page]


BEFORE = f'''
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}, {str(ROOT / 'tests' / 'docs')!r}]
from test_docs import own_learner

def make_learner():
    assert (torch.randn(10**6)*2).sum().isfinite() # as large as torch's threads take it up
    return own_learner()['learn']

make_learner().fit(1)
'''


def test_the_notebook_of_the_page_on_launching_trains_on_two_ranks_after_a_fit_in_one_process(tmp_path):
    (code,) = re.findall(
        r'^```python notebook\n(.*?)^```$', (ROOT / 'docs/launching.md').read_text(), re.MULTILINE | re.DOTALL
    )
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


ARGUMENTS = re.findall(
    r'^### `(\w+)`\n(.*?)(?=^##|\Z)',
    (ROOT / 'docs/from-stock-to-ours.md').read_text().split('## Arguments, fastai 1')[0],
    re.MULTILINE | re.DOTALL,
)
TRACKER = {'monitor', 'comp', 'min_delta', 'reset_on_fit', 'reduce'}


def own_defaults(f):
    "Of its own arguments; the signature has those that it passes on too."
    code = inspect.unwrap(f).__code__
    own = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]} - {'self'}
    return {name: p.default for name, p in inspect.signature(f).parameters.items() if name in own}


@pytest.mark.parametrize('name,section', ARGUMENTS, ids=[name for name, _ in ARGUMENTS])
def test_the_table_of_arguments_is_that_of_the_code(name, section):
    rows = re.findall(r'^\|([^|]*`[^|]*)\|([^|]*)\|', section, re.MULTILINE)
    on_page = {argument: default.strip() for names, default in rows for argument in re.findall(r'`(\w+)`', names)}
    public = getattr(fastai_ddp_callbacks, name)
    f = public.__init__ if isinstance(public, type) else public
    has = own_defaults(f) if f.__module__.startswith('fastai_ddp_callbacks') else {}
    assert on_page.keys() == has.keys()
    assert TRACKER <= on_page.keys() or not TRACKER & on_page.keys()
    assert not {k: default for k, default in on_page.items() if default and default != f'`{has[k]!r}`'}

"What mypy makes of uses as users write them: the types are those of what comes back, and nothing is refused."

import re, subprocess, sys
from pathlib import Path

import pytest

import fastai_ddp_callbacks

USES = '''
from pathlib import Path
from fastai_ddp_callbacks import (
    agree, all_gather, broadcast, is_main_process, main_process_first, main_process_only, no_collectives, once_per_node,
    run_on_main, run_once_per_node, all_or_none
)

class Scalar:  # as a 0-d tensor
    def item(self) -> float:
        return 0.5

def download(url: str = '') -> Path:
    return Path(url)

path = run_on_main(download)
reveal_type(path / 'train')  # Path
reveal_type(run_once_per_node(download, ['url']))  # Path
reveal_type(main_process_only(download)('url'))  # Path
reveal_type(once_per_node(download)())  # Path
reveal_type(broadcast({'lr': 0.1})['lr'])  # float
reveal_type(broadcast(['cat'] if is_main_process() else None)[0])  # str
reveal_type(all_gather(3))  # list[int]
reveal_type(round(agree(0.3), 3))  # float
reveal_type(agree(1, 'max') + 1)  # int | float
reveal_type(agree(path.exists(), 'any'))  # bool
reveal_type(agree(Scalar(), 'all'))  # bool
value: float | None = None
reveal_type(agree(value, name='loss', timeout=3))  # int | float | None
loss: float = agree(Scalar(), 'min') + agree(Scalar())
anything = broadcast()
anything.whatever
with main_process_first('cache'):
    path / 'vocab'
with no_collectives() as on_main:
    reveal_type(on_main)  # bool
with all_or_none('read') as ranks:
    ranks.value = 3
'''


CONFIG = '''
[mypy]
ignore_missing_imports = True
# torch and fastai would take a minute
follow_imports = skip
[mypy-fastai_ddp_callbacks.*]
follow_imports = silent
'''


@pytest.fixture(scope='module')
def said(tmp_path_factory):
    "What mypy says of each line of `USES`."
    file = tmp_path_factory.mktemp('uses') / 'uses.py'
    file.write_text(USES)
    (file.parent / 'mypy.ini').write_text(CONFIG)
    root = Path(fastai_ddp_callbacks.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, '-m', 'mypy', str(file)],
        cwd=file.parent,
        env={'PATH': '', 'MYPYPATH': str(root)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert 'uses.py' in done.stdout, done
    return re.findall(r'^uses.py:(\d+): (\w+): (.*)$', done.stdout, re.MULTILINE)


def test_nothing_is_refused(said):
    assert not [one for one in said if one[1] == 'error']


def test_the_types_are_those_of_what_comes_back(said):
    lines = USES.splitlines()
    expected = {
        i + 1: line.split('# ')[1] for i, line in enumerate(lines) if line.startswith('reveal') or '    reveal' in line
    }
    found = {
        int(line): re.sub(r'\b[\w.]+\.(?=\w)', '', text.split('"')[1]) for line, _, text in said if 'type is' in text
    }
    assert found == expected

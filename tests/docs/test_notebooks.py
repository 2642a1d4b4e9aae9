"The notebooks run from the first cell to the last on this Python, and what is stored in them comes from such a run."

from __future__ import annotations
import os, re
from pathlib import Path

import nbformat, pytest
from nbclient.exceptions import CellControlSignal, DeadKernelError

from notebooks import LIMIT, client_for

# for the kernel: torch looks up the name of each peer, and the groups there wait 4 s
os.environ.setdefault('RES_OPTIONS', 'timeout:1 attempts:1')

NOTEBOOKS = sorted((Path(__file__).parents[2] / 'nbs').glob('*.ipynb'))
each_notebook = pytest.mark.parametrize('file', NOTEBOOKS, ids=lambda o: o.stem)


def plain(text):
    return re.sub(r'\x1b\[[\d;]*m', '', text)


def code_cells(nb):
    return [o for o in nb.cells if o.cell_type == 'code']


def shown(cell):
    return plain(
        '\n'.join(o.get('text') or '\n'.join(o.get('traceback', ())) or str(o.get('data', '')) for o in cell.outputs)
    )


def story(nb):
    """What was run and shown so far, for the message of a failed test: a cell often checks what the one before has
    shown."""
    return '\n'.join(
        f'--- In [{o.execution_count}]:\n{o.source}\n--- Out:\n{shown(o)}'
        for o in code_cells(nb)
        if o.execution_count or o.outputs
    )


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.begins_early
@pytest.mark.timeout(LIMIT + 20)
@each_notebook
def test_a_notebook_runs_from_the_first_cell_to_the_last(file, tmp_path):
    nb = nbformat.read(file, as_version=4)
    for cell in code_cells(nb):
        cell.update(outputs=[], execution_count=None)
    try:
        client_for(nb, tmp_path).execute()
    except (CellControlSignal, DeadKernelError) as e:  # the cell failed, or took too long
        pytest.fail(f'{story(nb)}\n--- {type(e).__name__} in the last cell above', pytrace=False)


@each_notebook
def test_a_stored_notebook_shows_a_whole_run_and_nothing_of_the_machine_that_ran_it(file):
    nb = nbformat.read(file, as_version=4)
    nbformat.validate(nb)
    cells = code_cells(nb)
    assert [o.execution_count for o in cells] == [*range(1, len(cells) + 1)]
    assert not [o for c in cells for o in c.outputs if o.output_type == 'error']
    text = '\n'.join(str(c.outputs) for c in cells)
    assert not re.findall(r'\x1b|\\x1b|/(?:home|tmp|root|work|Users|opt|usr|var)/[^\'"\s]*', text)
    assert 'widgets' not in nb.metadata

"Bars for what takes long: on rank 0, after two seconds, and gone in the end."

import threading, time

import nbformat, pytest

from fastai_ddp_callbacks.distributed import progress
from fastai_ddp_callbacks.distributed.progress import Progress
from notebooks import client_for
from ranks import run, values


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, '_PATIENCE', 0)


def slowly(seconds, what='saving model.pth'):
    "Something in twenty steps."
    with Progress(what) as bar:
        for i in range(20):
            time.sleep(seconds / 20)
            bar.update(i + 1, 20)


def test_what_is_quick_shows_no_bar(capsys):
    slowly(0.1)
    assert capsys.readouterr().out == ''


def test_what_takes_longer_than_two_seconds_shows_how_far_it_has_come_and_takes_the_bar_away(capsys):
    slowly(2.6)
    out = capsys.readouterr().out
    assert '80.00%' in out and 'saving model.pth' in out and '99.00%' in out
    assert '10.00%' not in out  # while it was silent
    assert out.endswith('\r') and out.split('\r')[-2].strip() == ''


def test_only_rank_0_shows_it():
    def scenario():
        slowly(2.5)

    ranks = run(scenario, 2)
    values(ranks)
    assert '90.00%' in ranks[0].output and ranks[1].output == ''


def test_more_than_was_announced_and_nothing_at_all_are_no_errors(impatient, capsys):
    with Progress('loading') as bar:
        for done, total in ((0, 0), (50, 100), (150, 100)):
            bar.update(done, total)
    assert '50.00%' in capsys.readouterr().out


def test_an_error_takes_the_bar_away_too(impatient, capsys):
    with pytest.raises(OSError, match='disk'), Progress('saving') as bar:
        bar.update(50, 100)
        raise OSError('disk')
    assert capsys.readouterr().out.split('\r')[-2].strip() == ''


def test_a_thread_that_writes_in_the_background_shows_nothing(impatient, capsys):
    thread = threading.Thread(target=slowly, args=(0.1,))
    thread.start()
    thread.join()
    assert capsys.readouterr().out == ''


def test_without_fastprogress_it_is_silent(impatient, capsys, monkeypatch):
    monkeypatch.setattr(progress, 'find_spec', lambda name: None)
    slowly(0.1)
    assert capsys.readouterr().out == ''


def test_a_notebook_shows_a_bar_of_its_own_kind_and_is_left_without_it(tmp_path):
    code = '''import time
from fastai_ddp_callbacks.distributed import progress
progress._PATIENCE = 0
with progress.Progress('saving model.pth') as bar:
    for i in range(9):
        time.sleep(0.05)
        bar.update(i+1, 10)
    shown = bar.bar.progress
print('<progress' in str(shown), 'saving model.pth' in str(shown))'''
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    client_for(nb, tmp_path).execute()
    outputs = nb.cells[0].outputs
    texts = [o.text for o in outputs if o.output_type == 'stream' and o.name == 'stdout']
    assert texts == ['True True\n'], outputs
    bars = [o.data.get('text/html', '') for o in outputs if o.output_type == 'display_data']
    assert bars and not any('model.pth' in o for o in bars)

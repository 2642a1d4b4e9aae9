"Bars for what takes long: on rank 0, after two seconds, and gone in the end."

import threading, time

import nbformat, pytest

from fastai_ddp_callbacks.distributed import progress
from fastai_ddp_callbacks.distributed.progress import Progress
from notebooks import client_for
from ranks import run, values


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, '_DELAY', 0)


def slowly(seconds, what='saving model.pth'):
    "Something in twenty steps."
    with Progress(what) as bar:
        for i in range(20):
            time.sleep(seconds / 20)
            bar.update(i + 1, 20)


def gone(text):
    "Whether the last thing on the line are the blanks that wipe it out."
    return text.endswith('\r') and text.split('\r')[-2].strip() == ''


def test_what_is_quick_shows_no_bar(capsys):
    slowly(0.1)
    assert capsys.readouterr() == ('', '')


def test_what_takes_longer_than_two_seconds_shows_how_far_it_has_come(capsys):
    slowly(4)
    shown = capsys.readouterr().err
    assert 'saving model.pth' in shown and '90%' in shown
    assert '20%' not in shown  # while it was silent


def test_in_the_end_the_bar_is_gone(capsys):
    slowly(3)
    assert gone(capsys.readouterr().err)


def test_only_rank_0_shows_it():
    def scenario():
        slowly(4)

    ranks = run(scenario, 2)
    values(ranks)
    assert '90%' in ranks[0].output
    assert ranks[1].output == ''


def test_more_than_was_announced_and_nothing_at_all_are_no_errors(impatient, capsys):
    with Progress('loading') as bar:
        for done, total in ((0, 0), (50, 100), (150, 100)):
            time.sleep(0.3)
            bar.update(done, total)
    assert '50%' in capsys.readouterr().err


def test_an_error_takes_the_bar_away_too(impatient, capsys):
    with pytest.raises(OSError, match='disk'), Progress('saving') as bar:
        bar.update(50, 100)
        raise OSError('disk')
    assert gone(capsys.readouterr().err)


def test_a_thread_that_writes_in_the_background_shows_nothing(impatient, capsys):
    thread = threading.Thread(target=slowly, args=(0.1,))
    thread.start()
    thread.join()
    assert capsys.readouterr() == ('', '')


def test_a_bar_starts_no_thread_of_its_own(impatient):
    before = threading.active_count()
    with Progress('saving') as bar:
        bar.update(50, 100)
        assert threading.active_count() == before


def test_what_is_not_entered_shows_nothing(impatient, capsys):
    Progress('saving').update(50, 100)
    assert capsys.readouterr() == ('', '')


def test_a_notebook_shows_a_bar_and_no_warning_and_is_left_without_it(tmp_path):
    code = '''import time
from fastai_ddp_callbacks.distributed import progress
progress._DELAY = 0
with progress.Progress('saving model.pth') as bar:
    for i in range(9):
        time.sleep(0.3)
        bar.update(i+1, 10)'''
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    client_for(nb, tmp_path).execute()
    text = ''.join(output.get('text', '') for output in nb.cells[0].outputs)
    if text:  # a bar of characters, where ipywidgets is not installed
        assert 'saving model.pth' in text and 'Warning' not in text
        assert gone(text)
    else:
        assert [o.output_type for o in nb.cells[0].outputs] == ['display_data']

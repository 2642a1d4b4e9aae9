"The demonstration: what it shows, and that it says so when it goes wrong."

import json, re, signal, subprocess, sys, time
from pathlib import Path

import psutil, pytest, torch

from fastai_ddp_callbacks import demo, read_metadata
from fastai_ddp_callbacks.demo.notes import FAILED, LOADED, SAVED
from fastai_ddp_callbacks.demo.race import digest_of_file
from fastai_ddp_callbacks.demo.verdict import judge


def start(folder, *args, module='demo', **kwargs):
    return subprocess.Popen(
        [sys.executable, '-m', f'fastai_ddp_callbacks.{module}', *args],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **kwargs,
    )


def finish(process):
    "Exit status, standard output, error output."
    out, err = process.communicate(timeout=150)
    return process.returncode, out, err


def events(out):
    "(rank, what) of each line with a time, in the order of the output."
    return [(int(r), what) for r, what in re.findall(r'^\d\d:\d\d:\d\d\.\d{3}  rank (\d)  (.*)$', out, re.M)]


# -- three ranks


@pytest.fixture(scope='module')
def three(tmp_path_factory):
    "One run on three ranks, in a folder where an earlier run has left its model."
    folder = tmp_path_factory.mktemp('three')
    stale = folder / 'models' / 'digits.pth'
    stale.parent.mkdir()
    stale.write_text('of an earlier run')
    return folder, *finish(start(folder, '--epochs', '2', '--delay', '0.5', '--path', str(folder)))


def test_the_verdict_holds_and_the_exit_status_is_0(three):
    _, status, out, err = three
    assert status == 0, out + err
    assert 'Verdict: holds.' in out


def test_every_rank_loads_after_rank_0_has_saved(three):
    seen = events(three[2])
    assert [r for r, what in seen if what == 'saved'] == [0]
    assert sorted(r for r, what in seen if what == 'wants to load') == [0, 1, 2]
    assert sorted(r for r, what in seen[seen.index((0, 'saved')) :] if what == 'loaded') == [0, 1, 2]


def test_all_weights_are_those_of_the_file(three):
    folder, _, out, _ = three
    saved = digest_of_file(folder / 'models' / 'digits.pth')
    assert re.findall(r'weights (?:of|in).* (\w{16})$', out, re.M) == 4 * [saved]


def test_the_file_is_the_one_of_this_run_and_of_the_last_epoch(three):
    folder, _, out, _ = three
    assert read_metadata(folder / 'models' / 'digits.pth')['epoch'] == 1
    assert out.splitlines()[-1] == f"Saved model: {folder / 'models' / 'digits.pth'}"


def test_the_table_of_epochs_is_printed_once(three):
    lines = three[2].splitlines()
    assert [l.split() for l in lines if l.startswith('epoch')] == [
        ['epoch', 'train_loss', 'valid_loss', 'accuracy', 'score', 'time']
    ]
    assert [l.split()[0] for l in lines if re.match(r'\d+ ', l) and l.split()[-1].count(':') == 1] == ['0', '1']
    assert three[2].count('Better model found') == 1


# -- other ways to run it


def test_one_rank_from_the_command_line(tmp_path):
    status, out, err = finish(start(tmp_path, 'demo', '--ranks', '1', '--epochs', '1', '--delay', '0', module='cli'))
    assert status == 0, out + err
    assert [what for _, what in events(out)] == ['trained the last epoch', 'saved', 'wants to load', 'loaded']


def test_with_json_the_output_is_the_figures_and_nothing_else(tmp_path):
    status, out, err = finish(
        start(tmp_path, 'demo', '--json', '--ranks', '2', '--epochs', '1', '--delay', '0', module='cli')
    )
    figures = json.loads(out)
    assert status == 0 and figures['holds'] and not figures['problems'], out + err
    one = figures['ranks']['0']
    assert one['trained'] <= one['saved'] <= one['wants'] <= one['loaded'] and one['weights'] == figures['weights']
    assert (
        Path(figures['saved']).exists()
        and Path(figures['picture']).suffix == '.png'
        and Path(figures['picture']).exists()
        and 'train_loss' in err
    )


def test_the_stock_callback_is_reported_on_honestly(tmp_path):
    status, out, err = finish(
        start(tmp_path, '--stock', '--ranks', '2', '--epochs', '1', '--delay', '0.5', '--path', str(tmp_path))
    )
    assert "fastai's own SaveModelCallback" in out
    seen = events(out)
    for r in 0, 1:
        assert (r, 'loaded') in seen or any(o == r and what.startswith('failed: ') for o, what in seen), out + err
    # what stock fastai does is up to fastai: the verdict must fit what was seen
    early = (0, 'saved') not in seen or any(what == 'loaded' for _, what in seen[: seen.index((0, 'saved'))])
    held = not early and len(set(re.findall(r'weights (?:of|in).*  (\w.*)$', out, re.M))) == 1
    assert ('Verdict: holds.' in out) == held == (status == 0)
    assert read_metadata(tmp_path / 'models' / 'digits.pth') is None  # fastai wrote it


def test_a_rank_that_fails_is_named_with_its_error_and_the_exit_status_is_1(tmp_path):
    (tmp_path / 'sklearn.py').write_text(
        'raise OSError("the digits are gone")'
    )  # python -m looks in the current folder first
    status, out, err = finish(start(tmp_path, '--ranks', '1', '--path', str(tmp_path)))
    assert status == 1, out + err
    assert 'Verdict: does not hold.' in out and 'Rank 0 failed: OSError: the digits are gone' in out
    assert out.splitlines()[-1].startswith('No model was saved')


def test_ctrl_c_ends_all_ranks(tmp_path):
    process = start(tmp_path, '--ranks', '2', '--epochs', '1', '--delay', '120')
    ranks = []
    while len(ranks) < 3:  # with the launcher
        assert process.poll() is None
        time.sleep(0.05)
        ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    status, _, err = finish(process)
    assert status == 130 and 'all ranks have been stopped' in err
    assert not psutil.wait_procs(ranks, timeout=10)[1]


@pytest.mark.parametrize(
    'args, message',
    [
        (['--ranks', '0'], "--ranks: '0' is not a whole number from 1 to 16"),
        (['--ranks', 'two'], "--ranks: 'two' is not"),
        (['--epochs', '0'], "--epochs: '0' is not a whole number"),
        (['--epochs', '1.5'], "--epochs: '1.5' is not a whole number"),
        (['--delay', '-1'], "--delay: '-1' is not a number from 0 to 600"),
        (['--delay', 'nan'], "--delay: 'nan' is not a number"),
        (['--path', __file__], 'cannot be used as a folder'),
        (['--nonsense'], 'unrecognized arguments'),
    ],
)
def test_bad_arguments_are_refused_with_the_reason(args, message, capsys):
    with pytest.raises(SystemExit) as e:
        demo.main(args)
    assert e.value.code == 2 and message in capsys.readouterr().err


# -- the verdict


def notes(*events, weights=('same', 'same')):
    return [dict(time=t, rank=r, what=what, **more) for t, r, what, more in events] + [
        dict(time=9, rank=r, what='weights', digest=o) for r, o in enumerate(weights) if o
    ]


GOOD = (1, 0, SAVED, {}), (2, 0, LOADED, {}), (3, 1, LOADED, {})


def test_without_problems_the_verdict_comes_with_its_evidence():
    problems, evidence = judge(notes(*GOOD), 2, 'same')
    assert not problems
    assert 'rank 1 had loaded 2.000 s after the save was complete' in evidence


def test_a_load_before_the_save_breaks_the_verdict():
    assert judge(notes((0.5, 1, LOADED, {}), *GOOD[:2]), 2, 'same')[0] == [
        'Rank 1 loaded before the save was complete.'
    ]


def test_other_weights_on_one_rank_break_the_verdict():
    assert judge(notes(*GOOD, weights=('same', 'other')), 2, 'same')[0] == [
        'The weights of rank 1 are not those of the file.'
    ]


def test_equal_weights_on_all_ranks_that_are_not_in_the_file_break_the_verdict():
    assert len(judge(notes(*GOOD), 2, 'other')[0]) == 2


def test_a_failed_rank_and_a_silent_one_break_the_verdict():
    error = 'FileNotFoundError: digits.pth\nand a long story'
    assert judge(notes(GOOD[0], (2, 0, FAILED, dict(error=error)), weights=('same', None)), 2, 'same')[0] == [
        'Rank 0 failed: FileNotFoundError: digits.pth',
        'Rank 1 did not load the model.',
        'The weights of rank 1 are not those of the file.',
    ]


def test_a_file_cut_short_breaks_the_verdict(tmp_path):
    torch.save({'w': torch.ones(1000)}, tmp_path / 'cut.pth')
    (tmp_path / 'cut.pth').write_bytes((tmp_path / 'cut.pth').read_bytes()[:2000])
    digest = digest_of_file(tmp_path / 'cut.pth')
    assert digest.startswith('unreadable') and len(judge(notes(*GOOD), 2, digest)[0]) == 2


def test_without_a_save_the_verdict_does_not_hold():
    assert 'Rank 0 did not complete a save.' in judge(notes(*GOOD[1:]), 2, None)[0]

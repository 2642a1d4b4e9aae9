"The demonstration under fastai 1: stock's fault, and the cure."

import re, subprocess, sys

import pytest


def demo(*args):
    done = subprocess.run(
        [sys.executable, '-m', 'fastai_ddp_callbacks.demo', '--ranks', '2', '--epochs', '1', '--delay', '2', *args],
        capture_output=True,
        text=True,
        timeout=100,
    )
    digests = re.findall(r'weights of rank \d {2,}(\S+)', done.stdout) + re.findall(
        r'weights in the file {2,}(\S+)', done.stdout
    )
    return done.returncode, digests, done.stdout


@pytest.mark.timeout(120)
def test_every_rank_ends_with_the_weights_of_the_file(tmp_path):
    status, digests, said = demo('--path', str(tmp_path))
    assert status == 0, said
    assert len(digests) == 3, said  # of two ranks and of the file
    assert len(set(digests)) == 1, said
    assert said.count('train_loss') == 1, said
    assert 'Verdict: holds' in said, said


@pytest.mark.timeout(120)
def test_with_stock_each_rank_keeps_weights_of_its_own(tmp_path):
    status, digests, said = demo('--stock', '--path', str(tmp_path))
    assert status == 1, said
    assert len(set(digests)) == 3, said
    assert 'Rank 0 failed' in said, said
    assert 'Rank 1 did not load the model' in said, said

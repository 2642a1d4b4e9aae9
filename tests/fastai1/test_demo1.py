"The demonstration under fastai 1: stock's fault, and the cure."

import re, subprocess, sys

import pytest


def demo(*args):
    done = subprocess.run(
        [sys.executable, '-m', 'fastai_ddp_callbacks.demo', '--ranks', '3', '--epochs', '1', '--delay', '2', *args],
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
    assert status == 0 and len(digests) == 4 and len(set(digests)) == 1, said
    assert said.count('train_loss') == 1 and 'Verdict: holds' in said


@pytest.mark.timeout(120)
def test_with_stock_each_rank_keeps_weights_of_its_own(tmp_path):
    status, digests, said = demo('--stock', '--path', str(tmp_path))
    assert status == 1 and len(digests) == 4 and len(set(digests)) == 4, said
    assert (
        'Rank 0 failed' in said and 'Rank 1 did not load the model' in said and 'Rank 2 did not load the model' in said
    )

"The example of a user's training script, under each launcher."

import os, re, socket, subprocess, sys
from pathlib import Path

import pytest, torch

pytestmark = pytest.mark.begins_early
SCRIPT = Path(__file__).parent.parent / 'nbs' / 'examples' / 'train_ddp.py'


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return str(s.getsockname()[1])


def trained(folder, *launcher, args=()):
    "Run the example; gives the number of ranks that it reports."
    env = {
        **os.environ,
        'HF_HOME': str(folder),
        'OMP_NUM_THREADS': '1',
    }  # without accelerate's settings of whoever runs the tests
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), '--epochs', '1', *args],
        cwd=folder,
        env=env,
        text=True,
        capture_output=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ((ranks, path),) = re.findall(r'^ranks: (\d+), accuracy: 0\.\d+, saved: (.*)$', done.stdout, re.M)
    assert path == str(folder / 'models' / 'digits.pth') and torch.load(path, weights_only=True)
    assert done.stdout.count('Better model found') == 1
    return int(ranks)


def test_torchrun(tmp_path):
    assert (
        trained(
            tmp_path,
            '-m',
            'torch.distributed.run',
            '--nproc_per_node=2',
            '--master_port',
            free_port(),
            args=['--local_rank=0'],
        )
        == 2
    )


def test_torch_distributed_launch_which_gives_the_local_rank_as_an_argument(tmp_path):
    assert trained(tmp_path, '-m', 'torch.distributed.launch', '--nproc_per_node=2', '--master_port', free_port()) == 2


def test_accelerate_launch(tmp_path):
    assert (
        trained(
            tmp_path,
            '-m',
            'accelerate.commands.launch',
            '--multi_gpu',
            '--num_processes=2',
            '--num_machines=1',
            '--mixed_precision=no',
            '--dynamo_backend=no',
            '--main_process_port',
            free_port(),
        )
        == 2
    )


def test_plain_python(tmp_path):
    assert trained(tmp_path) == 1

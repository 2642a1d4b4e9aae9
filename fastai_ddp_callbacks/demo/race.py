"One rank's part in the demonstration: it trains, and notes when it saves and loads."

from __future__ import annotations
import hashlib, math, os, time, traceback, warnings
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from ..checkpoint.file import read_checkpoint
from ..errors import CheckpointError
from ..installed import fastai_line
from .notes import FAILED, SAVED, STARTED, WANTS, WEIGHTS, Notebook

__all__ = ['Race', 'FNAME', 'PICTURE', 'digits', 'digest_of_file']

FNAME = 'digits'  # of the saved model, without its suffix
PICTURE = 'timeline.png'


class Race:
    "One rank's part in the race. What differs between the lines of fastai is in `on_fastai1` and `on_fastai2`."

    def __init__(
        self,
        args: Namespace,  # of the command; `worker` is the folder for notes
    ):
        self.args = args
        self.rank = int(os.environ['RANK'])
        self.size = int(os.environ['WORLD_SIZE'])
        self.device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.device_count() >= self.size else 'cpu'
        if self.device != 'cpu':
            torch.cuda.set_device(self.device)
        self.note = Notebook(args.worker, self.rank).note
        torch.manual_seed(1)
        self.model = _cnn()

    def saving(
        self,
        save: Callable,  # saves the model on rank 0
        *args,
    ):
        "Call `save(*args)`, late on rank 0; the others write nothing."
        if self.rank:
            return save(*args)
        time.sleep(self.args.delay)
        result = save(*args)
        self.note(SAVED)
        return result

    def wants_to_load(self) -> None:
        "Overwrite the weights: from here on, the right ones can only come from the file."
        self.note(WANTS)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(self.rank + 1)

    def score(
        self,
        epoch: int,
    ) -> float:
        "What is monitored: NaN until the last epoch, which thereby is the best one."
        return 1.0 if epoch == self.args.epochs - 1 else math.nan

    def work(self) -> None:
        "Train, and note how it went."
        self.note(STARTED, pid=os.getpid())
        try:
            train = _import_train()
            if self.size > 1:
                # a short limit, so that a rank that waits in vain for another one reports it and does not hang
                limit = timedelta(seconds=self.args.delay + 45)
                dist.init_process_group('gloo' if self.device == 'cpu' else 'nccl', timeout=limit)
            train(self)
            if self.size > 1 and not self.args.stock:
                self._draw()
        except Exception as e:
            # noted, not raised: the launcher would kill the other ranks, and what becomes of them would stay unknown
            self.note(FAILED, error=f'{type(e).__name__}: {str(e).strip() or "without a message"}')
            if not self.args.stock:
                traceback.print_exc()
        self.note(WEIGHTS, digest=_digest(self.model.state_dict()))
        if dist.is_initialized():
            dist.destroy_process_group()

    def _draw(self):
        from ..timeline import plot_timeline  # it imports pandas, which the parent does without

        plot_timeline(Path(self.args.path) / PICTURE)


def _import_train():
    "The training function for the fastai that is installed."
    for text in '`torch.jit', 'pkg_resources':
        warnings.filterwarnings('ignore', text)  # the imports of fastai give one per rank
    module = '.on_fastai2' if fastai_line() == 2 else '.on_fastai1'
    return import_module(module, __package__).train


def _cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    "scikit-learn's handwritten digits, for training and for validation: float32 (n, 1, 8, 8) from 0 to 1, int64 (n,)."
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    return TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])


def _digest(state):
    sha = hashlib.sha256()
    for name in sorted(state):
        sha.update(name.encode() + state[name].detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def digest_of_file(
    path: Path,  # of the saved model
) -> str | None:  # 16 hexadecimal digits, or why there are none; None without a file
    "A digest of the weights in a file, as ranks note it of theirs."
    if not path.exists():
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '.* has no checksum')  # stock's has none
        try:
            state, _ = read_checkpoint(path)
        except CheckpointError as e:
            return f'unreadable ({type(e).__name__})'  # a rank was stopped while it wrote
    return _digest(state['model'] if set(state) == {'model', 'opt'} else state)

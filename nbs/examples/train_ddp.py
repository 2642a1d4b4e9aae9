"""Handwritten digits on several ranks: rank 0 saves the best model, and every rank ends with it. Any of these runs it:

    torchrun --nproc_per_node=3 train_ddp.py
    python -m torch.distributed.launch --nproc_per_node=3 train_ddp.py
    accelerate launch --multi_gpu --num_processes 3 train_ddp.py
    python train_ddp.py

On the CPU too accelerate needs `--multi_gpu`, which stands for several processes: with `--cpu` it starts one."""

import argparse, os

from fastai.basics import *
from fastai.callback.schedule import *
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from fastai_ddp_callbacks import DDPSaveModelCallback, ddp_ctx, is_main_process, world_size

parser = argparse.ArgumentParser()
parser.add_argument('--local_rank', '--local-rank', type=int, default=0)  # torch.distributed.launch gives it
parser.add_argument('--epochs', type=int, default=3)
parser.add_argument('--path', type=Path, default=Path('.'))
args = parser.parse_args()

# a GPU for each rank of this machine, or the CPU for all of them
local_rank, n_local = int(os.environ.get('LOCAL_RANK', args.local_rank)), int(os.environ.get('LOCAL_WORLD_SIZE', 1))
device = torch.device('cuda', local_rank) if torch.cuda.device_count() >= n_local else torch.device('cpu')

digits = load_digits()
x, y = tensor(digits.images).float()[:, None] / 16, tensor(digits.target)
dls = DataLoaders.from_dsets(
    TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:]), bs=64, num_workers=0, device=device
)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 10),
)
learn = Learner(dls, model, loss_func=CrossEntropyLossFlat(), metrics=accuracy, path=args.path)

save = DDPSaveModelCallback(monitor='accuracy', fname='digits')
with ddp_ctx(learn):
    learn.fit_one_cycle(args.epochs, 1e-2, cbs=save)
if is_main_process():
    print(f'ranks: {world_size()}, accuracy: {save.best:.4f}, saved: {save.last_saved_path}')

"Whole fits on two ranks: stock fastai, ours and Lightning's, of the same model on the same data."

from __future__ import annotations
import torch, torch.distributed as dist
from fastai.callback.core import Callback
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD

from contenders import installed, lightning

if lightning:
    from lightning.pytorch.plugins.environments import LightningEnvironment
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

from fastai_ddp_callbacks import DDPSaveModelCallback, ddp_ctx

FIT_MB, EPOCHS = 100, 5  # of the whole fits


class Net(torch.nn.Module):
    def __init__(self, mb, n):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.ModuleList(
            torch.nn.Embedding(round(mb * 1e6 / 4 / 256 / 24), 256) for _ in range(24)
        ).requires_grad_(False)
        self.head = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)), torch.nn.Linear(256, 1))
        self.data = [(torch.tensor(i % 32), torch.full((1,), 9.0)) for i in range(n)]

    def forward(self, x):
        return self.head(sum(o(x) for o in self.body))


class Epochs(Callback):
    order = 100

    def __init__(self, clock):
        self.clock = clock

    def before_epoch(self):
        if self.epoch == 0:
            self.clock.begin()

    def after_epoch(self):
        self.clock.epoch()


def cpu_broadcast(self, t, rank):  # stock's calls `.cuda()`
    t = torch.tensor(t)
    dist.broadcast(t, rank)
    return t.tolist()


def fastai_fit(context, make, lr=0.001, epochs=EPOCHS):
    def fit(net, folder, clock):
        dls = DataLoaders.from_dsets(net.data, net.data[:32], bs=8, num_workers=0, device='cpu')
        learn = Learner(dls, net, loss_func=torch.nn.functional.mse_loss, opt_func=SGD, path=folder, model_dir='.')
        cbs = [
            clock.timed(clock.timed(o, 'saving', 'before_fit', 'before_train', 'after_epoch'), 'end', 'after_fit')
            for o in make()
        ]
        with context(learn), learn.no_bar(), learn.no_logging():
            learn.fit(epochs, lr, cbs=[*cbs, Epochs(clock)])

    return fit


def stock_ctx(learn):
    return learn.distrib_ctx(sync_bn=False, cpu=True)


class Module(lightning.LightningModule if lightning else object):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.head.parameters(), 0.001)

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log('valid_loss', self.training_step(batch), sync_dist=True)


def lightning_fit(asynchronous):
    def fit(net, folder, clock):
        name = f'lightning{asynchronous}'
        saver = lightning.callbacks.ModelCheckpoint(
            folder, name, 'valid_loss', save_weights_only=True, enable_version_counter=False
        )
        clock.timed(saver, 'saving', 'on_validation_end', 'on_train_epoch_end')
        epochs = lightning.Callback()
        epochs.on_train_start, epochs.on_train_epoch_end = clock.begin, clock.epoch
        plugins = [
            LightningEnvironment(),
            *([clock.timed(AsyncCheckpointIO(), 'end', 'teardown')] if asynchronous else []),
        ]
        trainer = lightning.Trainer(
            accelerator='cpu',
            devices=2,
            strategy='ddp',
            plugins=plugins,
            callbacks=[epochs, saver],
            max_epochs=EPOCHS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        train, valid = (torch.utils.data.DataLoader(o, 8, shuffle=o is net.data) for o in (net.data, net.data[:32]))
        module = Module(net)
        trainer.fit(module, train, valid)
        clock.call(
            'end',
            lambda: module.load_state_dict(
                torch.load(folder / f'{name}.ckpt', map_location='cpu', weights_only=True)['state_dict']
            ),
        )()

    return fit


FITS = installed(
    {
        'none': fastai_fit(stock_ctx, lambda: []),
        'stock': fastai_fit(stock_ctx, lambda: [SaveModelCallback(fname='stock')]),
        'ours': fastai_fit(ddp_ctx, lambda: [DDPSaveModelCallback(fname='ours')]),
        'background': fastai_fit(ddp_ctx, lambda: [DDPSaveModelCallback(fname='background', background=True)]),
        'lightning': lightning_fit(False),
        'lightning async': lightning_fit(True),
    }
)
IDLE = {
    'with': fastai_fit(ddp_ctx, lambda: [DDPSaveModelCallback(fname='idle')], lr=0.0, epochs=12),
    'without': fastai_fit(ddp_ctx, lambda: [], epochs=12),
}

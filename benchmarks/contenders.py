"What saves and loads one model: ours, stock fastai, Lightning, a copy in memory and the bare disk."

from __future__ import annotations
import logging, os, threading, warnings

import torch

with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # how they use torch
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner

    try:
        from lightning import pytorch as lightning
    except ImportError:
        lightning = None
    else:
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

from fastai_ddp_callbacks.checkpoint.background import Writer
from fastai_ddp_callbacks.checkpoint.file import read_checkpoint, write_checkpoint
from fastai_ddp_callbacks.checkpoint.state import load_model_state, model_state

MISSING = [] if lightning else ['lightning', 'lightning async']


def installed(o):
    return {k: v for k, v in o.items() if k not in MISSING}


def learner(mb, folder):
    "A model of `mb` MB in 77 tensors, from 8 bytes to about 6% of the model."
    width = round((mb * 1e6 / 4 / 72) ** 0.5)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.TransformerEncoderLayer(width, 1, 4 * width) for _ in range(6)), torch.nn.BatchNorm1d(width)
    )
    return Learner(
        DataLoaders.from_dsets([0], [0], bs=1, num_workers=0, device='cpu'),
        model,
        loss_func=torch.nn.functional.mse_loss,
        path=folder,
        model_dir='.',
    )


class Ours:
    def __init__(self, learn):
        self.model, self.path = learn.model, learn.path / 'ours.pth'

    def save(self):
        write_checkpoint(model_state(self.model), self.path, dict(epoch=0, monitor='valid_loss', value=0.5))

    def load(self):
        load_model_state(self.model, read_checkpoint(self.path)[0], self.path)


class Stock:
    def __init__(self, learn):
        self.learn = learn

    def save(self):
        self.learn.save('stock', with_opt=False)

    def load(self):
        self.learn.load('stock', with_opt=False)


class Lightning:
    def __init__(self, learn):
        for o in ('lightning.pytorch', 'lightning.fabric'):
            logging.getLogger(o).setLevel(logging.ERROR)
        module = lightning.LightningModule()
        module.net, self.path = learn.model, learn.path / 'lightning.ckpt'
        self.trainer = lightning.Trainer(
            accelerator='cpu', devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
        )
        self.trainer.strategy.connect(module)  # as `fit` does

    def save(self):
        self.trainer.save_checkpoint(self.path, weights_only=True)

    def load(self):
        self.trainer.strategy.load_model_state_dict(self.trainer.strategy.load_checkpoint(self.path))


class Raw:
    def __init__(self, learn):
        self.path, self.source, self.data = learn.path / 'raw', learn.path / 'ours.pth', None

    def save(self):
        if self.data is None:
            self.data = bytearray(self.source.read_bytes())
        temporary = self.path.with_suffix('.writing')
        with open(temporary, 'wb', buffering=0) as f:
            written = f.write(self.data)
            os.fsync(f.fileno())
        assert written == len(self.data)
        os.replace(temporary, self.path)

    def load(self):
        if self.data is None:
            self.data = bytearray(self.path.stat().st_size)
        with open(self.path, 'rb', buffering=0) as f:
            assert f.readinto(self.data) == len(self.data)


class Background(Ours):
    def __init__(self, learn):
        self.model, self.path, self.writer = learn.model, learn.path / 'background.pth', Writer()

    def save(self):
        self.writer.start(
            lambda o: write_checkpoint(o, self.path, dict(epoch=0, monitor='valid_loss', value=0.5)),
            model_state(self.model),
        )

    def done(self):
        return self.writer.done


class Copy:
    def __init__(self, learn):
        self.state, self.copy = model_state(learn.model), {k: v.clone() for k, v in model_state(learn.model).items()}

    def save(self):
        for k, v in self.state.items():
            self.copy[k].copy_(v)


class LightningAsync(Lightning):
    def __init__(self, learn):
        super().__init__(learn)
        self.path, plain, self.saved = (
            self.path.with_name('async.ckpt'),
            self.trainer.strategy.checkpoint_io,
            threading.Event(),
        )
        save = plain.save_checkpoint
        plain.save_checkpoint = lambda *args, **kwargs: (save(*args, **kwargs), self.saved.set())
        self.trainer.strategy.checkpoint_io = AsyncCheckpointIO(plain)

    def save(self):
        self.saved.clear()
        super().save()

    def done(self):
        return self.saved.is_set()


STALLS = installed(
    {
        'stock': Stock,
        'ours': Ours,
        'background': Background,
        'copy': Copy,
        'lightning': Lightning,
        'lightning async': LightningAsync,
    }
)


SAVES_AND_LOADS = installed({'ours': Ours, 'stock': Stock, 'lightning': Lightning, 'raw': Raw})

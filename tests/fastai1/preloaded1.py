"Imported once, by the server that ranks are forked from."

import warnings

with warnings.catch_warnings():
    warnings.simplefilter('ignore')  # fastai 1 is from 2019
    import fastai.basics, fastai.callbacks, fastai.distributed  # noqa: F401
import torch._dynamo, torch.distributed.tensor  # noqa: F401 (what DDP imports when it is first used)

import fastai_ddp_callbacks.fastai1  # noqa: F401

"Imported once, by the server that ranks are forked from."

import accelerate, fastai.basics, fastai.callback.all, fastai.distributed, fastai.test_utils  # noqa: F401
import sklearn.datasets, torch._dynamo, torch.distributed.tensor  # noqa: F401 (what DDP imports when it is first used)

import fastai_ddp_callbacks.fastai2.context, fastai_ddp_callbacks.fastai2.save_model  # noqa: F401

"The race between saving and loading, staged: `fastai-ddp demo`, or `python -m fastai_ddp_callbacks.demo`."

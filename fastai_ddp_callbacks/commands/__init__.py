"What `fastai-ddp COMMAND` runs."

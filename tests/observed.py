"What is added to a save callback of either fastai line, so that tests see when files are written and read."

import time

from fastai_ddp_callbacks.training import loading
from fastai_ddp_callbacks import rank


class Observes:
    "Notes when a file is written and read, and takes its time over it where told: `slow={'write':2}`, on `slow_rank`."

    sleep = staticmethod(time.sleep)

    def __init__(self, *args, slow=None, slow_rank=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.slow, self.slow_rank, self.events = slow or {}, slow_rank, []

    def _do(self, what, f, *args, **kwargs):
        self.events.append((f'wants to {what}', time.monotonic()))
        if self.slow_rank in (None, rank()):
            self.sleep(self.slow.get(what, 0))
        res = f(*args, **kwargs)
        self.events.append((what, time.monotonic()))
        return res

    def _write(self, *args):
        return self._do('write', super()._write, *args)

    def _observed(self, load):
        "`load`, with what it reads noted."
        read = loading.read_checkpoint
        loading.read_checkpoint = lambda *args, **kwargs: self._do('read', read, *args, **kwargs)
        try:
            load()
        finally:
            loading.read_checkpoint = read

    def when(self, what):
        return [t for o, t in self.events if o == what]

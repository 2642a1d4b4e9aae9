"What tests of several files share, beside what they import."

from functools import lru_cache

import pytest

from resuming import start

collect_ignore = ['fastai1']  # runs in a process of its own, see test_fastai1.py


@pytest.fixture(scope='module')
def quiet(tmp_path_factory):
    "Results of the fit that nobody interrupts; each kind is run once."

    @lru_cache(None)
    def fit(world_size, make=tuple, **kwargs):
        return start(world_size, tmp_path_factory.mktemp('quiet'), *make(), **kwargs)

    return fit

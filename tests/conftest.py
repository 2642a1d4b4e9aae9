"What tests of several files share, beside what they import."

import os
from functools import lru_cache

import pytest

from resuming import start
from seeds import SEED
from strict import pytest_runtest_makereport  # noqa: F401 (a hook)

MOST = 8  # processes that run tests, each with a server and several ranks of its own
collect_ignore = ['fastai1']  # runs in a process of its own, see test_fastai1.py


def pytest_addoption(parser, pluginmanager):
    "Without pytest-xdist (`-p no:xdist`) its options in setup.cfg mean nothing."
    if not pluginmanager.hasplugin('xdist'):
        parser.addoption('--numprocesses')
        parser.addoption('--dist')


def pytest_report_header():
    return f'SEED={SEED}'


def pytest_collection_modifyitems(items):
    "Each process that runs tests begins with the long ones, so that none of them is what all wait for in the end."
    workers = int(os.environ.get('PYTEST_XDIST_WORKER_COUNT', 1))
    long = [o for o in items if o.get_closest_marker('begins_early')]
    short = [o for o in items if not o.get_closest_marker('begins_early')]
    if workers == 1 or not long:
        return
    # the scheduler deals the list out in as many parts as there are processes
    bounds = [len(short) * i // workers for i in range(workers + 1)]
    parts = [[*long[i::workers], *short[bounds[i] : bounds[i + 1]]] for i in range(workers)]
    items[:] = [item for part in parts for item in part]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    "Two for each core: half of the time a test waits, for a rank or for a file."
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return min(2 * cores, MOST)


@pytest.fixture(scope='module')
def quiet(tmp_path_factory):
    "Results of the fit that nobody interrupts; each kind is run once."

    @lru_cache(None)
    def fit(world_size, make=tuple, **kwargs):
        return start(world_size, tmp_path_factory.mktemp('quiet'), *make(), **kwargs)

    return fit

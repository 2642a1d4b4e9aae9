"These tests run in a process where `fastai` is fastai 1; `tests/test_fastai1.py` starts it."

import os, sys
from pathlib import Path

here = Path(__file__).parent
sys.path.insert(0, str(here.parent))  # the harness
os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(here), os.environ.get('PYTHONPATH')]))  # for the ranks

import ranks, torch  # noqa: E402
from strict import pytest_runtest_makereport  # noqa: E402, F401 (a hook)

ranks.PRELOAD = 'preloaded1'
torch.set_num_threads(1)  # as in the ranks

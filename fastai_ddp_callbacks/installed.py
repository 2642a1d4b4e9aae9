"Which fastai is installed: the one place that asks."

from __future__ import annotations
from importlib.util import find_spec
from pathlib import Path

__all__ = ['fastai_line']


def fastai_line() -> int | None:  # 1 or 2; None without fastai
    "The line of the fastai that is installed, without importing it."
    spec = find_spec('fastai')
    if spec is None:
        return None
    return 2 if any(Path(o, 'learner.py').exists() for o in spec.submodule_search_locations or ()) else 1

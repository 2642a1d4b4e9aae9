"Warnings for the user: shown each time, and with the line of the user's that led to them."

from __future__ import annotations
import contextlib, os, sys, warnings
from functools import lru_cache
from importlib.util import find_spec
from types import FrameType

__all__ = ['warn_user']

_PACKAGE = os.path.dirname(__file__)


def warn_user(
    text: str,  # what happened, and what to do
) -> None:
    """Warn, as of the innermost line that is neither this package's nor fastai's; of no line in a thread of ours.

    Python shows a warning of one line and text once. This one is shown each time: in a loop over trials or folds each
    fit has one of its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_between(frame.f_code.co_filename):
        frame = frame.f_back
    filename, line = (frame.f_code.co_filename, frame.f_lineno) if frame else ('fastai_ddp_callbacks', 0)
    warnings.warn_explicit(text, UserWarning, filename, line)


def _is_between(filename):
    "Whether code stands between the user's line and what is warned of."
    return filename.startswith(_between()) or filename == contextlib.__file__ or filename.startswith('<')


@lru_cache(1)
def _between():
    specs = [find_spec(name) for name in ('fastai', 'fastcore')]
    folders = [folder for spec in specs if spec for folder in spec.submodule_search_locations or ()]
    return tuple(os.path.join(folder, '') for folder in (_PACKAGE, *folders))

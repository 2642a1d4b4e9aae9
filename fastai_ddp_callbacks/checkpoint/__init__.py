"""One checkpoint file, and a folder of them: written whole or not at all, read safely. Knows torch, but no ranks."""

from .file import *
from .file import __all__ as _file
from .state import *
from .state import __all__ as _state

__all__ = [*_file, *_state]

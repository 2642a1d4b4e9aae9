"The callbacks for fastai 1.0.60 and 1.0.61."

from .callbacks import *
from .callbacks import __all__ as __all__

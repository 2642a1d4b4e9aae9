"The callbacks for fastai 1.0.60 and 1.0.61."

from .context import *
from .resume import *
from .save_model import *
from .stop import *
from .tracker import *

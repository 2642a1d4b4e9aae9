"fastai 2: our callbacks as fastai's own, so that an exported learner loads where this package is not installed."

from __future__ import annotations
import copyreg
from pathlib import Path

import numpy as np
from fastai.callback.core import Callback

__all__ = ['reduce_to_stock']

_PLAIN = (type(None), bool, int, float, str, Path, np.ufunc)  # what loads anywhere


def reduce_to_stock(
    cb: Callback,  # ours, on a learner
) -> tuple:  # as `__reduce_ex__` gives it
    "Pickle a callback as the class of fastai that it extends, with the plain values of its attributes."
    stock = next(cls for cls in type(cb).__mro__ if cls.__module__.startswith('fastai.'))
    values = {name: value for name, value in vars(cb).items() if isinstance(value, _PLAIN) and not name.startswith('_')}
    values.update(
        {name: getattr(cb, name) for name in ('best', 'wait') if isinstance(getattr(type(cb), name, None), property)}
    )
    return copyreg._reconstructor, (stock, object, None), {**values, 'learn': cb.learn}  # type: ignore[attr-defined]

"What `Learner` of fastai 2 has more: `learn.ddp_timeline()` and `learn.plot_ddp_timeline()`. Imported for that effect."

from __future__ import annotations
from pathlib import Path

import pandas as pd
from fastai.basics import Learner, patch
from matplotlib.figure import Figure

from ..timeline import plot_timeline, timeline


@patch
def ddp_timeline(self: Learner) -> pd.DataFrame:
    "The table of `timeline()`: which rank waited how long for which. Call it on all ranks."
    return timeline()


@patch
def plot_ddp_timeline(
    self: Learner,
    path: str | Path | None = None,  # where to save the picture, in the format of its suffix
) -> Figure | None:  # on rank 0; None on the others, and if there is nothing to draw
    "Draw `timeline()`, on rank 0. Call it on all ranks."
    return plot_timeline(path)

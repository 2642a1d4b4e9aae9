"fastai 2: saving what a fit needs to be resumed."

from __future__ import annotations
from importlib.metadata import version

from fastai.callback.tracker import EarlyStoppingCallback

from ..checkpoint.state import model_state, to_builtin
from ..distributed import all_gather, run_on_main, world_size
from ..training.resume_files import callback_keys
from .loader_state import own_state
from .resume_state import shared_state
from .resumed_fit import ResumableFit

__all__ = ['save', 'wait_for_write', 'patience']


def save(
    current: ResumableFit,
    epoch: int,  # that is to be trained next, or the rest of it
    batch: int = 0,  # how many batches of it are trained
    finished: bool = False,  # whether nothing is left to train
    background: bool = False,  # whether to write while training continues
) -> bool:  # whether a signal has asked any rank to exit
    "Save on rank 0, what all ranks have. Raises `CheckpointWriteError` on all ranks."
    by_rank = all_gather((bool(current.watch.by), own_state(current.learn)), 'random states')
    state = dict(
        shared_state(current.learn),
        plan=current.signature,
        epoch=epoch,
        rows=current.rows,
        order=current.epoch.order if batch else None,
        stages=_stages(current, batch),
        ranks=[own for _, own in by_rank],
        tables=current.tables.starts,
    )
    run_on_main(_write, (current, state, epoch, batch, finished, background and not finished))
    current.schedule.note_save()
    return any(asked for asked, _ in by_rank)


def _stages(current, batch):
    if not batch:
        return []
    bs = getattr(current.learn.dl, 'bs', None) or 1
    this_process = [world_size(), bs, batch - current.epoch.first_batch]
    return [*map(list, current.stages), this_process]


def _write(current, training, epoch, batch, finished, background):
    learn, files = current.learn, current.files
    wait_for_write(current)
    meta = dict(
        epoch=epoch,
        batch=batch,
        n_iter=vars(learn).get('n_iter', 0),
        n_epoch=learn.n_epoch,
        iteration=learn.train_iter,
        finished=finished,
        after=current.earlier.last,
        fastai=version('fastai'),
    )
    if finished and len(current.rows) < learn.n_epoch:
        meta['stopped'] = patience(learn)
    write = files.next(meta)
    opt = to_builtin(learn.opt.state_dict())
    state = {'model': model_state(learn.model), 'opt': opt, 'training': training}
    savers = [vars(cb)['_saver'] for cb in learn.cbs if vars(cb).get('_saver')]
    models = [thread for saver in savers for thread in saver.writer.under_way]

    def write_last(state):
        # killed in between, the fit would be resumed after an epoch whose best was never written
        for thread in models:
            thread.join()
        return write(state)

    if background:
        current.writer.start(write_last, state)
    else:
        files.keep_newest(write_last(state))


def wait_for_write(
    current: ResumableFit,
) -> None:
    "On rank 0: wait for what is written in the background. `CheckpointWriteError` if that has failed."
    if current.writer.busy:
        current.files.keep_newest(current.writer.wait())


def patience(learn) -> dict:
    "Of the callbacks that stop a fit early, by name. A fit that they stopped can be resumed when they have more of it."
    return {key: cb.patience for key, cb in callback_keys(learn.cbs) if isinstance(cb, EarlyStoppingCallback)}

"fastai 2: whether a fit can be saved to be resumed, and resuming it."

from __future__ import annotations

from fastai.callback.schedule import ParamScheduler
from fastai.learner import Learner

from ..checkpoint.state import refuse_sharded, size_of
from ..distributed import all_or_none, print_on_main, world_size
from ..training.resume_files import Found, load, progress
from .fit_signature import check_signature, data_sizes
from .history import show_rows
from .resume_saving import patience
from .resume_state import not_saved, restore_shared
from .resumed_fit import ResumableFit, Resumed

__all__ = ['check_fit', 'find', 'restore']


def check_fit(
    learn: Learner,  # when a fit begins
    who: str,  # the callback's class, for messages
    several: int,  # how many of it there are
) -> None:
    "`ValueError` or `CheckpointError` if this fit cannot be saved to be resumed."
    if several > 1:
        raise ValueError(f'{who}: {several} in one fit. Give it one, which may save by epochs, batches and minutes.')
    refuse_sharded(learn.model, who)
    own = {id(parameter) for parameter in learn.model.parameters()}
    trained = [parameter for group in getattr(learn.opt, 'param_lists', ()) for parameter in group]
    others = sum(id(parameter) not in own for parameter in trained)
    if others:  # copies are made before the saved weights are loaded, and would undo that
        raise ValueError(
            f"{who}: the optimizer trains {others} tensors that are not the model's own, which are not saved. Copies "
            'in another precision (NonNativeMixedPrecision)? MixedPrecision needs none. A loss that has weights? Make '
            'it a part of the model.'
        )
    names = not_saved(learn)
    if names:
        print_on_main(
            f'{who}: the state of {", ".join(names)} is not saved. A resumed fit will differ from an uninterrupted '
            'run.',
            warn=True,
        )


def find(
    current: ResumableFit,
    resume: str,  # 'auto', 'must' or 'never'
) -> Found | None:  # None to start from scratch
    "On rank 0: the file to resume from."
    learn = current.learn
    size = size_of([learn.model.state_dict(), learn.opt.state_dict()])
    scheduled = any(isinstance(cb, ParamScheduler) for cb in learn.cbs)

    def would_train(meta):
        "Whether a fit that was stopped early has more patience now."
        before, now = meta.get('stopped', {}), patience(learn)
        return bool(before) and all(key not in now or now[key] > epochs for key, epochs in before.items())

    return current.files.find(size, learn.n_epoch, scheduled, resume, current.earlier, would_train)


def restore(
    current: ResumableFit,
    found: Found,
) -> None:
    "Bring everything back to where it was. `ValueError` on all ranks if the file belongs to a different fit."
    learn, path, finished = current.learn, found.path, found.meta['finished']

    def check(rest):
        check_signature(learn, path, rest['opt'], rest['training'], current.signature)

    kept = load(learn.model, path, found.checksum, check)
    state = kept['training']
    resumed = Resumed(learn, state, kept['opt'])
    with all_or_none(f'resume from {path}'):
        resumed.restore_optimizer()
        restore_shared(learn, state, finished)
        current.tables.rewind(state.get('tables', {}))
    current.was_finished = finished
    current.rows = state['rows']
    current.fit.first_epoch = learn.n_epoch if finished else state['epoch']
    show_rows(learn, current.rows)
    if not resumed.stages:
        resumed.restore_random_states()
    if finished:
        _print_finished(path, state, data_sizes(learn))
        return
    current.resumed = resumed
    _print_resumed(found, state, data_sizes(learn))


def _print_finished(path, state, sizes):
    other = ''
    if state['data'] != sizes:
        other = (
            f' It had {state["data"]} samples and samples per batch, and this one has {sizes}: if this is another fit, '
            'it is not trained.'
        )
    print_on_main(
        f'{path}: already finished: loading its weights without training.{other} To train, give it another fname, or '
        "resume='never'.",
        warn=bool(other),
    )


def _print_resumed(found, state, sizes):
    print_on_main(f'Resuming after {progress(found.meta)}, from {found.path}.')
    ranks = len(state['ranks'])
    if world_size() != ranks:
        print_on_main(
            f'{found.path} was saved by {ranks} ranks, and is resumed by {world_size()}: batches and random numbers '
            'will differ from an uninterrupted run.',
            warn=True,
        )
    if state['data'] != sizes:
        print_on_main(
            f'{found.path} was saved with {state["data"]} samples and samples per batch, and is resumed with {sizes}: '
            'it will differ from an uninterrupted run.',
            warn=True,
        )

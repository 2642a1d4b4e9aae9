"fastai 1: a fit that was killed goes on after the last epoch that it has saved."

import os

import pytest
from fastai.basics import optim, partial
from fastai.callback import annealing_cos
from fastai.callbacks.general_sched import GeneralScheduler, TrainingPhase
from fastai.train import fit_one_cycle  # noqa: F401 (patches Learner)

from fastai_ddp_callbacks import (
    DDPEarlyStoppingCallback,
    DDPResumeCallback,
    DDPSaveModelCallback,
    DDPTerminateOnNaNCallback,
    ddp_ctx,
    rank,
)
from learners1 import Hook, Records, digest, learner
from ranks import run, values


def train(path, kill=None, n=5, cycle=False, given=None, **kwargs):
    """A fit that ends, or is killed after epoch `kill` has been saved.

    With 'end' it is killed after the last epoch has been saved, before the end is."""
    learn = learner(path)
    cbs = [DDPResumeCallback(learn, **kwargs), saver := DDPSaveModelCallback(learn)]
    if given:
        cbs += [Records(learn, given), DDPEarlyStoppingCallback(learn, patience=2)]
    if kill == 'end':
        cbs.append(Hook(learn, 'train_end', lambda **_: os._exit(9)))
    elif kill is not None:
        cbs.append(Hook(learn, 'epoch_end', lambda epoch, **_: os._exit(9) if epoch == kill else None, late=True))
    with ddp_ctx(learn):
        (learn.fit_one_cycle if cycle else learn.fit)(n, 0.02, callbacks=cbs)
    rec = learn.recorder
    history = [float(o) for o in rec.val_losses], list(rec.lrs), len(rec.losses)
    return digest(learn.model), float(saver.best), history if rank() == 0 else None  # which is rank 0's after a resume


def files(path):
    return sorted(o.name for o in path.glob('models/*'))


@pytest.mark.parametrize('world_size,cycle', [(1, False), (1, True), (2, True), (3, False)])
def test_killed_and_started_again_it_ends_as_if_it_had_not_been_killed(tmp_path, world_size, cycle):
    quiet = values(run(train, world_size, tmp_path / 'quiet', None, 5, cycle))
    killed = run(train, world_size, tmp_path / 'killed', 2, 5, cycle)
    assert [o.exitcode for o in killed] == [9] * world_size
    assert values(run(train, world_size, tmp_path / 'killed', None, 5, cycle)) == quiet
    assert len({o[0] for o in quiet}) == 1
    assert files(tmp_path / 'killed') == files(tmp_path / 'quiet')  # no rubbish, no more files


def test_a_fit_that_has_ended_is_not_trained_again(tmp_path):
    first = values(run(train, 2, tmp_path))
    again = run(train, 2, tmp_path)
    assert [o[0] for o in values(again)] == [o[0] for o in first] and 'end of a fit of 5 epochs' in again[0].output


@pytest.mark.parametrize('world_size', [1, 2])
def test_a_loss_that_is_nan_is_no_end_and_the_fit_goes_on_from_before_it(tmp_path, world_size):
    def scenario(nan):
        learn = learner(tmp_path)

        def spoil(epoch, num_batch, train, last_loss, **_):
            return {'last_loss': last_loss * float('nan')} if nan and train and (epoch, num_batch) == (2, 1) else None

        with ddp_ctx(learn):
            learn.fit(
                5,
                0.02,
                callbacks=[Hook(learn, 'backward_begin', spoil), DDPTerminateOnNaNCallback(), DDPResumeCallback(learn)],
            )
        return len(learn.recorder.val_losses), all(bool(o.isfinite().all()) for o in learn.model.parameters())

    first = run(lambda: scenario(True), world_size)
    values(first)
    assert 'is resumed from what was saved before' in first[0].output and not any(
        'finished' in o for o in files(tmp_path)
    )
    assert values(run(lambda: scenario(False), world_size)) == [(5, True)] * world_size


def test_patience_goes_on_counting(tmp_path):
    given = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    quiet = values(run(train, 2, tmp_path / 'quiet', None, 7, False, given))
    run(train, 2, tmp_path / 'killed', 1, 7, False, given)
    assert values(run(train, 2, tmp_path / 'killed', None, 7, False, given)) == quiet and len(quiet[0][2][0]) == 4


def test_a_fit_of_another_kind_is_refused_on_all_ranks(tmp_path):
    run(train, 2, tmp_path, 1, 5, True)

    def refused():
        try:
            train(tmp_path, n=6, cycle=True)
        except Exception as e:
            return type(e).__name__, str(e)

    zero, one = values(run(refused, 2))
    assert (
        zero[0] == 'ValueError'
        and 'another schedule' in zero[1]
        and one[0] == 'RankFailedError'
        and 'another schedule' in one[1]
    )


def test_there_must_be_something_to_go_on_with_if_it_must(tmp_path):
    def refused():
        try:
            train(tmp_path, resume='must')
        except Exception as e:
            return str(e)

    assert all('no whole' in o for o in values(run(refused, 2)))


def two_fits(path, style, kill=None):
    "Fits of 3 and 2 epochs on one learner, with a callback for each; killed after epoch `kill` of the second."
    learn = learner(path, callback_fns=[DDPResumeCallback] if style == 'callback_fns' else None)
    ends = []
    with ddp_ctx(learn):
        for n in (3, 2):
            hook = Hook(
                learn, 'epoch_end', lambda epoch, **_: os._exit(9) if n == 2 and epoch == kill else None, late=True
            )
            learn.fit(n, 0.02, callbacks=[hook, *([DDPResumeCallback(learn)] if style == 'callbacks' else [])])
            ends.append((digest(learn.model), len(learn.recorder.val_losses)))
    return ends


def test_a_second_fit_does_not_go_on_when_the_first_was_trained_anew(tmp_path):
    first = values(run(two_fits, 2, tmp_path, 'callbacks'))
    for o in tmp_path.glob('models/resume_*.pth'):
        o.unlink()
    again = run(two_fits, 2, tmp_path, 'callbacks')
    assert values(again) == first and 'starting from scratch' in again[0].output


@pytest.mark.parametrize('world_size,style', [(1, 'callbacks'), (2, 'callback_fns')])
def test_fits_are_numbered_by_the_learner_so_that_each_of_them_may_have_a_new_callback(tmp_path, world_size, style):
    quiet = values(run(two_fits, world_size, tmp_path / 'quiet', style))
    assert [n for _, n in quiet[0]] == [3, 2] and quiet[0][0] != quiet[0][1]
    killed = run(two_fits, world_size, tmp_path / 'killed', style, 0)
    assert [o.exitcode for o in killed] == [9] * world_size
    assert (
        values(run(two_fits, world_size, tmp_path / 'killed', style)) == quiet
    )  # the first fit is not trained again, the second goes on


def test_two_learners_count_their_fits_apart_and_a_name_counts_its_own(tmp_path):
    def fits():
        first, second = learner(tmp_path / 'first'), learner(tmp_path / 'second')
        for learn, name in ((first, 'resume'), (second, 'resume'), (first, 'other'), (first, 'resume')):
            learn.fit(1, 0.02, callbacks=[DDPResumeCallback(learn, name=name)])
        return [sorted(o.name for o in (tmp_path / k / 'models').glob('*_finished.pth')) for k in ('first', 'second')]

    assert values(run(fits, 1)) == [
        [['other_6_finished.pth', 'resume-2_6_finished.pth', 'resume_6_finished.pth'], ['resume_6_finished.pth']]
    ]


def test_of_two_callbacks_of_one_class_both_go_on(tmp_path):
    "fastai keeps the last one alone on the learner."

    def savers(kill=None):
        learn = learner(tmp_path)
        cbs = [DDPSaveModelCallback(learn, name=o) for o in ('first', 'second')]
        hook = Hook(learn, 'epoch_end', lambda epoch, **_: os._exit(9) if epoch == kill else None, late=True)
        learn.fit(3, 0.02, callbacks=[DDPResumeCallback(learn), *cbs, Records(learn, [1.0, 2.0, 3.0]), hook])
        return [o.best for o in cbs]

    assert run(savers, 1, 1)[0].exitcode == 9
    assert values(run(savers, 1)) == [[1.0, 1.0]]


def test_callbacks_of_an_earlier_fit_take_no_part_in_the_next(tmp_path):
    def fits(kill=None, n=2):
        learn = learner(tmp_path)
        learn.fit_one_cycle(
            2, 0.02, callbacks=[DDPResumeCallback(learn), DDPSaveModelCallback(learn, monitor='train_loss')]
        )
        hook = Hook(learn, 'epoch_end', lambda epoch, **_: os._exit(9) if epoch == kill else None, late=True)
        learn.fit(n, 0.02, callbacks=[DDPResumeCallback(learn), hook])  # has no schedule that would forbid more epochs
        return len(learn.recorder.val_losses)

    assert run(fits, 1, 0)[0].exitcode == 9
    assert values(run(fits, 1, None, 3)) == [3]


@pytest.mark.parametrize(
    'world_size,cycle,given',
    [(2, False, None), (1, True, None), (1, True, [3.0, 1.0, 2.0, 4.0, 5.0]), (2, False, [1.0, 2.0, 3.0, 4.0, 5.0])],
)
def test_killed_between_the_last_epoch_and_the_end_nothing_is_trained_and_the_end_is_the_same(
    tmp_path, world_size, cycle, given
):
    "Also where early stopping has made an epoch the last one."
    quiet = values(run(train, world_size, tmp_path / 'quiet', None, 5, cycle, given))
    assert [o.exitcode for o in run(train, world_size, tmp_path / 'killed', 'end', 5, cycle, given)] == [9] * world_size
    for _ in range(2):  # the second time it is a fit that has ended
        assert values(run(train, world_size, tmp_path / 'killed', None, 5, cycle, given)) == quiet
        assert files(tmp_path / 'killed') == files(tmp_path / 'quiet')


@pytest.mark.parametrize('kill', [None, 'end', 1])
def test_the_next_fit_begins_with_the_hyperparameters_that_the_last_one_ended_with(tmp_path, kill):
    "Which are those of the best epoch, not those at the end of the schedule."

    def fits(path, kill=None):
        learn = learner(path)
        hook = Hook(learn, 'train_end', lambda **_: os._exit(9)) if kill == 'end' else None
        learn.fit_one_cycle(
            3,
            0.02,
            callbacks=[
                DDPResumeCallback(learn),
                DDPSaveModelCallback(learn),
                Records(learn, [1.0, 2.0, 3.0]),
                *([hook] if hook else []),
            ],
        )
        momentum = learn.opt.opt.param_groups[0]['momentum']
        hook = Hook(learn, 'epoch_end', lambda epoch, **_: os._exit(9) if epoch == kill else None, late=True)
        learn.fit(3, 0.02, callbacks=[DDPResumeCallback(learn), hook])
        return momentum, digest(learn.model)

    quiet = values(run(fits, 1, tmp_path / 'quiet'))
    run(fits, 1, tmp_path / 'killed', kill)
    assert values(run(fits, 1, tmp_path / 'killed')) == quiet


def phases(learn, lr=0.02, length=9):
    return GeneralScheduler(
        learn,
        [
            TrainingPhase(length).schedule_hp('lr', (lr / 10, lr)).schedule_hp('mom', 0.8),
            TrainingPhase(21).schedule_hp('lr', (lr, 0.0), annealing_cos),
        ],
    )


def of_a_kind(
    path,
    kill=None,
    cycle=False,
    lr=0.02,
    max_lr=0.02,
    wd=0.0,
    opt=optim.SGD,
    split=False,
    frozen=False,
    monitor='valid_loss',
    phased=None,
):
    learn = learner(path)
    learn.opt_func = partial(opt, momentum=0.9) if opt is optim.SGD else opt
    if split or frozen:
        learn.split(lambda m: (m[1], m[2]))
    if frozen:
        learn.freeze()
    cbs = [DDPResumeCallback(learn), DDPSaveModelCallback(learn, monitor=monitor)]
    if phased:
        cbs.append(phases(learn, **phased))
    cbs.append(Hook(learn, 'epoch_end', lambda epoch, **_: os._exit(9) if epoch == kill else None, late=True))

    def saved():
        return sorted(path.glob('models/*.pth'))

    before, there = digest(learn.model), saved()
    with ddp_ctx(learn):
        try:
            learn.fit_one_cycle(5, max_lr, wd=wd, callbacks=cbs) if cycle else learn.fit(5, lr, wd=wd, callbacks=cbs)
        except ValueError as e:
            error = str(e)
        else:
            return len(learn.recorder.val_losses)
    return error, digest(learn.model) == before and saved() == there and (
        rank() or not [*path.glob('models/.resume*')]
    )  # the name is given back


@pytest.mark.parametrize(
    'world_size,was,now,told',
    [
        (2, {}, dict(lr=0.5), 'lr was 0.02 and is 0.5'),
        (1, {}, dict(wd=0.1), 'wd was 0.0 and is 0.1'),
        (1, dict(cycle=True), dict(cycle=True, max_lr=0.5), 'one-cycle schedule was lr_max=0.02'),
        (1, {}, dict(cycle=True), 'one-cycle schedule was none and is lr_max=0.02'),
        (1, {}, dict(opt=optim.Adam), 'optimizer was SGD and is Adam'),
        (1, dict(opt=optim.Adam), dict(opt=optim.AdamW), 'optimizer was Adam and is AdamW'),
        (1, {}, dict(split=True), 'parameters by group was [8, 13] and is [4, 4, 0, 8, 4, 1]'),
        (1, dict(split=True), dict(frozen=True), 'trained parameters was ['),
        (1, dict(phased=dict(lr=0.02)), dict(phased=dict(lr=0.5)), 'phases was '),
        (1, dict(phased=dict(lr=0.02)), dict(phased=dict(length=12)), 'lengths of phases was [9, 21] and is [12, 21]'),
        (2, {}, dict(monitor='train_loss'), "the fit to resume followed 'valid_loss'"),
    ],
)
def test_a_fit_of_another_kind_is_refused_before_anything_is_changed(tmp_path, world_size, was, now, told):
    assert [o.exitcode for o in run(lambda: of_a_kind(tmp_path, 1, **was), world_size)] == [9] * world_size
    for error, unchanged in values(run(lambda: of_a_kind(tmp_path, **now), world_size)):
        assert told in error and unchanged


@pytest.mark.parametrize(
    'kind',
    [
        {},
        dict(cycle=True),
        dict(cycle=True, opt=optim.Adam, split=True, wd=0.1),
        dict(phased=dict(lr=0.02)),
        dict(frozen=True),
    ],
)
def test_a_fit_of_the_same_kind_goes_on_with_any_number_of_ranks(tmp_path, kind):
    run(lambda: of_a_kind(tmp_path, 1, **kind), 2)
    assert values(run(lambda: of_a_kind(tmp_path, **kind), 1)) == [5]


def test_a_fit_that_was_interrupted_goes_on_in_the_same_process_whatever_its_schedule_has_left_behind(tmp_path):
    def fits(schedule):
        learn, asked = learner(tmp_path / schedule), []

        def interrupt(epoch, **_):
            if epoch == 1 and not asked:
                asked.append(True)
                raise KeyboardInterrupt

        for _ in range(2):
            cbs = [
                DDPResumeCallback(learn),
                Hook(learn, 'batch_begin', interrupt),
                *([phases(learn)] if schedule == 'phases' else []),
            ]
            try:
                learn.fit_one_cycle(5, 0.02, callbacks=cbs) if schedule == 'one_cycle' else learn.fit(
                    5, 0.02, callbacks=cbs
                )
            except KeyboardInterrupt:
                pass
        return len(learn.recorder.val_losses)

    for o in ('one_cycle', 'phases'):
        assert values(run(fits, 1, o)) == [5]


@pytest.mark.parametrize(
    'wrong,told',
    [
        (dict(keep=0), 'keep=0'),
        (dict(keep=-1), 'keep=-1'),
        (dict(keep=None), 'keep=None'),
        (dict(every_epoch=0), 'every_epoch=0'),
        (dict(every_epoch=0.5), 'every_epoch=0.5'),
        (dict(name=''), "name=''"),
        (dict(name='a{epoch}'), 'braces'),
        (dict(name='a{'), 'braces'),
        (dict(resume='yes'), "resume='yes'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused_by_the_constructor(tmp_path, wrong, told):
    learn = learner(tmp_path)
    with pytest.raises((TypeError, ValueError), match=told):
        DDPResumeCallback(learn, **wrong)
    assert not hasattr(learn, 'ddp_resume_callback')


@pytest.mark.parametrize('kill', [1, 'end', None])
def test_the_path_of_the_last_save_is_known_after_going_on_also_in_a_folder_that_was_moved(tmp_path, kill):
    def last(path, kill=None):
        learn = learner(path)
        event, late = ('train_end', False) if kill == 'end' else ('epoch_end', True)
        hook = Hook(learn, event, lambda epoch, **_: os._exit(9) if kill == 'end' or epoch == kill else None, late=late)
        cbs = (
            DDPResumeCallback(learn),
            DDPSaveModelCallback(learn, name='sub/best'),
            Records(learn, [1.0, 2.0, 3.0]),
            hook,
        )
        with ddp_ctx(learn):
            learn.fit(3, 0.02, callbacks=cbs)
        return cbs[1].last_saved_path

    run(last, 2, tmp_path / 'before', kill)
    (tmp_path / 'before').rename(tmp_path / 'after')
    assert values(run(last, 2, tmp_path / 'after')) == [tmp_path / 'after/models/sub/best.pth'] * 2

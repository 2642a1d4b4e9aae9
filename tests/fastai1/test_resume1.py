"fastai 1: a fit that was killed goes on after the last epoch that it has saved."
import os

import pytest
from fastai.train import fit_one_cycle # noqa: F401 (patches Learner)

from fastai_ddp_callbacks import DDPEarlyStoppingCallback, DDPResumeCallback, DDPSaveModelCallback, ddp_ctx, rank
from learners1 import Hook, Records, digest, learner
from ranks import run, values


def train(path, kill=None, n=5, cycle=False, given=None, **kwargs):
    """A fit that ends, or is killed after epoch `kill` has been saved; with 'end' after the last one has been, before the end is."""
    learn = learner(path)
    cbs = [DDPResumeCallback(learn, **kwargs), saver := DDPSaveModelCallback(learn)]
    if given: cbs += [Records(learn, given), DDPEarlyStoppingCallback(learn, patience=2)]
    if kill == 'end': cbs.append(Hook(learn, 'train_end', lambda **_: os._exit(9)))
    elif kill is not None: cbs.append(Hook(learn, 'epoch_end', lambda epoch, **_: os._exit(9) if epoch == kill else None, late=True))
    with ddp_ctx(learn): (learn.fit_one_cycle if cycle else learn.fit)(n, 0.02, callbacks=cbs)
    rec = learn.recorder
    history = [float(o) for o in rec.val_losses],list(rec.lrs),len(rec.losses)
    return digest(learn.model),float(saver.best),history if rank() == 0 else None # which is rank 0's after a resume

def files(path): return sorted(o.name for o in (path/'models').iterdir())

@pytest.mark.parametrize('world_size,cycle', [(1, False), (1, True), (2, True), (3, False)])
def test_killed_and_started_again_it_ends_as_if_it_had_not_been_killed(tmp_path, world_size, cycle):
    quiet = values(run(train, world_size, tmp_path/'quiet', None, 5, cycle))
    killed = run(train, world_size, tmp_path/'killed', 2, 5, cycle)
    assert [o.exitcode for o in killed] == [9]*world_size
    assert values(run(train, world_size, tmp_path/'killed', None, 5, cycle)) == quiet
    assert len({o[0] for o in quiet}) == 1
    assert files(tmp_path/'killed') == files(tmp_path/'quiet') # no rubbish, no more files

def test_a_fit_that_has_ended_is_not_trained_again(tmp_path):
    first = values(run(train, 2, tmp_path))
    again = run(train, 2, tmp_path)
    assert [o[0] for o in values(again)] == [o[0] for o in first] and 'end of a fit of 5 epochs' in again[0].output

def test_patience_goes_on_counting(tmp_path):
    given = [1., 2., 3., 4., 5., 6., 7.]
    quiet = values(run(train, 2, tmp_path/'quiet', None, 7, False, given))
    run(train, 2, tmp_path/'killed', 1, 7, False, given)
    assert values(run(train, 2, tmp_path/'killed', None, 7, False, given)) == quiet and len(quiet[0][2][0]) == 4

def test_a_fit_of_another_kind_is_refused_on_all_ranks(tmp_path):
    run(train, 2, tmp_path, 1, 5, True)
    def refused():
        try: train(tmp_path, n=6, cycle=True)
        except Exception as e: return type(e).__name__,str(e)
    zero,one = values(run(refused, 2))
    assert zero[0] == 'ValueError' and 'another schedule' in zero[1] and one[0] == 'RankFailedError' and 'another schedule' in one[1]

def test_there_must_be_something_to_go_on_with_if_it_must(tmp_path):
    def refused():
        try: train(tmp_path, resume='must')
        except Exception as e: return str(e)
    assert all('no whole' in o for o in values(run(refused, 2)))

def two_fits(path, style, kill=None):
    "Fits of 3 and 2 epochs on one learner, with a callback for each; killed after epoch `kill` of the second."
    learn = learner(path, callback_fns=[DDPResumeCallback] if style == 'callback_fns' else None)
    ends = []
    with ddp_ctx(learn):
        for n in (3, 2):
            hook = Hook(learn, 'epoch_end', lambda epoch, **_: os._exit(9) if n == 2 and epoch == kill else None, late=True)
            learn.fit(n, 0.02, callbacks=[hook, *([DDPResumeCallback(learn)] if style == 'callbacks' else [])])
            ends.append((digest(learn.model), len(learn.recorder.val_losses)))
    return ends

@pytest.mark.parametrize('world_size,style', [(1, 'callbacks'), (2, 'callback_fns')])
def test_fits_are_numbered_by_the_learner_so_that_each_of_them_may_have_a_new_callback(tmp_path, world_size, style):
    quiet = values(run(two_fits, world_size, tmp_path/'quiet', style))
    assert [n for _,n in quiet[0]] == [3, 2] and quiet[0][0] != quiet[0][1]
    killed = run(two_fits, world_size, tmp_path/'killed', style, 0)
    assert [o.exitcode for o in killed] == [9]*world_size
    assert values(run(two_fits, world_size, tmp_path/'killed', style)) == quiet # the first fit is not trained again, the second goes on

def test_two_learners_count_their_fits_apart_and_a_name_counts_its_own(tmp_path):
    def fits():
        first,second = learner(tmp_path/'first'),learner(tmp_path/'second')
        for learn,name in ((first, 'resume'), (second, 'resume'), (first, 'other'), (first, 'resume')):
            learn.fit(1, 0.02, callbacks=[DDPResumeCallback(learn, name=name)])
        return [sorted(o.name for o in (tmp_path/k/'models').glob('*_finished.pth')) for k in ('first', 'second')]
    assert values(run(fits, 1)) == [[['other_6_finished.pth', 'resume-2_6_finished.pth', 'resume_6_finished.pth'], ['resume_6_finished.pth']]]

def test_of_two_callbacks_of_one_class_both_go_on(tmp_path):
    "fastai keeps the last one alone on the learner."
    def savers(kill=None):
        learn = learner(tmp_path)
        cbs = [DDPSaveModelCallback(learn, name=o) for o in ('first', 'second')]
        hook = Hook(learn, 'epoch_end', lambda epoch, **_: os._exit(9) if epoch == kill else None, late=True)
        learn.fit(3, 0.02, callbacks=[DDPResumeCallback(learn), *cbs, Records(learn, [1., 2., 3.]), hook])
        return [o.best for o in cbs]
    assert run(savers, 1, 1)[0].exitcode == 9
    assert values(run(savers, 1)) == [[1., 1.]]

def test_callbacks_of_an_earlier_fit_take_no_part_in_the_next(tmp_path):
    def fits(kill=None, n=2):
        learn = learner(tmp_path)
        learn.fit_one_cycle(2, 0.02, callbacks=[DDPResumeCallback(learn), DDPSaveModelCallback(learn, monitor='train_loss')])
        hook = Hook(learn, 'epoch_end', lambda epoch, **_: os._exit(9) if epoch == kill else None, late=True)
        learn.fit(n, 0.02, callbacks=[DDPResumeCallback(learn), hook]) # has no schedule that would forbid more epochs
        return len(learn.recorder.val_losses)
    assert run(fits, 1, 0)[0].exitcode == 9
    assert values(run(fits, 1, None, 3)) == [3]

@pytest.mark.parametrize('world_size,cycle,given', [(2, False, None), (1, True, None), (1, True, [3., 1., 2., 4., 5.]), (2, False, [1., 2., 3., 4., 5.])])
def test_killed_between_the_last_epoch_and_the_end_nothing_is_trained_and_the_end_is_the_same(tmp_path, world_size, cycle, given):
    "Also where early stopping has made an epoch the last one."
    quiet = values(run(train, world_size, tmp_path/'quiet', None, 5, cycle, given))
    assert [o.exitcode for o in run(train, world_size, tmp_path/'killed', 'end', 5, cycle, given)] == [9]*world_size
    for _ in range(2): # the second time it is a fit that has ended
        assert values(run(train, world_size, tmp_path/'killed', None, 5, cycle, given)) == quiet
        assert files(tmp_path/'killed') == files(tmp_path/'quiet')

@pytest.mark.parametrize('kill', [None, 'end', 1])
def test_the_next_fit_begins_with_the_hyperparameters_that_the_last_one_ended_with(tmp_path, kill):
    "Which are those of the best epoch, not those at the end of the schedule."
    def fits(path, kill=None):
        learn = learner(path)
        hook = Hook(learn, 'train_end', lambda **_: os._exit(9)) if kill == 'end' else None
        learn.fit_one_cycle(3, 0.02, callbacks=[DDPResumeCallback(learn), DDPSaveModelCallback(learn), Records(learn, [1., 2., 3.]), *([hook] if hook else [])])
        momentum = learn.opt.opt.param_groups[0]['momentum']
        hook = Hook(learn, 'epoch_end', lambda epoch, **_: os._exit(9) if epoch == kill else None, late=True)
        learn.fit(3, 0.02, callbacks=[DDPResumeCallback(learn), hook])
        return momentum,digest(learn.model)
    quiet = values(run(fits, 1, tmp_path/'quiet'))
    run(fits, 1, tmp_path/'killed', kill)
    assert values(run(fits, 1, tmp_path/'killed')) == quiet

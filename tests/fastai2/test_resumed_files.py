"""What a saver takes for its own when its fit goes on: the files of before, those of epochs that are trained once
more, copies, damaged ones."""

import os, random, shutil, signal

import pytest
from fastai.basics import Callback

from fastai_ddp_callbacks import DDPResumeCallback, DDPSaveModelCallback, ddp_ctx, read_metadata, verify_checkpoint
from learners import Records
from ranks import run, values
from resuming import Dies, DiesAfter, Ends, files, killed, learner, start, train
from seeds import SEED


class DiesBefore(Ends):
    "Dies when the saver has saved the epoch, and the state that the fit goes on with is of an earlier one."

    order = 75

    def _end(self):
        os.kill(os.getpid(), signal.SIGKILL)


class DiesAtEnd(Callback):
    "Dies when the saver has come to its end, and nothing yet tells so."

    order = 75

    def after_fit(self):
        os.kill(os.getpid(), signal.SIGKILL)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def saved(path):
    return {
        o: (m['epoch'], m['value'])
        for o in files(path)
        if o.startswith('m') and (m := verify_checkpoint(path / 'models' / o))
    }


def tree(path):
    return sorted(
        (str(o.relative_to(path)), m['epoch'], m['value']) for o in path.rglob('*.pth') if (m := verify_checkpoint(o))
    )


def quiet_and_killed(tmp_path, make, end, world_size=1, **kwargs):
    "The results of the fit that nobody interrupts and of the one that is killed and goes on."
    quiet = values(start(world_size, tmp_path / 'quiet', *make(), **kwargs))
    killed(start(world_size, tmp_path / 'killed', *make(), end, **kwargs))
    return quiet, values(start(world_size, tmp_path / 'killed', *make(), **kwargs))


DOWN, UP_AND_DOWN = [6.0, 5.0, 4.0, 3.0, 2.0, 1.0], [3.0, 2.0, 4.0, 1.0, 5.0, 6.0]


@pytest.mark.parametrize(
    'settings,records,end',
    [
        (dict(keep_best=3), DOWN, Dies(5)),
        (dict(keep_best=3), UP_AND_DOWN, DiesBefore(3)),
        (dict(keep_best=2), UP_AND_DOWN, DiesBefore(3)),
        (dict(keep_best=2, keep_last=2, last='m-last'), UP_AND_DOWN, DiesBefore(4)),
        (dict(every_epoch=2, keep_best=3, keep_last=2, last='m-last'), DOWN, DiesBefore(5)),
        (dict(keep_best=2, fname='m-{epoch}-{valid_loss:.2f}'), UP_AND_DOWN, DiesBefore(3)),
        (dict(every_epoch=True), UP_AND_DOWN, DiesBefore(3)),
        (dict(every_epoch=True, fname='m-{valid_loss:.1f}'), [2.0] * 6, DiesBefore(3)),
        (dict(keep_best=3, fname='m-{valid_loss:.1f}'), [2.0, 1.0, 1.0, 2.0, 1.0, 1.0], DiesBefore(3)),
        (dict(keep_best=2, fname='m-{epoch}', at_end=True), UP_AND_DOWN, DiesAtEnd()),
        (dict(at_end=True), UP_AND_DOWN, DiesAtEnd()),
        (dict(), UP_AND_DOWN, DiesBefore(3)),
        (dict(min_delta=0.5, keep_last=3), [3.0, 2.9, 2.8, 9.0, 9.0, 9.0], Dies(2)),
        (dict(min_delta=0.5, keep_last=3), [3.0, 2.9, 2.8, 9.0, 9.0, 9.0], DiesBefore(2)),
    ],
)
@pytest.mark.parametrize('every_epoch', [1, 2])
def test_the_files_and_the_best_are_those_of_an_uninterrupted_run(tmp_path, settings, records, end, every_epoch):
    quiet, again = quiet_and_killed(
        tmp_path, lambda: (DDPSaveModelCallback(**settings), Records(records)), end, n=6, every_epoch=every_epoch
    )
    assert saved(tmp_path / 'killed') == saved(tmp_path / 'quiet')
    assert [(o['weights'], o['state']) for o in again] == [(o['weights'], o['state']) for o in quiet]
    assert not again[0]['warnings']


def test_copies_and_renamed_files_of_the_user_are_neither_counted_nor_deleted(tmp_path):
    make = lambda: (DDPSaveModelCallback(keep_best=1, keep_last=1), Records(UP_AND_DOWN))
    killed(start(1, tmp_path, *make(), Dies(3), n=6))
    models = tmp_path / 'models'
    (models / 'backup').mkdir()
    copies = [
        shutil.copy(models / old, models / new)
        for old, new in (
            ('model_3.pth', 'paper.pth'),
            ('model_3.pth', 'backup/model_3.pth'),
            ('resume_32.pth', 'resume_32_mine.pth'),
        )
    ]
    values(start(1, tmp_path, *make(), n=6))
    assert all(map(os.path.exists, copies)) and list(saved(tmp_path)) == ['model_3.pth', 'model_5.pth']


@pytest.mark.parametrize('harm', [os.unlink, flip])
def test_a_best_that_is_gone_or_damaged_is_told_at_once_and_the_best_that_is_left_takes_its_place(tmp_path, harm):
    make = lambda: (DDPSaveModelCallback(keep_best=2), Records([3.0, 1.0, 2.0, 4.0]))
    killed(start(1, tmp_path, *make(), Dies(2)))
    harm(tmp_path / 'models/model_1.pth')
    (result,) = values(start(1, tmp_path, *make()))
    told = [o for o in result['warnings'] if 'no longer there' in o]
    assert len(told) == 1 and 'the best that is left, with 2.0' in told[0] and result['state'][0]['best'] == 2.0


def test_savers_are_known_by_the_name_of_their_files(tmp_path):
    def make(name, **kwargs):
        return DDPSaveModelCallback(fname=name, **kwargs)

    records = Records(UP_AND_DOWN)
    killed(start(1, tmp_path, make('ma', keep_last=4), make('mb', keep_last=1), records, Dies(3), n=6))
    runs = [read_metadata(tmp_path / f'models/{o}_3.pth')['run'] for o in ('ma', 'mb')]
    (result,) = values(start(1, tmp_path, make('mb', keep_last=1), records, n=6))
    assert list(saved(tmp_path)) == ['ma_0.pth', 'ma_1.pth', 'ma_2.pth', 'ma_3.pth', 'mb_3.pth', 'mb_5.pth']
    assert [read_metadata(tmp_path / f'models/{o}_3.pth')['run'] for o in ('ma', 'mb')] == runs
    assert any('DDPSaveModelCallback ma-1 is not there any more' in o for o in result['warnings'])


def test_the_order_of_savers_does_not_matter(tmp_path):
    def make():
        return [DDPSaveModelCallback(fname='ma', keep_last=2), DDPSaveModelCallback(fname='mb', keep_best=2)]

    killed(start(1, tmp_path, *make(), Records(UP_AND_DOWN), Dies(3), n=6))
    values(start(1, tmp_path, *make()[::-1], Records(UP_AND_DOWN), n=6))
    values(start(1, tmp_path / 'quiet', *make(), Records(UP_AND_DOWN), n=6))
    assert saved(tmp_path) == saved(tmp_path / 'quiet')


def paths(path, cb):
    return [str(o.relative_to(path)) if o else None for o in (cb.best_path, cb.last_saved_path, *cb.best_paths)]


@pytest.mark.parametrize('end', [None, Dies(2)])
def test_a_fit_is_resumed_in_a_folder_that_was_moved_and_a_finished_one_still_has_its_paths(tmp_path, end):
    def fit(path, *cbs):
        cb = DDPSaveModelCallback(keep_best=2)
        train(path, cb, Records([3.0, 1.0, 2.0, 2.0]), *cbs)
        return paths(path, cb)

    first = run(lambda: fit(tmp_path / 'a', *([end] if end else [])), 2)
    best, other = 'models/model_1.pth', 'models/model_2.pth'
    expected = [best, best, best, other]  # at the end of a fit the last path is that of the best
    assert killed(first) if end else values(first) == [expected] * 2
    os.rename(tmp_path / 'a', tmp_path / 'b')
    assert values(run(lambda: fit(tmp_path / 'b'), 2)) == [expected] * 2


def test_a_best_that_is_gone_after_the_end_of_its_fit_is_not_missed(tmp_path):
    first = values(start(1, tmp_path, DDPSaveModelCallback(), Records(UP_AND_DOWN), n=6))
    (tmp_path / 'models/model.pth').unlink()
    again = values(start(1, tmp_path, DDPSaveModelCallback(), Records(UP_AND_DOWN), n=6))
    assert (
        again[0]['weights'] == first[0]['weights']
        and again[0]['state'] == first[0]['state']
        and not again[0]['warnings']
    )


def test_between_two_fits_the_best_of_the_first_is_not_forgotten(tmp_path):
    def fits(path, between=lambda: None):
        learn, cb = learner(path), DDPSaveModelCallback(reset_on_fit=False)
        resume = DDPResumeCallback()
        with ddp_ctx(learn):
            learn.fit(3, 0.1, cbs=[resume, cb, Records([3.0, 1.0, 2.0])])
            between()
            learn.fit(2, 0.1, cbs=[resume, cb, Records([5.0, 5.0])])
        return cb.best, cb.best_path.name, [float(o.sum()) for o in learn.model.parameters()]

    killed(run(lambda: fits(tmp_path / 'a', lambda: os.kill(os.getpid(), signal.SIGKILL)), 1))
    assert values(run(lambda: fits(tmp_path / 'a'), 1)) == values(run(lambda: fits(tmp_path / 'b'), 1))


FITS = int(os.environ.get('FITS', 12))  # more of them on request


@pytest.mark.begins_early
@pytest.mark.timeout(120 + 20 * FITS)
def test_whatever_is_kept_and_whenever_it_is_killed_the_end_is_that_of_an_uninterrupted_run(tmp_path):
    rng = random.Random(SEED)

    def maybe(*choices):
        return rng.choice([None, *choices])

    for i in range(FITS):
        records = [rng.choice([1.0, 2.0, 2.5, 3.0, 4.0, 5.0, float('nan')]) for _ in range(rng.choice([3, 4, 6]))]
        kept = dict(
            keep_best=maybe(1, 2, 3),
            keep_last=maybe(1, 2),
            every_epoch=rng.choice([0, 0, 1, 2]),
            last=maybe('m-last'),
            fname=rng.choice(['m', 'm-{epoch}', 'm/{epoch}/m']),
            with_opt=rng.random() < 0.3,
            background=rng.random() < 0.4,
            reset_on_fit=rng.random() < 0.7,
        )
        resume = dict(
            every_epoch=rng.choice([1, 2, None]),
            every_batches=rng.choice([1, 3]),
            keep=rng.choice([1, 2]),
            background=rng.random() < 0.3,
            n=len(records),
        )
        ends = [
            rng.choice(
                [
                    DiesAfter(rng.randint(3, 14)),
                    Dies(rng.randrange(len(records)), maybe(0, 3)),
                    DiesBefore(rng.randrange(len(records))),
                    DiesAtEnd(),
                ]
            )
            for _ in range(rng.choice([1, 2]))
        ]

        def make():
            return DDPSaveModelCallback(**kept), Records(records)

        story, size = (
            f'SEED={SEED}, fit {i}: {kept}, {records}, {resume}, {[(type(o).__name__, vars(o)) for o in ends]}',
            rng.choice([1, 1, 2]),
        )
        quiet = values(start(size, tmp_path / f'{i}/quiet', *make(), **resume))
        for end in ends:
            start(size, tmp_path / f'{i}/killed', *make(), end, **resume)
        again = values(start(size, tmp_path / f'{i}/killed', *make(), **resume))
        for o in 'weights', 'values', 'state', 'warnings':
            assert [repr(r[o]) for r in again] == [repr(r[o]) for r in quiet], f'{o}: {story}'
        assert tree(tmp_path / f'{i}/killed') == tree(tmp_path / f'{i}/quiet'), story

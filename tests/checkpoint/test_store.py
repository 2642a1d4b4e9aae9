"""What stays of a run: names, the best and the newest, what is deleted and when, and disks on which nothing can be
written."""

import errno, os, random, resource, shutil, tempfile, threading, time, warnings
from pathlib import Path

import pytest, torch
from fastai.basics import Callback
from fastai.test_utils import RegModel
from hypothesis import given, settings, strategies as st

from fastai_ddp_callbacks import (
    DDPSaveModelCallback,
    DDPTrackerCallback,
    barrier,
    ddp_ctx,
    rank,
    read_checkpoint,
    read_metadata,
    verify_checkpoint,
    write_checkpoint,
)
from fastai_ddp_callbacks.checkpoint.store import Store, delete
from disks import disk
from learners import Records, digest, learner
from ranks import run, values

NAN = float('nan')
UP_AND_DOWN = [5.0, 3.0, 4.0, 1.0, 2.0]  # better in epochs 0, 1 and 3


def fit(learn, cb, records, cbs=()):
    "As many epochs as there are records, which are lists of values by column, maybe by rank too."
    columns = records if isinstance(records, dict) else {'valid_loss': records}
    n = min(len(v[0] if isinstance(v, dict) else v) for v in columns.values())
    with ddp_ctx(learn):
        learn.fit(n, 0.1, cbs=[cb, *(Records(v, k) for k, v in columns.items()), *cbs])
    return cb


def names(path):
    "All files under `models`, hidden ones too."
    return sorted(str(o.relative_to(path / 'models')) for o in (path / 'models').rglob('*') if o.is_file())


def epochs(path):
    return {o: verify_checkpoint(path / 'models' / o)['epoch'] for o in names(path)}


def warned(f, *args, **kwargs):
    "What `f` returns, and the texts of the warnings about models and checkpoints that it gave."
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter('always')
        result = f(*args, **kwargs)
    return result, [
        str(o.message) for o in seen if any(s in str(o.message) for s in ('.pth', 'checkpoint', 'No model'))
    ]


def metric(name):
    def f(x, y):
        return ((x - y) ** 2).mean()

    f.__name__ = name
    return f


# -- which files stay


@pytest.mark.parametrize(
    'settings,kept',
    [
        (dict(), {'model.pth': 3}),
        (dict(keep_best=2), {'model_3.pth': 3, 'model_4.pth': 4}),  # epoch 1 was the second best until epoch 4
        (dict(keep_best=3), {'model_1.pth': 1, 'model_3.pth': 3, 'model_4.pth': 4}),
        (dict(keep_last=1), {'model_3.pth': 3, 'model_4.pth': 4}),
        (dict(keep_last=3), {'model_2.pth': 2, 'model_3.pth': 3, 'model_4.pth': 4}),
        (dict(keep_best=2, keep_last=1), {'model_3.pth': 3, 'model_4.pth': 4}),
        (dict(keep_best=3, keep_last=2), {'model_1.pth': 1, 'model_3.pth': 3, 'model_4.pth': 4}),
        (dict(every_epoch=True), {f'model_{i}.pth': i for i in range(5)}),
        (dict(every_epoch=2), {f'model_{i}.pth': i for i in (0, 2, 4)}),
        (dict(every_epoch=2, keep_last=1), {'model_4.pth': 4}),  # which is the best of those that were due, too
        (dict(every_epoch=2, keep_last=2), {'model_2.pth': 2, 'model_4.pth': 4}),
        (dict(every_epoch=3, keep_best=1), {'model_3.pth': 3}),
        (dict(every_epoch=2, keep_best=2), {'model_3.pth': 3, 'model_4.pth': 4}),
        (dict(every_epoch=4, keep_best=2, keep_last=2), {'model_3.pth': 3, 'model_4.pth': 4}),
        (dict(fname='m-{epoch}'), {'m-3.pth': 3}),
        (dict(fname='m-{epoch}', every_epoch=2), {'m-0.pth': 0, 'm-2.pth': 2, 'm-4.pth': 4}),
        (dict(fname='m-{epoch}', keep_best=2), {'m-3.pth': 3, 'm-4.pth': 4}),
        (dict(last='last'), {'model_3.pth': 3, 'model_4.pth': 4, 'last.pth': 4}),
        (dict(last='model'), {'model_3.pth': 3, 'model_4.pth': 4, 'model.pth': 4}),
        (dict(keep_best=2, last='last'), {'model_3.pth': 3, 'model_4.pth': 4, 'last.pth': 4}),
        (
            dict(every_epoch=2, last='last'),
            {'model_0.pth': 0, 'model_2.pth': 2, 'model_4.pth': 4, 'last.pth': 4},
        ),  # a second name deletes nothing
        (dict(at_end=True), {'model.pth': 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize('background', [False, True], ids=['foreground', 'background'])
def test_what_is_kept(tmp_path, settings, kept, background):
    cb = fit(learner(tmp_path), DDPSaveModelCallback(**settings, background=background), UP_AND_DOWN)
    assert epochs(tmp_path) == kept  # and no lock, nor anything half written
    assert cb.last_saved_path.exists() and all(o.exists() for o in cb.best_paths)
    if cb.best_path:
        assert read_metadata(cb.best_path)['value'] == cb.best and cb.best_paths[0] == cb.best_path


@pytest.mark.parametrize('n', [2, 3])
def test_the_name_does_not_depend_on_how_often_the_model_got_better(tmp_path, n):
    fit(learner(tmp_path), DDPSaveModelCallback(keep_best=1), [3.0, 2.0, 1.0][:n])
    assert names(tmp_path) in (['model.pth'], [f'model_{n - 1}.pth'])


@pytest.mark.parametrize('world_size', [1, 2, 3])
def test_all_ranks_know_the_same_ranked_list_and_the_best_is_loaded(tmp_path, world_size):
    def scenario():
        learn = learner(tmp_path)
        cb = fit(
            learn,
            DDPSaveModelCallback(keep_best=3, keep_last=1),
            {'valid_loss': {r: [o + r / 8 for o in (5.0, 1.0, 3.0, 2.0, 7.0, 6.0, 8.0)] for r in range(world_size)}},
        )
        return cb.best, cb.best_path, cb.best_paths, cb.last_saved_path, digest(learn.model)

    results = values(run(scenario, world_size))
    assert all(o == results[0] for o in results)
    best, path, paths, last, weights = results[0]
    assert [o.name for o in paths] == ['model_1.pth', 'model_3.pth', 'model_2.pth', 'model_6.pth']
    assert path == last == paths[0]  # loggers take the last one for the best
    assert [read_metadata(o)['value'] for o in paths] == sorted(
        read_metadata(o)['value'] for o in paths
    ) and read_metadata(path)['value'] == best
    assert names(tmp_path) == sorted(o.name for o in paths)
    plain = learner(tmp_path).load('model_1')
    assert digest(plain.model) == weights


@pytest.mark.parametrize(
    'settings',
    [dict(keep_best=1), dict(keep_last=1), dict(keep_best=2), dict(last='last'), dict(fname='m-{epoch}'), dict()],
    ids=str,
)
@pytest.mark.parametrize('records', [[3.0, 2.0, 1.0], [1.0, 2.0, 3.0], [3.0, 4.0, 2.0]], ids=str)
def test_written_in_the_background_the_list_is_that_of_the_disk_on_all_ranks(tmp_path, settings, records):
    def scenario():
        learn = learner(tmp_path)
        cb = fit(learn, DDPSaveModelCallback(**settings, background=True), records)
        return cb.best, cb.best_path, cb.best_paths, cb.last_saved_path, digest(learn.model)

    a, b = values(run(scenario, 2))
    assert a == b and a[0] == min(records) == read_metadata(a[1])['value'] and a[3].exists()
    assert {o.name for o in a[2]} == set(names(tmp_path)) - {'last.pth'}


def test_higher_is_better_where_the_metric_says_so_and_of_equals_the_older_stays(tmp_path):
    learn = learner(tmp_path, metrics=metric('accuracy'))
    cb = fit(learn, DDPSaveModelCallback('accuracy', keep_best=2), {'accuracy': [0.5, 0.7, 0.7, 0.6, 0.7, 0.7]})
    assert epochs(tmp_path) == {'model_1.pth': 1, 'model_2.pth': 2} and cb.best == 0.7
    assert [o.name for o in cb.best_paths] == ['model_1.pth', 'model_2.pth']


def test_epochs_without_a_number_are_kept_among_the_newest_and_never_among_the_best(tmp_path):
    cb = fit(
        learner(tmp_path), DDPSaveModelCallback(keep_best=2, keep_last=2), [NAN, 3.0, -float('inf'), 4.0, NAN, None]
    )
    assert epochs(tmp_path) == {f'model_{i}.pth': i for i in (1, 3, 4, 5)}
    assert [o.name for o in cb.best_paths] == ['model_1.pth', 'model_3.pth'] and cb.best == 3.0
    assert read_metadata(tmp_path / 'models/model_4.pth')['value'] is None


def test_the_best_stays_the_best_although_a_later_one_is_better_by_less_than_min_delta(tmp_path):
    learn = learner(tmp_path)
    cb = fit(learn, DDPSaveModelCallback(min_delta=0.5, keep_best=1, keep_last=1), [3.0, 2.9, 2.8, 9.0])
    assert cb.best == 3.0 and read_metadata(cb.best_path)['epoch'] == 0 and set(epochs(tmp_path).values()) >= {0, 3}
    assert digest(learn.model) == digest(learner(tmp_path).load(cb.best_path.stem).model)


def test_the_files_of_a_run_bear_its_number_and_two_runs_have_different_ones(tmp_path):
    def scenario():
        return fit(learner(tmp_path), DDPSaveModelCallback(fname='a', keep_last=2), [3.0, 2.0]).best_paths

    paths = values(run(scenario, 2))[0]
    other = fit(learner(tmp_path), DDPSaveModelCallback(fname='b'), [1.0]).best_path
    runs = [read_metadata(o)['run'] for o in (*paths, other)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    'wrong',
    [dict(keep_best=0), dict(keep_last=-1), dict(keep_best=1.5), dict(on_error='ignore'), dict(keep_last='all')],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DDPSaveModelCallback(**wrong)


ACCIDENTS = {
    'lost': os.unlink,
    'overwritten': lambda o: write_checkpoint({'a': torch.tensor(-1)}, o, dict(epoch=99)),
    'stock': lambda o: torch.save({'a': torch.tensor(-1)}, o),
    'damaged': lambda o: Path(o).write_bytes(b'PK damaged'),
}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(st.one_of(st.none(), st.integers(0, 4).map(float)), st.sampled_from(['', '', '', *ACCIDENTS])),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(1, 3)),
    st.booleans(),
    st.sampled_from([0.0, 1.5]),
    st.sampled_from(['m', 'm-{epoch}', 'm-{value:.0f}', 'x/{epoch}/m']),
)
def test_after_every_save_the_best_and_the_newest_are_on_disk_and_of_this_run_nothing_else(
    saves, k, n, lower, delta, fname
):
    "Whatever is saved, and whatever others do to the files: what they have made is never touched."
    folder = Path(tempfile.mkdtemp())
    store, sign, chance = Store(folder, fname, lower, k, n, several=True), 1 if lower else -1, random.Random(1)
    written, best, others = [], None, {}  # `Saved`, oldest first; what others have put in the place of a file
    try:
        for i, (value, accident) in enumerate(saves):
            better = value is not None and (best is None or sign * (best.value - value) > delta)
            path = store.place(dict(epoch=i, value=value))
            assert not path.exists()
            saved = store.write({'a': torch.tensor(i)}, path, dict(epoch=i, value=value))
            with warnings.catch_warnings():
                if not others:
                    warnings.simplefilter('error')
                for o in store.add(saved, better):
                    delete(o)
            others.pop(saved.path, None)  # a name that was lost may be used again
            written = [*(o for o in written if o.path != saved.path), saved]
            best = saved if better else None if best and best.path == saved.path else best
            ranked = sorted((o for o in written if o.value is not None), key=lambda o: (sign * o.value, o.epoch))
            kept = {*ranked[:k], *written[-(n or 1) :], *([best] if best else [])}
            written = [o for o in written if o in kept]
            assert set(store.files) == kept and store.best == best and store.add(saved, better) == []
            assert store.ranked() == sorted((o for o in ranked if o in kept), key=lambda o: o != best)
            found = {str(o) for o in folder.rglob('*.pth')}
            assert found - others.keys() == {o.path for o in kept} - others.keys()
            for o in kept:
                assert o.path in others or read_checkpoint(o.path, checksum=o.checksum)[0]['a'] == o.epoch
            for o, data in others.items():
                assert (Path(o).read_bytes() if o in found else None) == data
            if accident:
                victim = chance.choice(sorted(o.path for o in kept))
                if os.path.exists(victim):
                    ACCIDENTS[accident](victim)
                others[victim] = Path(victim).read_bytes() if os.path.exists(victim) else None
    finally:
        shutil.rmtree(folder)


# -- names


def test_names_tell_epoch_iteration_and_columns_of_rank_0_and_the_monitored_value_of_all(tmp_path):
    def scenario():
        learn = learner(tmp_path, metrics=[metric('f1.score'), metric('top 5 %')])
        template = 'runs/x/{epoch:02d}-{iteration}-{valid_loss:.3f}-{f1.score:.1f}-{top 5 %}'
        records = {
            'valid_loss': {0: [2.0, 4.0], 1: [3.0, 5.0]},
            'f1.score': {0: [0.25, 0.75], 1: [0.0, 0.0]},
            'top 5 %': [None, NAN],
        }
        return fit(learn, DDPSaveModelCallback(fname=template, keep_best=2), records).best_paths

    a, b = values(run(scenario, 2))
    assert (
        a == b == [tmp_path / 'models/runs/x/00-1-2.500-0.2-nan.pth', tmp_path / 'models/runs/x/01-2-4.500-0.8-nan.pth']
    )
    assert names(tmp_path) == [str(o.relative_to(tmp_path / 'models')) for o in a]


@pytest.mark.parametrize('column', ['f1/score', 'größe', "it's", '-rf', 'a\\b', '100%', 'x*?', 'A.B.c', '..'])
def test_any_name_of_a_column_may_stand_in_a_template_and_makes_a_file_in_the_folder(tmp_path, column):
    learn = learner(tmp_path, metrics=metric(column))
    cb = fit(learn, DDPSaveModelCallback(fname='m-{%s:.2f}' % column), {column: [0.5], 'valid_loss': [1.0]})
    assert cb.best_path == tmp_path / 'models/m-0.50.pth' and names(tmp_path) == ['m-0.50.pth']


@pytest.mark.parametrize('value', [None, NAN, float('inf'), -float('inf'), 1e300, -1e-300])
def test_any_value_has_a_name(tmp_path, value):
    learn = learner(tmp_path, metrics=metric('m'))
    cb = fit(learn, DDPSaveModelCallback(fname='x{m}-{m:.2e}'), {'m': [value], 'valid_loss': [1.0]})
    shown = NAN if value is None else value
    assert names(tmp_path) == [f'x{shown}-{shown:.2e}.pth'] == [cb.best_path.name]


def test_two_epochs_of_equal_names_are_two_files_of_which_neither_is_overwritten(tmp_path):
    cb = fit(
        learner(tmp_path),
        DDPSaveModelCallback(fname='m{valid_loss:.1f}', keep_best=4, keep_last=1),
        [0.11, 0.12, 0.13, 0.21],
    )
    assert epochs(tmp_path) == {'m0.1.pth': 0, 'm0.1-1.pth': 1, 'm0.1-2.pth': 2, 'm0.2.pth': 3}
    assert [read_metadata(o)['value'] for o in cb.best_paths] == [0.11, 0.12, 0.13, 0.21]


@pytest.mark.parametrize('world_size', [1, 2])
@pytest.mark.parametrize(
    'fname,tells',
    [
        ('m-{accuracy}', 'there is no accuracy.*epoch'),
        ('m-{}', 'm-{}'),
        ('m-{0}', 'there is no 0'),
        ('m-{epoch', 'm-{epoch'),
        ('{epoch:{wide}}', 'wide'),
        ('m-{valid_loss:d}', 'valid_loss:d'),
        ('m-{epoch:.2f}-{epoch:zz}', 'epoch:zz'),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_refused_on_all_ranks_before_training(
    tmp_path, fname, tells, world_size
):
    def scenario():
        learn, trained = learner(tmp_path), []

        class Batches(Callback):
            def after_batch(self):
                trained.append(1)

        try:
            fit(learn, DDPSaveModelCallback(fname=fname), [1.0], [Batches()])
        except Exception as e:
            return type(e).__name__, str(e), len(trained)
        finally:
            barrier()  # stays until the other one has been told

    for kind, text, trained in values(run(scenario, world_size)):
        assert kind == 'ValueError' and not trained
        assert all(o in text for o in tells.split('.*')), text


@pytest.mark.parametrize('last', ['last', 'runs/last', 'other/last'])
def test_the_newest_has_a_second_name_and_is_no_second_file(tmp_path, last):
    inodes = []

    class Look(Callback):
        order = 70

        def after_epoch(self):
            inodes.append([(tmp_path / 'models' / f'{o}.pth').stat().st_ino for o in (last, f'runs/m_{self.epoch}')])

    fit(learner(tmp_path), DDPSaveModelCallback(fname='runs/m', last=last, keep_last=2), [1.0, 3.0, 2.0], [Look()])
    assert len(inodes) == 3 and all(a == b for a, b in inodes)
    assert epochs(tmp_path) == {'runs/m_0.pth': 0, 'runs/m_1.pth': 1, 'runs/m_2.pth': 2, f'{last}.pth': 2}


def no_links(*args, **kwargs):
    raise OSError(errno.EPERM, 'Operation not permitted')


def test_the_second_name_is_a_copy_where_the_disk_knows_no_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'link', no_links)
    fit(learner(tmp_path), DDPSaveModelCallback(last='last'), UP_AND_DOWN)
    assert epochs(tmp_path) == {'model_3.pth': 3, 'model_4.pth': 4, 'last.pth': 4}
    a, b = (tmp_path / 'models' / o for o in ('model_4.pth', 'last.pth'))
    assert a.read_bytes() == b.read_bytes() and a.stat().st_ino != b.stat().st_ino


@pytest.mark.parametrize('on_error', ['raise', 'warn'])
def test_a_second_name_that_cannot_be_given_is_a_warning_as_the_checkpoint_itself_is_whole(
    tmp_path, monkeypatch, on_error
):
    "The newest keeps its own name, and nothing half copied is left."
    monkeypatch.setattr(os, 'link', no_links)
    copy, fails = shutil.copyfileobj, [1, 2]

    def full(source, target, *args):
        if fails.pop(0) != 2:
            return copy(source, target, *args)
        target.write(b'some of it')
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(shutil, 'copyfileobj', full)
    cb = DDPSaveModelCallback(last='last', on_error=on_error)
    fails.append(3)
    _, said = warned(fit, learner(tmp_path), cb, [3.0, 2.0, 1.0])
    assert len(said) == 1 and 'last.pth' in said[0] and epochs(tmp_path)['last.pth'] == 2 and cb.best == 1.0
    assert not [o for o in names(tmp_path) if o.endswith('.writing')]


# -- files of others


@pytest.mark.parametrize(
    'settings,old,new',
    [
        (dict(keep_last=1), ['model_99.pth'], ['model_1.pth', 'model_0.pth']),
        (dict(keep_last=1), ['model_1.pth', 'model_99.pth'], ['model_1-1.pth', 'model_0.pth']),
        (dict(fname='m-{epoch}', keep_best=2), ['m-0.pth', 'm-1.pth', 'm-1-1.pth'], ['m-0-1.pth', 'm-1-2.pth']),
        (dict(fname='m-{epoch}', every_epoch=True), ['m-0.pth'], ['m-0-1.pth', 'm-1.pth']),
    ],
    ids=str,
)
def test_files_of_another_run_are_neither_touched_nor_counted_nor_loaded(tmp_path, settings, old, new):
    state = learner(tmp_path / 'other').model.state_dict()
    for i, o in enumerate(old):
        write_checkpoint(
            state, tmp_path / 'models' / o, dict(epoch=99 + i, value=-9.0, run='other', monitor='valid_loss')
        )
    others = 'notes.txt', 'model_5.pth.bak', 'weights.pth', '.hidden.pth'
    for o in others:
        (tmp_path / 'models' / o).write_text('mine')
    before = {o: (tmp_path / 'models' / o).read_bytes() for o in (*old, *others)}
    learn = learner(tmp_path)
    cb = fit(learn, DDPSaveModelCallback(**settings), [1.0, 2.0])
    assert {o: (tmp_path / 'models' / o).read_bytes() for o in before} == before
    assert set(names(tmp_path)) - set(before) == set(new)
    if cb.best_path:
        assert read_metadata(cb.best_path)['epoch'] == 0 and cb.best == 1.0


def test_a_second_run_under_a_plain_name_replaces_the_file_and_one_that_never_improves_does_not_load_it(tmp_path):
    def scenario():
        learn = learner(tmp_path)
        torch.nn.init.constant_(next(learn.model.parameters()), 7.0)
        _, said = warned(fit, learn, cb := DDPSaveModelCallback(), [NAN])
        return len(said), cb.best_path, cb.best_paths, cb.last_saved_path, digest(learn.model)

    old = digest(fit_and_learner(tmp_path, [1.0]).model)
    a, b = values(run(scenario, 2))
    assert (
        a[0] == 1 and b[0] == 0 and a[1:] == b[1:] == (None, [], None, a[4]) and a[4] != old
    )  # weights as training left them


def fit_and_learner(path, records, **kwargs):
    learn = learner(path)
    fit(learn, DDPSaveModelCallback(**kwargs), records)
    return learn


def test_nobody_deletes_but_rank_0_even_if_both_believe_to_be_first_on_their_node(tmp_path):
    def scenario():
        unlinked, unlink = [], os.unlink

        def noted(path, *args, **kwargs):
            if str(path).endswith('.pth'):
                unlinked.append(os.path.basename(path))
            return unlink(path, *args, **kwargs)

        os.unlink = noted
        _, said = warned(fit, learner(tmp_path), DDPSaveModelCallback(keep_best=1, keep_last=1), [4.0, 3.0, 2.0, 1.0])
        return unlinked, said

    a, b = values(run(scenario, 2, env=lambda r: dict(LOCAL_RANK=0)))
    assert (
        a == (['model_0.pth', 'model_1.pth', 'model_2.pth'], [])
        and b == ([], [])
        and names(tmp_path) == ['model_3.pth']
    )


# -- order, and those who read


def test_nothing_is_deleted_before_the_next_one_is_durable_and_the_best_is_there_at_every_moment(tmp_path, monkeypatch):
    events, seen, stop = [], [], threading.Event()

    def noted(name):
        f = getattr(os, name)

        def inner(*args, **kwargs):
            if name == 'unlink' and str(args[0]).endswith('.pth'):
                whole = {
                    o: verify_checkpoint(tmp_path / 'models' / o)['value']
                    for o in names(tmp_path)
                    if o.endswith('.pth')
                }
                assert os.path.basename(args[0]) != min(whole, key=lambda o: whole[o]) and len(whole) >= 2
                events.append(f'delete {os.path.basename(args[0])}')
            if name == 'replace':
                events.append(f'save {os.path.basename(args[1])}')
            if name == 'fsync':
                events.append('sync folder' if os.path.isdir(f'/proc/self/fd/{args[0]}') else 'sync')
            return f(*args, **kwargs)

        monkeypatch.setattr(os, name, inner)

    def watch():
        while not stop.wait(0.002):
            found = [o for o in names(tmp_path) if o.endswith('.pth')] if (tmp_path / 'models').exists() else []
            if found or seen:
                seen.append(len(found))

    for o in ('unlink', 'replace', 'fsync'):
        noted(o)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        fit(learner(tmp_path), DDPSaveModelCallback(keep_best=1, keep_last=1), [5.0, 4.0, 6.0, 3.0])
    finally:
        stop.set()
        thread.join()

    def save(i):
        return ['sync', f'save model_{i}.pth', 'sync folder']

    assert events == [
        *save(0),
        *save(1),
        'delete model_0.pth',
        *save(2),
        *save(3),
        'delete model_1.pth',
        'delete model_2.pth',
    ]
    assert seen and min(seen) >= 1


@pytest.mark.parametrize(
    'order,others',
    [(55, 0), (70, 0), (60.5, 1)],
    ids=['before it', 'after it', 'after another tracker of the same column'],
)
def test_who_reads_a_checkpoint_in_an_event_of_the_epoch_has_it_until_the_end_of_that_event(tmp_path, order, others):
    def scenario():
        cb, read = DDPSaveModelCallback(keep_best=1, keep_last=1), []

        class Reader(Callback):
            "Rank 1 looks at what it is told of, slowly."

            def after_epoch(self):
                if rank() != 1 or not cb.best_paths:
                    return
                paths = cb.best_paths
                time.sleep(0.4)
                for o in paths:
                    read.append(verify_checkpoint(o)['epoch'])

        reader = Reader()
        reader.order = order
        fit(learner(tmp_path), cb, [4.0, 3.0, 2.0], [reader, *(DDPTrackerCallback() for _ in range(others))])
        return read

    assert len(values(run(scenario, 2))[1]) >= 2


# -- what goes wrong while deleting


@pytest.mark.parametrize('accident', ['gone', 'overwritten', 'by stock', 'a folder', 'may not'])
def test_a_file_that_cannot_or_must_not_be_deleted_is_a_warning_and_training_goes_on(tmp_path, accident):
    def scenario():
        victim = tmp_path / 'models/model_0.pth'

        class Accident(Callback):
            order = 70

            def after_epoch(self):
                if self.epoch or rank():
                    return
                if accident != 'may not':
                    victim.unlink()
                if accident == 'overwritten':
                    write_checkpoint({'a': torch.ones(1)}, victim, dict(run='other'))
                elif accident == 'by stock':
                    torch.save({'a': torch.ones(1)}, victim)
                elif accident == 'a folder':
                    victim.mkdir()

        unlink = os.unlink

        def refused(path, *args, **kwargs):
            if accident == 'may not' and os.path.basename(path) == victim.name:
                raise PermissionError(errno.EPERM, 'Operation not permitted', str(path))
            return unlink(path, *args, **kwargs)

        os.unlink = refused
        cb, said = warned(
            fit, learner(tmp_path), DDPSaveModelCallback(keep_best=1, keep_last=1), [3.0, 2.0, 1.0], [Accident()]
        )
        return cb.best, cb.best_paths, said

    a, b = values(run(scenario, 2))
    assert a[:2] == b[:2] == (1.0, [tmp_path / 'models/model_2.pth']) and b[2] == []
    assert len(a[2]) == 1 and 'model_0.pth' in a[2][0] and 'NoneType' not in a[2][0], a[2]
    assert (tmp_path / 'models/model_0.pth').exists() == (accident != 'gone')


# -- two fits


@pytest.mark.parametrize('reset', [True, False])
def test_a_second_fit_counts_the_files_of_the_first_only_if_it_goes_on_from_there(tmp_path, reset):
    def scenario():
        learn, cb = learner(tmp_path), DDPSaveModelCallback(keep_best=2, reset_on_fit=reset)
        fit(learn, cb, [2.0, 1.0])
        first = digest(learn.model)
        fit(learn, cb, [1.5, 3.0])
        return cb.best, [(read_metadata(o)['value'], o.name) for o in cb.best_paths], digest(learn.model) == first

    a, b = values(run(scenario, 2))
    assert a == b
    if reset:
        assert a == (1.5, [(1.5, 'model_0-1.pth'), (3.0, 'model_1-1.pth')], False)
        assert names(tmp_path) == ['model_0-1.pth', 'model_0.pth', 'model_1-1.pth', 'model_1.pth']
    else:
        assert a == (1.0, [(1.0, 'model_1.pth'), (1.5, 'model_0-1.pth')], True) and names(tmp_path) == [
            'model_0-1.pth',
            'model_1.pth',
        ]


def test_a_second_fit_that_goes_on_overwrites_nothing_of_the_first_although_its_epochs_have_the_same_numbers(tmp_path):
    learn, cb = learner(tmp_path), DDPSaveModelCallback(keep_best=1, keep_last=1, reset_on_fit=False)
    fit(learn, cb, [1.0, 2.0])
    best = digest(learn.model)
    fit(learn, cb, [5.0, 6.0])
    assert cb.best == 1.0 == read_metadata(cb.best_path)['value'] and digest(learn.model) == best
    assert names(tmp_path) == ['model_0.pth', 'model_1-1.pth'] or names(tmp_path) == ['model_0.pth', 'model_1.pth']


def test_after_a_second_fit_under_a_plain_name_the_worse_best_of_that_fit_is_not_mixed_with_the_first(tmp_path):
    learn, cb = learner(tmp_path), DDPSaveModelCallback()
    fit(learn, cb, [1.0])
    fit(learn, cb, [5.0])
    assert cb.best == 5.0 == read_metadata(tmp_path / 'models/model.pth')['value'] and cb.best_paths == [
        tmp_path / 'models/model.pth'
    ]
    _, said = warned(fit, learn, cb, [NAN])
    assert len(said) == 1 and cb.best_path is None and cb.best_paths == [] and cb.best == float('inf')


# -- nothing can be written


class Full(Callback):
    "Leaves no room to rank 0 in given epochs."

    order = 55

    def __init__(self, folder, mounted, epochs):
        self.filler, self.mounted, self.epochs = folder / 'filler', mounted, epochs

    def after_epoch(self):
        if rank() == 0:
            self._fill() if self.epoch in self.epochs else self._free()

    def _fill(self):
        if not self.mounted:
            return resource.setrlimit(
                resource.RLIMIT_FSIZE, (64 << 10, resource.RLIM_INFINITY)
            )  # enough for what is printed
        with open(self.filler, 'ab', buffering=0) as f:
            try:
                while True:
                    f.write(bytes(4096))
            except OSError as e:
                assert e.errno == errno.ENOSPC

    def _free(self):
        if self.mounted:
            self.filler.unlink(missing_ok=True)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


def heavy(n=1_000_000):
    "A model of so many numbers."
    model = RegModel()
    model.register_buffer('ballast', torch.zeros(n))
    return model


@pytest.mark.parametrize('settings', [dict(), dict(keep_best=2, last='last')], ids=str)
def test_with_on_error_warn_training_goes_on_and_the_best_is_always_that_of_a_file(tmp_path, settings):
    folder = tmp_path / 'models'

    def scenario(mounted):
        learn, bests = learner(tmp_path, model=heavy(30_000)), []

        class Note(Callback):
            order = 70

            def after_epoch(self):
                path = self.save_model.best_path
                bests.append((self.save_model.best, self.save_model.new_best, path and read_metadata(path)['value']))

        cb, said = warned(
            fit,
            learn,
            DDPSaveModelCallback(on_error='warn', **settings),
            [5.0, 2.0, 4.0, 1.0, 3.0],
            [Full(folder, mounted, (1, 3)), Note()],
        )
        return bests, cb.best, cb.best_path, digest(learn.model), said

    with disk(folder, 1 << 20) as mounted:
        a, b = values(run(scenario, 2, mounted))
        assert a[:4] == b[:4] and b[4] == []
        assert (
            [o[0] for o in a[0]] == [o[2] for o in a[0]] == [5.0, 5.0, 4.0, 4.0, 3.0]
        )  # an improvement is one on what is on disk
        assert [o[1] for o in a[0]] == [True, False, True, False, True]
        assert len(a[4]) == 2 and all(
            'model' in o and 'on_error' in o and ('space' in o or 'too large' in o) for o in a[4]
        ), a[4]
        assert a[1] == 3.0 and read_metadata(a[2])['epoch'] == 4
        assert set(epochs(tmp_path)) == ({'model_2.pth', 'model_4.pth', 'last.pth'} if settings else {'model.pth'})
        assert digest(learner(tmp_path, model=heavy(30_000)).load(a[2].stem).model) == a[3]


def test_if_no_save_at_all_succeeds_the_weights_stay_as_they_are_and_a_warning_says_so(tmp_path):
    folder = tmp_path / 'models'

    def scenario(mounted):
        cb, said = warned(
            fit,
            learner(tmp_path, model=heavy(30_000)),
            DDPSaveModelCallback(on_error='warn'),
            [5.0, 2.0],
            [Full(folder, mounted, (0, 1))],
        )
        return cb.best, cb.best_path, cb.last_saved_path, said

    with disk(folder, 1 << 20) as mounted:
        a, b = values(run(scenario, 2, mounted))
    assert a[:3] == b[:3] == (float('inf'), None, None) and b[3] == []
    assert len(a[3]) == 3 and 'No model' in a[3][2]


def test_with_on_error_raise_all_ranks_raise_and_what_would_have_made_way_remains(tmp_path):
    folder = tmp_path / 'models'

    def scenario(mounted):
        cb, start = DDPSaveModelCallback(keep_best=1, keep_last=1), time.monotonic()
        try:
            fit(learner(tmp_path, model=heavy(30_000)), cb, [5.0, 4.0, 3.0, 2.0], [Full(folder, mounted, (2,))])
        except Exception as e:
            return type(e).__name__, str(e), getattr(e, 'errno', None), time.monotonic() - start, cb.best_path

    with disk(folder, 1 << 20) as mounted:
        a, b, c = values(run(scenario, 3, mounted))
        (folder / 'filler').unlink(missing_ok=True)
        assert epochs(tmp_path) == {'model_1.pth': 1}
    assert a[0] == 'CheckpointWriteError' and 'model_2.pth' in a[1] and a[3] < 20
    for o in (b, c):
        assert (
            o[0] == 'RankFailedError'
            and 'rank 0' in o[1]
            and 'model_2.pth' in o[1]
            and o[3] < 20
            and o[4] == folder / 'model_1.pth'
        )


@pytest.mark.parametrize(
    'settings,size,expected',
    [
        (dict(), 6, 1),
        (dict(), 16, 0),
        (dict(keep_best=2, keep_last=2), 15, 1),
        (dict(keep_best=2, keep_last=2), 40, 0),
        (dict(every_epoch=2), 9, 1),
        (dict(with_opt=True), 16, 1),
    ],
    ids=str,
)
def test_a_disk_that_looks_too_small_is_told_once_before_the_first_batch(
    tmp_path, monkeypatch, settings, size, expected
):
    learn, told = learner(tmp_path, model=heavy()), []

    class Batches(Callback):
        def after_batch(self):
            told.append(sum('MB left' in str(o.message) for o in seen))

    with disk(tmp_path / 'models', size << 20) as mounted:
        if not mounted:
            monkeypatch.setattr(shutil, 'disk_usage', lambda _: type('Usage', (), dict(free=size << 20)))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            fit(learn, DDPSaveModelCallback(on_error='warn', **settings), [3.0, 2.0, 1.0], [Batches()])
        said = [str(o.message) for o in seen if 'MB left' in str(o.message)]
    assert len(said) == expected and told[0] == expected
    if said:
        assert str(tmp_path / 'models') in said[0] and 'MB' in said[0]


def test_a_disk_that_is_full_from_the_start_is_told_by_folder_and_leaves_nothing_there(tmp_path):
    folder = tmp_path / 'models'

    def scenario(mounted):
        full = Full(folder, mounted, ())
        if rank() == 0:
            full._fill()
        try:
            _, said = warned(fit, learner(tmp_path, model=heavy(30_000)), DDPSaveModelCallback(), [1.0])
        except Exception as e:
            return str(e)
        finally:
            if rank() == 0:
                full._free()

    with disk(folder, 1 << 20) as mounted:
        for o in values(run(scenario, 2, mounted)):
            assert o and str(folder) in o, o
        assert names(tmp_path) == []

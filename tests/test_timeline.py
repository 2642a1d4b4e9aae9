"Who waited for whom: the table, its sums, the line after a fit, and the picture."

import random, subprocess, sys, time
from collections import deque
from pathlib import Path

import nbformat, numpy as np, pandas as pd, pytest
from fastai.basics import Callback
from matplotlib.image import imread

from fastai_ddp_callbacks import agree, barrier, ddp_ctx, rank, run_on_main
from fastai_ddp_callbacks.distributed.current import known_control
from fastai_ddp_callbacks.errors import DDPError, RankFailedError
from fastai_ddp_callbacks.timeline import (
    picture,
    plot_timeline,
    straggler_summary,
    timeline,
    waits_by_name,
    waits_by_rank,
)
from learners import Observed, learner
from notebooks import client_for
from ranks import run, values

LATE = 1.5  # seconds
BEGIN = 10**15  # ns since the epoch, when the made-up time begins


class MadeUpTime:
    """What ranks take for the time: nobody waits, and load changes nothing.

    `pass_by` moves it on this rank alone; ranks that have met leave at one moment, a µs later. Clocks may be wrong."""

    def __init__(self):
        self.now, self.ahead = BEGIN, {}

    def shown(self, r, now):
        return now + int(self.ahead.get(r, 0) * 1e9)

    def meet(self, entered):
        "Ranks have met that had come when each one's own clock showed this."
        self.now = max(came - self.shown(r, 0) for r, came in enumerate(entered)) + 1000


made_up = MadeUpTime()


def clock():
    "In place of `time.time_ns`."
    return made_up.shown(rank(), made_up.now)


def pass_by(seconds):
    "Time goes by on this rank alone."
    made_up.now += int(seconds * 1e9)


class Record(deque):
    "What a rank remembers, in made-up time."

    def append(self, entry):
        place, entered, _ = entry
        made_up.meet(entered)
        super().append((place, entered, clock()))


def with_clock(ahead=(), remember=2000):
    "On each rank: from now on time is made up. What was before is forgotten."
    barrier('with made-up time')
    made_up.ahead = dict(ahead)
    time.time_ns = clock
    known_control().record = Record(maxlen=remember)


def about(seconds):
    "As the tables have it: a rendezvous takes a µs."
    return pytest.approx(seconds, abs=1e-4)


def late(r, seconds=LATE):
    "Rank `r` takes its time."
    if rank() == r:
        pass_by(seconds)


def work(ahead=()):
    "Four rendezvous; rank 2 is late to the second one, and rank 0 alone works before the last."
    with_clock(ahead)
    barrier('begin')
    late(2)
    barrier('middle')
    agree(1.0, name='loss of epoch 0')
    run_on_main(write)


def write():
    pass_by(LATE)


# -- the table


def test_the_table_tells_who_waited_how_long_for_whom_and_is_the_same_on_all_ranks():
    def scenario():
        work()
        return timeline()

    a, b, c = values(run(scenario, 3))
    pd.testing.assert_frame_equal(a, b), pd.testing.assert_frame_equal(a, c)
    assert list(a.columns) == [
        'name',
        'where',
        'kind',
        'begin',
        'end',
        'straggler',
        'waited',
        'rank 0',
        'rank 1',
        'rank 2',
    ]
    assert list(a.name[:3]) == ["barrier('begin')", "barrier('middle')", "agree('loss of epoch 0', how='mean')"]
    assert a.name[3].startswith('run_on_main(write) at test_timeline.py:') and a['where'][0].startswith(
        'test_timeline.py:'
    )
    assert list(a.begin) == about([0, 0, LATE, LATE])
    assert list(a.end) == about([0, LATE, LATE, 2 * LATE])
    assert list(a.straggler[[1, 3]]) == [2, 0]
    assert list(a['rank 0']) == about([0, LATE, 0, 0])
    assert list(a['rank 1']) == about([0, LATE, 0, LATE])
    assert list(a['rank 2']) == about([0, 0, 0, LATE])
    assert list(a.waited) == about([0, 2 * LATE, 0, 2 * LATE])


@pytest.mark.parametrize('r, ahead', [(2, 100), (2, -100), (0, 3600), (1, -0.7)])
def test_clocks_that_differ_change_nothing(r, ahead):
    def scenario(ahead):
        work(ahead)
        return timeline()

    right, wrong = (values(run(scenario, 3, clocks))[0] for clocks in ({}, {r: ahead}))
    pd.testing.assert_frame_equal(right, wrong)


def test_in_one_process_the_table_is_empty():
    table = timeline()
    assert len(table) == 0 and list(table.columns) == [
        'name',
        'where',
        'kind',
        'begin',
        'end',
        'straggler',
        'waited',
        'rank 0',
    ]
    assert len(waits_by_name(table)) == 0 and waits_by_rank(table).to_numpy().sum() == 0


def test_before_any_rendezvous_the_table_is_empty_on_all_ranks():
    assert [len(o) for o in values(run(timeline, 2))] == [0, 0]


def test_a_rendezvous_that_not_all_remember_is_left_out():
    def scenario():
        work()
        if rank() == 1:
            known_control().record.popleft()  # as after a rank left in the midst of it
        return list(timeline().name)

    a, b = values(run(scenario, 2))
    assert a == b and a[0] == "barrier('middle')" and len(a) == 3


def test_rank_0_cannot_ask_for_it_alone():
    def scenario():
        barrier('begin')
        run_on_main(timeline)

    a, b = run(scenario, 2)
    assert isinstance(a.error, DDPError) and 'one rank only' in str(a.error) and 'one rank only' in str(b.error)


# -- the sums


def some_table(n=4, epochs=5, seed=0):
    "A fit in which rank 1 is slow and rank 0 saves."
    draw, rows, now = random.Random(seed), [], 0.0

    def meet(name, seconds, kind='wait'):
        came = np.array([now + o for o in seconds])
        rows.append(
            (
                name,
                'tracker.py:109',
                kind,
                came.min(),
                came.max(),
                int(came.argmax()),
                (came.max() - came).sum(),
                *(came.max() - came),
            )
        )
        return came.max()

    now = meet('run_on_main(Saver._prepare) at save_model.py:92', [0.1] + [0.0] * (n - 1))
    for e in range(epochs):
        now = meet(
            f"agree('valid_loss of epoch {e}', how='mean')", [10 + draw.random() + 2 * (r == 1) for r in range(n)]
        )
        now = meet('run_on_main(Saver._write) at save_model.py:188', [3.0] + [0.0] * (n - 1), 'save')
    now = meet(
        "all_or_none('before loading /a/folder/of/a/name/that/goes/on/model.pth')",
        [1.0 + draw.random() for _ in range(n)],
        'load',
    )
    now = meet(
        "all_or_none('load /a/folder/of/a/name/that/goes/on/model.pth')",
        [0.5 + draw.random() for _ in range(n)],
        'load',
    )
    return pd.DataFrame(
        rows, columns=['name', 'where', 'kind', 'begin', 'end', 'straggler', 'waited', *(f'rank {r}' for r in range(n))]
    )


def test_sums_by_name_take_the_epochs_together_and_begin_with_the_longest():
    table = some_table()
    sums = waits_by_name(table)
    assert sums.index[0] == 'run_on_main(Saver._write) at save_model.py:188' and sums.waited.iloc[0] == pytest.approx(
        5 * 3 * 3
    )
    assert sums.times["agree('valid_loss of an epoch', how='mean')"] == 5 and sums.waited.is_monotonic_decreasing
    assert sums.times.sum() == len(table) and sums.waited.sum() == pytest.approx(table.waited.sum())
    assert sums['rank 0'].sum() == pytest.approx(table['rank 0'].sum())


def test_sums_by_rank_tell_for_whom_each_waited():
    table = some_table()
    sums = waits_by_rank(table)
    assert list(sums.index) == ['rank 0', 'rank 1', 'rank 2', 'rank 3'] and list(sums.columns) == [
        'for rank 0',
        'for rank 1',
        'for rank 2',
        'for rank 3',
    ]
    assert sums.loc['rank 3', 'for rank 0'] >= 15 and sums.loc['rank 0', 'for rank 1'] > 5 and not np.diag(sums).any()
    assert sums.to_numpy().sum() == pytest.approx(table.waited.sum())


def test_without_a_table_the_sums_are_of_what_the_ranks_remember_now():
    def scenario():
        work()
        table = timeline()
        return table, waits_by_name(), waits_by_rank()

    for table, by_name, by_rank in values(run(scenario, 3)):
        before = waits_by_name(table)
        assert list(by_name.times[before.index]) == list(before.times) and {*by_name.index} - {*before.index} == {
            "all_gather('timeline')"
        }
        assert by_rank.loc['rank 0', 'for rank 2'] == about(LATE)
        assert waits_by_rank(table).loc['rank 0', 'for rank 2'] == about(LATE)


# -- one line after a fit


def line(scenario, n, *args, ahead=(), remember=2000):
    "What `straggler_summary` gives on each rank about `scenario`."

    def summary():
        with_clock(ahead, remember)
        barrier('before')
        begin = clock()
        scenario(*args)
        return straggler_summary(begin, clock())

    return values(run(summary, n))


def test_a_rank_that_cost_the_others_much_is_named_on_rank_0_with_the_place():
    def scenario():
        for e in range(3):
            late(2, 0.8)
            agree(1.0, name=f'valid_loss of epoch {e}')

    text, *others = line(scenario, 3)
    assert others == [None, None]
    assert text.startswith('rank 2 cost each of the others 2.4 s of waiting (100 % of this fit), mostly at ')
    assert " mostly at agree('valid_loss of an epoch', how='mean') at " in text


def test_rank_0_that_saves_is_named_too():
    text, _ = line(lambda: run_on_main(write), 2)
    assert text.startswith('rank 0 cost the other 1.5 s of waiting (100 % of this fit), mostly at run_on_main(write)')


@pytest.mark.parametrize('ahead', [100, -100])
@pytest.mark.parametrize('sleeper', [None, 0, 1, 2])
def test_another_clock_is_not_taken_for_a_late_rank(ahead, sleeper):
    def scenario():
        for e in range(4):  # as in a fit: agree, save, go on
            barrier('epoch')
            run_on_main(lambda: None)
        late(sleeper)
        barrier('last')

    text, *_ = line(scenario, 3, ahead={1: ahead})
    if sleeper is None:
        assert text is None
    else:
        assert text.startswith(f'rank {sleeper} cost each of the others 1.5 s')


@pytest.mark.parametrize('wait, fit', [(0.9, 1), (1.9, 20)])
def test_short_waits_and_waits_of_a_small_part_are_not_worth_a_line(wait, fit):
    def scenario():
        late(1, wait)
        barrier('end')
        pass_by(fit - wait)

    assert line(scenario, 2) == [None, None]


def test_what_was_before_the_fit_does_not_count():
    def scenario():
        with_clock()
        late(1)
        barrier('before')
        begin = clock()
        barrier('end')
        return straggler_summary(begin, clock())

    assert values(run(scenario, 2)) == [None, None]


def test_where_nobody_met_there_is_no_line():
    assert straggler_summary(0, time.time_ns()) is None
    assert line(lambda: None, 2) == [None, None]


def test_a_record_that_does_not_reach_back_to_the_beginning_says_at_least():
    def scenario():
        barrier('begin')
        late(1)
        barrier('middle')
        barrier('end')

    text, _ = line(scenario, 2, remember=2)
    assert text.startswith('rank 1 cost the other at least 1.5 s')


# -- the picture


def ink(figure, colour):
    "How many pixels have that colour."
    figure.savefig(ink.file, dpi=100)
    pixels = (imread(ink.file)[:, :, :3] * 255).round().astype(int)
    return int((pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(2).sum())


@pytest.mark.parametrize('n', [2, 3, 8, 16])
def test_the_picture_has_a_row_for_each_rank_and_no_text_over_another(n, tmp_path):
    figure = picture._draw(some_table(n))
    figure.draw_without_rendering()
    ax = figure.axes[0]
    assert [o.get_text() for o in ax.get_yticklabels()] == [f'rank {r}' for r in range(n)]
    texts = [
        *figure.texts,
        *ax.get_yticklabels(),
        *(o for o in ax.texts if len(o.get_text()) > 2),
        *figure.legends[0].texts,
        ax.xaxis.label,
    ]
    boxes = [o.get_window_extent() for o in texts if o.get_text()]
    for i, a in enumerate(boxes):
        assert a.x0 >= 0 and a.y0 >= 0 and a.x1 <= figure.bbox.x1 and a.y1 <= figure.bbox.y1
        assert not any(a.overlaps(b) for b in boxes[i + 1 :])
    ink.file = tmp_path / 'picture.png'
    assert all(ink(figure, o) > 200 for o in picture._COLOURS.values())


def test_what_each_rank_did_follows_from_what_the_rendezvous_are_for():
    table = some_table(3, epochs=1)
    bars = picture._bars(table)
    write, load = table.loc[2], table.loc[4]
    assert bars['save'] == [[(pytest.approx(write.begin), pytest.approx(write.end))], [], []]
    assert [len(o) for o in bars['load']] == [2, 2, 2] and bars['load'][1][1] == (
        table.end[3],
        pytest.approx(load.end - load['rank 1']),
    )
    assert all(len(o) == len(table) for o in bars['wait'])


def test_the_longest_waits_are_marked_on_the_row_of_the_straggler_and_explained():
    figure = picture._draw(some_table())
    numbers = {o.get_text(): o.get_position()[1] for o in figure.axes[0].texts if o.get_text().isdigit()}
    lines = [o.get_text() for o in figure.texts[1:]]
    assert len(numbers) == len(lines) == 6
    for o in lines:
        assert f' for rank {numbers[o[0]]}, at ' in o
    assert any("how='mean') at tracker.py:109" in o for o in lines)


def test_without_long_waits_the_picture_says_so():
    table = some_table(2)
    table[['rank 0', 'rank 1', 'waited']] = 0.0
    table['begin'] = table['end']
    assert picture._draw(table).texts[1].get_text() == 'No rank waited for another one for long.'


def test_units_of_time_follow_the_length():
    long = some_table(2)
    for column in 'begin', 'end', 'waited', 'rank 0', 'rank 1':
        long[column] *= 1000
    assert [picture._draw(o).axes[0].get_xlabel().split()[0] for o in (some_table(2), long)] == ['s', 'h']
    assert [picture._seconds(o) for o in (0.5, 12, 900, 36000)] == ['0.50 s', '12.0 s', '15.0 min', '10.0 h']


def test_long_names_and_paths_are_shortened_to_what_tells_them_apart():
    assert (
        picture._shortened("all_or_none('load /a/b/c/model.pth')", 'loading.py:42')
        == "all_or_none('load model.pth') at loading.py:42"
    )
    assert picture._shortened('run_on_main(f) at a.py:3', 'a.py:3') == 'run_on_main(f) at a.py:3'
    assert len(picture._shortened(200 * 'x', 'a.py:3')) < 115


def test_rank_0_draws_and_saves_the_picture(tmp_path):
    def scenario():
        work()
        return plot_timeline(tmp_path / f'{rank()}.png') is not None

    assert values(run(scenario, 2)) == [True, False]
    assert [o.name for o in tmp_path.iterdir()] == ['0.png'] and imread(tmp_path / '0.png').shape[1] > 1000


@pytest.mark.parametrize(
    'name, words', [('gone/x.png', 'No such file or directory'), ('x.xyz', "'xyz' is not supported")]
)
def test_a_picture_that_cannot_be_saved_is_an_error_on_all_ranks_with_the_cause(tmp_path, name, words):
    def scenario():
        barrier('begin')
        plot_timeline(tmp_path / name)

    zero, one = run(scenario, 2)
    assert isinstance(zero.error, OSError if 'gone' in name else ValueError) and words in str(zero.error)
    assert isinstance(one.error, RankFailedError) and one.error.rank == 0 and words in str(one.error)


def test_names_with_signs_that_mean_formulas_elsewhere_are_drawn_as_they_are(tmp_path):
    table = some_table(2)
    names = ['costs $5_ and $6^', r'$\frac{$', '$x$']
    table['name'] = [*names, *table.name[3:]]
    table['begin'] = table.end - 1
    figure = picture._draw(table)
    figure.savefig(tmp_path / 'x.png')
    lines = [o for o in figure.texts if any(n in o.get_text() for n in names)]
    assert len(lines) == 3 and not any(o.get_parse_math() for o in lines)


def test_a_notebook_shows_the_picture_once(tmp_path):
    code = f'''import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_timeline import picture, some_table
picture._draw(some_table())'''
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    client_for(nb, tmp_path).execute()
    assert len([o for o in nb.cells[0].outputs if 'image/png' in o.get('data', {})]) == 1


def test_in_one_process_there_is_nothing_to_draw(tmp_path, capsys):
    assert plot_timeline(tmp_path / 'none.png') is None and not list(tmp_path.iterdir())
    assert 'no timeline' in capsys.readouterr().out


# -- a fit of fastai 2


IMPORT_ONE = '''
import os, torch, fastai.learner
for name in 'DDPSaveModelCallback', 'DDPStopCallback', 'DDPResumeCallback':
    if not os.fork(): # a process that has imported fastai and nothing of ours
        exec(f'from fastai_ddp_callbacks import {name}')
        print(name, fastai.learner.Learner.ddp_timeline.__doc__, flush=True)
        os._exit(0)
    os.wait()
'''


def test_with_any_of_our_callbacks_learners_have_a_timeline():
    command = [sys.executable, '-c', IMPORT_ONE]
    said = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=100)
    for name in 'DDPSaveModelCallback', 'DDPStopCallback', 'DDPResumeCallback':
        assert f'{name} The table of `timeline()`: which rank waited' in said.stdout, said.stderr


def test_a_fit_with_a_slow_rank_and_a_slow_save_shows_both_and_the_learner_knows(tmp_path):
    def scenario():
        class Slow(Callback):
            order = 40  # after the last exchange of gradients of the epoch

            def after_epoch(self):
                late(1, 0.7)

        with_clock()
        learn = learner(tmp_path)
        save = Observed(slow={'write': 1.0, 'read': 0.5})
        save.sleep = pass_by
        with ddp_ctx(learn):
            learn.fit(2, 0.01, cbs=[Slow(), save])
        return learn.ddp_timeline(), learn.plot_ddp_timeline(tmp_path / 'timeline.png') is not None

    (table, drawn), (_, other) = values(run(scenario, 2))
    assert (drawn, other) == (True, False)
    assert (tmp_path / 'timeline.png').exists()
    agreed = table[table.name.str.startswith('agree(')]
    assert list(agreed.straggler) == [1, 1]
    assert list(agreed['rank 0']) == about([0.7, 0.7])
    bars = {k: [sum(b - a for a, b in o) for o in v] for k, v in picture._bars(table).items()}
    assert bars['save'] == about([2.0, 0.0])
    assert bars['load'] == about([0.5, 0.5])

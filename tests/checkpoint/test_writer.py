"""Saving in the background: what the file holds, when it is there, and what becomes of it when something goes wrong
meanwhile."""

import inspect, os, pickle, resource, signal, stat, subprocess, sys, threading, time, warnings
from contextlib import contextmanager
from pathlib import Path

import pytest, torch
from fastai.basics import Callback, CancelFitException, Datasets, Learner, load_learner, nn
from fastai.callback.schedule import lr_find  # noqa: F401 (patches Learner)

from fastai_ddp_callbacks import (
    CheckpointError,
    CheckpointWriteError,
    DDPEarlyStoppingCallback,
    DDPSaveModelCallback,
    ddp_ctx,
    rank,
    read_checkpoint,
    read_metadata,
    verify_checkpoint,
    write_checkpoint,
)
from fastai_ddp_callbacks.checkpoint.state import tensors_of
from fastai_ddp_callbacks.checkpoint.background import Writer
from learners import Records, Trace, digest, learner
from ranks import report, run, values

UP_AND_DOWN = [5.0, 3.0, 4.0, 1.0, 2.0]  # better in epochs 0, 1 and 3
BETTER = [5.0, 4.0, 3.0, 2.0, 1.0]


@contextmanager
def disk(wait):
    "A disk that makes no file durable before `wait()` returns, or so many seconds have gone by."
    fsync = os.fsync

    def slow(fd):
        if stat.S_ISREG(os.fstat(fd).st_mode):
            time.sleep(wait) if isinstance(wait, (int, float)) else wait()
        fsync(fd)

    os.fsync = slow
    try:
        yield
    finally:
        os.fsync = fsync


class At(Callback):
    "Does something at an event."

    def __init__(self, event, f, order=0):
        self.order = order
        setattr(self, event, lambda: f(self))


def fit(learn, cb, records, *cbs):
    "As many epochs as there are records."
    with ddp_ctx(learn):
        learn.fit(len(records), 0.1, cbs=[cb, Records(records), *cbs])
    return cb


def saver(*args, **kwargs):
    return DDPSaveModelCallback(*args, background=True, **kwargs)


def heavy(path, numbers=1 << 14):
    "A learner with so many more numbers in the file."
    learn = learner(path)
    learn.model.register_buffer('ballast', torch.zeros(numbers))
    return learn


def files(path):
    return {o.name: verify_checkpoint(o)['epoch'] for o in (path / 'models').iterdir() if not o.name.endswith('.lock')}


def raised(f, *args):
    try:
        f(*args)
    except BaseException as e:
        return type(e).__name__, str(e)


@pytest.fixture(autouse=True)
def the_handler_of_sigterm_is_that_of_before():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


# -- the writer alone


def state_of_all_kinds():
    w, wide = torch.randn(4, 3), torch.randn(5, 6)
    return dict(
        w=w,
        tied=w,
        part=w[1],
        scalar=torch.tensor(3.0),
        half=torch.randn(7).bfloat16(),
        flags=torch.tensor([True, False]),
        turned=wide.t(),
        strided=wide[::2, 1::3],
        spread=torch.ones(1).expand(4),
        none=torch.zeros(0, 3),
        whole=torch.arange(3),
        complex=torch.randn(2, dtype=torch.cfloat),
        text='x',
        number=2,
        opt={'state': [{'avg': torch.randn(3)}, {}], 'hypers': [{'lr': 0.1}]},
    )


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


def test_the_file_is_what_the_state_was_when_it_was_asked_for_whatever_its_tensors_are(tmp_path):
    writer, free, state = Writer(), threading.Event(), state_of_all_kinds()
    expected = pickle.loads(pickle.dumps(state))
    with disk(free.wait):
        writer.start(lambda o: (free.wait(), write_checkpoint(o, tmp_path / 'a')), state)
        for t in tensors_of(state):
            if t is not state['spread']:
                t.zero_()
        state['number'], state['opt']['hypers'][0]['lr'] = 3, 0.2
        free.set()
        writer.wait()
    assert same(read_checkpoint(tmp_path / 'a')[0], expected)


def test_weights_that_are_tied_are_copied_and_written_once(tmp_path):
    writer, state = Writer(), {'a': torch.ones(100_000)}
    state['b'] = state['a'].detach()
    writer.start(lambda o: write_checkpoint(o, tmp_path / 'a'), state)
    writer.wait()
    assert (tmp_path / 'a').stat().st_size < 500_000 and same(read_checkpoint(tmp_path / 'a')[0], state)


def test_the_copy_is_made_in_the_memory_of_the_one_before_and_only_what_has_changed_its_shape_is_new():
    writer, seen, state = Writer(), [], {'a': torch.zeros(3), 'b': [torch.ones(2, 2).t()], 'c': torch.zeros(5)}
    for _ in range(3):
        writer.start(seen.append, state)
        writer.wait()
    a, b, c = ([t.data_ptr() for t in tensors_of(o)] for o in seen)
    assert a == b == c and not set(a) & {t.data_ptr() for t in tensors_of(state)}
    writer.start(seen.append, {**state, 'b': [torch.ones(3)]})
    writer.wait()
    d = [t.data_ptr() for t in tensors_of(seen[3])]
    assert (d[0], d[2]) == (a[0], a[2]) and d[1] != a[1]


def test_the_second_waits_for_the_first_and_none_is_dropped():
    writer, free, seen = Writer(), threading.Event(), []

    def write(o):
        free.wait(10)
        seen.append(int(o['a']))
        return seen[-1]

    state = {'a': torch.tensor(1)}
    writer.start(write, state)
    state['a'].fill_(2)
    threading.Timer(0.2, free.set).start()
    assert writer.busy and not writer.done and not seen
    writer.start(write, state)
    assert seen[0] == 1 and writer.wait() == 2 and seen == [1, 2] and not writer.busy and writer.wait() is None


def test_what_goes_wrong_is_raised_once_and_then_it_can_be_used_again(tmp_path):
    writer = Writer()

    def fails(state):
        write_checkpoint(state, tmp_path / 'file' / 'a')

    (tmp_path / 'file').touch()
    for again in (writer.wait, writer.check, lambda: writer.start(fails, {})):
        writer.start(fails, {'a': torch.ones(1)})
        while not writer.done:
            time.sleep(0.01)
        with pytest.raises(CheckpointWriteError, match='file/a'):
            again()
        assert not writer.busy
    writer.start(lambda o: 'well', {})
    assert writer.wait() == 'well'


def test_a_thread_that_cannot_be_started_is_told_and_leaves_the_writer_usable(monkeypatch):
    writer, before = Writer(), signal.getsignal(signal.SIGTERM)

    def no_more(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as m:
        m.setattr(threading.Thread, 'start', no_more)
        with pytest.raises(RuntimeError, match='new thread'):
            writer.start(lambda o: 1, {})
    assert signal.getsignal(signal.SIGTERM) is before
    writer.join()
    writer.start(lambda o: 2, {})
    assert writer.wait() == 2


# -- signals and the end of the process


@contextmanager
def own_handler(f=lambda: None):
    "A handler of SIGTERM, as a user may have it; it is there again at the end."

    def mine(number, frame):
        f()

    before = signal.signal(signal.SIGTERM, mine)
    try:
        yield
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_of_sigterm_is_called_when_the_file_is_written_and_is_there_again_afterwards():
    writer, events = Writer(), []

    def write(state):
        time.sleep(0.3)
        events.append('written')

    with own_handler(lambda: events.append('called')):
        writer.start(write, {})
        os.kill(os.getpid(), signal.SIGTERM)
        assert events == ['written', 'called']
        writer.start(write, {})
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        writer.wait()
    assert events == ['written', 'called'] * 2


def test_sigterm_at_the_moment_when_writing_begins_breaks_nothing(monkeypatch):
    writer, calls, start = Writer(), [], threading.Thread.start

    def hit(self):
        signal.raise_signal(signal.SIGTERM)
        start(self)
        signal.raise_signal(signal.SIGTERM)

    with own_handler(lambda: calls.append(1)), monkeypatch.context() as m:
        m.setattr(threading.Thread, 'start', hit)
        writer.start(lambda o: 1, {})
        assert writer.wait() == 1 and calls == [1, 1]


def test_a_process_forked_meanwhile_ends_at_once_by_sigterm():
    writer, free = Writer(), threading.Event()
    writer.start(lambda o: free.wait(20), {})
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            time.sleep(20)
        finally:
            os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    status = os.waitpid(child, 0)[1]
    assert writer.busy and not writer.done and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    free.set()
    writer.wait()


PROGRAM = '''
import os, signal, sys, time, torch
from fastai_ddp_callbacks import write_checkpoint
from fastai_ddp_callbacks.checkpoint.background import Writer
writer,fsync = Writer(),os.fsync
os.fsync = lambda fd: (time.sleep(.5), fsync(fd))
writer.start(lambda o: write_checkpoint(o, sys.argv[1]), {'a':torch.tensor(2)})
if sys.argv[2] == 'raise': 1/0
'''


@pytest.mark.parametrize('end,code', [('return', 0), ('raise', 1)])
def test_the_end_of_the_interpreter_waits_for_the_file(tmp_path, end, code):
    ended = subprocess.run(
        [sys.executable, '-c', PROGRAM, tmp_path / 'a', end],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == code, ended.stderr
    assert read_checkpoint(tmp_path / 'a')[0]['a'] == 2 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    'end,code,epoch',
    [
        (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM, 1),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL, 0),
        (lambda: sys.exit(3), 3, 1),
    ],
    ids=['SIGTERM', 'SIGKILL', 'exit'],
)
def test_the_file_is_whole_however_rank_0_ends_and_the_new_one_if_it_had_the_choice(tmp_path, end, code, epoch):
    def scenario():
        wait = 0.1

        def ends(cb):
            nonlocal wait
            if cb.epoch == 1:
                wait = 1.0
            if cb.epoch == 2 and rank() == 0:
                end()

        with disk(lambda: time.sleep(wait)):
            fit(learner(tmp_path), saver(), BETTER, At('before_train', ends))

    zero, one = run(scenario, 2)
    assert zero.exitcode == code and not zero.hung and one.error is not None and not one.hung, report([zero, one])
    assert (
        read_metadata(tmp_path / 'models/model.pth')['epoch']
        == verify_checkpoint(tmp_path / 'models/model.pth')['epoch']
        == epoch
    )


# -- a fit

EVENTS = (
    'before_epoch',
    'before_train',
    'after_train',
    'before_validate',
    'after_epoch',
    'after_cancel_fit',
    'after_fit',
)


@pytest.mark.parametrize(
    'settings',
    [
        dict(),
        dict(keep_best=2),
        dict(keep_last=2),
        dict(every_epoch=2),
        dict(every_epoch=2, keep_best=2),
        dict(at_end=True),
        dict(last='last', with_opt=True),
        dict(fname='m-{epoch}-{valid_loss:.1f}', keep_best=2, keep_last=1),
    ],
    ids=str,
)
def test_all_is_as_in_the_foreground_and_every_path_that_is_named_is_durable(tmp_path, settings):
    def told(cb):
        return (
            [None if o is None else o.name for o in (cb.last_saved_path, cb.best_path)],
            [o.name for o in cb.best_paths],
            cb.best,
        )

    def all_in(folder):
        return {
            o.name: (verify_checkpoint(o)['epoch'], read_checkpoint(o)[0]) for o in (folder / 'models').glob('*.pth')
        }

    results = []
    for background in (False, True):
        folder, checked = tmp_path / str(background), []

        def check(o):
            for path in {cb.last_saved_path, cb.best_path, *cb.best_paths} - {None}:
                checked.append(verify_checkpoint(path)['epoch'])

        learn, cb = learner(folder), DDPSaveModelCallback(background=background, **settings)
        with disk(0.05 if background else 0):
            fit(learn, cb, UP_AND_DOWN, *(At(o, check, n) for n in (-100, 99) for o in EVENTS))
        assert checked and not cb._saver.writer.busy and not tensors_of(cb._saver.writer._copies)
        results.append((digest(learn.model), told(cb), all_in(folder)))
    assert results[0][:2] == results[1][:2] and same(*({k: list(v) for k, v in o[2].items()} for o in results))


def test_two_of_them_in_one_fit_keep_out_of_each_other_s_way_and_leave_sigterm_as_it_was(tmp_path):
    best, every, depths = saver(fname='best'), saver(every_epoch=True, fname='e'), []

    def depth():
        depths.append(len(inspect.stack()))

    def signalled(o):
        if o.epoch < 4:
            return
        depth()
        signal.raise_signal(signal.SIGTERM)

    waits = iter([0.05, 0.15, 0.25, 0.05, 0.15, 0.05, 0.25, 0.05] * 4)
    with own_handler(depth), disk(lambda: time.sleep(next(waits))):
        fit(learner(tmp_path), best, UP_AND_DOWN, every, At('before_train', signalled))
    assert files(tmp_path) == {'best.pth': 3} | {f'e_{i}.pth': i for i in range(5)} and best.best == 1.0
    assert len(depths) == 2 and depths[1] - depths[0] <= 4  # no handler is left over from each epoch


def the_end(how):
    "A callback that brings it about in epoch 3, and the epoch of the last save."

    def cancel(cb):
        if cb.epoch == 3:
            raise CancelFitException

    return dict(
        whole=([], 4),
        early=([DDPEarlyStoppingCallback()], 2),
        batch=([At('before_batch', cancel)], 2),
        epoch=([At('after_epoch', cancel, 70)], 3),
    )[how]


@pytest.mark.parametrize(
    'how,records', [('whole', BETTER), ('early', [5.0, 4.0, 3.0, 9.0, 1.0]), ('batch', BETTER), ('epoch', BETTER)]
)
def test_however_a_fit_ends_the_file_is_durable_before_the_loggers_look_for_it(tmp_path, how, records):
    def scenario():
        others, epoch = the_end(how)
        cb, found = saver(), []

        def look(o):
            found.append((verify_checkpoint(cb.last_saved_path)['epoch'], cb.best))

        learn = learner(tmp_path)
        with disk(0.4):
            fit(learn, cb, records, *others, At('after_fit', look, 51))
        return found, epoch, digest(learn.model)

    a, b = values(run(scenario, 2))
    assert a == b and a[0] == [(a[1], records[a[1]])] and files(tmp_path) == {'model.pth': a[1]}


def test_the_thread_runs_no_collective_and_the_ranks_two_per_save_and_none_per_batch(tmp_path):
    class ByThread(Trace):
        def _traced(self, name, f):
            def inner(*args, **kwargs):
                self.calls.append((threading.current_thread().name, name))
                return f(*args, **kwargs)

            return inner

    def scenario():
        learn, counts = heavy(tmp_path), []
        with ByThread() as trace, disk(0.05):

            def note(o):
                counts.append(len(trace.calls))

            learn.fit(
                5,
                0.1,
                cbs=[
                    saver(every_epoch=1, keep_last=2),
                    Records(UP_AND_DOWN),
                    *(At(o, note, -100) for o in ('before_epoch', 'before_batch', 'after_epoch', 'after_fit')),
                ],
            )
        return trace.calls, counts

    results = values(run(scenario, 3))
    calls, counts = results[0]
    assert all(o == results[0] for o in results) and {o for o, _ in calls} == {'MainThread'}
    # one before the first epoch, then two at the end of each
    assert counts == [1 + 2 * (i // 6) for i in range(31)], str(counts)


def test_one_copy_of_the_state_is_in_the_memory_of_rank_0_until_the_fit_is_over(tmp_path):
    def own():
        with open('/proc/self/status') as f:
            return next(int(o.split()[1]) for o in f if o.startswith('RssAnon')) / 1e3

    def scenario():
        learn, seen = heavy(tmp_path, 20_000_000), [own()]
        with disk(0.3):
            learn.fit(4, 0.1, cbs=[saver(), Records(BETTER), At('before_validate', lambda o: seen.append(own()))])
        return [round(o - seen[0]) for o in (*seen, own())]

    main, other = values(run(scenario, 2))
    assert all(75 < o < 120 for o in main[2:5]) and main[5] < 40 and max(other) < 40, (
        main,
        other,
    )  # 80 MB are one copy


def test_whole_checkpoints_are_there_at_any_moment_once_the_first_is(tmp_path):
    folder = tmp_path / 'models'

    def scenario():
        over, scans = threading.Event(), []

        def watch():
            while not over.is_set():
                names = [o for o in os.listdir(folder) if o.startswith('m-')]
                scans.append(({int(o[2:-4]) for o in names}, [whole(folder / o) for o in names]))

        def whole(path):
            try:
                return verify_checkpoint(path)['epoch']
            except CheckpointError as e:
                return str(e) if path.exists() else None  # deleted meanwhile

        folder.mkdir(exist_ok=True)
        thread = threading.Thread(target=watch)
        if rank() == 0:
            thread.start()
        with disk(0.1):
            fit(
                learner(tmp_path),
                saver(every_epoch=True, keep_last=2, fname='m-{epoch}'),
                [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            )
        over.set()
        if rank() == 0:
            thread.join()
        return scans

    scans = values(run(scenario, 2))[0]
    for names, found in scans[next(i for i, o in enumerate(scans) if o[0]) :]:
        assert any(o is not None for o in found) and not any(isinstance(o, str) for o in found), found
        assert {max(names), max(names) - 1, 0} - {-1} <= names, names  # an older one goes when a newer one is there
    assert sorted(files(tmp_path).values()) == [0, 4, 5] and len({max(o, default=None) for o, _ in scans}) >= 5


# -- failures


class Full(Callback):
    "In given epochs no file of rank 0 may grow as large as a checkpoint, from before the save until it has failed."

    order = 59

    def __init__(self, *epochs):
        self.epochs = epochs

    def after_epoch(self):
        self._limit(60_000 if self.epoch in self.epochs else resource.RLIM_INFINITY)

    def before_validate(self):
        self.save_model._saver.writer.join()
        self._limit(resource.RLIM_INFINITY)

    def _limit(self, size):
        if rank() == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize('epoch', [1, 3, 4])
def test_a_write_that_fails_is_raised_on_all_ranks_when_they_meet_next(tmp_path, epoch):
    def scenario():
        learn, cb = heavy(tmp_path), saver()
        error = raised(fit, learn, cb, UP_AND_DOWN[:4] + [0.5], Full(epoch))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        return error, learn.epoch, cb.last_saved_path.exists(), type(learn.model).__name__

    zero, *others = values(run(scenario, 3))
    assert zero[0][0] == 'CheckpointWriteError' and 'models/model.pth' in zero[0][1] and 'too large' in zero[0][1]
    for o in others:
        assert o[0][0] == 'RankFailedError' and 'rank 0' in o[0][1] and 'models/model.pth' in o[0][1]
    assert all(o[1:] == (min(epoch + 1, 4), True, 'RegModel') for o in (zero, *others))
    assert files(tmp_path) == {'model.pth': {1: 0, 3: 1, 4: 3}[epoch]}


def test_with_on_error_warn_training_goes_on_and_the_best_is_that_of_the_file(tmp_path):
    def scenario():
        learn, cb, bests = heavy(tmp_path), saver(on_error='warn'), []
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter('always')
            fit(
                learn, cb, [5.0, 1.0, 4.0, 3.0, 2.0], Full(1, 4), At('after_epoch', lambda o: bests.append(cb.best), 70)
            )
        return (
            bests,
            cb.best,
            cb.best_path,
            digest(learn.model),
            [str(o.message) for o in seen if '.pth' in str(o.message)],
        )

    a, b = values(run(scenario, 2))
    assert a[:4] == b[:4] and a[0] == [5.0, 1.0, 4.0, 3.0, 3.0] and a[1] == 3.0
    assert b[4] == [] and len(a[4]) == 2 and all('models/model.pth' in o and 'on_error' in o for o in a[4])
    assert files(tmp_path) == {'model.pth': 3}
    plain = heavy(tmp_path).load('model')
    assert digest(plain.model) == a[3]


class Boom(Callback):
    "Raises on the given ranks; the others are then on their way to a rendezvous of ours, and not of torch's."

    order = 55

    def __init__(self, *ranks, epoch=1):
        self.ranks, self.at = ranks, epoch

    def after_epoch(self):
        if self.epoch == self.at and rank() in self.ranks:
            raise ValueError('boom')


@pytest.mark.parametrize('ranks,background', [((0,), True), ((1,), True), ((0, 1), True), ((0, 1), False)])
def test_after_a_fit_that_raised_while_a_file_was_written_the_same_callback_fits_again(tmp_path, ranks, background):
    def scenario():
        learn, cb, found = learner(tmp_path), saver(), []
        with disk(0.3):
            error = raised(fit, learn, cb, [0.5, 4.0], Boom(*ranks))
        cb.background = background
        with disk(0.1):
            fit(
                learn,
                cb,
                UP_AND_DOWN,
                At('after_fit', lambda o: found.append(verify_checkpoint(cb.last_saved_path)['epoch']), 51),
            )
        return (
            error[0],
            found,
            cb.best,
            read_metadata(cb.best_path)['epoch'],
            digest(learn.model),
            digest(learner(tmp_path).load('model').model),
        )

    for r, (error, *found, weights, saved) in enumerate(values(run(scenario, 2))):
        assert (
            error == ('ValueError' if r in ranks else 'RankFailedError') and found == [[3], 1.0, 3] and weights == saved
        )


@pytest.mark.parametrize('on_error', ['raise', 'warn'])
@pytest.mark.parametrize('background', [True, False])
@pytest.mark.parametrize('reset_on_fit', [True, False])
def test_a_best_that_could_not_be_written_is_not_held_against_the_next_fit(
    tmp_path, on_error, background, reset_on_fit
):
    learn, cb = (
        heavy(tmp_path),
        DDPSaveModelCallback(on_error=on_error, background=background, reset_on_fit=reset_on_fit),
    )
    error = raised(fit, learn, cb, [6.0, 0.5, 4.0], Full(1), Boom(0, epoch=2))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    assert error[0] == ('ValueError' if background or on_error == 'warn' else 'CheckpointWriteError')
    fit(learn, cb, UP_AND_DOWN)
    assert cb.best == 1.0 and files(tmp_path) == {'model.pth': 3}


def test_what_was_being_written_when_a_fit_raised_counts_for_the_next_if_that_goes_on_from_it(tmp_path):
    learn, cb = learner(tmp_path), saver(reset_on_fit=False)
    with disk(0.3):
        raised(fit, learn, cb, [0.5, 4.0], Boom(0))
    with disk(0.1):
        fit(learn, cb, [3.0, 2.0])
    best = read_metadata(cb.best_path)
    assert (cb.best, best['value'], best['epoch']) == (0.5, 0.5, 0) and digest(learn.model) == digest(
        learner(tmp_path).load('model').model
    )


def test_a_fit_that_raises_ends_when_the_file_is_written_and_gives_back_the_name_and_the_handler_of_sigterm_then(
    tmp_path,
):
    with own_handler(), disk(0.3):
        assert raised(fit, learner(tmp_path), saver(), [0.5, 4.0], Boom(0))[0] == 'ValueError'
        assert files(tmp_path) == {'model.pth': 0} and not list((tmp_path / 'models').glob('.*'))


# -- fastai's other parts


def test_lr_find_validate_get_preds_and_export_leave_the_result_of_a_failed_fit_to_the_next_fit(tmp_path):
    dls = Datasets(
        range(40),
        [lambda o: torch.tensor([float(o)]), lambda o: torch.tensor([2.0 * o])],
        splits=[range(30), range(30, 40)],
    ).dataloaders(bs=5, num_workers=0)
    learn = Learner(dls, nn.Linear(1, 1), nn.MSELoss(), path=tmp_path, cbs=saver())
    with disk(0.3):
        raised(learn.fit, 2, 1e-5, None, Boom(0))
        writer = learn.save_model._saver.writer
        learn.validate()
        learn.get_preds()
        learn.lr_find(show_plot=False, num_it=3)
        learn.export('learner.pkl')
        assert learn.save_model._saver.writer is writer
        assert writer.busy and writer.done  # the fit has waited for it before it gave the name back
        learn.fit(1, 1e-5)
    loaded = load_learner(tmp_path / 'learner.pkl')
    assert type(loaded.save_model).__module__ == 'fastai.callback.tracker'
    assert files(tmp_path)['model.pth'] == 0


def test_what_went_wrong_is_told_even_if_nobody_asks(tmp_path):
    (tmp_path / 'file').touch()
    writer = Writer()
    writer.start(lambda o: write_checkpoint(o, tmp_path / 'file' / 'a'), {'a': torch.ones(1)})
    writer.join()
    with pytest.warns(UserWarning, match='in the background has failed.*file/a could not be written'):
        del writer


@pytest.mark.parametrize('ask', [lambda o: o.error, lambda o: raised(o.wait), lambda o: raised(o.check)])
def test_what_somebody_has_asked_for_is_told_once(tmp_path, ask):
    (tmp_path / 'file').touch()
    writer = Writer()
    writer.start(lambda o: write_checkpoint(o, tmp_path / 'file' / 'a'), {'a': torch.ones(1)})
    writer.join()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert ask(writer)
        del writer

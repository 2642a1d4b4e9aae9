"""The best model on every rank, whoever sees the file: own disks, disks that lag, old files, all kinds of tensors,
ranks that fail or die."""

import os, signal, threading, time, warnings

import pytest, torch, torch.distributed as dist
from fastai.basics import Callback
from fastai.test_utils import RegModel
from torch import nn

from fastai_ddp_callbacks import (
    DDPSaveModelCallback,
    broadcast_tensors,
    ddp_ctx,
    model_state,
    rank,
    read_checkpoint,
    read_metadata,
    run_on_main,
    run_once_per_node,
    write_checkpoint,
)
from fastai_ddp_callbacks.training import loading
from fastai_ddp_callbacks.training.loading import load_everywhere
from disks import own_disk
from learners import Records, Trace, digest, learner
from ranks import report, run, values

MB = 1_000_000


class Sends:
    "How many bytes each broadcast of our own group had, for the time of the block. `at` is called before each."

    def __init__(self, at=lambda i: None):
        self.sizes, self.at = [], at

    def __enter__(self):
        self.before = send = dist.ProcessGroupGloo.broadcast

        def broadcast(group, tensors, *args):
            self.at(len(self.sizes))
            self.sizes.append(sum(o.nbytes for o in tensors))
            return send(group, tensors, *args)

        dist.ProcessGroupGloo.broadcast = broadcast
        return self

    def __exit__(self, *_):
        dist.ProcessGroupGloo.broadcast = self.before

    @property
    def large(self):
        return [o for o in self.sizes if o > 100_000]


def with_norm():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def fit(learn, cb, records=(2.0, 1.0, 3.0), cbs=()):
    with ddp_ctx(learn):
        learn.fit(len(records), 0.1, cbs=[cb, Records(list(records)), *cbs])
    return cb


def optimizer(learn):
    return [float(o['grad_avg'].sum()) for o in learn.opt.state_dict()['state']]


def share(model, path):
    "Rank 0 saves; all ranks get the checksum."
    return run_on_main(lambda: write_checkpoint(model_state(model), path)['checksum'])


def raised(f, *args):
    "What all ranks need to tell of an error, and how long it took to come."
    start = time.monotonic()
    try:
        f(*args)
    except Exception as e:
        return type(e).__name__, str(e), getattr(e, 'rank', None), time.monotonic() - start


# -- no shared disk


@pytest.mark.parametrize('with_opt', [False, True])
@pytest.mark.parametrize('world_size', [2, 4])
def test_without_a_shared_disk_all_ranks_end_with_the_weights_buffers_and_optimizer_of_the_file(
    tmp_path, world_size, with_opt
):
    def scenario():
        node = rank() * 2 // world_size  # the ranks of each half share a disk
        if node:
            own_disk(tmp_path / 'models')
        learn = learner(tmp_path, model=with_norm())
        cb = fit(learn, DDPSaveModelCallback(with_opt=with_opt))
        norm = learn.model[1]
        files, alone = (
            [o for o in os.listdir(tmp_path / 'models') if not o.startswith('.')],
            not node or os.path.ismount(tmp_path / 'models'),
        )
        return (
            digest(learn.model),
            optimizer(learn) if with_opt else None,
            cb.best_path,
            cb.best,
            norm.running_mean.tolist(),
            int(norm.num_batches_tracked),
            files,
            alone,
        )

    results = values(
        run(
            scenario, world_size, env=lambda r: dict(LOCAL_RANK=r % (world_size // 2), LOCAL_WORLD_SIZE=world_size // 2)
        )
    )
    state, _ = read_checkpoint(tmp_path / 'models/model.pth')
    model = state['model'] if with_opt else state
    expected = with_norm()
    expected.load_state_dict(model)
    for i, o in enumerate(results):
        assert o[:4] == (
            digest(expected),
            [float(s['grad_avg'].sum()) for s in state['opt']['state']] if with_opt else None,
            tmp_path / 'models/model.pth',
            1.0,
        )
        assert o[4] == model['1.running_mean'].tolist() and o[5] == int(model['1.num_batches_tracked']) > 0
        if o[7]:
            assert o[6] == (['model.pth'] if i * 2 < world_size else [])  # only global rank 0 has written


def test_two_nodes_of_two_ranks_have_one_writer_and_do_once_per_node_what_each_needs(tmp_path):
    def scenario():
        saved, node = [], rank() // 2
        learn = learner(tmp_path / f'node{node}')

        class Writes(DDPSaveModelCallback):
            def _write(self, *args):
                saved.append(rank())
                return super()._write(*args)

        cb = fit(learn, Writes())
        (tmp_path / f'node{node}').mkdir(exist_ok=True)
        done = run_once_per_node(lambda: (tmp_path / f'node{node}/by{rank()}').write_text('') or rank())
        return saved, done, cb.best_path, digest(learn.model)

    results = values(run(scenario, 4, env=lambda r: dict(LOCAL_RANK=r % 2, LOCAL_WORLD_SIZE=2)))
    assert [o[0] for o in results] == [[0, 0], [], [], []] and [o[1] for o in results] == [0, 0, 2, 2]
    assert {o[2:] for o in results} == {(tmp_path / 'node0/models/model.pth', results[0][3])}
    assert sorted(o.name for o in tmp_path.rglob('by*')) == ['by0', 'by2']


def test_one_rank_alone_that_does_not_see_the_file_makes_no_difference(tmp_path):
    def scenario():
        if rank() == 2:
            own_disk(tmp_path / 'models')
        learn = learner(tmp_path, model=with_norm())
        with Trace() as t:
            fit(learn, DDPSaveModelCallback())
        return digest(learn.model), t.calls

    a, b, c = values(run(scenario, 3))
    assert a == b == c


def test_an_old_file_of_another_run_on_a_ranks_own_disk_is_not_used(tmp_path):
    def scenario():
        if rank() == 1:
            old = own_disk(tmp_path / 'models')()
            model = RegModel()
            nn.init.constant_(model.a, 77.0)
            write_checkpoint(
                model_state(model), old / 'model.pth', dict(epoch=2, run='other', monitor='valid_loss', value=1.0)
            )
        learn = learner(tmp_path)
        fit(learn, DDPSaveModelCallback())
        return digest(learn.model), learn.model.a.item()

    a, b = values(run(scenario, 2))
    assert a == b and b[1] != 77.0


@pytest.mark.parametrize('seconds,sent', [(0.5, 0), (5, 1)])
def test_a_disk_that_lags_a_little_is_waited_for_and_one_that_lags_much_is_not(tmp_path, seconds, sent):
    def scenario():
        class Late(Callback):
            order = 70

            def after_epoch(self):
                if rank() == 1 and self.epoch == 2:
                    timer = threading.Timer(seconds, arrive)
                    timer.daemon = True
                    timer.start()

        arrive, broadcast, calls = (
            own_disk(tmp_path / 'models', loading._LAG) if rank() == 1 else None,
            loading.broadcast_tensors,
            [],
        )

        def noted(*args, **kwargs):
            calls.append(1)
            return broadcast(*args, **kwargs)

        loading.broadcast_tensors = noted
        learn = learner(tmp_path)
        fit(learn, DDPSaveModelCallback(), cbs=[Late()])
        return digest(learn.model), len(calls)

    a, b = values(run(scenario, 2))
    assert a == b and a[1] == sent
    assert a[0] == digest(learner(tmp_path).load('model').model)


# -- pieces


class Sized(nn.Module):
    "So many bytes, in tensors of which some are larger than a piece and many smaller."

    def __init__(self, mb, fill):
        super().__init__()
        self.large = nn.Parameter(torch.full((mb * MB // 8,), fill))
        self.small = nn.ParameterList(torch.full((mb * MB // 800,), fill) for _ in range(100))


def test_a_model_is_sent_in_pieces_of_16_mb(tmp_path):
    def scenario():
        if rank():
            own_disk(tmp_path / 'disk')
        model = Sized(40, float(rank()))
        checksum = share(model, tmp_path / 'disk/m.pth')
        with Sends() as sends:
            load_everywhere(model, str(tmp_path / 'disk/m.pth'), checksum)
        return sends.large, {float(v.min()) for v in model.parameters()} | {float(v.max()) for v in model.parameters()}

    for sizes, seen in values(run(scenario, 3)):
        assert len(sizes) == 3 and sum(sizes) == 40 * MB and max(sizes) <= 1 << 24 and seen == {0.0}


def test_who_is_sent_a_model_needs_little_more_memory_than_the_model_itself(tmp_path):
    def scenario():
        if rank():
            own_disk(tmp_path / 'disk')
        model = Sized(120, float(rank()))
        checksum = share(model, tmp_path / 'disk/m.pth')

        def anonymous():
            with open('/proc/self/status') as f:
                return next(int(o.split()[1]) << 10 for o in f if o.startswith('RssAnon'))

        def watch():
            while not stop.wait(0.001):
                seen.append(anonymous())

        before, seen, stop = anonymous(), [0], threading.Event()
        thread = threading.Thread(target=watch)
        thread.start()
        load_everywhere(model, str(tmp_path / 'disk/m.pth'), checksum)
        stop.set()
        thread.join()
        return max(seen) - before, len(seen)

    for grown, looks in values(run(scenario, 2)):
        assert grown < 0.6 * 120 * MB and looks > 10


# -- all that a model may hold


class Odd(nn.Module):
    "Tensors of all kinds; `seed` makes other values."

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.tied = nn.Linear(4, 4)
        self.tied_too = self.tied
        self.same = nn.Linear(4, 4)
        self.same.weight = self.tied.weight
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        for o in (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn):
            self.register_buffer(f'of_{str(o)[6:]}', torch.randn(7).to(o))
        for o in (torch.int64, torch.int32, torch.uint8, torch.int8):
            self.register_buffer(f'of_{str(o)[6:]}', torch.randint(0, 100, (7,)).to(o))
        self.register_buffer('bools', torch.rand(9) < 0.5)
        self.register_buffer('scalar', torch.randn(()))
        self.register_buffer('count', torch.tensor(seed))
        self.register_buffer('empty', torch.empty(0, 3))
        self.register_buffer('every_other', torch.randn(10)[::2])
        self.register_buffer('images', torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.register_buffer('nan', torch.tensor([float('nan'), float('inf'), -0.0]))


def contents(model):
    return {
        k: (str(v.dtype), tuple(v.shape), v.detach().contiguous().reshape(-1).view(torch.uint8).tolist())
        for k, v in model.state_dict().items()
    }


@pytest.mark.parametrize('sent', [False, True], ids=['read', 'sent'])
def test_every_kind_of_tensor_comes_as_it_was_saved_and_in_its_place(tmp_path, sent):
    def scenario():
        if rank() and sent:
            own_disk(tmp_path / 'disk')
        model = Odd(rank())
        places = {k: (v.data_ptr(), v.stride()) for k, v in model.state_dict().items()}
        checksum, before = share(model, tmp_path / 'disk/m.pth'), contents(model)
        load_everywhere(model, str(tmp_path / 'disk/m.pth'), checksum)
        assert model.same.weight is model.tied.weight and model.turned.stride() == (1, 3)
        assert places == {
            k: (v.data_ptr(), v.stride()) for k, v in model.state_dict().items()
        }  # the optimizer goes on with these
        return before, contents(model)

    (saved, zero), (other, one) = values(run(scenario, 2))
    assert saved == zero == one != other


@pytest.mark.parametrize('sent', [False, True], ids=['read', 'sent'])
def test_a_file_of_another_precision_is_converted_alike_on_all_ranks(tmp_path, sent):
    def scenario():
        if rank() and sent:
            own_disk(tmp_path / 'disk')
        model = with_norm()
        nn.init.constant_(model[0].weight, rank() + 0.1)
        state = {k: v.bfloat16() if v.is_floating_point() else v for k, v in model_state(model).items()}
        checksum = run_on_main(lambda: write_checkpoint(state, tmp_path / 'disk/m.pth')['checksum'])
        load_everywhere(model, str(tmp_path / 'disk/m.pth'), checksum)
        return model[0].weight.tolist(), str(model[0].weight.dtype)

    a, b = values(run(scenario, 2))
    assert a == b == ([[torch.tensor(0.1).bfloat16().item()]] * 4, 'torch.float32')


def test_tensors_that_do_not_lie_in_one_piece_are_sent_and_received_too():
    def scenario():
        mine = [
            torch.zeros(4, 3).t(),
            torch.zeros(8)[::2],
            torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last),
            torch.zeros(4, 4)[1:3, 1:3],
            torch.zeros(()),
        ]
        if rank() == 0:
            for i, o in enumerate(mine):
                o.copy_(torch.arange(o.numel()).reshape(o.shape) + i)
        broadcast_tensors(mine)
        return [o.tolist() for o in mine]

    a, b = values(run(scenario, 2))
    assert a == b and a[1] == [1.0, 2.0, 3.0, 4.0]


class Counted(RegModel):
    "Has a state that is no tensor."

    seen = 0

    def get_extra_state(self):
        return dict(seen=self.seen, names=['a', 'b'])

    def set_extra_state(self, state):
        self.seen = state['seen']


@pytest.mark.parametrize('sent', [False, True], ids=['read', 'sent'])
def test_a_model_with_a_state_of_its_own_is_saved_and_loaded_with_it(tmp_path, sent):
    def scenario():
        if rank() and sent:
            own_disk(tmp_path / 'models')
        learn = learner(tmp_path, model=Counted())

        class Count(Callback):
            def after_epoch(self):
                self.learn.model.module.seen = 10 * rank() + self.epoch

        fit(learn, DDPSaveModelCallback(), cbs=[Count()])
        return learn.model.seen

    assert values(run(scenario, 2)) == [1, 1]


def test_saved_in_ddp_from_a_compiled_model_it_loads_plainly_and_the_other_way_round(tmp_path):
    def scenario():
        learn = learner(tmp_path, model=torch.compile(with_norm(), backend='eager'))
        fit(learn, DDPSaveModelCallback(fname='compiled'))
        plain = learner(tmp_path, model=with_norm())
        load_everywhere(
            plain.model,
            str(tmp_path / 'models/compiled.pth'),
            read_metadata(tmp_path / 'models/compiled.pth')['checksum'],
        )
        same = digest(plain.model) == digest(learn.model)
        fit(plain, cb := DDPSaveModelCallback(fname='plain'))
        load_everywhere(learn.model, str(cb.best_path), cb._saver.store.best.checksum)
        return same, digest(plain.model) == digest(learn.model)

    assert values(run(scenario, 2, timeout=100)) == [(True, True)] * 2
    keys = list(with_norm().state_dict())
    for o in ('compiled', 'plain'):
        assert list(torch.load(tmp_path / f'models/{o}.pth', weights_only=True)) == keys
        learner(tmp_path, model=with_norm()).load(o)  # stock


# -- what goes wrong on one rank is raised on all


@pytest.mark.parametrize('sent', [False, True], ids=['read', 'sent'])
@pytest.mark.parametrize('where', [(0, 1, 2), (1,)], ids=['all ranks', 'rank 1'])
def test_a_file_that_does_not_fit_is_refused_on_all_ranks_and_no_weights_are_changed(tmp_path, sent, where):
    def scenario():
        if rank() == 2 and sent:
            own_disk(tmp_path / 'disk')
        checksum = share(with_norm(), tmp_path / 'disk/m.pth')
        model = nn.Sequential(
            nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 2) if rank() in where else nn.Linear(4, 1)
        )
        before = digest(model)
        return *raised(load_everywhere, model, str(tmp_path / 'disk/m.pth'), checksum), digest(model) == before

    for r, (kind, text, who, took, unchanged) in enumerate(values(run(scenario, 3))):
        sees = not (sent and r == 2)  # one without the file hears of it from those that have it
        assert (
            kind == ('MismatchedCheckpointError' if r in where and sees else 'RankFailedError')
            and 'm.pth' in text
            and '2.weight' in text
        )
        assert took < 20 and unchanged and (r in where or who == 1)


@pytest.mark.parametrize('damage', ['flipped', 'cut'])
def test_a_damaged_file_on_the_disk_of_one_rank_is_told_on_all_and_no_weights_are_changed(tmp_path, damage):
    def scenario():
        checksum = share(with_norm(), tmp_path / 'disk/m.pth')
        if rank() == 1:
            file = own_disk(tmp_path / 'disk')() / 'm.pth'
            data = bytearray(file.read_bytes())
            data[1000] ^= 1
            file.write_bytes(data if damage == 'flipped' else data[:-100])
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        before = digest(model)
        return *raised(load_everywhere, model, str(tmp_path / 'disk/m.pth'), checksum), digest(model) == before

    for r, (kind, text, who, took, unchanged) in enumerate(values(run(scenario, 3))):
        assert kind == ('CorruptCheckpointError' if r == 1 else 'RankFailedError') and 'm.pth' in text and took < 20
        assert r == 1 or who == 1 and 'rank 1' in text
        assert unchanged, f'rank {r}'


def test_a_file_that_has_gone_is_told_on_all_ranks_by_name(tmp_path):
    def scenario():
        class Gone(Callback):
            order = 70

            def after_epoch(self):
                if rank() == 0 and self.epoch == 2:
                    (tmp_path / 'models/model.pth').unlink()

        return raised(fit, learner(tmp_path), DDPSaveModelCallback(), (2.0, 1.0, 3.0), [Gone()])

    a, b = values(run(scenario, 2))
    assert (
        a[0] == 'CheckpointError'
        and b[0] == 'RankFailedError'
        and b[2] == 0
        and all('model.pth' in o[1] and o[3] < 20 for o in (a, b))
    )


def test_a_rank_that_is_killed_while_weights_are_sent_is_named_within_seconds(tmp_path):
    def scenario():
        if rank():
            own_disk(tmp_path / 'disk')
        model = Sized(60, float(rank()))
        checksum = share(model, tmp_path / 'disk/m.pth')
        with Sends(
            at=lambda i: rank() == 1 and len(sends.large) == 1 and os.kill(os.getpid(), signal.SIGKILL)
        ) as sends:
            return raised(load_everywhere, model, str(tmp_path / 'disk/m.pth'), checksum)

    zero, one, two = results = run(scenario, 3)
    assert one.exitcode == -signal.SIGKILL
    for o in (zero, two):
        assert o.ok, report(results)
        kind, text, who, took = o.value
        assert kind == 'RankFailedError' and who == 1 and 'rank 1' in text and took < 20


@pytest.mark.parametrize('sent', [False, True], ids=['read', 'sent'])
def test_ranks_that_do_not_hold_the_same_after_loading_are_told_so(tmp_path, sent):
    def scenario():
        if rank() == 2 and sent:
            own_disk(tmp_path / 'disk')
        model = with_norm()
        checksum = share(model, tmp_path / 'disk/m.pth')

        def noise(module, keys):
            if rank() == 1:
                module[2].bias.data[0] += 1e-6

        model.register_load_state_dict_post_hook(noise)
        try:
            load_everywhere(model, str(tmp_path / 'disk/m.pth'), checksum)
        except Exception as e:
            return type(e).__name__, str(e), e.digests

    a, b, c = values(run(scenario, 3))
    assert a[0] == 'UnequalWeightsError' and 'm.pth' in a[1] and a == b == c
    assert a[2][0] == a[2][2] != a[2][1] and 'rank 1: ' in a[1]


def test_other_files_without_a_checksum_under_the_same_name_are_noticed(tmp_path):
    def scenario():
        torch.manual_seed(rank())
        own = own_disk(tmp_path / 'disk')()
        torch.save(nn.Linear(3, 3).state_dict(), own / 'm.pth')
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')  # that it cannot be verified
            return raised(load_everywhere, nn.Linear(3, 3), str(tmp_path / 'disk/m.pth'), None)

    assert [o[0] for o in values(run(scenario, 2))] == ['UnequalWeightsError'] * 2


def test_nothing_hangs_if_only_one_rank_can_load_its_optimizer(tmp_path):
    def scenario():
        state = {'model': model_state(with_norm()), 'opt': {'state': [{'a': torch.ones(3)}], 'hypers': [{'lr': 0.1}]}}
        checksum = run_on_main(lambda: write_checkpoint(state, tmp_path / 'm.pth')['checksum'])

        def load_rest(rest):
            if rank() == 1:
                raise ValueError('no such optimizer')
            assert rest['opt']['state'][0]['a'].tolist() == [1.0, 1.0, 1.0]

        return raised(load_everywhere, with_norm(), str(tmp_path / 'm.pth'), checksum, load_rest)

    a, b = values(run(scenario, 2))
    assert a[0] == 'RankFailedError' and a[2] == 1 and 'no such optimizer' in a[1] and b[0] == 'ValueError'

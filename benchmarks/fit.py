"""Saving that training does not feel: ours against stock fastai and Lightning, on this machine's CPU. Needs Linux.

    python benchmarks/fit.py [--quick] [--sizes 10 100 500] [--folder DIR] [--json FILE] [--check] [--write [JSON ...]]

Stall: how long a save keeps one process from its next step. `stock` is `learn.save`; `ours` is a save in the
foreground; `background` copies the weights and writes them in a thread, as `DDPSaveModelCallback(background=True)`
does; `copy` is the limit, a copy of the weights into memory that is there; `lightning` is what its ModelCheckpoint
calls; `lightning async` is the same with its AsyncCheckpointIO. Then steps, which are almost only Python, as long as
the write is under way; as many undisturbed ones are run beside them. Ours wait for the disk and verify; the others do
neither.

Whole fits: 2 ranks with gloo, frozen embeddings of 100 MB and a head that is trained, and a save after every epoch, as
each is better than the one before; at the end the best is loaded on both ranks. `none` saves nothing. Lightning's fit
is its own Trainer with DDP and ModelCheckpoint. Time in checkpointing is rank 0's in the callback (and in the loading
that Lightning's user does), and starts when both ranks are there. Collectives are those of Python, not the gradients';
memory is anonymous.

No save due: epochs with our callback, whose value does not improve, against epochs without any callback, on 2 ranks.
End of fit: each rank reads and verifies the file, or rank 0 does and sends the weights.

All contenders take turns, round after round (Lightning's in every other one); what is dirty is flushed before each.
Medians. `--write` makes README.md and stall.png beside this file, with the figures of the other benchmarks too: from
the JSON files that are given, or measured now. The targets that `--check` holds:"""

from __future__ import annotations
import argparse, ctypes, gc, io, json, logging, os, platform, socket
import statistics, subprocess, sys, tempfile, threading, time, warnings
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

_START = time.monotonic()  # the imports count

import torch, torch.distributed as dist, torch.multiprocessing as mp
import report
from save_load import Lightning, Ours, Stock, anonymous, learner, lightning
from fastai.callback.core import Callback
from fastai.callback.tracker import SaveModelCallback
from fastai.data.core import DataLoaders
from fastai.distributed import DistributedDL
from fastai.learner import Learner
from fastai.optimizer import SGD

if lightning:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
if lightning:
    from lightning.pytorch.plugins.environments import LightningEnvironment

from fastai_ddp_callbacks import DDPSaveModelCallback, ddp_ctx
from fastai_ddp_callbacks.training import loading
from fastai_ddp_callbacks.checkpoint.file import write_checkpoint
from fastai_ddp_callbacks.checkpoint.state import model_state
from fastai_ddp_callbacks.checkpoint.background import Writer

SIZES, FIT_MB, EPOCHS = (100, 500), 100, 5  # MB for which the targets of a stall hold; of the whole fits
TARGETS = {  # at most
    'stall in the background, of learn.save': 0.2,
    'stall in the background, of a copy in memory': 1.5,
    'median step while writing, of undisturbed': 1.1,
    'worst step while writing, ms longer': 20,
    'memory of the background, rank 0, models': 1.1,
    'memory of the background, rank 1, models': 0.1,
    'whole fit, ours of stock': 1,
    'whole fit, background of stock': 1,
    'time in checkpointing, ours of lightning': 0.5,
    'time in checkpointing, background of lightning': 0.5,
    'no save due, % of an epoch of 1 s': 1,
}
MISSING = [] if lightning else ['lightning', 'lightning async']
median = statistics.median


def installed(o):
    return {k: v for k, v in o.items() if k not in MISSING}


# -- the stall of a save, and the steps while it is written


class Background(Ours):
    def __init__(self, learn):
        self.model, self.path, self.writer = learn.model, learn.path / 'background.pth', Writer()

    def save(self):
        self.writer.start(
            lambda o: write_checkpoint(o, self.path, dict(epoch=0, monitor='valid_loss', value=0.5)),
            model_state(self.model),
        )

    def done(self):
        return self.writer.done


class Copy:
    def __init__(self, learn):
        self.state, self.copy = model_state(learn.model), {k: v.clone() for k, v in model_state(learn.model).items()}

    def save(self):
        for k, v in self.state.items():
            self.copy[k].copy_(v)


class LightningAsync(Lightning):
    def __init__(self, learn):
        super().__init__(learn)
        self.path, plain, self.saved = (
            self.path.with_name('async.ckpt'),
            self.trainer.strategy.checkpoint_io,
            threading.Event(),
        )
        save = plain.save_checkpoint
        plain.save_checkpoint = lambda *args, **kwargs: (save(*args, **kwargs), self.saved.set())
        self.trainer.strategy.checkpoint_io = AsyncCheckpointIO(plain)

    def save(self):
        self.saved.clear()
        super().save()

    def done(self):
        return self.saved.is_set()


STALLS = installed(
    {
        'stock': Stock,
        'ours': Ours,
        'background': Background,
        'copy': Copy,
        'lightning': Lightning,
        'lightning async': LightningAsync,
    }
)


def step(seen={}, x=torch.ones(16)):
    "About 2 ms, of which almost all is the interpreter's."
    for i in range(24000):
        seen[i & 63] = seen.get(i & 7, 0) + (i & 15)
    for _ in range(20):
        x.mul_(1.0)


def steps(more):
    "The time of each step, as long as there are to be more."
    times = []
    while more(len(times)):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def stalls(rank, mb, folder, end, queue):
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    warnings.simplefilter('ignore')
    learn = learner(mb, folder)
    those, figures, n = {k: v(learn) for k, v in STALLS.items()}, {k: [] for k in STALLS}, 20
    names, rounds = [*those], 0
    while rounds < 2 or time.monotonic() < end and rounds < 41:
        for name in names:
            if 'lightning' in name and rounds and rounds % 2 == 0:
                continue  # they take the longest
            o = those[name]
            os.sync()
            alone = steps(lambda i: i < n) if hasattr(o, 'done') else []
            start = time.perf_counter()
            o.save()
            row = dict(stall=time.perf_counter() - start)
            if alone:
                writing = steps(lambda i: i == 0 or not o.done())
                row.update(
                    write=time.perf_counter() - start,
                    alone=median(alone),
                    worst_alone=max(alone),
                    step=median(writing),
                    worst=max(writing),
                )
                n = max(20, len(writing))
            figures[name].append(row)
        names, rounds = names[1:] + names[:1], rounds + 1
    if lightning:
        those['lightning async'].trainer.strategy.checkpoint_io.teardown()
    those['background'].writer.wait()
    first = {k: v.pop(0)['stall'] for k, v in figures.items()}  # takes memory, and makes the file
    queue.put(
        dict(
            rounds=rounds - 1,
            first=first,
            **{k: {o: median(r[o] for r in v) for o in v[0]} for k, v in figures.items()},
        )
    )


# -- whole fits on two ranks


class Net(torch.nn.Module):
    def __init__(self, mb, n):
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.ModuleList(
            torch.nn.Embedding(round(mb * 1e6 / 4 / 256 / 24), 256) for _ in range(24)
        ).requires_grad_(False)
        self.head = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)), torch.nn.Linear(256, 1))
        self.data = [(torch.tensor(i % 32), torch.full((1,), 9.0)) for i in range(n)]

    def forward(self, x):
        return self.head(sum(o(x) for o in self.body))


class Clock:
    """What a rank spends in some calls, when both ranks have come to them; and how many collectives there were at
    each epoch's end."""

    def __init__(self, meet, begin=lambda *_: None):
        self.meet, self.begin, self.spent, self.collectives, self.ends = meet, begin, dict(saving=0.0, end=0.0), [], []

    def timed(self, o, what, *names):
        for name in names:
            if hasattr(o, name):
                setattr(o, name, self.call(what, getattr(o, name)))
        return o

    def call(self, what, f):
        def inner(*args, **kwargs):
            self.meet()
            start = time.perf_counter()
            res = f(*args, **kwargs)
            self.spent[what] += time.perf_counter() - start
            return res

        return inner

    def epoch(self, *_):
        self.collectives.append(Clock.count)
        self.ends.append(time.perf_counter())

    count = 0


def count_collectives():
    def counted(f):
        def inner(*args, **kwargs):
            Clock.count += 1
            return f(*args, **kwargs)

        return inner

    for o in dist.ProcessGroup, dist.ProcessGroupGloo:
        for name in vars(o):
            if name.startswith(('all', '_all', 'reduce', '_reduce', 'broadcast', 'gather', 'scatter', 'barrier')):
                setattr(o, name, counted(getattr(o, name)))


class Epochs(Callback):
    order = 100

    def __init__(self, clock):
        self.clock = clock

    def before_epoch(self):
        if self.epoch == 0:
            self.clock.begin()

    def after_epoch(self):
        self.clock.epoch()


def cpu_broadcast(self, t, rank):  # stock's calls `.cuda()`
    t = torch.tensor(t)
    dist.broadcast(t, rank)
    return t.tolist()


def fastai_fit(context, make, lr=0.001, epochs=EPOCHS):
    def fit(net, folder, clock):
        dls = DataLoaders.from_dsets(net.data, net.data[:32], bs=8, num_workers=0, device='cpu')
        learn = Learner(dls, net, loss_func=torch.nn.functional.mse_loss, opt_func=SGD, path=folder, model_dir='.')
        cbs = [
            clock.timed(clock.timed(o, 'saving', 'before_fit', 'before_train', 'after_epoch'), 'end', 'after_fit')
            for o in make()
        ]
        with context(learn), learn.no_bar(), learn.no_logging():
            learn.fit(epochs, lr, cbs=[*cbs, Epochs(clock)])

    return fit


def stock_ctx(learn):
    return learn.distrib_ctx(sync_bn=False, cpu=True)


class Module(lightning.LightningModule if lightning else object):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.head.parameters(), 0.001)

    def training_step(self, batch):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log('valid_loss', self.training_step(batch), sync_dist=True)


def lightning_fit(asynchronous):
    def fit(net, folder, clock):
        name = f'lightning{asynchronous}'
        saver = lightning.callbacks.ModelCheckpoint(
            folder, name, 'valid_loss', save_weights_only=True, enable_version_counter=False
        )
        clock.timed(saver, 'saving', 'on_validation_end', 'on_train_epoch_end')
        epochs = lightning.Callback()
        epochs.on_train_start, epochs.on_train_epoch_end = clock.begin, clock.epoch
        plugins = [
            LightningEnvironment(),
            *([clock.timed(AsyncCheckpointIO(), 'end', 'teardown')] if asynchronous else []),
        ]
        trainer = lightning.Trainer(
            accelerator='cpu',
            devices=2,
            strategy='ddp',
            plugins=plugins,
            callbacks=[epochs, saver],
            max_epochs=EPOCHS,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        train, valid = (torch.utils.data.DataLoader(o, 8, shuffle=o is net.data) for o in (net.data, net.data[:32]))
        module = Module(net)
        trainer.fit(module, train, valid)
        clock.call(
            'end',
            lambda: module.load_state_dict(
                torch.load(folder / f'{name}.ckpt', map_location='cpu', weights_only=True)['state_dict']
            ),
        )()

    return fit


FITS = installed(
    {
        'none': fastai_fit(stock_ctx, lambda: []),
        'stock': fastai_fit(stock_ctx, lambda: [SaveModelCallback(fname='stock')]),
        'ours': fastai_fit(ddp_ctx, lambda: [DDPSaveModelCallback(fname='ours')]),
        'background': fastai_fit(ddp_ctx, lambda: [DDPSaveModelCallback(fname='background', background=True)]),
        'lightning': lightning_fit(False),
        'lightning async': lightning_fit(True),
    }
)
IDLE = {
    'with': fastai_fit(ddp_ctx, lambda: [DDPSaveModelCallback(fname='idle')], lr=0.0, epochs=12),
    'without': fastai_fit(ddp_ctx, lambda: [], epochs=12),
}


def watch(pids, peaks):
    while True:
        for i, o in enumerate(pids):
            peaks[i] = max(peaks[i], anonymous(o))
        time.sleep(0.004)


def fits(rank, size, folder, end, shared, queue):
    numbers, meet, more = shared
    pids, peaks, before = numbers  # of each rank
    DistributedDL._broadcast = cpu_broadcast
    count_collectives()
    pids[rank] = os.getpid()
    meet()
    watcher = mp.get_context('fork').Process(target=watch, args=(list(pids), peaks), daemon=True)
    if rank == 0:
        watcher.start()
    figures, idle, names = {k: [] for k in FITS}, {k: [] for k in IDLE}, [*FITS]
    model = sum(o.nbytes for o in Net(FIT_MB, 0).state_dict().values())

    def begin(*_):
        before[rank] = peaks[rank] = anonymous(os.getpid())  # what DDP needed to begin with is free again

    environment = dict(os.environ)

    def run(f, mb, n):
        net, clock = Net(mb, n), Clock(meet, begin)
        os.environ.update(environment)  # Lightning takes variables away
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free already would hide some
        if rank == 0:
            os.sync()
        meet()
        start = time.perf_counter()
        with redirect_stdout(io.StringIO()):
            f(net, folder, clock)
        meet()
        return clock, time.perf_counter() - start

    for name in names:
        run(FITS[name], 1, 64)  # warms up
    rounds = 0
    while more.value:
        for name in names:
            if 'lightning' in name and rounds % 2:
                continue
            clock, seconds = run(FITS[name], FIT_MB, 256)
            figures[name].append(
                dict(
                    clock.spent,
                    checkpointing=sum(clock.spent.values()),
                    fit=seconds,
                    **{f'memory{r}': (peaks[r] - before[r]) / model for r in range(size)},
                    collectives=(clock.collectives[-1] - clock.collectives[0]) / (EPOCHS - 1),
                )
            )
        for name, f in IDLE.items():
            ends = run(f, 1, 64)[0].ends
            idle[name] += [b - a for a, b in zip(ends[1:], ends[2:])]  # in the second epoch nothing is saved any more
        names, rounds = names[1:] + names[:1], rounds + 1
        if rank == 0:
            more.value = rounds < 3 or time.monotonic() < end
        meet()
    if rank == 0:
        watcher.kill()
        queue.put(
            dict(
                rounds=rounds,
                idle={k: median(v) for k, v in idle.items()},
                **{k: {o: median(r[o] for r in v) for o in v[0]} for k, v in figures.items()},
            )
        )


# -- the end of a fit on more ranks


def ends(rank, size, folder, end, shared, queue):
    _, meet, more = shared
    net, path = Net(FIT_MB, 0), folder / 'end.pth'
    meta = write_checkpoint(model_state(net), path) if rank == 0 else {}
    checksum = [meta.get('checksum')]
    dist.broadcast_object_list(checksum)
    sees, times = loading._sees, dict(read=[], sent=[])
    while more.value:
        for name, v in times.items():
            loading._sees = sees if name == 'read' else lambda *_: rank == 0  # as on disks that are not shared
            meet()
            start = time.perf_counter()
            loading.load_everywhere(net, path, checksum[0])
            meet()
            v.append(time.perf_counter() - start)
        if rank == 0:
            more.value = len(times['read']) < 4 or time.monotonic() < end
        meet()
    if rank == 0:
        queue.put({k: median(v[1:]) for k, v in times.items()})  # the first made the groups


def worker(rank, f, size, port, *args):
    torch.set_num_threads(1)  # as launchers set it
    warnings.simplefilter('ignore')
    logging.getLogger('lightning.pytorch').setLevel(logging.ERROR)
    os.environ.update(
        {
            k: str(v)
            for k, v in dict(
                RANK=rank,
                LOCAL_RANK=rank,
                WORLD_SIZE=size,
                LOCAL_WORLD_SIZE=size,
                OMP_NUM_THREADS=1,
                MASTER_ADDR='127.0.0.1',
                MASTER_PORT=port,
            ).items()
        }
    )
    dist.init_process_group('gloo')
    f(rank, size, *args)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(f, size, folder, end):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    context = mp.get_context('fork')
    queue, shared = (
        context.SimpleQueue(),
        ([mp.RawArray('q', size) for _ in range(3)], context.Barrier(size, timeout=120).wait, mp.RawValue('i', 1)),
    )
    mp.start_processes(worker, (f, size, port, folder, end, shared, queue), size, start_method='fork')
    return queue.get()


# -- what is told


def ratios(r):
    "What the targets are about, as (where, what, value)."
    for mb, o in r['stalls'].items():
        if mb not in SIZES:
            continue
        b, where = o['background'], f'{mb} MB: '
        yield where, 'stall in the background, of learn.save', b['stall'] / o['stock']['stall']
        yield where, 'stall in the background, of a copy in memory', b['stall'] / o['copy']['stall']
        yield where, 'median step while writing, of undisturbed', b['step'] / b['alone']
        yield where, 'worst step while writing, ms longer', (b['worst'] - b['worst_alone']) * 1e3
    f = r['fits']
    for i in range(2):
        yield '', f'memory of the background, rank {i}, models', f['background'][f'memory{i}'] - f['none'][f'memory{i}']
    for o in 'ours', 'background':
        yield '', f'whole fit, {o} of stock', f[o]['fit'] / f['stock']['fit']
        if 'lightning' in f:
            yield (
                '',
                f'time in checkpointing, {o} of lightning',
                f[o]['checkpointing'] / f['lightning']['checkpointing'],
            )
    yield '', 'no save due, % of an epoch of 1 s', (f['idle']['with'] - f['idle']['without']) * 100


def tables(r):
    "(title, names of columns, rows) of what was measured here."
    for mb, o in r['stalls'].items():

        def written(v):
            return (
                (
                    f"{v['write'] * 1e3:.0f}",
                    f"{v['step'] / v['alone']:.2f}",
                    f"{v['worst'] * 1e3:.1f}",
                    f"{v['worst_alone'] * 1e3:.1f}",
                )
                if 'write' in v
                else ('',) * 4
            )

        yield (
            f"{mb} MB: stall of a save, ms, and steps while it is written; medians of {o['rounds']} saves",
            (
                '',
                'stall',
                'of stock',
                'of copy',
                'the first',
                'written after',
                'median step, of undisturbed',
                'worst step',
                'undisturbed',
            ),
            [
                (
                    k,
                    f"{v['stall'] * 1e3:.1f}",
                    f"{v['stall'] / o['stock']['stall']:.2f}",
                    f"{v['stall'] / o['copy']['stall']:.2f}",
                    f"{o['first'][k] * 1e3:.1f}",
                    *written(v),
                )
                for k in STALLS
                if (v := o.get(k))
            ],
        )
    f = r['fits']
    of = [(k, f[k]['checkpointing']) for k in ('stock', 'lightning', 'lightning async') if k in f]
    yield (
        f'Whole fits of {EPOCHS} epochs with as many saves of {FIT_MB} MB on 2 ranks, ms; '
        f"medians of {f['rounds']} fits",
        (
            '',
            'fit',
            'of stock',
            'in saves',
            'at the end',
            *(f'both, of {k}' for k, _ in of),
            'memory, models',
            'on rank 1',
            'collectives per epoch',
        ),
        [
            (
                k,
                f"{v['fit'] * 1e3:.0f}",
                f"{v['fit'] / f['stock']['fit']:.2f}",
                f"{v['saving'] * 1e3:.0f}",
                f"{v['end'] * 1e3:.0f}",
                *(f"{v['checkpointing'] / o:.2f}" for _, o in of),
                f"{v['memory0']:.2f}",
                f"{v['memory1']:.2f}",
                f"{v['collectives']:.1f}",
            )
            for k in FITS
            if (v := f.get(k))
        ],
    )
    a, b = (f['idle'][k] * 1e3 for k in ('with', 'without'))
    yield (
        'No save due: an epoch on 2 ranks, ms',
        ('with our callback', 'without', 'more'),
        [(f'{a:.2f}', f'{b:.2f}', f'{a - b:.2f}')],
    )
    yield (
        f'End of fit: {FIT_MB} MB into the model of every rank of this machine, ms',
        ('ranks', 'each reads the file', 'rank 0 reads and sends', 'reading, of sending'),
        [
            (str(n), f"{o['read'] * 1e3:.0f}", f"{o['sent'] * 1e3:.0f}", f"{o['read'] / o['sent']:.2f}")
            for n, o in r['ends'].items()
        ],
    )


def show(title, columns, rows):
    print(f'\n{title}')
    widths = [max(map(len, o)) for o in zip(columns, *rows)]
    for row in columns, *rows:
        print(
            '  ' + '  '.join(f'{o:{"<" if i == 0 else ">"}{w}}' for i, (o, w) in enumerate(zip(row, widths))),
            flush=True,
        )


def machine():
    with open('/proc/cpuinfo') as f:
        cpu = next((o.split(':')[1].strip() for o in f if o.startswith('model name')), platform.machine())
    return (
        f'{time.strftime("%Y-%m-%d")}, {cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, '
        + ', '.join(f'{o} {version(o)}' for o in ('torch', 'fastai', 'lightning') if o not in MISSING)
        + '.'
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog='\n'.join(f'  {k}: at most {v:g}' for k, v in TARGETS.items()),
    )
    parser.add_argument(
        '--sizes', type=int, nargs='+', default=[10, *SIZES], help='models whose stall is measured, in MB'
    )
    parser.add_argument(
        '--folder', type=Path, help='a folder on the disk to measure; by default that for temporary files'
    )
    parser.add_argument(
        '--quick',
        action='store_true',
        help='fewer rounds, in about a minute: the disk has not settled then, '
        'and a ratio of whole fits may be off by a fifth',
    )
    parser.add_argument('--json', type=Path, help='write the figures to this file')
    parser.add_argument('--check', action='store_true', help='exit with 1 if a target is missed')
    parser.add_argument(
        '--write',
        type=Path,
        nargs='*',
        metavar='JSON',
        help='make README.md and stall.png, with figures of these files; what is missing is measured',
    )
    args = parser.parse_args()
    for name in MISSING:
        print(f'missing: {name} is not installed (pip install fastai_ddp_callbacks[bench])')
    files = {
        'rendezvous' if 'seconds' in o else 'save_load' if 'medians' in o else 'fit': o
        for o in (json.loads(o.read_text()) for o in args.write or [])
    }
    r = files.get('fit') or measure(
        args.sizes, args.folder, _START + (32 if args.quick else 300), (2, 4) if args.quick else (2, 4, 8)
    )
    files['fit'] = r = dict(r, **{k: {int(n): v for n, v in r[k].items()} for k in ('stalls', 'ends')})
    for o in tables(r):
        show(*o)
    if args.json:
        args.json.write_text(json.dumps(r, indent=1))
    if args.write is not None:
        here = Path(__file__).parent
        for name in {'rendezvous', 'save_load'} - files.keys():
            with tempfile.NamedTemporaryFile(suffix='.json') as f:
                subprocess.run(
                    [sys.executable, here / f'{name}.py', '--json', f.name, *(['--quick'] if args.quick else [])],
                    check=True,
                )
                files[name] = json.load(f)
        targets = [
            (where + what, f'{v:.2f}', f'{TARGETS[what]:g}', 'met' if v <= TARGETS[what] else 'missed')
            for where, what, v in ratios(r)
        ]
        report.write(here, r, targets, tables(r), files, STALLS)
    missed = [
        f'{where}{what} is {v:.2f}, the target is {TARGETS[what]:g}'
        for where, what, v in ratios(r)
        if not v <= TARGETS[what]
    ]
    unknown = [f'{o} MB' for o in SIZES if o not in r['stalls']] + MISSING
    print()
    for o in missed:
        print('missed:', o)
    for o in unknown:
        print(f'not measured: {o}, for which there are targets')
    if not missed and not unknown:
        print('All targets are met.')
    if args.check and (missed or unknown):
        sys.exit(1)


def measure(sizes, folder, end, ranks):
    "In turn, each with its share of the time that there is."
    now, stall = time.monotonic(), {}

    def until(share):
        return now + share * (end - now)

    with tempfile.TemporaryDirectory(dir=folder) as d:
        d = Path(d)
        for i, mb in enumerate(sizes):
            queue, share = (
                mp.get_context('fork').SimpleQueue(),
                0.5 * sum(o + 60 for o in sizes[: i + 1]) / sum(o + 60 for o in sizes),
            )
            mp.start_processes(stalls, (mb, d, until(share), queue), 1, start_method='fork')
            stall[mb] = queue.get()
        fit = on_ranks(fits, 2, d, until(0.8))
        return dict(
            stalls=stall,
            fits=fit,
            ends={n: on_ranks(ends, n, d, until(1 - 0.2 * (1 - (i + 1) / len(ranks)))) for i, n in enumerate(ranks)},
            missing=MISSING,
            made=machine(),
        )


if __name__ == '__main__':
    main()

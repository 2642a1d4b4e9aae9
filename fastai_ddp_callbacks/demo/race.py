"""The demonstration: ranks race to load the best model while rank 0 is late to save it.

    python -m fastai_ddp_callbacks.demo [--ranks N] [--epochs N] [--delay S] [--path DIR] [--stock]

A parent starts the ranks through torch's launcher. They train, and each notes what it does and when. Then the parent
puts the notes in order and judges by them, so that no rank needs another one to be heard, whatever happened to it."""

from __future__ import annotations
import argparse, hashlib, json, math, os, signal, subprocess, sys, tempfile, time, traceback, warnings
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from ..checkpoint.file import read_checkpoint
from ..errors import CheckpointError
from ..installed import fastai_line

__all__ = ['main', 'add_arguments', 'run', 'judge']

FNAME, PICTURE = 'digits', 'timeline.png'  # of the saved model, without its suffix; of the picture
TRAINED, SAVED, WANTS, LOADED, FAILED = 'trained the last epoch', 'saved', 'wants to load', 'loaded', 'failed'
_WEIGHTS, _STARTED = 'weights', 'started'  # notes for the parent, no lines of their own


# -- a rank


class Race:
    "One rank's part in the race, and its notes. What is peculiar to a line of fastai is in `demo2.train`."

    def __init__(self, args):
        self.args, self.rank, self.size = args, int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
        self.device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.device_count() >= self.size else 'cpu'
        if self.device != 'cpu':
            torch.cuda.set_device(self.device)
        self.file = open(Path(args.worker) / f'{self.rank}.notes', 'w', buffering=1)
        torch.manual_seed(1)
        self.model = _cnn()

    def note(self, what, **more):
        print(json.dumps(dict(time=time.time(), rank=self.rank, what=what, **more)), file=self.file)

    def saving(self, save, *args):
        "Rank 0 is late; the others write nothing."
        if self.rank:
            return save(*args)
        time.sleep(self.args.delay)
        res = save(*args)
        self.note(SAVED)
        return res

    def wants_to_load(self):
        "From here on, the weights can only come from the file."
        self.note(WANTS)
        with torch.no_grad():
            for p in self.model.parameters():
                p.fill_(self.rank + 1)

    def score(self, epoch):
        return 1.0 if epoch == self.args.epochs - 1 else math.nan

    def work(self):
        self.note(_STARTED, pid=os.getpid())
        try:
            train = _train()
            # a short limit, so that a rank which waits in vain for another one says so and does not hang
            if self.size > 1:
                dist.init_process_group(
                    'gloo' if self.device == 'cpu' else 'nccl', timeout=timedelta(seconds=self.args.delay + 45)
                )
            train(self)
            if self.size > 1 and not self.args.stock:
                self.draw()
        except (
            Exception
        ) as e:  # noted, not raised: the launcher would kill the other ranks, and nobody knew what becomes of them
            self.note(FAILED, error=f'{type(e).__name__}: {str(e).strip() or "without a message"}')
            if not self.args.stock:
                traceback.print_exc()
        self.note(_WEIGHTS, digest=_digest(self.model.state_dict()))
        if dist.is_initialized():
            dist.destroy_process_group()

    def draw(self):
        import_module('..timeline', __package__).plot_timeline(
            Path(self.args.path) / PICTURE
        )  # it imports fastai, which the parent does without


def _cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def digits():
    "scikit-learn's handwritten digits as two datasets, for training and for validation."
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)
    return TensorDataset(x[:1440], y[:1440]), TensorDataset(x[1440:], y[1440:])


def _digest(state):
    sha = hashlib.sha256()
    for k in sorted(state):
        sha.update(k.encode() + state[k].detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


def _digest_of_file(path):
    if not path.exists():
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', '.* has no checksum')  # stock's has none
        try:
            state, _ = read_checkpoint(path)
        except CheckpointError as e:
            return f'unreadable ({type(e).__name__})'  # a rank was stopped while it wrote
    return _digest(state['model'] if set(state) == {'model', 'opt'} else state)


def _train():
    "The training function for the fastai that is installed."
    for o in '`torch.jit', 'pkg_resources':
        warnings.filterwarnings('ignore', o)  # the imports of fastai give one per rank
    return import_module('.on_fastai2' if fastai_line() == 2 else '.on_fastai1', __package__).train


# -- the parent


def run(args) -> int:
    "Start the ranks, wait for them, report; gives the exit status."
    folder = Path(args.path or tempfile.mkdtemp(prefix='fastai-ddp-demo-')).absolute()
    saved = folder / 'models' / f'{FNAME}.pth'
    for o in saved, folder / PICTURE:
        o.unlink(missing_ok=True)  # an old run must not hide the race
    print(
        _INTRO.format(
            ranks=_count(args.ranks, 'rank'),
            epochs=_count(args.epochs, 'epoch'),
            delay=args.delay,
            who="fastai's own SaveModelCallback" if args.stock else 'DDPSaveModelCallback',
        ),
        file=sys.stderr if args.json else sys.stdout,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix='fastai-ddp-notes-') as notes:
        try:
            ended = _launch(args, folder, notes)
        except KeyboardInterrupt:
            print('interrupted: all ranks have been stopped', file=sys.stderr)
            return 128 + signal.SIGINT
        notes = _read_notes(notes)
    digest = _digest_of_file(saved)
    problems, evidence = judge(notes, args.ranks, digest)
    if ended:
        problems.insert(0, ended)
    if args.json:
        made = {k: str(o) if o.exists() else None for k, o in (('saved', saved), ('picture', folder / PICTURE))}
        print(
            json.dumps(
                dict(
                    holds=not problems,
                    problems=problems,
                    stock=args.stock,
                    ranks=_figures(notes),
                    weights=digest,
                    **made,
                )
            ),
            flush=True,
        )
        return 1 if problems else 0
    print()
    for o in notes:
        if o['what'] not in (_STARTED, _WEIGHTS):
            print(
                f"{_clock(o['time'])}  rank {o['rank']}  {o['what']}{': ' + _short(o['error']) if 'error' in o else ''}"
            )
    print(
        '\nVerdict: '
        + (
            'does not hold.'
            if problems
            else 'holds. No rank loaded before the save was complete, and every rank has the weights of the file.'
        )
    )
    for o in problems:
        print(f'  {o}')
    if args.stock and args.ranks > 1 and not problems and fastai_line() == 2:
        print(
            '  The barrier inside Learner.load of fastai 2 covers this race. It does not cover at_end=True, nor a save that fails on rank 0.'
        )
    print('Evidence:')
    for o in evidence:
        print(f'  {o}')
    if (folder / PICTURE).exists():
        print(f'Who waited for whom: {folder / PICTURE}')
    print(f'Saved model: {saved}' if saved.exists() else f'No model was saved as {saved}', flush=True)
    return 1 if problems else 0


_INTRO = """{ranks}, {epochs} on handwritten digits (8x8), a small CNN, {who}.
Staged: the column `score` is nan until the last epoch, which is thereby the best one and the only one that is saved.
Rank 0 sleeps {delay:g} s before that save. Before it loads, every rank overwrites its weights: only the file has the right ones.
"""


def judge(
    notes: list,  # of all ranks: dicts with `time`, `rank`, `what`, and `error` or `digest`
    ranks: int,  # how many there should be
    saved: str | None,  # digest of the saved weights
) -> tuple:  # (problems, evidence), two lists of lines
    "The verdict: without problems it holds."
    when = lambda what: {o['rank']: o for o in notes if o['what'] == what}
    save, loads, failed, weights = when(SAVED).get(0), when(LOADED), when(FAILED), when(_WEIGHTS)
    problems, evidence = [], []
    if not save:
        problems.append('Rank 0 did not complete a save.')
    for r in range(ranks):
        if r in failed:
            problems.append(f"Rank {r} failed: {_short(failed[r]['error'])}")
        elif r not in loads:
            problems.append(f'Rank {r} did not load the model.')
        if save and r in loads:
            late = loads[r]['time'] - save['time']
            evidence.append(
                f'rank {r} had loaded {abs(late):.3f} s {"after" if late >= 0 else "BEFORE"} the save was complete'
            )
            if late < 0:
                problems.append(f'Rank {r} loaded before the save was complete.')
    for r in range(ranks):
        digest = weights[r]['digest'] if r in weights else None
        evidence.append(f'weights of rank {r}    {digest or "unknown: it ended before it could tell"}')
        if digest != saved or not saved:
            problems.append(f'The weights of rank {r} are not those of the file.')
    evidence.append(f'weights in the file  {saved or "no file"}')
    return problems, evidence


def _figures(notes):
    "By rank: when it did what, in s since the epoch, or its error; and its weights at the end."
    res, keys = (
        {},
        {TRAINED: 'trained', WANTS: 'wants', SAVED: 'saved', LOADED: 'loaded', FAILED: 'failed', _WEIGHTS: 'weights'},
    )
    for o in notes:
        if o['what'] in keys:
            res.setdefault(o['rank'], {})[keys[o['what']]] = o.get('error') or o.get('digest') or o['time']
    return res


def _launch(args, folder, notes):
    "Run the ranks; gives what was wrong with that as a whole, or None."
    command = [
        sys.executable,
        '-m',
        'torch.distributed.run',
        '--standalone',
        '--nproc_per_node',
        args.ranks,
        '-m',
        'fastai_ddp_callbacks.demo',
        '--worker',
        notes,
        '--epochs',
        args.epochs,
        '--delay',
        args.delay,
        '--path',
        folder,
        *(['--stock'] if args.stock else []),
    ]
    limit = 90 + 10 * args.ranks + 5 * args.epochs + 2 * args.delay
    with _termination_raises():
        # a session of its own: Ctrl-C comes to us alone, and we end the ranks
        launcher = subprocess.Popen(
            [*map(str, command)],
            env={'OMP_NUM_THREADS': '1', **os.environ},
            start_new_session=True,
            stdout=sys.stderr if args.json else None,
        )
        try:
            code = launcher.wait(limit)
        except subprocess.TimeoutExpired:
            return f'The ranks had not ended after {limit:g} s, and were stopped.'
        finally:
            _end(launcher, notes)
    return f'The launcher ended with exit status {code}.' if code else None


@contextmanager
def _termination_raises():
    "Whoever terminates us does not leave the ranks behind."

    def leave(*_):
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(launcher, notes):
    if launcher.poll() is not None:
        return
    launcher.terminate()  # it terminates the ranks
    try:
        launcher.wait(10)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
        for o in _read_notes(notes):
            if o['what'] == _STARTED:
                with suppress(ProcessLookupError):
                    os.kill(o['pid'], signal.SIGKILL)


def _read_notes(folder):
    lines = [l for f in sorted(Path(folder).glob('*.notes')) for l in f.read_text().splitlines(keepends=True)]
    return sorted(
        (json.loads(l) for l in lines if l.endswith('\n')), key=lambda o: o['time']
    )  # a killed rank may leave half a line


def _clock(t):
    return time.strftime('%H:%M:%S', time.localtime(t)) + f'.{int(t % 1 * 1000):03d}'


def _count(n, what):
    return f'{n} {what}{"" if n == 1 else "s"}'


def _short(text):
    return text.splitlines()[0][:200]


# -- the command line


def add_arguments(parser) -> None:
    "Add the demonstration's options to an argparse parser."
    parser.add_argument(
        '--ranks', type=_number(int, 1, 16), default=3, metavar='N', help='how many ranks train (default 3)'
    )
    parser.add_argument(
        '--epochs', type=_number(int, 1, 1000), default=3, metavar='N', help='how many epochs they train (default 3)'
    )
    parser.add_argument(
        '--delay',
        type=_number(float, 0, 600),
        default=3.0,
        metavar='S',
        help='seconds that rank 0 sleeps before it saves (default 3)',
    )
    parser.add_argument(
        '--path', type=_folder, metavar='DIR', help='folder for the model (default: a new temporary one, which is kept)'
    )
    parser.add_argument(
        '--stock', action='store_true', help="use fastai's own SaveModelCallback, to see what that does"
    )
    parser.add_argument(
        '--json', action='store_true', help='print the figures as JSON; what the ranks say goes to the error output'
    )


def _number(kind, low, high):
    def number(text):
        try:
            n = kind(text)
        except ValueError:
            n = math.nan
        if not low <= n <= high:
            raise argparse.ArgumentTypeError(
                f'{text!r} is not {"a whole number" if kind is int else "a number"} from {low} to {high}'
            )
        return n

    return number


def _folder(text):
    try:
        Path(text, 'models').mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise argparse.ArgumentTypeError(f'{text!r} cannot be used as a folder: {e.strerror}') from e
    if not os.access(Path(text, 'models'), os.W_OK):
        raise argparse.ArgumentTypeError(f'{text!r} cannot be written to')
    return text


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog='python -m fastai_ddp_callbacks.demo',
        description='Ranks race to load the best model while rank 0 '
        'is late to save it. The exit status is 0 if no rank loaded before the save was complete and all have the same weights, else 1.',
    )
    add_arguments(parser)
    parser.add_argument(
        '--worker', metavar='NOTES', help=argparse.SUPPRESS
    )  # given to a rank: the folder for its notes
    args = parser.parse_args(argv)
    if not args.worker:
        return run(args)
    Race(args).work()
    # Not by way of the interpreter's end: DistributedDataParallel keeps gloo's threads alive for good (torch 2.14), and one that
    # has a tensor to free by then aborts the process, and with it the other ranks.
    for o in sys.stdout, sys.stderr:
        o.flush()
    os._exit(0)

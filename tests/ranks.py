"""The harness: `run(scenario, 3)` calls `scenario()` on three real ranks, processes of their own with a gloo group.

Ranks are forked from a server that has fastai imported already, so that a scenario costs a fraction of a second. They
see what `torchrun` would set (RANK, WORLD_SIZE, LOCAL_RANK, ...). A rank that hangs is killed and reported as hung,
with the stack of each of its threads in `output`."""

from __future__ import annotations
import faulthandler, multiprocessing as mp, os, pickle, shutil, socket, sys, tempfile, time, traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path

import cloudpickle

PRELOAD = 'preloaded'  # the module that ranks find imported
_context = mp.get_context('forkserver')


def _start_server():
    "Ranks are forked from this process; it finds our modules on its path, not on ours."
    _context.set_forkserver_preload([PRELOAD])
    path, here = os.environ.get('PYTHONPATH'), Path(__file__).parent
    os.environ['PYTHONPATH'] = os.pathsep.join([str(here), str(here.parent), *filter(None, [path])])
    os.environ.setdefault(
        'RES_OPTIONS', 'timeout:1 attempts:1'
    )  # torch looks up the name of each peer: a deaf name server must not cost 5 s
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ['PYTHONPATH']
        else:
            os.environ['PYTHONPATH'] = path


@dataclass
class Result:
    "What became of one rank."

    rank: int
    value: object = None  # what the scenario returned
    error: BaseException | None = None  # what it raised
    traceback: str = ''
    output: str = ''  # what it printed, both streams
    exitcode: int | None = None  # negative: killed by that signal
    hung: bool = False  # the harness had to kill it
    seconds: float = 0.0  # from when the group was made to the end

    @property
    def ok(self):
        return self.error is None and not self.hung and self.exitcode == 0


def run(
    scenario,  # a function, any (closures too); called on every rank
    world_size,  # how many ranks
    *args,  # its arguments
    timeout=60,  # seconds after which a rank counts as hung
    group_timeout=30,  # seconds, of the default process group
    env=lambda rank: {},  # more environment variables for a rank
    group=True,  # whether to make a default process group
):  # list of `Result` by rank
    _start_server()
    folder = Path(tempfile.mkdtemp(prefix='ranks-'))
    payload = cloudpickle.dumps((scenario, args))
    with socket.socket() as s:  # a free port
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    ranks = [
        _context.Process(
            target=_rank,
            daemon=False,
            args=(payload, r, world_size, port, folder, timeout, group_timeout, env(r), group),
        )
        for r in range(world_size)
    ]
    for p in ranks:
        p.start()
    end = time.monotonic() + timeout
    for p in ranks:
        p.join(max(0, end - time.monotonic()))
    results = []
    for r, p in enumerate(ranks):
        hung = p.is_alive()
        if hung:
            p.kill()
            p.join()
        file = folder / f'{r}.result'
        result = pickle.loads(file.read_bytes()) if file.exists() else Result(r)
        result.exitcode, result.hung, result.output = (
            p.exitcode,
            hung,
            (folder / f'{r}.output').read_text(errors='replace'),
        )
        results.append(result)
        p.close()
    shutil.rmtree(folder)
    return results


def values(results):
    "What the ranks returned; fails with their output if one did not return."
    assert all(o.ok for o in results), report(results)
    return [o.value for o in results]


def report(results):
    "All that the ranks said, for the message of a failed assertion."
    return '\n'.join(
        f'--- rank {o.rank}: exit {o.exitcode}{" HUNG" if o.hung else ""}\n{o.output}{o.traceback}' for o in results
    )


def _rank(payload, rank, world_size, port, folder, timeout, group_timeout, env, group):
    fd = os.open(folder / f'{rank}.output', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(fd, 1), os.dup2(fd, 2)
    sys.stdout = open(1, 'w', buffering=1, closefd=False)
    sys.stderr = open(2, 'w', buffering=1, closefd=False)
    faulthandler.dump_traceback_later(timeout - 1, file=sys.stderr)
    os.environ.update(
        {
            k: str(v)
            for k, v in dict(
                RANK=rank,
                WORLD_SIZE=world_size,
                LOCAL_RANK=rank,
                LOCAL_WORLD_SIZE=world_size,
                MASTER_ADDR='127.0.0.1',
                MASTER_PORT=port,
            ).items()
        }
    )
    os.environ.update({k: str(v) for k, v in env.items() if v is not None})
    for k, v in env.items():
        if v is None:
            del os.environ[k]
    import torch, torch.distributed as dist

    torch.set_num_threads(1)
    result, start = Result(rank), time.monotonic()
    try:
        if group:
            dist.init_process_group(
                'gloo',
                init_method=f'tcp://127.0.0.1:{port}',
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=group_timeout),
            )
        scenario, args = cloudpickle.loads(payload)
        result.value = scenario(*args)
    except BaseException as e:
        result.error, result.traceback = e, traceback.format_exc()
    result.seconds = time.monotonic() - start
    part = folder / f'{rank}.part'
    try:
        part.write_bytes(cloudpickle.dumps(result))
    except Exception as e:
        part.write_bytes(
            pickle.dumps(
                Result(rank, error=RuntimeError(f'result could not be sent: {e}'), traceback=traceback.format_exc())
            )
        )
    part.rename(folder / f'{rank}.result')
    if isinstance(result.error, SystemExit):
        sys.exit(result.error.code)

"""Two hosts with a wire between them, each with a name, a network and a disk of its own.

They are namespaces of this host, which end with the processes in them. Where none may be made: two processes that see
different folders."""

import json, os, signal, socket, subprocess, time
from datetime import timedelta

import pytest, torch.distributed as dist
from torch import nn

from fastai_ddp_callbacks import (
    DDPSaveModelCallback,
    ddp_ctx,
    is_local_main_process,
    model_state,
    rank,
    read_checkpoint,
    run_on_main,
    run_once_per_node,
    set_timeout,
    write_checkpoint,
)
from fastai_ddp_callbacks.training.loading import load_everywhere
from fastai_ddp_callbacks.checkpoint.lock import Lock
from disks import NEW_MOUNTS, NEW_NAMES, NEW_NET, own_disk, unshare
from learners import Records, Trace, digest, learner
from ranks import report, run, values

PORT = 29500  # of a network that nobody else is in


def ip(text):
    subprocess.run(['ip', *text.split()], check=True)


def tell(folder, name, text=''):
    (folder / f'{name}.part').write_text(str(text))
    (folder / f'{name}.part').rename(folder / name)


def hear(folder, name):
    end = time.monotonic() + 30
    while not (folder / name).exists():
        assert time.monotonic() < end, f'{name} does not come'
        time.sleep(0.01)
    return (folder / name).read_text()


def become_host(me, folder):
    """Move this process to host `me`, 0 or 1, wired to the other one. Whether we may; `folder` is where the two hear
    of each other."""
    alone = unshare(NEW_NET | NEW_NAMES | NEW_MOUNTS)
    if not alone:
        return False
    with open('/proc/sys/kernel/hostname', 'w') as f:
        f.write(f'host{me}')
    ip('link set lo up')
    if me == 0:
        ip(f'link add wire0 type veth peer name wire1 netns {hear(folder, "host1")}')
        tell(folder, 'wired')
    else:
        tell(folder, 'host1', os.getpid())
        hear(folder, 'wired')
    ip(f'addr add 10.77.0.{me + 1}/24 dev wire{me}')
    ip(f'link set wire{me} up')
    os.environ.update(MASTER_ADDR='10.77.0.1', MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME=f'wire{me}')
    return True


def on_two_hosts(scenario, tmp_path, **kwargs):
    "What became of `scenario(alone)` on the one rank of each host, whose folder `models` is on its own disk."
    (tmp_path / 'signs').mkdir()

    def on_host():
        me = int(os.environ['RANK'])
        alone = become_host(me, tmp_path / 'signs')
        if alone or me:
            own_disk(tmp_path / 'models')
        dist.init_process_group('gloo', init_method='env://', timeout=timedelta(seconds=30))
        try:
            return scenario(alone)
        finally:
            time.sleep(0.3)  # the store lives on until both have heard all

    return run(on_host, 2, group=False, env=lambda r: dict(LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, GROUP_RANK=r), **kwargs)


def with_norm():
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize('with_opt', [False, True])
def test_both_hosts_end_with_the_best_model_of_which_only_the_first_has_a_file(tmp_path, with_opt):
    def scenario(alone):
        learn, cb = learner(tmp_path, model=with_norm()), DDPSaveModelCallback(keep_best=2, with_opt=with_opt)
        with Trace() as t, ddp_ctx(learn):
            learn.fit(4, 0.1, cbs=[cb, Records([3.0, 1.0, 2.0, 4.0])])
        first = is_local_main_process()
        names = sorted(o.name for o in (tmp_path / 'models').glob('*.pth'))
        state = read_checkpoint(cb.best_path)[0] if rank() == 0 else None
        if state:
            (saved := with_norm()).load_state_dict(state['model'] if with_opt else state)
        opt = [float(o['grad_avg'].sum()) for o in learn.opt.state_dict()['state']] if with_opt else None
        return dict(
            alone=alone,
            host=socket.gethostname(),
            first=first,
            names=names,
            weights=digest(learn.model),
            saved=digest(saved) if state else None,
            opt=opt,
            opt_saved=[float(o['grad_avg'].sum()) for o in state['opt']['state']] if state and with_opt else None,
            calls=t.calls,
            paths=[cb.best, cb.best_path, cb.best_paths, cb.last_saved_path],
            node=run_once_per_node(rank),
        )

    a, b = values(on_two_hosts(scenario, tmp_path))
    assert a['weights'] == b['weights'] == a['saved'] and a['opt'] == b['opt'] == a['opt_saved']
    assert a['paths'] == b['paths'] and a['paths'][1].name == 'model_1.pth' and a['calls'] == b['calls']
    assert a['names'] == ['model_1.pth', 'model_2.pth']
    assert a['first'] and b['first'] and (a['node'], b['node']) == (0, 1)
    if a['alone']:
        assert (a['host'], b['host']) == ('host0', 'host1') and b['names'] == []


@pytest.mark.parametrize('dies', ['process', 'host'])
def test_a_process_or_a_host_that_dies_while_weights_are_sent_is_named_on_the_other(tmp_path, dies):
    "A host goes silently: nobody is left to close a connection, and only time tells."

    def scenario(alone):
        model, sent = nn.Linear(1000, 10_000), []
        checksum = run_on_main(lambda: write_checkpoint(model_state(model), tmp_path / 'models/m.pth')['checksum'])
        send = dist.ProcessGroupGloo.broadcast

        def broadcast(*args):
            sent.append(1)
            if rank() == 1 and len(sent) == 3:
                subprocess.Popen(['sleep', '4'])  # somebody is left on the host, so that its end of the wire stays
                if dies == 'host' and alone:
                    ip('link set wire1 down')
                os.kill(os.getpid(), signal.SIGKILL)
            return send(*args)

        dist.ProcessGroupGloo.broadcast = broadcast
        set_timeout(25 if dies == 'process' else 3)
        start = time.monotonic()
        try:
            load_everywhere(model, str(tmp_path / 'models/m.pth'), checksum)
        except Exception as e:
            return type(e).__name__, str(e), getattr(e, 'missing', [getattr(e, 'rank', None)]), time.monotonic() - start

    a, b = results = on_two_hosts(scenario, tmp_path)
    assert b.exitcode == -signal.SIGKILL and a.ok, report(results)
    kind, text, who, took = a.value
    assert who == [1] and 'rank 1' in text and 'm.pth' in text and took < 20
    assert kind == 'RankFailedError' or kind == 'BarrierTimeoutError' and dies == 'host'


def test_a_name_that_a_job_of_another_host_holds_is_refused_until_that_has_been_silent_for_a_minute(tmp_path):
    signs, file = tmp_path / 'signs', tmp_path / '.model.lock'
    signs.mkdir()

    def scenario():
        me = int(os.environ['RANK'])
        alone = become_host(me, signs)
        mine = Lock(file, 'the name')
        if me == 0:
            mine.acquire()
            tell(signs, 'held')
            hear(signs, 'die')
            os.kill(os.getpid(), signal.SIGKILL)

        def tried():
            try:
                mine.acquire()
            except Exception as e:
                return f'{type(e).__name__}: {e}'

        hear(signs, 'held')
        said = [tried()]
        tell(signs, 'die')
        owner = json.loads(file.read_text())
        time.sleep(0.5)
        if alone:  # its death cannot be seen from here
            said.append(tried())
            os.utime(file, (time.time() - 61,) * 2)
        said.append(tried())
        return alone, owner, said

    zero, one = results = run(scenario, 2, group=False)
    assert zero.exitcode == -signal.SIGKILL and one.ok, report(results)
    alone, owner, said = one.value
    assert said[-1] is None and len(said) == (3 if alone else 2)
    for o in said[:-1]:
        assert (
            o.startswith('CheckpointInUseError: the name is in use')
            and f'process {owner["pid"]} on {owner["name"]}' in o
        )
    if alone:
        assert owner['name'] == 'host0'

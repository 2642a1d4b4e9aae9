"What the doctor says: facts of all ranks in, one verdict per line out. Every check is a function that yields (verdict, text, advice)."

from __future__ import annotations
from statistics import median
from typing import NamedTuple

from ..training.process_group import _LAUNCHED
from .files import _size

__all__ = ['Finding', 'judge', 'look_at_variables', 'VARIABLES', 'count']

_OURS = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'
_OTHERS = 'SLURM_NTASKS', 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE'  # how many processes other launchers have started
VARIABLES = *_OURS, *_OTHERS
_FEW, _LITTLE = 100e6, 1e9  # bytes of free space that are a problem, and those worth a note


class Finding(NamedTuple):
    "One line of the report."

    verdict: str  # 'ok', 'note' or 'problem'
    check: str  # what was looked at
    text: str  # what was seen
    advice: str = ''  # what to do about it


def judge(
    facts: dict,  # what each rank that came has seen, by rank; see `doctor._facts`
    size: int,  # how many ranks there should be
    missing=(),  # ranks that did not come, or went
    timeout: float = 30,  # how many seconds they were waited for
    lost: str = '',  # what is wrong with the connection to the others
    twice=(),  # ranks that several processes take themselves for
) -> list:  # of `Finding`
    "The verdicts, at least one for each check."
    found = dict(
        launcher=_launcher(facts),
        ranks=_ranks(facts, size, missing, timeout, lost, twice),
        backend=_backend(facts, size),
        devices=_devices(facts),
        gloo=_gloo(facts, size),
        clock=_clock(facts, size),
        disk=_disk(facts),
        space=_space(facts),
        versions=_versions(facts),
    )
    return [Finding(verdict, check, *text) for check, lines in found.items() for verdict, *text in lines]


def look_at_variables(
    env: dict,  # the launcher's variables that there are
) -> tuple:  # rank, world size, (verdict, text, advice)
    "What the variables say. A process that they do not put into a group is rank 0 of 1."
    said, missing = ', '.join(f'{k}={v}' for k, v in env.items() if k in _OURS), [o for o in _LAUNCHED if o not in env]
    for k in _OURS:
        if k in env and k != 'MASTER_ADDR' and not env[k].isdecimal():
            return 0, 1, ('problem', f'{k}={env[k]!r} is not a whole number.', f'Unset {k}, or mend it.')
    n = {k: int(env[k]) for k in _OURS if k in env and k != 'MASTER_ADDR'}
    if not 0 < n.get('MASTER_PORT', 1) < 2**16:
        return (
            0,
            1,
            (
                'problem',
                f"MASTER_PORT={n['MASTER_PORT']} is no port: they go from 1 to 65535.",
                'Choose one that is free on the host of rank 0.',
            ),
        )
    if not env.get('MASTER_ADDR', 'unset').strip():
        return (
            0,
            1,
            ('problem', 'MASTER_ADDR is empty.', 'Set it to the host of rank 0, as all hosts reach it, or unset it.'),
        )
    for low, high in ('RANK', 'WORLD_SIZE'), ('LOCAL_RANK', 'LOCAL_WORLD_SIZE'), ('LOCAL_RANK', 'WORLD_SIZE'):
        if low in n and high in n and n[low] >= n[high]:
            return (
                0,
                1,
                (
                    'problem',
                    f'{low}={n[low]} does not go with {high}={n[high]}: it counts from 0.',
                    'Let the launcher set these variables, all of them.',
                ),
            )
    if not missing:
        return (
            n['RANK'],
            n['WORLD_SIZE'],
            ('ok', f'{", ".join(o for o in _OURS if o in env)} are set and go together', ''),
        )
    if n.get('RANK') or n.get('WORLD_SIZE', 1) > 1:
        return (
            0,
            1,
            (
                'problem',
                f'{said}, but no {", ".join(missing)}: no process group can be made, and this process would train alone.',
                'Start the script by torchrun or accelerate launch, or unset these variables.',
            ),
        )
    if said:
        return (
            0,
            1,
            (
                'note',
                f'{said}, without a launcher: left over in this shell.',
                'Unset these variables, unless your script completes them.',
            ),
        )
    for o in _OTHERS:
        if env.get(o, '1') != '1':
            return (
                0,
                1,
                (
                    'note',
                    f"{o}={env[o]}, but none of torch's variables: each of these processes would train alone.",
                    'Start torchrun on each node, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process.',
                ),
            )
    return 0, 1, ('ok', 'no launcher: one process, which trains alone', '')


# -- words


def count(n, what):
    return f'{n or "no"} {what}{"" if n == 1 else "s"}'


def _who(ranks):
    return f'rank{"" if len(ranks) == 1 else "s"} {", ".join(map(str, ranks))}'


def _groups(facts, get):
    "{what `get` gives: the ranks for which it does}."
    res = {}
    for r, o in facts.items():
        res.setdefault(get(o), []).append(r)
    return res


def _each(groups):
    return '; '.join(f'{_who(ranks)}: {o}' for o, ranks in groups.items())


# -- the checks


def _launcher(facts):
    own = [tuple(o['launcher']) for o in facts.values()]
    bad = [*dict.fromkeys(o for o in own if o[0] != 'ok'), *_launched_apart(facts)]
    yield from bad or own[:1]


def _launched_apart(facts):
    sizes = _groups(facts, lambda o: o['size'])
    if len(sizes) > 1:
        yield (
            'problem',
            f'WORLD_SIZE differs. {_each(sizes)}',
            'Start all nodes with the same --nnodes, and the same --nproc_per_node.',
        )
    if len(facts) == 1:
        return
    for ranks in _groups(facts, lambda o: o['machine']).values():
        local, where = [facts[r]['env'].get('LOCAL_RANK') for r in ranks], f"on {facts[ranks[0]]['host']}"
        told = facts[ranks[0]]['env'].get('LOCAL_WORLD_SIZE', str(len(ranks)))
        if None in local:
            yield 'note', f'LOCAL_RANK is not set {where}.', 'Let the launcher set it: scripts choose their GPU by it.'
        elif len({*local}) < len(local):
            yield (
                'problem',
                f'{_who(ranks)} {where} have LOCAL_RANK {", ".join(local)}.',
                'Give each process of a node a LOCAL_RANK of its own.',
            )
        elif told != str(len(ranks)):
            yield (
                'note',
                f'LOCAL_WORLD_SIZE={told} {where}, where {_who(ranks)} came.',
                'As it should be if each rank has a container of its own.',
            )


def _ranks(facts, size, missing, timeout, lost, twice):
    if twice:
        yield (
            'problem',
            f'Several processes take themselves for {_who(twice)}.',
            'Give each node a --node_rank of its own, and look for processes of an earlier job.',
        )
    if lost:
        yield (
            'problem',
            f'{lost[0].upper()}{lost[1:]}',
            (
                'MASTER_ADDR must be the host of rank 0 as all hosts reach it (not localhost if there are several), and '
                'MASTER_PORT a port that is free there and that firewalls let pass.'
            ),
        )
    elif missing:
        yield (
            'problem',
            f'{_who(missing)} did not come in {timeout:g} s, or went.',
            (
                'Look at what these processes say. If only this one was '
                'started, RANK and WORLD_SIZE are left over in this shell: unset them.'
            ),
        )
    elif not twice:
        yield 'ok', f'{count(size, "rank")} on {count(len(_groups(facts, lambda o: o["machine"])), "host")}'


def _backend(facts, size):
    without = {o: [r for r, f in facts.items() if not f[o]] for o in ('gloo', 'nccl')}
    needed = [r for r in without['nccl'] if facts[r]['gpus'] and size > 1]
    if without['gloo']:
        yield (
            'problem',
            f"torch has no gloo on {_who(without['gloo'])}: ranks cannot meet.",
            'Install a build of torch with gloo, as the official ones are.',
        )
    if needed:
        yield (
            'problem',
            f'torch has no NCCL on {_who(needed)}, with GPUs.',
            'Install a build of torch for CUDA on Linux, or train on the CPU.',
        )
    if not (without['gloo'] or needed):
        yield 'ok', 'gloo; no NCCL, which only GPUs need' if without['nccl'] else 'gloo and NCCL'


def _devices(facts):
    idle = [r for r, o in facts.items() if not o['gpus'] and o['driver'] and o['visible'] is None]
    if idle:
        yield (
            'note',
            f'{_who(idle)} cannot use the GPU of this host.',
            'Install a build of torch that fits the driver (`nvidia-smi` shows its version).',
        )
    hidden = {
        r: o
        for r, o in facts.items()
        if not o['gpus'] and o['driver'] and (o['visible'] or '').strip() not in ('', '-1')
    }  # those two are meant so
    if hidden:
        yield (
            'problem',
            f"Every GPU of the host is hidden. {_each(_groups(hidden, lambda o: 'CUDA_VISIBLE_DEVICES=' + o['visible']))}",
            (
                "Name GPUs that are there (`nvidia-smi -L` lists them), or set it to '' to train on the CPU. If they are there, install a build of torch that fits the driver."
            ),
        )
    with_gpus = {r: o for r, o in facts.items() if o['gpus']}
    places = _groups(with_gpus, lambda o: (o['machine'], _gpu(o)))
    shared = {gpu: ranks for (_, gpu), ranks in places.items() if len(ranks) > 1}
    if shared:
        yield (
            'problem',
            f'A GPU for several ranks. {_each(shared)}',
            (
                'Start at most as many processes on a node as it has GPUs (--nproc_per_node), or make '
                'more of them visible (CUDA_VISIBLE_DEVICES): NCCL refuses to share one.'
            ),
        )
    mixed = 0 < len(with_gpus) < len(facts)
    if mixed:
        yield (
            'problem',
            f'{_who(list(with_gpus))} would train on GPUs, the other ranks on the CPU.',
            'Make GPUs visible to all ranks, or to none.',
        )
    if not (idle or hidden or shared or mixed):
        yield (
            'ok',
            _each({gpu: ranks for (_, gpu), ranks in places.items()}) if places else 'no GPU: training on the CPU',
        )


def _gpu(o):
    "The GPU that a rank trains on: the one of its local rank."
    local = o['env'].get('LOCAL_RANK', '')
    i = int(local if local.isdecimal() else o['rank']) % o['gpus']
    return f"GPU {o['visible'].split(',')[i].strip() if o['visible'] else i}"


def _gloo(facts, size):
    met = {r: o['met'] for r, o in facts.items() if o['met']}
    errors = _groups({r: o for r, o in met.items() if 'error' in o}, lambda o: o['error'])
    if size == 1:
        yield 'ok', 'one rank: nothing to reach'
    elif errors:
        yield (
            'problem',
            f'The ranks cannot meet. {_each(errors)}',
            (
                'Set GLOO_SOCKET_IFNAME on each host to the network interface that the other hosts reach '
                '(`ip addr` lists them), and let firewalls pass all ports between them.'
            ),
        )
    elif len(met) < size:
        yield (
            'note',
            'Not tried, since not all ranks are there and in order.',
            'Mend the problems above, and ask again.',
        )
    else:
        yield (
            'ok',
            f"all ranks met after {max(o['seconds'] for o in met.values()):.2f} s; a rendezvous takes {1000 * median(o['trip'] for o in met.values()):.1f} ms",
        )


def _clock(facts, size):
    ahead = next((o['met']['ahead'] for o in facts.values() if o['met'] and 'ahead' in o['met']), None)
    if ahead is None:
        yield 'ok', 'one rank: nothing to compare' if size == 1 else 'not compared'
    else:
        low, high = min(ahead), max(ahead)
        if high - low <= 1:
            yield 'ok', f'clocks differ by {high - low:.2f} s'
        else:
            yield (
                'problem' if high - low > 60 else 'note',
                f'The clock of rank {ahead.index(high)} is {high - low:.1f} s ahead of that of rank {ahead.index(low)}.',
                'Let all hosts keep time by NTP (`timedatectl`): the times in checkpoints and in the timeline are those of the clocks.',
            )


def _disk(facts):
    bad = _groups({r: o for r, o in facts.items() if o['disk_error']}, lambda o: f"{o['folder']}: {o['disk_error']}")
    if bad:
        yield (
            'problem',
            f'No file can be written. {_each(bad)}',
            'Make the folder, or choose one that can be written to (--folder DIR).',
        )
    good = {r: o for r, o in facts.items() if not o['disk_error']}
    apart, after = _groups(good, lambda o: tuple(o['sees'])), max((o['after'] for o in good.values()), default=0)
    if len(apart) > 1:
        yield (
            'note',
            f"Separate disks: {'; '.join(f'{_who(ranks)}: files of {_who(sees)}' for sees, ranks in apart.items())}",
            (
                'As it should be if nodes have disks of their own: the best model is then sent by rank 0. Downloads belong into `run_once_per_node`.'
            ),
        )
    elif after > 0.5:
        yield (
            'note',
            f'A shared disk, which shows new files after {after:.1f} s.',
            'What one rank writes is not seen at once by the others: send it by `broadcast`.',
        )
    elif not bad:
        yield 'ok', f'{"shared by all ranks, and " if len(good) > 1 else ""}can be written to'


def _space(facts):
    free = {r: o['free'] for r, o in facts.items() if o['free'] is not None}
    low = [r for r, o in free.items() if o < _LITTLE]
    if low:
        yield (
            'problem' if min(free.values()) < _FEW else 'note',
            f'{_size(min(free.values()))} free for {_who(low)}.',
            'Free some: a save needs room for the new file beside the old one.',
        )
    else:
        yield 'ok', f'{_size(min(free.values()))} free' if free else 'unknown'


def _versions(facts):
    first = facts[min(facts)]['versions']
    differ = {k: o for k in first if len(o := _groups(facts, lambda f: f['versions'][k] or 'missing')) > 1}
    for k, groups in differ.items():
        yield 'problem', f'{k} differs. {_each(groups)}', 'Install the same on all nodes.'
    if not first['fastai']:
        yield 'note', 'fastai is missing.', 'The callbacks need it: pip install fastai.'
    elif not differ:
        yield 'ok', ', '.join(f'{k} {v or "missing"}' for k, v in first.items())

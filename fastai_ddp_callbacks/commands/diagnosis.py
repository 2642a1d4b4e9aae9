"""What the doctor concludes: facts of all ranks in, one verdict per line out.

Every check is a function that yields lines."""

from __future__ import annotations
from collections.abc import Sequence
from statistics import median

from .files import _size
from .findings import Finding, count, each_in_words, note, ok, problem, ranks_by, ranks_in_words
from .launcher_variables import check_launcher

__all__ = ['judge']

_HARDLY_ANY, _LITTLE = 100e6, 1e9  # bytes of free space that are a problem, and those worth a note


def judge(
    facts: dict[int, dict],  # what each rank that answered has seen, by rank; see `facts.own_facts`
    size: int,  # how many ranks there should be
    missing: Sequence[int] = (),  # ranks that did not answer, or left
    timeout: float = 30,  # how many seconds they were waited for
    connection_error: str = '',  # what is wrong with the connection to the others
    duplicates: Sequence[int] = (),  # ranks that several processes take themselves for
) -> list[Finding]:
    "The verdicts, at least one for each check."
    found = dict(
        launcher=check_launcher(facts),
        ranks=_ranks(facts, size, missing, timeout, connection_error, duplicates),
        backend=_backend(facts, size),
        devices=_devices(facts),
        gloo=_gloo(facts, size),
        clock=_clock(facts, size),
        disk=_disk(facts),
        space=_space(facts),
        versions=_versions(facts),
    )
    return [Finding(line.verdict, check, line.text, line.advice) for check, lines in found.items() for line in lines]


def _ranks(facts, size, missing, timeout, connection_error, duplicates):
    if duplicates:
        yield problem(
            f'Several processes take themselves for {ranks_in_words(duplicates)}.',
            'Give each node a --node_rank of its own, and look for processes of an earlier job.',
        )
    if connection_error:
        yield problem(
            f'{connection_error[0].upper()}{connection_error[1:]}',
            'MASTER_ADDR must be the host of rank 0 as all hosts reach it (not localhost if there are several), and '
            'MASTER_PORT a port that is free there and that firewalls let pass.',
        )
    elif missing:
        yield problem(
            f'{ranks_in_words(missing)} did not answer within {timeout:g} s, or left.',
            'Look at the output of these processes. If only this one was started, RANK and WORLD_SIZE are left over in '
            'this shell: unset them.',
        )
    elif not duplicates:
        hosts = ranks_by(facts, lambda own: own['machine'])
        yield ok(f'{count(size, "rank")} on {count(len(hosts), "host")}')


def _backend(facts, size):
    without_gloo = [rank for rank, own in facts.items() if not own['gloo']]
    without_nccl = [rank for rank, own in facts.items() if not own['nccl']]
    needing_nccl = [rank for rank in without_nccl if facts[rank]['gpus'] and size > 1]
    if without_gloo:
        yield problem(
            f'torch has no gloo on {ranks_in_words(without_gloo)}: ranks cannot meet.',
            'Install a build of torch with gloo, as the official ones are.',
        )
    if needing_nccl:
        yield problem(
            f'torch has no NCCL on {ranks_in_words(needing_nccl)}, with GPUs.',
            'Install a build of torch for CUDA on Linux, or train on the CPU.',
        )
    if not without_gloo and not needing_nccl:
        yield ok('gloo; no NCCL, which only GPUs need' if without_nccl else 'gloo and NCCL')


def _devices(facts):
    lines = [*_unusable_gpus(facts)]
    with_gpus = {rank: own for rank, own in facts.items() if own['gpus']}
    places = ranks_by(with_gpus, lambda own: (own['machine'], _gpu(own)))
    shared = {gpu: ranks for (_, gpu), ranks in places.items() if len(ranks) > 1}
    if shared:
        lines.append(
            problem(
                f'A GPU for several ranks. {each_in_words(shared)}',
                'Start at most as many processes on a node as it has GPUs (--nproc_per_node), or make more of them '
                'visible (CUDA_VISIBLE_DEVICES): NCCL refuses to share one.',
            )
        )
    if 0 < len(with_gpus) < len(facts):
        lines.append(
            problem(
                f'{ranks_in_words([*with_gpus])} would train on GPUs, the other ranks on the CPU.',
                'Make GPUs visible to all ranks, or to none.',
            )
        )
    if lines:
        return lines
    gpus = {gpu: ranks for (_, gpu), ranks in places.items()}
    return [ok(each_in_words(gpus) if gpus else 'no GPU: training on the CPU')]


def _unusable_gpus(facts):
    "GPUs that a host has, but torch does not see."
    blind = {rank: own for rank, own in facts.items() if own['driver'] and not own['gpus']}
    unhidden = [rank for rank, own in blind.items() if own['visible'] is None]
    if unhidden:
        yield note(
            f'{ranks_in_words(unhidden)} cannot use the GPU of this host.',
            'Install a build of torch that fits the driver (`nvidia-smi` shows its version).',
        )
    # '' and -1 are how one asks for the CPU
    hidden = {rank: own for rank, own in blind.items() if (own['visible'] or '').strip() not in ('', '-1')}
    if hidden:
        values = ranks_by(hidden, lambda own: f'CUDA_VISIBLE_DEVICES={own["visible"]}')
        yield problem(
            f'Every GPU of the host is hidden. {each_in_words(values)}',
            "Name GPUs that are there (`nvidia-smi -L` lists them), or set it to '' to train on the CPU. If they are "
            'there, install a build of torch that fits the driver.',
        )


def _gpu(own):
    "The GPU that a rank trains on: the one of its local rank."
    local = own['env'].get('LOCAL_RANK', '')
    index = int(local if local.isdecimal() else own['rank']) % own['gpus']
    return f"GPU {own['visible'].split(',')[index].strip() if own['visible'] else index}"


def _gloo(facts, size):
    met = {rank: own['met'] for rank, own in facts.items() if own['met']}
    failed = {rank: outcome for rank, outcome in met.items() if 'error' in outcome}
    if size == 1:
        yield ok('one rank: nothing to reach')
    elif failed:
        errors = ranks_by(failed, lambda outcome: outcome['error'])
        yield problem(
            f'The ranks cannot meet. {each_in_words(errors)}',
            'Set GLOO_SOCKET_IFNAME on each host to the network interface that the other hosts reach (`ip addr` lists '
            'them), and let firewalls pass all ports between them.',
        )
    elif len(met) < size:
        yield note(
            'Not tried, since not all ranks are there and in order.',
            'Correct the problems above, and run the doctor again.',
        )
    else:
        seconds = max(outcome['seconds'] for outcome in met.values())
        trip = median(outcome['trip'] for outcome in met.values())
        yield ok(f'all ranks met after {seconds:.2f} s; a rendezvous takes {1000 * trip:.1f} ms')


def _clock(facts, size):
    ahead = next((own['met']['ahead'] for own in facts.values() if own['met'] and 'ahead' in own['met']), None)
    if ahead is None:
        return [ok('one rank: nothing to compare' if size == 1 else 'not compared')]
    difference = max(ahead) - min(ahead)
    if difference <= 1:
        return [ok(f'clocks differ by {difference:.2f} s')]
    first, last = ahead.index(max(ahead)), ahead.index(min(ahead))
    line = problem if difference > 60 else note
    return [
        line(
            f'The clock of rank {first} is {difference:.1f} s ahead of that of rank {last}.',
            'Let all hosts keep time by NTP (`timedatectl`): the times in checkpoints and in the timeline are those of '
            'the clocks.',
        )
    ]


def _disk(facts):
    failed = {rank: own for rank, own in facts.items() if own['disk_error']}
    if failed:
        errors = ranks_by(failed, lambda own: f'{own["folder"]}: {own["disk_error"]}')
        yield problem(
            f'No file can be written. {each_in_words(errors)}',
            'Make the folder, or choose one that can be written to (--folder DIR).',
        )
    written = {rank: own for rank, own in facts.items() if not own['disk_error']}
    disks = ranks_by(written, lambda own: tuple(own['sees']))
    delay = max((own['after'] for own in written.values()), default=0)
    if len(disks) > 1:
        seen = [f'{ranks_in_words(ranks)}: files of {ranks_in_words(sees)}' for sees, ranks in disks.items()]
        yield note(
            f'Separate disks: {"; ".join(seen)}',
            'As it should be if nodes have disks of their own: the best model is then sent by rank 0. Downloads belong '
            'into `run_once_per_node`.',
        )
    elif delay > 0.5:
        yield note(
            f'A shared disk, which shows new files after {delay:.1f} s.',
            'The other ranks do not see at once what one rank writes: send it by `broadcast`.',
        )
    elif not failed:
        yield ok('shared by all ranks, and can be written to' if len(written) > 1 else 'can be written to')


def _space(facts):
    free = {rank: own['free'] for rank, own in facts.items() if own['free'] is not None}
    least = min(free.values(), default=None)
    low = [rank for rank, n in free.items() if n < _LITTLE]
    if least is None:
        yield ok('unknown')
    elif low:
        line = problem if least < _HARDLY_ANY else note
        yield line(
            f'{_size(least)} free for {ranks_in_words(low)}.',
            'Free some: a save needs room for the new file beside the old one.',
        )
    else:
        yield ok(f'{_size(least)} free')


def _versions(facts):
    first = facts[min(facts)]['versions']
    differ = False
    for package in first:
        groups = ranks_by(facts, lambda own: own['versions'][package] or 'missing')
        if len(groups) > 1:
            differ = True
            yield problem(f'{package} differs. {each_in_words(groups)}', 'Install the same on all nodes.')
    if not first['fastai']:
        yield note('fastai is missing.', 'The callbacks need it: pip install fastai.')
    elif not differ:
        yield ok(', '.join(f'{package} {version or "missing"}' for package, version in first.items()))

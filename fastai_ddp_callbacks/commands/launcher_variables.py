"What the variables of a launcher say, on one rank and of all ranks together."

from __future__ import annotations
from collections.abc import Iterator

from ..training.process_group import LAUNCHED
from .findings import Line, each_in_words, note, ok, problem, ranks_by, ranks_in_words

__all__ = ['VARIABLES', 'look_at_variables', 'check_launcher']

_TORCHS = 'RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'
_NUMBERS = tuple(name for name in _TORCHS if name != 'MASTER_ADDR')
_OTHERS = 'SLURM_NTASKS', 'OMPI_COMM_WORLD_SIZE', 'PMI_SIZE'  # how many processes other launchers have started
_BOUNDS = ('RANK', 'WORLD_SIZE'), ('LOCAL_RANK', 'LOCAL_WORLD_SIZE'), ('LOCAL_RANK', 'WORLD_SIZE')
VARIABLES = *_TORCHS, *_OTHERS


def look_at_variables(
    env: dict[str, str],  # the launcher's variables that are set
) -> tuple[int, int, Line]:  # rank, world size, what there is to report
    "What the variables say. A process that they do not put into a group is rank 0 of 1."
    invalid = _invalid(env)
    if invalid:
        return 0, 1, invalid
    if all(name in env for name in LAUNCHED):
        present = ', '.join(name for name in _TORCHS if name in env)
        return int(env['RANK']), int(env['WORLD_SIZE']), ok(f'{present} are set and go together')
    return 0, 1, _without_group(env)


def _invalid(env):
    "The first variable whose value cannot be right."
    for name in _NUMBERS:
        if name in env and not env[name].isdecimal():
            return problem(f'{name}={env[name]!r} is not a whole number.', f'Unset {name}, or correct it.')
    numbers = {name: int(env[name]) for name in _NUMBERS if name in env}
    port = numbers.get('MASTER_PORT', 1)
    if not 0 < port < 2**16:
        return problem(
            f'MASTER_PORT={port} is no port: they go from 1 to 65535.', 'Choose one that is free on the host of rank 0.'
        )
    if 'MASTER_ADDR' in env and not env['MASTER_ADDR'].strip():
        return problem('MASTER_ADDR is empty.', 'Set it to the host of rank 0, as all hosts reach it, or unset it.')
    for low, high in _BOUNDS:
        if low in numbers and high in numbers and numbers[low] >= numbers[high]:
            return problem(
                f'{low}={numbers[low]} does not go with {high}={numbers[high]}: it counts from 0.',
                'Let the launcher set these variables, all of them.',
            )
    return None


def _without_group(env):
    "Of variables that are valid, but not enough for a group."
    present = ', '.join(f'{name}={env[name]}' for name in _TORCHS if name in env)
    if int(env.get('RANK', 0)) or int(env.get('WORLD_SIZE', 1)) > 1:
        missing = ', '.join(name for name in LAUNCHED if name not in env)
        return problem(
            f'{present}, but no {missing}: no process group can be made, and this process would train alone.',
            'Start the script by torchrun or accelerate launch, or unset these variables.',
        )
    if present:
        return note(
            f'{present}, without a launcher: left over in this shell.',
            'Unset these variables, unless your script completes them.',
        )
    for name in _OTHERS:
        if env.get(name, '1') != '1':
            return note(
                f"{name}={env[name]}, but none of torch's variables: each of these processes would train alone.",
                'Start torchrun on each node, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for '
                'each process.',
            )
    return ok('no launcher: one process, which trains alone')


def check_launcher(
    facts: dict[int, dict],  # of each rank that answered
) -> Iterator[Line]:
    "What any rank reports of its own variables, and what does not fit together."
    own = [Line(*of_rank['launcher']) for of_rank in facts.values()]
    bad = [line for line in own if line.verdict != 'ok']
    bad = [*dict.fromkeys(bad), *_do_not_fit_together(facts)]  # what several ranks report is reported once
    yield from bad or own[:1]


def _do_not_fit_together(facts):
    sizes = ranks_by(facts, lambda own: own['size'])
    if len(sizes) > 1:
        yield problem(
            f'WORLD_SIZE differs. {each_in_words(sizes)}',
            'Start all nodes with the same --nnodes, and the same --nproc_per_node.',
        )
    if len(facts) == 1:
        return
    for ranks in ranks_by(facts, lambda own: own['machine']).values():
        first = facts[ranks[0]]
        where = f'on {first["host"]}'
        local = [facts[rank]['env'].get('LOCAL_RANK') for rank in ranks]
        expected = first['env'].get('LOCAL_WORLD_SIZE', str(len(ranks)))
        if None in local:
            yield note(f'LOCAL_RANK is not set {where}.', 'Let the launcher set it: scripts choose their GPU by it.')
        elif len(set(local)) < len(local):
            yield problem(
                f'{ranks_in_words(ranks)} {where} have LOCAL_RANK {", ".join(local)}.',
                'Give each process of a node a LOCAL_RANK of its own.',
            )
        elif expected != str(len(ranks)):
            yield note(
                f'LOCAL_WORLD_SIZE={expected} {where}, where only {ranks_in_words(ranks)} answered.',
                'As it should be if each rank has a container of its own.',
            )

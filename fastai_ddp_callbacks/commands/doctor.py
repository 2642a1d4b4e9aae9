"""What goes wrong before training begins, looked at on every rank: `fastai-ddp doctor`, alone or under a launcher.

    torchrun --nproc_per_node=3 -m fastai_ddp_callbacks.cli doctor

Every rank looks for itself (`facts.py`) and sends what it saw to the others (`roll_call.py`). All of them judge by the
same facts (`diagnosis.py`), and the first one prints."""

from __future__ import annotations
import argparse

from .arguments import number
from .diagnosis import judge
from .facts import examine, own_facts
from .files import _print, _print_json
from .findings import Finding, count
from .roll_call import RollCall, first_line
from .termination import termination_raises

__all__ = ['add_arguments', 'run']


def add_arguments(
    parser: argparse.ArgumentParser,
) -> None:
    "Add the doctor's options to a parser."
    parser.add_argument(
        '--folder',
        default='.',
        metavar='DIR',
        help='where checkpoints are to go: a small file is written there and removed (default: here)',
    )
    parser.add_argument(
        '--timeout',
        type=number(float, 1, 3600),
        default=30.0,
        metavar='S',
        help='seconds to wait for the other ranks (default 30)',
    )
    parser.add_argument('--json', action='store_true', help='print JSON')


def run(
    args: argparse.Namespace,  # as `add_arguments` defines them
) -> int:  # the exit status: 1 if there is a problem, else 0
    "Look, exchange, judge, report."
    own = own_facts(args.folder)
    roll_call = RollCall(own['rank'], own['size'], args.timeout)
    with termination_raises():  # a launcher that ends the ranks does not leave their files behind
        try:
            facts = examine(roll_call, own, args.folder, args.timeout)
        except RuntimeError as e:
            facts, roll_call.connection_error = {own['rank']: own}, first_line(e)
    findings = judge(
        facts, own['size'], roll_call.missing, args.timeout, roll_call.connection_error, roll_call.duplicates
    )
    status = int(any(finding.verdict == 'problem' for finding in findings))
    if own['rank'] == min(facts):
        _report(facts, findings, status, args.json)
    roll_call.leave()
    return status


def _report(facts: dict[int, dict], findings: list[Finding], status: int, as_json: bool) -> None:
    if as_json:
        _print_json(dict(status=status, ranks=facts, checks=[finding._asdict() for finding in findings]))
        return
    for rank, own in facts.items():
        versions = own['versions']
        _print(
            f'rank {rank} of {own["size"]}: {own["host"]}, process {own["pid"]}, {count(own["gpus"], "GPU")}, '
            f'Python {versions["python"]}, torch {versions["torch"]}, fastai {versions["fastai"] or "missing"}, '
            f'{own["folder"]}'
        )
    print()
    for finding in findings:
        _print(f'{finding.verdict:<8} {finding.check:<9} {finding.text}')
        if finding.advice:
            _print(f'{"":18} -> {finding.advice}')
    verdicts = [finding.verdict for finding in findings]
    print(
        f'\nVerdict: {count(verdicts.count("problem"), "problem")}, {count(verdicts.count("note"), "note")}.',
        flush=True,
    )

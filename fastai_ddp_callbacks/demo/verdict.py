"What the notes of all ranks and the saved file prove."

from __future__ import annotations

from .notes import FAILED, LOADED, SAVED, TRAINED, WANTS, WEIGHTS

__all__ = ['judge', 'figures', 'first_line']


def judge(
    notes: list[dict],  # of all ranks: with `time`, `rank`, `what`, and `error` or `digest`
    ranks: int,  # how many there should be
    saved: str | None,  # digest of the saved weights
) -> tuple[list[str], list[str]]:  # problems and evidence, as lines
    "Whether every rank loaded after the save and has the weights of the file: it holds if there are no problems."
    save = _by_rank(notes, SAVED).get(0)
    loads = _by_rank(notes, LOADED)
    failed = _by_rank(notes, FAILED)
    weights = _by_rank(notes, WEIGHTS)
    problems, evidence = [], []
    if not save:
        problems.append('Rank 0 did not complete a save.')
    for rank in range(ranks):
        if rank in failed:
            problems.append(f"Rank {rank} failed: {first_line(failed[rank]['error'])}")
        elif rank not in loads:
            problems.append(f'Rank {rank} did not load the model.')
        if save and rank in loads:
            late = loads[rank]['time'] - save['time']
            order = 'after' if late >= 0 else 'BEFORE'
            evidence.append(f'rank {rank} had loaded {abs(late):.3f} s {order} the save was complete')
            if late < 0:
                problems.append(f'Rank {rank} loaded before the save was complete.')
    for rank in range(ranks):
        digest = weights[rank]['digest'] if rank in weights else None
        evidence.append(f'weights of rank {rank}    {digest or "unknown: it ended before it could report them"}')
        if digest != saved or not saved:
            problems.append(f'The weights of rank {rank} are not those of the file.')
    evidence.append(f'weights in the file  {saved or "no file"}')
    return problems, evidence


def _by_rank(notes, what):
    return {note['rank']: note for note in notes if note['what'] == what}


def figures(
    notes: list[dict],  # of all ranks
) -> dict[int, dict]:  # by rank
    "When each rank did what, in s since the epoch, or its error; and its weights at the end."
    keys = {
        TRAINED: 'trained',
        WANTS: 'wants',
        SAVED: 'saved',
        LOADED: 'loaded',
        FAILED: 'failed',
        WEIGHTS: 'weights',
    }
    by_rank: dict[int, dict] = {}
    for note in notes:
        if note['what'] in keys:
            figure = note.get('error') or note.get('digest') or note['time']
            by_rank.setdefault(note['rank'], {})[keys[note['what']]] = figure
    return by_rank


def first_line(
    text: str,  # of an error
) -> str:
    "As much of a message as fits into a line."
    return text.splitlines()[0][:200]

"""Saving the models of a fit: rank 0 writes and deletes, between rendezvous of all ranks, and all know what is on disk.

What is due, every rank knows by itself: it follows from the agreed value. What became of it, rank 0 reports: at once,
or in a later rendezvous where it writes in the background."""

from __future__ import annotations
from collections.abc import Callable
from pathlib import Path

from ..checkpoint.background import Writer
from ..checkpoint.store import Saved, Store, check_name
from ..distributed.call_site import doing
from ..distributed import barrier, print_on_main, propagate_failure, run_on_main
from .loading import load_everywhere
from .save_policy import SavePolicy
from .saving_on_main import SaverOnMain, Snapshot
from .tracking import Tracker, Verdict

__all__ = ['Saver', 'Snapshot']


class Saver(SaverOnMain):
    "The checkpoints that one callback saves, with the same list of them on all ranks."

    def __init__(
        self,
        policy: SavePolicy,
        tracker: Tracker,  # of the value that the checkpoints are ranked by; its `best` is kept in step with the disk
        folder: Path,  # where the files go
        columns: list[str],  # the columns that a file's name may have fields of
    ):
        check_name(policy.fname, {**dict.fromkeys(columns, 0.5), 'epoch': 0, 'iteration': 0})
        kept = policy.kept_best, policy.keep_last, policy.last
        super().__init__(policy, Store(folder, policy.fname, tracker.lower, *kept, several=policy.numbered))
        self.tracker = tracker
        self.last_path: Path | None = None  # of what was saved last, and is durable

    @property
    def best_path(self) -> Path | None:
        best = self.store.best
        return Path(best.path) if best else None

    @property
    def best_paths(self) -> list[Path]:
        return [Path(saved.path) for saved in self.store.ranked()]

    def saves_to(
        self,
        policy: SavePolicy,
        folder: Path,
    ) -> bool:
        "Whether a fit with these arguments in this folder can continue the list of files."
        return (self.policy, self.store.folder) == (policy, folder)

    def prepare(
        self,
        size: Callable[[], int],  # runs on rank 0: bytes of one checkpoint, about; raises for what cannot be saved
        epochs: int,  # of the fit
        state: dict | None = None,  # of a run that was interrupted, to be continued
        again: bool = False,  # whether an earlier fit has saved here, and this one continues its list
        takes_over: bool = False,  # whether the files of a run that was killed before it could be resumed are its own
    ) -> None:
        "Reserve the name on rank 0, and bring the list of files in step with the disk. Raises as `Store.prepare`."
        files, best, run, repeated = run_on_main(self._prepare, (size, epochs, state, again, takes_over))
        self.due = []
        self.store.run, self.store.again = run, repeated
        if state:
            self._resume(state, files)
        elif again:  # rank 0 knows what is on disk, however the earlier fit has ended
            self.store.files, self.store.best = files, best
            self.tracker.best = best.value if best else self.tracker.worst

    def _resume(self, state, files):
        best, warning = self.store.resume(state, files, self.tracker.better, self.tracker.worst)
        if warning:
            print_on_main(warning, warn=True)
        followed = state.get('best')
        if state['file'] is None and followed is not None and not self.tracker.better(best, followed):
            best = followed  # the best was followed, but no file of it was to stay, as with `at_end`
        self.tracker.best = best

    def is_wanted(
        self,
        verdict: Verdict,  # on the epoch
    ) -> bool:
        "Whether the model is among the best to keep, although it is not the best."
        if verdict.value is None or not self.policy.keeps_some_of_the_best:
            return False
        return self.store.wants(verdict.epoch, verdict.value, [due.value for due in self.due])

    def save(
        self,
        write: Callable[..., list],  # runs on rank 0: makes a `Snapshot`, passes `now` and `name` to `write_on_main`
        verdict: Verdict,  # on the epoch
        now: bool,  # whether to wait until it is written
        met: bool,  # whether the ranks have just met, so that none reads what may be deleted
        name: str | None = None,  # of the file; the next of the store's by default
    ) -> Verdict:  # the verdict, corrected if the save has failed
        "Save on rank 0; every rank goes on when it is written, or, unless `now`, when its copy is made."
        self.due.append(verdict)
        return self._on_main(write, verdict, now, name, met=met, verdict=verdict)

    def wait_for_write(self, met: bool = False) -> None:
        "Wait for what is being written."
        if self.due:
            self._on_main(self._finished, met=met)

    def check_background(
        self,
        place: str,  # where the ranks are, for messages
        meets: bool,  # whether all ranks meet soon, so that they learn of a failure
    ) -> None:
        "Learn what became of a save in the background, as far as it is known."
        if not self.due:
            return
        if self.policy.on_error == 'warn':  # all ranks must know what the best is
            self._on_main(self._finished, True)
        elif meets:
            with propagate_failure(place):
                self.writer.check()

    def load_best(
        self,
        model,  # wrapped or not
        load_rest: Callable | None = None,  # called with what else the file holds, as {'opt':...}
        check_rest: Callable | None = None,  # called with the same before anything is changed, to refuse it
    ) -> None:
        "Load the best model of this saver on every rank. A warning if there is none: no other file is loaded."
        best = self.store.best
        if best:
            return load_everywhere(model, best.path, best.checksum, load_rest, check_rest)
        which = 'best model' if self.store.files else 'model'
        print_on_main(
            f'No {which} was saved during this fit, as {self.tracker.monitor} never improved (or no save succeeded): '
            'the weights stay as training left them, and a file of an earlier run is not loaded.',
            warn=True,
        )

    def _on_main(self, func, *args, met=False, verdict=None):
        if self.store.selective and not met:
            barrier('before checkpoints are deleted')  # nobody reads then
        with doing('save'):
            outcomes = run_on_main(func, args)
        for outcome in outcomes:
            verdict = self._record(outcome, self.due.pop(0), verdict)
        return verdict

    def _record(self, outcome, due, verdict):
        "Keep the list of files, the best value and the last path in step with the disk."
        if isinstance(outcome, Saved):
            self.store.add(outcome, due.best)
            self.last_path = Path(outcome.path)
            return verdict
        print_on_main(
            f"Epoch {due.epoch}: {outcome} Training continues without this checkpoint (on_error='warn').", warn=True
        )
        if not due.best or self.tracker.best != due.value:
            return verdict
        # the next better one is an improvement on what is on disk
        self.tracker.best = self.store.best.value if self.store.best else self.tracker.worst
        return verdict and verdict._replace(best=False)

    def release(self) -> None:
        "Give the name back, when nothing is being written any more."
        self.writer.join()  # before another run may have the name
        if self.writer.error:
            print_on_main(f'After the fit had failed: {self.writer.error}', warn=True)
        self.store.release()
        if not self.writer.busy:
            self.writer = Writer()  # without the memory of this one

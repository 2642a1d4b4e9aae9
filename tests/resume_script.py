"""A training for launchers: `resume_script.py FOLDER [--die EPOCH BATCH]`. A rank that is to die does so once, the
first time that it comes there."""

import argparse, os, signal, sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from fastai.basics import Callback  # noqa: E402

from fastai_ddp_callbacks import DDPResumeCallback, DDPSaveModelCallback, ddp_ctx, rank, world_size  # noqa: E402
from fastai_ddp_callbacks.training.process_group import process_group  # noqa: E402
from learners import digest  # noqa: E402
from resuming import learner  # noqa: E402


class DiesOnce(Callback):
    order = 80  # before this batch can be saved

    def __init__(self, *at):
        self.at = at

    def after_batch(self):
        if (
            self.training
            and (self.epoch, self.iter) == self.at
            and rank() == world_size() - 1
            and not (self.path / 'died').exists()
        ):
            (self.path / 'died').touch()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('folder', type=Path)
    parser.add_argument('--die', type=int, nargs=2, default=(-1, -1))
    parser.add_argument('--resume', default='auto')
    args = parser.parse_args()
    with process_group('cpu'):  # the learner is to be another one on each rank
        learn = learner(args.folder)
        with ddp_ctx(learn):
            learn.fit_one_cycle(
                4,
                0.1,
                cbs=[
                    DDPResumeCallback(every_batches=1, resume=args.resume),
                    DDPSaveModelCallback(),
                    DiesOnce(*args.die),
                ],
            )
        if rank() == 0:
            print('ranks:', world_size(), 'epochs:', len(learn.recorder.values), 'weights:', digest(learn.model))

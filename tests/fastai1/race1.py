"The race between saving and loading, under a launcher: rank 0 saves late, in the only epoch. Prints who did what when."

import argparse, os, sys, time, warnings

warnings.simplefilter('ignore')  # fastai 1 is from 2019
from pathlib import Path

sys.path[:0] = [
    str(Path(__file__).parent),
    str(Path(__file__).parent.parent),
]  # the learners, and what both lines share
from learners1 import Observed, digest, fit, learner

from fastai_ddp_callbacks import rank


def arguments(args=None):
    p = argparse.ArgumentParser()
    p.add_argument('folder')
    p.add_argument('--local_rank', '--local-rank', type=int, default=int(os.environ.get('LOCAL_RANK', 0)))
    return p.parse_args(args)


def log(text):
    sys.stdout.write(f'RACE {rank()} {time.time():.6f} {text}\n')  # one write: the lines of the ranks stay whole


class Logged(Observed):
    def _do(self, what, f, *args, **kwargs):
        log(f'wants to {what}')
        res = super()._do(what, f, *args, **kwargs)
        log({'write': 'saved', 'read': 'loaded'}[what])
        return res


if __name__ == '__main__':
    learn = learner(arguments().folder)
    fit(learn, Logged(learn, slow={'write': 1.0}), n=1)
    log(f'weights {digest(learn.model)}')

"One seed for all that tests draw at random: the same in every run, and another one on request (`SEED=5 pytest ...`)."

import os

SEED = int(os.environ.get('SEED', 1))

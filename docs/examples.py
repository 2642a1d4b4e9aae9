"""The examples of `api.md`, by name of what they show.

Each runs by itself: on two ranks with `@two`, else in one process.

They find `learn` and `other_model` in place, as `tests/docs/test_docs.py` gives them."""
# ruff: noqa: F821


def two(f):
    f.two = True
    return f


# -- train


@two
def ddp_ctx():
    from fastai_ddp_callbacks import DDPSaveModelCallback, ddp_ctx

    with ddp_ctx(learn):
        learn.fit_one_cycle(2, cbs=DDPSaveModelCallback())


@two
def DDPTrackerCallback():
    from fastai_ddp_callbacks import DDPTrackerCallback, ddp_ctx

    class Report(DDPTrackerCallback):
        def after_epoch(self):
            super().after_epoch()
            if self.new_best:
                print(f'epoch {self.epoch}: {self.best}')  # on all ranks in the same epochs

    with ddp_ctx(learn):
        learn.fit(2, cbs=Report(monitor='accuracy'))


@two
def DDPSaveModelCallback():
    from fastai_ddp_callbacks import DDPSaveModelCallback, ddp_ctx

    save = DDPSaveModelCallback(monitor='accuracy', fname='model-{epoch}-{accuracy:.3f}', keep_best=2)
    with ddp_ctx(learn):
        learn.fit_one_cycle(3, cbs=save)
    assert save.best_path == save.best_paths[0] and save.best_path.exists()


@two
def DDPEarlyStoppingCallback():
    from fastai_ddp_callbacks import DDPEarlyStoppingCallback, ddp_ctx

    with ddp_ctx(learn):
        learn.fit(5, cbs=DDPEarlyStoppingCallback(monitor='accuracy', min_delta=0.5, patience=2))
    assert len(learn.recorder.values) < 5


@two
def DDPReduceLROnPlateau():
    from fastai_ddp_callbacks import DDPReduceLROnPlateau, ddp_ctx

    with ddp_ctx(learn):
        learn.fit(3, 1e-2, cbs=DDPReduceLROnPlateau(min_delta=10, patience=1))
    assert learn.opt.hypers[-1]['lr'] < 1e-2


@two
def DDPTerminateOnNaNCallback():
    from fastai_ddp_callbacks import DDPTerminateOnNaNCallback, ddp_ctx

    with ddp_ctx(learn):
        learn.fit(1, lr=1e30, cbs=DDPTerminateOnNaNCallback())


@two
def DDPStopCallback():
    from fastai.basics import Callback
    from fastai_ddp_callbacks import DDPStopCallback, ddp_ctx, rank

    class OutOfTime(Callback):
        def after_batch(self):
            if rank() == 1 and self.iter == 2:
                self.learn.ddp_stop.ask('out of time')

    stop = DDPStopCallback()
    with ddp_ctx(learn):
        learn.fit(100, cbs=[stop, OutOfTime()])
    assert stop.reason == 'out of time'  # on all ranks


@two
def DDPResumeCallback():
    from fastai_ddp_callbacks import DDPResumeCallback, ddp_ctx

    with ddp_ctx(learn):
        learn.fit_one_cycle(2, cbs=DDPResumeCallback(every_epoch=1))  # run it again after a kill, and it resumes


def patch():
    from fastai_ddp_callbacks.patch import SaveModelCallback  # or `import *`, which brings all of them

    learn.fit(1, cbs=SaveModelCallback())  # ours
    assert SaveModelCallback.__name__ == 'DDPSaveModelCallback'


# -- ranks that meet


@two
def rank():
    from fastai_ddp_callbacks import rank, world_size

    print(f'rank {rank()} of {world_size()}')


@two
def world_size():
    from fastai_ddp_callbacks import world_size

    batch_size = 64 // world_size()
    assert batch_size == 32


@two
def is_main_process():
    from fastai_ddp_callbacks import is_main_process

    if is_main_process():
        print('printed once')


@two
def is_local_main_process():
    from fastai_ddp_callbacks import is_local_main_process

    first = is_local_main_process()  # on all ranks, as the first call may be a rendezvous
    if first:
        print('printed once on each machine')


@two
def barrier():
    from fastai_ddp_callbacks import barrier

    barrier('data is ready')
    barrier('model is ready', timeout=600)


@two
def agree():
    from fastai_ddp_callbacks import agree, rank

    assert agree(rank(), 'max') == 1
    assert agree(rank() == 0, 'any') and not agree(rank() == 0, 'all')
    assert agree(0.5 + rank(), 'mean', name='loss') == 1.0


@two
def broadcast():
    from fastai_ddp_callbacks import broadcast, is_main_process

    classes = broadcast(['cat', 'dog'] if is_main_process() else None)
    assert classes == ['cat', 'dog']


@two
def all_gather():
    from fastai_ddp_callbacks import all_gather, rank

    assert all_gather({'seen': 10 * rank()}) == [{'seen': 0}, {'seen': 10}]


@two
def broadcast_tensors():
    import torch
    from fastai_ddp_callbacks import broadcast_tensors, rank

    t = torch.full((3,), float(rank()))
    broadcast_tensors([t], src=1)
    assert t.tolist() == [1.0, 1.0, 1.0]


@two
def all_or_none():
    from fastai_ddp_callbacks import all_or_none, rank

    with all_or_none('read my part') as ranks:  # if it fails on one rank, all raise
        ranks.value = 100 + rank()  # may be left out
    assert ranks.values == [100, 101]


@two
def run_on_main():
    from fastai_ddp_callbacks import run_on_main

    def make():
        with open('words.txt', 'w') as f:
            f.write('some words')
        return 10

    assert run_on_main(make) == 10  # on all ranks, and the file is there


@two
def main_process_only():
    from fastai_ddp_callbacks import main_process_only

    @main_process_only
    def log(text):
        print(text)
        return len(text)

    assert log('epoch done') == 10  # called by all ranks, printed by rank 0


@two
def run_once_per_node():
    from fastai_ddp_callbacks import run_once_per_node

    def fetch():
        return 'path on the disk of this machine'

    print(run_once_per_node(fetch))


@two
def once_per_node():
    from fastai_ddp_callbacks import once_per_node

    @once_per_node
    def fetch(name):
        return f'{name}.zip'

    assert fetch('digits') == 'digits.zip'


@two
def main_process_first():
    from pathlib import Path
    from fastai_ddp_callbacks import main_process_first

    with main_process_first('vocabulary'):  # rank 0 first, then the others
        if not Path('vocab.txt').exists():
            Path('vocab.txt').write_text('a b c')  # on rank 0 only: the others find it
        vocab = Path('vocab.txt').read_text().split()  # on each rank
    assert vocab == ['a', 'b', 'c']


@two
def no_collectives():
    from fastai_ddp_callbacks import no_collectives

    with no_collectives() as on_main:
        if on_main:
            print('a barrier in here would raise, and not hang')


@two
def propagate_failure():
    from fastai_ddp_callbacks import barrier, propagate_failure

    with propagate_failure('training'):  # if it raises here, the ranks that wait in a barrier raise too
        print('a batch is trained')
    barrier('end of training')


def get_timeout():
    from fastai_ddp_callbacks import get_timeout

    print(f'a rendezvous waits for {get_timeout()} s')


def set_timeout():
    from fastai_ddp_callbacks import get_timeout, set_timeout

    before = get_timeout()
    set_timeout(600)  # 10 minutes
    set_timeout(before)


# -- who waited for whom


@two
def plot_timeline():
    from fastai_ddp_callbacks import barrier, is_main_process, plot_timeline

    for i in range(3):
        barrier(f'step {i}')
    fig = plot_timeline('timeline.png')  # on all ranks
    assert (fig is not None) == is_main_process()


@two
def waits_by_name():
    from fastai_ddp_callbacks import barrier, waits_by_name

    for i in range(3):
        barrier('step')
    print(waits_by_name())


@two
def waits_by_rank():
    from fastai_ddp_callbacks import barrier, waits_by_rank

    for i in range(3):
        barrier('step')
    print(waits_by_rank())


@two
def ddp_timeline():
    from fastai_ddp_callbacks import ddp_ctx

    with ddp_ctx(learn):
        learn.fit(1)
        table = learn.ddp_timeline()  # on all ranks, inside
    print(table.to_string())  # all columns


@two
def plot_ddp_timeline():
    from fastai_ddp_callbacks import DDPSaveModelCallback, ddp_ctx

    with ddp_ctx(learn):
        learn.fit(1, cbs=DDPSaveModelCallback())
        learn.plot_ddp_timeline('timeline.png')  # on all ranks, inside


# -- files


def write_checkpoint():
    from fastai_ddp_callbacks import model_state, write_checkpoint

    meta = write_checkpoint(model_state(learn.model), 'models/mine.pth', {'note': 'before pruning'})
    print(meta['checksum'])


def read_checkpoint():
    from fastai_ddp_callbacks import load_model_state, model_state, read_checkpoint, write_checkpoint

    write_checkpoint(model_state(learn.model), 'mine.pth', {'note': 'before pruning'})
    state, meta = read_checkpoint('mine.pth')
    load_model_state(learn.model, state)
    assert meta['note'] == 'before pruning'


def verify_checkpoint():
    from fastai_ddp_callbacks import model_state, verify_checkpoint, write_checkpoint

    write_checkpoint(model_state(learn.model), 'mine.pth')
    verify_checkpoint('mine.pth')  # raises CorruptCheckpointError if a byte has changed


def read_metadata():
    from fastai_ddp_callbacks import DDPSaveModelCallback, read_metadata

    learn.fit(1, cbs=DDPSaveModelCallback(monitor='accuracy'))
    meta = read_metadata('models/model.pth')
    assert meta['epoch'] == 0 and meta['monitor'] == 'accuracy'


def model_state():
    import torch
    from fastai_ddp_callbacks import model_state

    wrapped = torch.nn.DataParallel(learn.model)
    assert model_state(wrapped).keys() == learn.model.state_dict().keys()  # no `module.` in front


def load_model_state():
    from fastai_ddp_callbacks import load_model_state, model_state

    kept = {k: v.clone() for k, v in model_state(learn.model).items()}
    learn.fit(1)
    load_model_state(learn.model, kept)  # as it was


# -- errors


@two
def DDPError():
    from fastai_ddp_callbacks import DDPError, barrier, rank

    try:
        barrier('here' if rank() == 0 else 'there')
    except DDPError as e:
        print(f'{type(e).__name__}: {e}')  # any of those below that are of ranks


@two
def BarrierMismatchError():
    from fastai_ddp_callbacks import BarrierMismatchError, barrier, rank

    try:
        barrier('here' if rank() == 0 else 'there')
    except BarrierMismatchError as e:
        assert 'here' in e.places[0] and 'there' in e.places[1]


@two
def RankFailedError():
    from fastai_ddp_callbacks import RankFailedError, run_on_main

    try:
        run_on_main(lambda: 1 / 0)
    except RankFailedError as e:
        assert e.rank == 0 and e.error_type == 'ZeroDivisionError'  # on rank 1
    except ZeroDivisionError:
        print('rank 0 raises its own')


@two
def BarrierTimeoutError():
    import time
    from fastai_ddp_callbacks import BarrierTimeoutError, barrier, rank

    if rank() == 1:
        time.sleep(1.5)
    try:
        barrier('epoch done', timeout=0.5)
    except BarrierTimeoutError as e:
        assert e.missing == [1]  # on both ranks


def BarrierInBranchError():
    from fastai_ddp_callbacks import BarrierInBranchError, barrier, no_collectives

    try:
        with no_collectives():
            barrier('never')
    except BarrierInBranchError as e:
        print(e.call, 'within', e.block)


@two
def UnequalWeightsError():
    from fastai_ddp_callbacks import DDPSaveModelCallback, UnequalWeightsError, ddp_ctx, rank

    def after_loading(model, keys):
        model[0].bias.data.add_(rank())  # a hook that should not be there

    learn.model.register_load_state_dict_post_hook(after_loading)
    try:
        with ddp_ctx(learn):
            learn.fit(1, cbs=DDPSaveModelCallback())
    except UnequalWeightsError as e:
        assert e.digests[0] != e.digests[1]


def CheckpointError():
    from fastai_ddp_callbacks import CheckpointError, read_checkpoint

    try:
        read_checkpoint('nowhere.pth')
    except CheckpointError as e:
        assert e.path == 'nowhere.pth'  # any of those below that are of files


def CheckpointWriteError():
    from pathlib import Path
    from fastai_ddp_callbacks import CheckpointWriteError, write_checkpoint

    Path('models').touch()  # a file where the folder should be
    try:
        write_checkpoint({}, 'models/model.pth')
    except CheckpointWriteError as e:
        print(e.errno, e)


def CorruptCheckpointError():
    from pathlib import Path
    from fastai_ddp_callbacks import CorruptCheckpointError, verify_checkpoint, write_checkpoint

    write_checkpoint({'a': 1}, 'model.pth')
    Path('model.pth').write_bytes(Path('model.pth').read_bytes()[:-100])
    try:
        verify_checkpoint('model.pth')
    except CorruptCheckpointError:
        print('use an earlier one')


def UnsafeCheckpointError():
    import torch
    from fastai_ddp_callbacks import UnsafeCheckpointError, read_checkpoint

    torch.save(learn.model, 'model.pth')  # an object, whose class would have to be run
    try:
        read_checkpoint('model.pth')
    except UnsafeCheckpointError:
        print('not loaded')


def NewerCheckpointError():
    from fastai_ddp_callbacks import NewerCheckpointError, read_metadata, write_checkpoint

    write_checkpoint({'a': 1}, 'model.pth')
    try:
        read_metadata('model.pth')
    except NewerCheckpointError:
        print('pip install -U fastai_ddp_callbacks')


def MismatchedCheckpointError():
    from fastai_ddp_callbacks import MismatchedCheckpointError, load_model_state, model_state

    try:
        load_model_state(learn.model, model_state(other_model))
    except MismatchedCheckpointError:
        print('nothing was changed')


def CheckpointInUseError():
    from fastai_ddp_callbacks import CheckpointInUseError, DDPSaveModelCallback

    try:
        learn.fit(1, cbs=DDPSaveModelCallback(fname='mine'))
    except CheckpointInUseError:
        learn.fit(1, cbs=DDPSaveModelCallback(fname='mine-too'))


def Preempted():
    import os, signal
    from fastai.basics import Callback
    from fastai_ddp_callbacks import DDPResumeCallback, Preempted

    class Signal(Callback):
        def after_batch(self):
            if self.epoch == 1:
                os.kill(os.getpid(), signal.SIGTERM)  # as a scheduler does

    try:
        learn.fit(3, cbs=[Signal(), DDPResumeCallback(exit_status=3)])
    except Preempted as e:
        assert e.code == 3
    learn.fit(3, cbs=DDPResumeCallback())  # resumes

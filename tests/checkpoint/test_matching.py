"Which states a model takes: under plain names from any wrapper, by the modules' own rules, and none that is sharded."

import pytest, torch
from torch import nn

from fastai_ddp_callbacks import (
    CheckpointError,
    MismatchedCheckpointError,
    load_model_state,
    model_state,
    read_checkpoint,
    write_checkpoint,
)
from fastai_ddp_callbacks.checkpoint.background import Writer
from fastai_ddp_callbacks.checkpoint.state import digest, refuse_sharded, size_of
from ranks import run, values


class Model(nn.Module):
    "A part of it may be wrapped, and one is called as wrappers call theirs."

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.enc = wrap(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
        self.module = nn.Linear(2, 2)


WRAPPERS = dict(
    bare=lambda module: module,
    parallel=nn.DataParallel,
    compiled=torch.compile,
    both=lambda module: nn.DataParallel(torch.compile(module)),
    twice=lambda module: nn.Sequential(nn.DataParallel(module[0]), module[1]),
)


@pytest.mark.parametrize('source', WRAPPERS)
@pytest.mark.parametrize('target', WRAPPERS)
@pytest.mark.parametrize('form', ['ours', 'stock'])
def test_parts_may_be_wrapped_and_the_keys_are_those_of_the_bare_model(tmp_path, source, target, form):
    model = Model(WRAPPERS[source])
    state = model_state(model) if form == 'ours' else model.state_dict()
    if form == 'ours':
        assert list(state) == list(Model().state_dict())
        write_checkpoint(state, tmp_path / 'm.pth')
        state = read_checkpoint(tmp_path / 'm.pth')[0]
    other = Model(WRAPPERS[target])
    load_model_state(other, state)
    assert digest(other) == digest(model)


def test_a_part_that_is_distributed_is_saved_under_plain_names():
    def scenario():
        model = Model(nn.parallel.DistributedDataParallel)
        load_model_state(other := Model(), model_state(model))
        return list(model_state(model)) == list(other.state_dict()), digest(model) == digest(other)

    assert values(run(scenario, 1)) == [(True, True)]


def test_names_that_only_look_like_a_wrapper_s_are_not_mixed_up():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.ModuleDict({'module': nn.Linear(1, 1)})
            self.b = nn.ModuleDict({'module': nn.ModuleDict({'module': nn.Linear(1, 1)})})

    source, target = Odd(), Odd()
    load_model_state(target, model_state(source))
    assert list(model_state(source)) == list(source.state_dict()) and digest(source) == digest(target)


# -- modules that load by themselves


class Growing(nn.Module):
    "Its buffer grows in training, as those of quantization-aware training do."

    def __init__(self):
        super().__init__()
        self.register_buffer('scale', torch.ones(1))

    def _load_from_state_dict(self, state_dict, prefix, *args):
        if f'{prefix}scale' in state_dict:
            self.scale = state_dict[f'{prefix}scale'].clone()
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_buffer_that_has_grown_is_loaded_by_its_module(tmp_path):
    source, target = nn.Sequential(nn.Linear(2, 2), Growing()), nn.Sequential(nn.Linear(2, 2), Growing())
    source[1].scale = torch.arange(6.0)
    write_checkpoint(model_state(source), tmp_path / 'm.pth')
    load_model_state(target, read_checkpoint(tmp_path / 'm.pth')[0], 'm.pth')
    assert target[1].scale.tolist() == source[1].scale.tolist()


def test_quantization_aware_training_is_loaded_into_a_new_model(tmp_path):
    quantization = pytest.importorskip('torch.ao.quantization')

    def prepared():
        model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6), nn.ReLU())
        model.qconfig = quantization.get_default_qat_qconfig('fbgemm')
        return quantization.prepare_qat(model.train())

    source, target = prepared(), prepared()
    source(torch.randn(2, 3, 4, 4))
    assert any(a.shape != b.shape for a, b in zip(source.buffers(), target.buffers())), 'nothing has grown'
    write_checkpoint(model_state(source), tmp_path / 'm.pth')
    load_model_state(target, read_checkpoint(tmp_path / 'm.pth')[0], 'm.pth')
    assert digest(source) == digest(target)


@pytest.mark.parametrize('lazy', [nn.LazyLinear, lambda n: nn.LazyConv2d(n, 1)], ids=['linear', 'conv'])
def test_a_lazy_module_is_saved_before_it_has_a_shape_and_takes_one_from_a_file(tmp_path, lazy):
    model, other = nn.Sequential(lazy(2)), nn.Sequential(lazy(2))
    assert size_of(model_state(model)) == 0 and digest(model) == digest(other)
    write_checkpoint(model_state(model), tmp_path / 'lazy.pth')
    assert list(read_checkpoint(tmp_path / 'lazy.pth')[0]) == ['0.weight', '0.bias']
    model(torch.randn(4, 3, 5, 5) if isinstance(model[0], nn.LazyConv2d) else torch.randn(4, 3))
    write_checkpoint(model_state(model), tmp_path / 'm.pth')
    load_model_state(other, read_checkpoint(tmp_path / 'm.pth')[0], 'm.pth')
    assert digest(model) == digest(other)


def test_a_lazy_module_is_copied_for_the_background(tmp_path):
    writer = Writer()
    writer.start(
        lambda state: write_checkpoint(state, tmp_path / 'm.pth'), model_state(nn.Sequential(nn.LazyLinear(2)))
    )
    assert writer.wait()['checksum']


def test_old_names_that_a_hook_of_the_model_translates_are_taken(tmp_path):
    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.new = nn.Linear(2, 2)
            self.register_load_state_dict_pre_hook(self.translate)

        def translate(self, module, state_dict, prefix, *args):
            for k in [k for k in state_dict if k.startswith(f'{prefix}old.')]:
                state_dict[k.replace('old.', 'new.')] = state_dict.pop(k)

    source, target = Renamed(), Renamed()
    load_model_state(target, {k.replace('new', 'old'): v for k, v in model_state(source).items()}, 'm.pth')
    assert digest(source) == digest(target)


def test_batch_norm_of_an_old_file_gets_its_counter():
    source, target = Model(), Model()
    state = {k: v for k, v in model_state(source).items() if 'num_batches' not in k}
    load_model_state(target, state)
    assert digest(source) == digest(target)


@pytest.mark.parametrize('shape', [(3,), ()], ids=str)
def test_what_such_a_module_refuses_itself_leaves_the_whole_model_as_it_was(shape):
    class Strict(Growing):
        def _load_from_state_dict(self, state_dict, prefix, local, strict, missing, unexpected, errors):
            if state_dict[f'{prefix}scale'].numel() > 2 or not state_dict[f'{prefix}scale'].shape:
                errors.append('scale has at most two numbers')
            else:
                super()._load_from_state_dict(state_dict, prefix, local, strict, missing, unexpected, errors)

    model, state = nn.Sequential(nn.Linear(2, 2), Strict()), model_state(nn.Sequential(nn.Linear(2, 2), Strict()))
    before = digest(model)
    with pytest.raises(MismatchedCheckpointError, match='m.pth.*at most two numbers'):
        load_model_state(model, {**state, '1.scale': torch.ones(shape)}, 'm.pth')
    assert digest(model) == before


def test_a_part_that_does_not_load_by_itself_is_compared_as_ever():
    model = nn.Sequential(nn.Linear(2, 2), Growing())
    state = model_state(nn.Sequential(nn.Linear(3, 2), Growing()))
    with pytest.raises(MismatchedCheckpointError, match=r'0\.weight \(\(2, 3\) in the file, \(2, 2\) in the model\)'):
        load_model_state(model, {**state, '1.scale': torch.ones(4)}, 'm.pth')


# -- sharded


def test_a_sharded_model_is_refused_by_name_with_where_to_go(tmp_path):
    def scenario():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import distribute_module

        model = nn.Sequential(nn.Linear(4, 2))
        refuse_sharded(nn.parallel.DistributedDataParallel(model), 'ours')  # is not
        sharded = distribute_module(nn.Sequential(nn.Linear(4, 2)), init_device_mesh('cpu', (2,)))
        said = []
        for f in (
            lambda: refuse_sharded(sharded, 'Saver'),
            lambda: write_checkpoint(sharded.state_dict(), tmp_path / 'm'),
        ):
            with pytest.raises(CheckpointError) as e:
                f()
            said.append(str(e.value))
        return said

    for first, second in values(run(scenario, 2)):
        assert first.startswith("Saver: '0.weight' of the model is sharded over ranks (a DTensor)")
        assert "state['0.weight'] is sharded over ranks" in second
        assert 'torch.distributed.checkpoint' in first and 'torch.distributed.checkpoint' in second

"""The key under which something computed from a parameter may be kept."""

import pytest
import torch

from prequal.runtime import parameter_cache
from prequal.runtime.parameter_cache import ParameterKey, watch


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.arange(12.0).view(3, 4))


def test_an_untouched_parameter_keeps_its_key(parameter):
    assert ParameterKey.of(parameter) == ParameterKey.of(parameter)
    assert hash(ParameterKey.of(parameter)) == hash(ParameterKey.of(parameter))
    (parameter * 2).sum().backward()
    assert ParameterKey.of(parameter) == ParameterKey.of(parameter.detach())


def in_place(parameter):
    with torch.no_grad():
        parameter.add_(1)


def optimiser(parameter):
    parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD([parameter], lr=0.1).step()


def loaded(parameter):
    module = torch.nn.Module()
    module.weight = parameter
    module.load_state_dict({"weight": torch.zeros(3, 4)})


def other_storage(parameter):
    parameter.data = parameter.data.clone()


def other_dtype(parameter):
    parameter.data = parameter.data.half()


def through_a_view(parameter):
    with torch.no_grad():
        parameter[1].zero_()


@pytest.mark.parametrize("change", [in_place, optimiser, loaded, other_storage, other_dtype, through_a_view])
def test_a_change_of_the_values_or_of_their_place_changes_the_key(parameter, change):
    before, kept = ParameterKey.of(parameter), parameter.data
    change(parameter)
    assert ParameterKey.of(parameter) != before
    del kept  # alive so far: else the new memory could lie at the old address


FUSED = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]


@pytest.mark.parametrize("cls", FUSED)
def test_a_step_of_a_fused_optimiser_changes_the_key_of_what_is_watched(parameter, cls, monkeypatch):
    monkeypatch.setattr(
        parameter_cache, "_kept", set()
    )  # else of memory that others kept something of, handed out again
    idle, other = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    watch(parameter.detach())  # the memory is what counts
    watch(idle)
    before = [ParameterKey.of(x) for x in (parameter, idle, other)]
    parameter.grad, other.grad = torch.ones_like(parameter), torch.ones_like(other)
    cls([parameter, idle, other], lr=0.1, fused=True).step()
    after = [ParameterKey.of(x) for x in (parameter, idle, other)]
    assert after[0] != before[0]
    assert after[1] == before[1], "without a gradient nothing is written"
    assert after[2] == before[2], "of what nobody keeps anything of, torch's own rules hold"


@pytest.mark.parametrize("other", [lambda x: x.t(), lambda x: x[:, :2], lambda x: x[1:], lambda x: x.view(12)])
def test_another_layout_of_the_same_memory_is_another_key(parameter, other):
    assert ParameterKey.of(other(parameter.detach())) != ParameterKey.of(parameter)


def test_a_tensor_whose_writes_nobody_counts_has_no_key():
    with torch.inference_mode():
        assert ParameterKey.of(torch.ones(3)) is None


@pytest.mark.gpu
def test_another_device_is_another_key(parameter, cuda):
    assert ParameterKey.of(parameter.to(cuda)) != ParameterKey.of(parameter)

"""What a fast path took the place of, on events made up and on PyTorch's own profiler."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import prequal
from prequal.bench.replacement import Event, Observation, observe

X = torch.linspace(-2, 2, 64).view(8, 8)

EAGER = [
    *(
        Event("aten::linear"),
        Event("aten::gelu"),
        Event("aten::gelu"),
        Event("my range"),
        Event("std::thing that is not"),
    ),
    *(Event("cudaLaunchKernel"), Event("cudaLaunchKernel"), Event("cuLaunchKernelEx"), Event("cudaMemcpyAsync")),
    *(Event("gemm_128", True), Event("gelu_kernel<float>", True), Event("gelu_kernel<float>", True)),
    *(Event("Memcpy DtoD", True), Event("Memset (Device)", True)),
]
FUSED = [Event("aten::linear"), Event("prequal::linear_gelu"), Event("cudaLaunchKernelExC"), Event("fused", True)]


def seen(*sides):
    """An observer that has seen these, in turn."""
    left = iter(sides)
    return lambda call: Observation.of(next(left))


def nothing(*args):
    return None


def test_events_are_sorted_into_ops_kernels_and_launches():
    found = Observation.of(EAGER)
    assert found.ops == {"aten::linear": 1, "aten::gelu": 2, "std::thing that is not": 1}
    assert found.kernels == {"gemm_128": 1, "gelu_kernel<float>": 2}
    assert found.launches == 3


def test_a_replayed_graph_is_one_launch_of_many_kernels():
    found = Observation.of([Event("cudaGraphLaunch"), *[Event("k", True)] * 7])
    assert (found.launches, found.kernels) == (1, {"k": 7})


def test_what_disappeared_and_what_came_is_listed():
    report = prequal.verify_replacement(
        nothing, nothing, gone=["aten::gelu", "gelu_kernel"], observer=seen(EAGER, FUSED)
    )
    assert report.ok
    assert report.ops_gone["aten::gelu"] == 2
    assert report.ops_new == {"prequal::linear_gelu": 1}
    assert report.kernels_gone == {"gemm_128": 1, "gelu_kernel<float>": 2}
    assert report.kernels_new == {"fused": 1}
    assert str(report).splitlines()[0] == "launches: 3 before, 1 after"


def test_what_is_still_there_fails():
    with pytest.raises(prequal.ReplacementError, match="STILL THERE: 2 × aten::gelu") as error:
        prequal.verify_replacement(nothing, nothing, gone=["aten::gelu"], observer=seen(EAGER, EAGER))
    assert error.value.report.still_there == {"aten::gelu": 2}


def test_what_never_was_there_proves_nothing():
    with pytest.raises(prequal.ReplacementError, match="NEVER THERE: aten::silu"):
        prequal.verify_replacement(nothing, nothing, gone=["aten::silu"], observer=seen(EAGER, FUSED))


def test_an_op_is_not_another_one_that_begins_like_it():
    with pytest.raises(prequal.ReplacementError, match="NEVER THERE"):
        prequal.verify_replacement(nothing, nothing, gone=["aten::gel"], observer=seen(EAGER, FUSED))


def test_names_in_one_text_are_an_error():
    with pytest.raises(TypeError, match="gone: expected names"):
        prequal.verify_replacement(nothing, nothing, gone="aten::gelu")


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"gone": None}, "gone: expected names of ops or kernels in a list, got NoneType"),
        ({"gone": b"aten::gelu"}, "gone: expected names of ops or kernels in a list, got bytes"),
        ({"gone": [3]}, "gone: expected names of ops or kernels, got int among them"),
        ({"args": X}, r"args: expected a tuple of arguments, got a tensor: \(x,\) for one"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_called(named, message):
    def never(*args):
        raise AssertionError

    with pytest.raises(TypeError, match=message):
        prequal.verify_replacement(never, never, **named)


def test_a_profiler_that_is_on_keeps_what_it_saw():
    with torch.profiler.profile(acc_events=True) as profiler:
        torch.sigmoid(X)
        with pytest.raises(RuntimeError, match="expected no profiler that is on"):
            prequal.verify_replacement(F.gelu, F.relu, (X,))
    assert any(event.name == "aten::sigmoid" for event in profiler.events())


def test_the_profiler_of_pytorch_sees_what_is_dispatched():
    report = prequal.verify_replacement(F.gelu, F.relu, (X,), gone=["aten::gelu"])
    assert report.ops_gone["aten::gelu"] == 1
    assert report.ops_new["aten::relu"] == 1
    with pytest.raises(prequal.ReplacementError, match="STILL THERE: 1 × aten::gelu"):
        prequal.verify_replacement(F.gelu, lambda x: F.gelu(x) + 1, (X,), gone=["aten::gelu"])


def test_the_first_call_is_not_looked_at():
    calls = []

    def warms_up(x):
        if not calls:
            torch.sigmoid(x)
        calls.append(1)
        return torch.tanh(x)

    assert observe(lambda: warms_up(X)).ops == {"aten::tanh": 1}


@pytest.mark.gpu
def test_a_kernel_of_ours_takes_the_place_of_the_chain(cuda):
    x = torch.randn(512, 1024, device=cuda, dtype=torch.bfloat16)
    op = prequal.rms_norm.op
    report = prequal.verify_replacement(op.reference, prequal.rms_norm, (x,), gone=["aten::rsqrt", "aten::mean"])
    assert report.after.launches == 1
    assert report.before.launches > 3
    (name,) = report.kernels_new
    assert "prequal::" in name

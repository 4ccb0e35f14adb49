"""Every reason in the enumeration is driven through the public functions; one that no test drives is a failure.

A test under `@drives(reason)` returns what the public functions said of its calls; the decorator checks that the reason
is among it, so that no test can claim what it does not show.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import pytest
import torch

import prequal
from prequal import runtime_state as state
from prequal.registry import OPS
from prequal.runtime.reasons import BOUNDARY_NEEDS, Reason, is_reason, unsupported

X = torch.ones(2, 8)
DRIVEN: dict[Reason, list[str]] = {}


def drives(reason: Reason) -> Callable[[Callable[..., Iterable[str]]], Callable[..., None]]:
    def mark(test: Callable[..., Iterable[str]]) -> Callable[..., None]:
        assert test.__name__.startswith("test_"), f"{test.__name__} is not collected"
        DRIVEN.setdefault(reason, []).append(test.__name__)

        @functools.wraps(test)
        def checked(*args: Any, **kwargs: Any) -> None:
            seen = set(test(*args, **kwargs))
            assert all(is_reason(text) for text in seen), seen
            assert reason in {text.partition(":")[0] for text in seen}, f"{test.__name__} saw {seen}, not {reason}"

        return checked

    return mark


def undriven(reasons: Iterable[Any], driven: Iterable[Any]) -> list[str]:
    return sorted(set(reasons) - set(driven))


def called(x: torch.Tensor = X, **kwargs: Any) -> set[str]:
    """The reasons that stats, explain and strict mode give of one call, which must be one and the same."""
    prequal.reset_stats()
    got = prequal.rms_norm(x, **kwargs)
    torch.testing.assert_close(got, OPS["rms_norm"].reference(x, **kwargs), rtol=1e-2, atol=1e-2)
    ((_, row),) = prequal.stats()["rms_norm"].items()
    assert row["fast"] == 0
    assert set(row["reference"].values()) == {1}
    with prequal.strict(), pytest.raises(prequal.FallbackError) as caught:
        prequal.rms_norm(x, **kwargs)
    seen = {*row["reference"], caught.value.reason, prequal.explain("rms_norm", x, **kwargs).reason}
    assert len(seen) == 1, seen
    return seen


def in_a_process(code: str, **environ: str) -> set[str]:
    """Of calls in a new process: {reason: calls} as its stats say, and what its log said."""
    program = f"""if True:
        import json, logging, sys
        logging.basicConfig(format="%(message)s")
        {code}
        import torch, prequal
        prequal.rms_norm(torch.ones(2, 8))
        prequal.knn(torch.ones(2, 3), torch.ones(4, 3))
        assert not torch.cuda.is_initialized()
        print(json.dumps([prequal.stats(), prequal.explain("rms_norm").reason]))
    """
    env = {**os.environ, **environ}
    found = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    stats, explained = json.loads(found.stdout)
    reasons = {reason for op in stats.values() for row in op.values() for reason in row["reference"]}
    assert reasons == {explained}
    assert all(f"rms_norm on cpu goes to its PyTorch reference: {reason}" in found.stderr for reason in reasons)
    return reasons


# ---- real processes --------------------------------------------------------------------------------------------------


@drives(Reason.NO_NATIVE_MODULE)
def test_a_module_that_cannot_be_loaded_is_no_native_module():
    return in_a_process('sys.modules["prequal._native"] = None')


@drives(Reason.NO_CUDA)
def test_a_process_that_sees_no_gpu_has_no_cuda():
    if state.native is None:
        pytest.skip(f"no native module, which is said first: {state.native_problem}")
    return in_a_process("", CUDA_VISIBLE_DEVICES="")


# ---- simulated machines ----------------------------------------------------------------------------------------------


@drives(Reason.NO_NATIVE_MODULE)
def test_a_host_without_the_module_is_no_native_module(machine, make_host):
    machine(make_host(native="prequal._native could not be loaded: libfoo.so.1: cannot open shared object file"))
    assert "libfoo.so.1" in prequal.explain("rms_norm", X).detail
    return called()


@drives(Reason.NO_CUDA)
def test_a_host_without_a_gpu_is_no_cuda(machine, make_host):
    machine(make_host(cuda="torch sees no GPU (no driver)"))
    return called()


@drives(Reason.DRIVER_TOO_OLD)
def test_a_driver_below_the_toolkits_minimum_is_too_old(machine, make_host):
    machine(make_host(driver="570.211.01"))
    assert prequal.explain("rms_norm", X).detail == "driver 570.211.01; CUDA 13.0 needs 580.65.06 or newer"
    return called()


@drives(Reason.ARCH_NOT_BUILT)
def test_a_gpu_that_the_wheel_holds_no_code_for_is_not_built(machine, make_host):
    machine(make_host((10, 0)))
    return called()


@drives(Reason.DISABLED_BY_FLAG)
def test_a_disabled_op_is_disabled_by_flag(machine, make_host):
    machine(make_host())
    prequal.disable("rms_norm")
    seen = called()
    prequal.enable("rms_norm")
    with prequal.reference("rms_norm"):
        seen |= called()
    return seen


@drives(Reason.NOT_QUALIFIED)
def test_the_strict_policy_without_a_qualification_is_not_qualified(machine, make_host):
    machine(make_host())
    prequal.set_policy("strict")
    return called()


@drives(Reason.NOT_QUALIFIED)
def test_a_first_use_inside_a_capture_is_not_qualified(machine, make_host):
    host = machine(make_host())
    host.in_capture = True
    return called()


@drives(Reason.QUALIFICATION_FAILED)
def test_a_kernel_that_breaks_its_contract_here_has_failed(machine, make_host):
    host = machine(make_host())
    host.kernel = lambda op, args: OPS[op]._call(OPS[op].reference, args) * 2
    prequal.rms_norm(X)
    assert "values differ" in prequal.explain("rms_norm", X).detail
    return called()


@drives(Reason.UNSUPPORTED_INPUT)
def test_a_right_call_that_the_kernel_does_not_cover_is_unsupported(machine, make_host):
    machine(make_host())
    prequal.rms_norm(X)
    seen = called(X.double())
    assert seen == {"unsupported_input:dtype"}
    return seen


@drives(Reason.UNSUPPORTED_INPUT)
def test_tensors_on_the_cpu_of_a_machine_with_a_gpu_are_unsupported(make_host, monkeypatch):
    monkeypatch.setattr(state.gate, "host", make_host())
    state.gate.forget()
    seen = called()
    state.gate.forget()
    assert seen == {"unsupported_input:cuda"}
    return seen


@drives(Reason.RUNTIME_ERROR)
def test_an_op_that_cuda_failed_in_is_closed_by_a_runtime_error(machine, make_host):
    host = machine(make_host())
    prequal.rms_norm(X)
    host.failures["rms_norm", 0] = "rms_norm on cuda:0: an illegal memory access was encountered"
    state.gate.forget()
    assert prequal.explain("rms_norm", X).detail.endswith("was encountered; restart the process")
    return called()


# ---- the enumeration -------------------------------------------------------------------------------------------------


def test_every_reason_is_driven_by_a_test():
    assert undriven(Reason, DRIVEN) == []
    assert all(name in globals() for names in DRIVEN.values() for name in names)


def test_a_reason_without_a_test_would_be_found():
    """The test above can fail."""

    class More(StrEnum):
        NO_CUDA = "no_cuda"
        NEWLY_ADDED = "newly_added"

    assert undriven(More, DRIVEN) == ["newly_added"]


def test_a_test_that_does_not_show_its_reason_would_be_found():
    driven = {reason: list(names) for reason, names in DRIVEN.items()}
    try:

        @drives(Reason.NO_CUDA)
        def test_claims_too_much():
            return {"arch_not_built"}

        with pytest.raises(AssertionError, match=r"saw \{'arch_not_built'\}, not no_cuda"):
            test_claims_too_much()
    finally:
        DRIVEN.clear()
        DRIVEN.update(driven)


def test_the_enumeration_is_that_of_the_design():
    assert [str(reason) for reason in Reason] == [
        "no_native_module",
        "no_cuda",
        "driver_too_old",
        "arch_not_built",
        "disabled_by_flag",
        "not_qualified",
        "qualification_failed",
        "unsupported_input",
        "runtime_error",
    ]


@pytest.mark.parametrize("reason", [r for r in Reason if r is not Reason.UNSUPPORTED_INPUT])
def test_a_member_is_a_reason_and_carries_no_need(reason):
    assert is_reason(str(reason))
    assert not is_reason(f"{reason}:dtype")
    assert not is_reason(f"{reason}:")
    assert not is_reason(str(reason).upper())


def test_an_unsupported_input_always_names_its_need():
    assert not is_reason("unsupported_input")
    assert not is_reason("unsupported_input:")
    names = {need.name for op in OPS.values() for need in op.needs} | set(BOUNDARY_NEEDS)
    assert all(is_reason(unsupported(name)) for name in names)


@pytest.mark.parametrize("text", ["", "nonsense", "dtype", ":dtype", "no_cuda "])
def test_what_is_no_member_is_no_reason(text):
    assert not is_reason(text)

"""For each op and device: the right verdict, for the right reason, in the right order, on simulated machines."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import prequal
from prequal import runtime_state as state
from prequal.contracts import Bitwise, Exact, Tolerance
from prequal.registry import OPS
from prequal.runtime.gate import POLICIES, Gate, Qualification, driver_refusal, now, static_refusal, variant_for
from prequal.runtime.manifest import Manifest
from prequal.runtime.reasons import Reason, is_reason

X = torch.ones(2, 8)


class FakeOp:
    """An op whose quick case does what it is told, and counts how often it is asked."""

    basename = "toy"

    def __init__(self, contract=None, name="toy", problem=None):
        self.contract = contract or Tolerance({})
        self.name, self.problem = name, problem
        self.runs = Counter()

    def quick_case(self, device):
        self.runs[device] += 1
        if isinstance(self.problem, BaseException):
            raise self.problem
        return self.problem(device) if callable(self.problem) else self.problem


def of(verdict) -> tuple[str, str | None]:
    return verdict.path, verdict.reason


FAST = ("fast", None)
NOT_QUALIFIED = ("reference", "not_qualified")
FAILED = ("reference", "qualification_failed")


# ---- a variant for a device ------------------------------------------------------------------------------------------

RELEASED = ("80", "86", "89", "90")


@pytest.mark.parametrize(
    ("capability", "archs", "variant"),
    [
        # the released wheel
        *(((8, 0), RELEASED, "80"), ((8, 6), RELEASED, "86"), ((8, 9), RELEASED, "89"), ((9, 0), RELEASED, "90")),
        *(((7, 5), RELEASED, None), ((7, 0), RELEASED, None), ((10, 0), RELEASED, None), ((10, 3), RELEASED, None)),
        *(((12, 0), RELEASED, None), ((12, 1), RELEASED, None), ((13, 0), RELEASED, None), ((8, 7), RELEASED, None)),
        # the highest minor that is not above the device's, of its major alone
        *(((8, 6), ("80",), "80"), ((8, 9), ("80", "86"), "86"), ((8, 0), ("86", "89"), None)),
        *(((9, 0), ("80", "89"), None), ((8, 9), ("90",), None), ((8, 9), ("89", "80", "86"), "89")),
        # architecture-specific code runs on that very architecture, family-specific code on its family
        *(((9, 0), ("90a",), "90a"), ((10, 0), ("100a",), "100a"), ((10, 3), ("100a",), None)),
        *(((10, 0), ("100f",), "100f"), ((10, 3), ("100f",), "100f"), ((10, 0), ("103f",), None)),
        *(((12, 1), ("120f",), "120f"), ((12, 1), ("120a",), None), ((12, 0), ("100f",), None)),
        *(((10, 3), ("100", "103a"), "103a"), ((10, 3), ("100f", "120f"), "100f")),
        # GPUs that share a chip with their CPU run code for themselves alone, and nobody else runs theirs
        *(((8, 7), ("87",), "87"), ((8, 9), ("87",), None), ((11, 0), ("110",), "110"), ((8, 7), ("80", "86"), None)),
        ((9, 0), (), None),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_the_variant_is_the_code_that_runs_on_this_capability(capability, archs, variant, make_manifest):
    assert variant_for(make_manifest(archs), capability, {}) == variant


def test_a_variant_is_forced_in_a_test_build_alone(make_manifest):
    forced = {"PREQUAL_FORCE_ARCH": "86"}
    assert variant_for(make_manifest(("90",)), (9, 0), forced) == "90"
    assert variant_for(make_manifest(("90",), ptx=("80", "86")), (9, 0), forced) == "86"
    assert variant_for(make_manifest(("90",), ptx=("80",)), (9, 0), forced) == "90"
    assert variant_for(make_manifest((), ptx=("86",)), (9, 0), forced) == "86"
    assert variant_for(make_manifest((), ptx=("86",)), (9, 0), {}) is None


# ---- the driver ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "minimum", "is_refused"),
    [
        *(("580.65.06", "580.65.06", False), ("580.95.05", "580.65.06", False), ("590.1", "580.65.06", False)),
        *(("580.65.05", "580.65.06", True), ("570.999.99", "580.65.06", True), ("99.9", "580.65.06", True)),
        *(("580.100.01", "580.65.06", False), ("580.9.1", "580.65.06", True)),  # numbers, not text
        *(("580", "580", False), ("580.65.06", "580", False), ("580", "580.0.0", False), ("579.99", "580", True)),
        *((None, "580.65.06", False), ("", "580", False), ("unknown", "580", False), ("580.x", "580", False)),
        *(("580..65", "580", False), ("r580.65", "580", False)),
    ],
)
def test_the_driver_minimum_is_that_of_the_toolkit_in_the_manifest(driver, minimum, is_refused, make_manifest):
    refusal = driver_refusal(make_manifest(minimum_driver=minimum), driver)
    if is_refused:
        assert refusal == f"driver {driver}; CUDA 13.0 needs {minimum} or newer"
    else:
        assert refusal is None


def test_a_build_without_cuda_asks_for_no_driver():
    assert driver_refusal(Manifest(), "1.0") is None


# ---- a mixed host ----------------------------------------------------------------------------------------------------

MIXED = [(8, 0), (8, 6), (8, 9), (9, 0), (7, 5), (12, 0), (9, 0)]
VARIANTS = ["80", "86", "89", "90", None, None, "90"]


def test_each_device_of_a_mixed_host_has_its_own_verdict_and_variant(make_host):
    gate, op = Gate(make_host(*MIXED)), FakeOp()
    for device, variant in enumerate(VARIANTS):
        verdict = gate.verdict(op, device)
        assert verdict.device == f"cuda:{device}"
        assert verdict.variant == variant
        assert of(verdict) == (FAST if variant else ("reference", "arch_not_built"))
    assert op.runs == {0: 1, 1: 1, 2: 1, 3: 1, 6: 1}
    assert gate.host.opened() == {("toy", device) for device in (0, 1, 2, 3, 6)}
    assert gate.verdict(op, 4).detail == "compute capability 7.5; this wheel holds sm_80, sm_86, sm_89, sm_90"


def test_an_op_that_is_wrong_on_one_device_is_closed_there_alone(make_host):
    op = FakeOp(problem=lambda device: "output 0: wrong" if device in (1, 6) else None)
    gate = Gate(make_host(*MIXED))
    found = [of(gate.verdict(op, device)) for device in (0, 1, 2, 3, 6)]
    assert found == [FAST, FAILED, FAST, FAST, FAILED]
    assert gate.host.opened() == {("toy", 0), ("toy", 2), ("toy", 3)}


def test_public_calls_on_a_mixed_host_go_each_its_own_way(machine, make_host, make_manifest):
    host = machine(make_host(*MIXED, manifest=make_manifest(evidence={"rms_norm": ("86",)})))
    host.failures["rms_norm", 6] = "CUDA said no"
    for host.current in range(len(MIXED)):
        for _ in range(2):
            torch.testing.assert_close(prequal.rms_norm(X), X, rtol=1e-5, atol=1e-5)
    fast = {"fast": 2, "reference": {}}
    assert prequal.stats()["rms_norm"] == {
        **{f"cuda:{device}": fast for device in range(4)},
        **{f"cuda:{device}": {"fast": 0, "reference": {"arch_not_built": 2}} for device in (4, 5)},
        "cuda:6": {"fast": 0, "reference": {"runtime_error": 2}},
    }
    assert host.quick_runs == {("rms_norm", device): 1 for device in (0, 2, 3)}  # evidence speaks for 8.6
    rows = {row["device"]: row for row in prequal.runtime.gate.rows(run=False) if row["op"] == "rms_norm"}
    assert [rows[f"cuda:{i}"]["path"] for i in range(7)] == ["fast"] * 4 + ["reference"] * 3
    assert rows["cuda:1"]["qualified"].startswith("release evidence for sm_86, ")


# ---- reasons and their order -----------------------------------------------------------------------------------------


def test_the_first_reason_in_the_fixed_order_is_the_one_given(make_host):
    """Everything is wrong at once; each cure shows the next reason."""
    host = make_host((7, 5), native="no module", cuda="no CUDA", driver="1.0")
    host.failures["toy", 0] = "CUDA said no"
    off = {"toy"}
    gate = Gate(host, lambda op: "by a flag" if op in off else None, policy="strict")
    op = FakeOp()

    def reason() -> str | None:
        gate.forget()
        return gate.verdict(op, 0).reason

    assert reason() == "no_native_module"
    host.native = None
    assert reason() == "no_cuda"
    host.cuda = None
    assert reason() == "driver_too_old"
    host.driver_version = None
    assert reason() == "arch_not_built"
    host.capabilities[0] = (9, 0)
    assert reason() == "disabled_by_flag"
    off.clear()
    assert reason() == "runtime_error"
    host.failures.clear()
    assert reason() == "not_qualified"
    gate.record("toy", 0, Qualification("me", now(), "output 0: wrong"))
    assert reason() == "qualification_failed"
    gate.record("toy", 0, Qualification("me", now()))
    assert reason() is None


def test_tensors_on_the_cpu_are_told_what_is_missing_for_all_and_then_that_they_are_there(make_host):
    host = make_host(native="no module", cuda="no CUDA", driver="1.0")
    gate, op = Gate(host), FakeOp()
    reasons = []
    for cure in ("native", "cuda", "driver_version", None):
        gate.forget()
        reasons.append(gate.verdict(op, None).reason)
        if cure:
            setattr(host, cure, None)
    assert reasons == ["no_native_module", "no_cuda", "driver_too_old", "unsupported_input:cuda"]
    assert all(is_reason(reason) for reason in reasons)
    assert gate.verdict(op, None).device == "cpu"
    assert op.runs == {}


def test_a_refusal_carries_the_words_of_who_refused(make_host):
    op = FakeOp()
    for host, detail in (
        (
            make_host(native="prequal._native could not be loaded: libfoo"),
            "prequal._native could not be loaded: libfoo",
        ),
        (make_host(cuda="torch sees no GPU"), "torch sees no GPU"),
        (make_host(driver="535.1"), "driver 535.1; CUDA 13.0 needs 580.65.06 or newer"),
    ):
        verdict = Gate(host).verdict(op, 0)
        assert verdict.detail == detail
        assert verdict.variant is None
        assert verdict.qualification is None


def test_the_static_half_is_asked_once_a_device(make_host):
    host = make_host((7, 5))
    gate, op = Gate(host), FakeOp()
    for _ in range(5):
        gate.verdict(op, 0)
    assert host.asked["capability"] == 1
    gate.forget()
    gate.verdict(op, 0)
    assert host.asked["capability"] == 2


def test_the_static_half_reads_no_capability_for_tensors_on_the_cpu(make_host):
    host = make_host()
    assert static_refusal(host, None) is None
    assert host.asked["capability"] == 0


# ---- policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contract", [Tolerance({}), Exact("none"), Bitwise()], ids=lambda c: c.kind)
@pytest.mark.parametrize("evidence", [(), ("90",), ("80",)], ids=["no evidence", "evidence", "evidence elsewhere"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_says_what_must_be_shown_first(policy, evidence, contract, make_host, make_manifest):
    op = FakeOp(contract)
    gate = Gate(make_host((9, 0), manifest=make_manifest(evidence={"toy": evidence})), policy=policy)
    verdict = gate.verdict(op, 0)
    serves = policy != "strict" and contract.kind != "bitwise"
    assert of(verdict) == (FAST if serves else NOT_QUALIFIED)
    quick = policy == "auto" and serves and "90" not in evidence
    assert op.runs == ({0: 1} if quick else {})
    if serves:
        by = {"trust": "policy trust", "auto": "quick case at first use" if quick else "release evidence for sm_90"}
        assert verdict.qualification.by == by[policy]
        assert verdict.qualification.problem is None

    gate.record("toy", 0, Qualification("prequal.qualify()", now()))
    assert of(gate.verdict(op, 0)) == FAST
    gate.record("toy", 0, Qualification("prequal.qualify()", now(), "output 0: wrong"))
    assert of(gate.verdict(op, 0)) == FAILED
    assert gate.host.opened() == set()


def test_a_bitwise_path_is_not_qualified_by_a_quick_case_or_trust(make_host):
    for policy in POLICIES:
        verdict = Gate(make_host(), policy=policy).verdict(FakeOp(Bitwise()), 0)
        assert of(verdict) == NOT_QUALIFIED
        assert "a bitwise path serves only after prequal.qualify() or with a valid lock" in verdict.detail


def test_a_stricter_policy_does_not_inherit_what_the_looser_one_let_through(make_host, make_manifest):
    host = make_host((9, 0), (8, 0), manifest=make_manifest(evidence={"toy": ("80",)}))
    gate, op = Gate(host), FakeOp()
    assert [of(gate.verdict(op, device)) for device in (0, 1)] == [FAST, FAST]
    gate.set_policy("strict")
    assert host.opened() == set()
    assert [of(gate.verdict(op, device)) for device in (0, 1)] == [NOT_QUALIFIED, NOT_QUALIFIED]
    gate.record("toy", 0, Qualification("prequal.qualify()", now()))
    for policy in (*POLICIES, "strict"):
        gate.set_policy(policy)
        assert of(gate.verdict(op, 0)) == FAST
        assert gate.verdict(op, 0).qualification.by == "prequal.qualify()"


def test_a_looser_policy_does_not_open_what_was_found_wrong(make_host):
    gate, op = Gate(make_host()), FakeOp(problem="output 0: wrong")
    assert of(gate.verdict(op, 0)) == FAILED
    for policy in ("trust", "auto", "strict", "trust"):
        gate.set_policy(policy)
        assert of(gate.verdict(op, 0)) == FAILED
    assert op.runs == {0: 1}


def test_an_unknown_policy_is_an_error_and_changes_nothing(make_host):
    gate = Gate(make_host(), policy="strict")
    with pytest.raises(ValueError, match=r"policy \(PREQUAL_POLICY\): expected auto, strict, trust, got 'Trust'"):
        gate.set_policy("Trust")
    assert gate.policy == "strict"


# ---- the quick case at first use -------------------------------------------------------------------------------------


def test_a_quick_case_is_run_once_for_each_op_and_device(make_host):
    gate = Gate(make_host((9, 0), (9, 0)))
    ops = [FakeOp(name="one"), FakeOp(name="two")]
    for _ in range(3):
        for op in ops:
            for device in (0, 1):
                assert of(gate.verdict(op, device)) == FAST
        gate.forget()
    assert all(op.runs == {0: 1, 1: 1} for op in ops)


def test_a_failed_quick_case_closes_the_op_with_the_comparators_sentence(machine, make_host):
    host = machine(make_host())
    host.kernel = lambda op, args: OPS[op]._call(OPS[op].reference, args) + 1
    torch.testing.assert_close(prequal.rms_norm(X), X, rtol=1e-5, atol=1e-5)
    verdict = prequal.explain("rms_norm", device="cuda:0")
    assert of(verdict) == FAILED
    assert re.fullmatch(
        r"quick: output 0 at \[\d+, \d+\]: got \S+, want \S+, \d+ ulp apart \(.*; 512 of 512 values differ\)",
        verdict.detail,
    )
    host.kernel = lambda op, args: OPS[op]._call(OPS[op].reference, args)
    prequal.rms_norm(X)
    assert host.quick_runs == {("rms_norm", 0): 1}
    assert prequal.stats()["rms_norm"]["cuda:0"] == {"fast": 0, "reference": {"qualification_failed": 2}}


@pytest.mark.parametrize("error", [RuntimeError("CUDA said no"), torch.OutOfMemoryError("no more"), KeyError("what")])
def test_a_quick_case_that_raises_closes_the_op_and_is_not_run_again(error, make_host):
    gate, op = Gate(make_host()), FakeOp(problem=error)
    for _ in range(3):
        verdict = gate.verdict(op, 0)
        assert of(verdict) == FAILED
        assert verdict.detail == f"the quick case raised {type(error).__name__}: {error}"
    assert op.runs == {0: 1}
    assert gate.host.opened() == set()


def test_an_interrupt_in_a_quick_case_is_no_verdict(make_host):
    gate, op = Gate(make_host()), FakeOp(problem=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        gate.verdict(op, 0)
    op.problem = None
    assert of(gate.verdict(op, 0)) == FAST
    assert op.runs == {0: 2}


def test_a_first_use_inside_a_capture_is_answered_by_the_reference_and_not_remembered(machine, make_host):
    host = machine(make_host())
    host.in_capture = True
    for _ in range(2):
        prequal.rms_norm(X)
    assert "inside a graph capture" in state.gate.verdict(OPS["rms_norm"], 0).detail
    assert host.quick_runs == {}
    host.in_capture = False
    prequal.rms_norm(X)
    host.in_capture = True
    prequal.rms_norm(X)
    assert prequal.stats()["rms_norm"]["cuda:0"] == {"fast": 2, "reference": {"not_qualified": 2}}
    assert host.quick_runs == {("rms_norm", 0): 1}


def test_evidence_and_qualifications_hold_inside_a_capture(make_host, make_manifest):
    host = make_host((9, 0), (8, 0), manifest=make_manifest(evidence={"toy": ("90",)}))
    host.in_capture = True
    gate, op = Gate(host), FakeOp()
    gate.record("toy", 1, Qualification("prequal.qualify()", now()))
    assert [of(gate.verdict(op, device)) for device in (0, 1)] == [FAST, FAST]
    assert op.runs == {}


def test_nothing_opens_before_the_kernels_of_the_device_are_loaded(make_host, make_manifest):
    host = make_host((9, 0), manifest=make_manifest(evidence={"toy": ("90",)}))
    host.loading = "inside a graph capture"
    gate, op = Gate(host), FakeOp()
    verdict = gate.verdict(op, 0)
    assert (of(verdict), verdict.detail) == (NOT_QUALIFIED, "inside a graph capture")
    assert host.opened() == set()
    host.loading = None
    assert of(gate.verdict(op, 0)) == FAST
    assert host.opened() == host.loaded == {("toy", 0)}


def test_a_child_forked_while_the_gate_is_held_is_not_stuck(make_host):
    gate, op = Gate(make_host()), FakeOp()
    held, let_go = threading.Event(), threading.Event()

    def hold():
        with gate._lock:
            held.set()
            let_go.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of any fork beside threads: that is the case
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        gate.verdict(op, 0)
        os._exit(0)
    let_go.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_looking_runs_nothing_and_opens_nothing(make_host):
    gate, op = Gate(make_host()), FakeOp()
    verdict = gate.verdict(op, 0, may_run=False)
    assert of(verdict) == NOT_QUALIFIED
    assert verdict.detail == "its quick case runs at first use"
    assert (op.runs, gate.host.opened()) == ({}, set())
    gate.verdict(op, 0)
    gate.forget()
    assert of(gate.verdict(op, 0, may_run=False)) == FAST
    assert gate.host.opened() == set()


# ---- a failure at run time -------------------------------------------------------------------------------------------


def test_a_failure_at_run_time_closes_the_op_on_that_device_alone(make_host):
    host = make_host((9, 0), (9, 0))
    gate, op, other = Gate(host), FakeOp(), FakeOp(name="other")
    assert [of(gate.verdict(op, device)) for device in (0, 1)] == [FAST, FAST]
    host.failures["toy", 0] = "toy on cuda:0: an illegal memory access was encountered"
    verdict = gate.verdict(op, 0)
    assert of(verdict) == ("reference", "runtime_error")
    assert verdict.detail == "toy on cuda:0: an illegal memory access was encountered; restart the process"
    assert of(gate.verdict(op, 1)) == FAST
    assert of(gate.verdict(other, 0)) == FAST


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_opens_an_op_that_failed_at_run_time(policy, make_host):
    host = make_host()
    host.failures["toy", 0] = "CUDA said no"
    gate, op = Gate(host), FakeOp()
    gate.record("toy", 0, Qualification("prequal.qualify()", now()))
    gate.set_policy(policy)
    gate.unqualify()
    gate.record("toy", 0, Qualification("prequal.qualify()", now()))
    assert of(gate.verdict(op, 0)) == ("reference", "runtime_error")
    assert host.opened() == set()
    assert op.runs == {}


# ---- forgetting ------------------------------------------------------------------------------------------------------


def test_forget_closes_and_keeps_what_was_qualified(make_host):
    gate, op = Gate(make_host()), FakeOp()
    gate.verdict(op, 0)
    gate.forget()
    assert gate.host.opened() == set()
    assert gate.qualification("toy", 0).by == "quick case at first use"
    assert of(gate.verdict(op, 0)) == FAST
    assert op.runs == {0: 1}


def test_unqualify_stands_where_a_new_process_does(make_host):
    gate, op = Gate(make_host()), FakeOp(problem="output 0: wrong")
    assert of(gate.verdict(op, 0)) == FAILED
    gate.unqualify()
    assert gate.qualification("toy", 0) is None
    op.problem = None
    assert of(gate.verdict(op, 0)) == FAST
    assert op.runs == {0: 2}


def test_a_record_closes_until_the_next_verdict(make_host):
    gate, op = Gate(make_host()), FakeOp()
    gate.verdict(op, 0)
    gate.record("toy", 0, Qualification("prequal.qualify()", now()))
    assert gate.host.opened() == set()
    assert gate.verdict(op, 0).qualification.by == "prequal.qualify()"


def test_a_changed_host_counts_after_forget(make_host, make_manifest):
    host = make_host((9, 0), manifest=make_manifest(("80",)))
    gate, op = Gate(host), FakeOp()
    assert gate.verdict(op, 0).reason == "arch_not_built"
    host.manifest = replace(host.manifest, archs=("80", "90"))
    assert gate.verdict(op, 0).reason == "arch_not_built"
    gate.forget()
    assert of(gate.verdict(op, 0)) == FAST


# ---- threads ---------------------------------------------------------------------------------------------------------


def test_many_threads_at_first_use_run_one_quick_case(make_host):
    threads = 16
    barrier = threading.Barrier(threads)
    gate, op = Gate(make_host((9, 0), (8, 0))), FakeOp()

    def work(i: int) -> tuple[str, str | None]:
        barrier.wait(30)
        return of(gate.verdict(op, i % 2))

    with ThreadPoolExecutor(threads) as pool:
        assert set(pool.map(work, range(threads))) == {FAST}
    assert op.runs == {0: 1, 1: 1}


def test_no_thread_is_served_fast_by_a_gate_that_another_has_closed(make_host):
    """After `disable` has returned, the native side is closed, whatever verdicts were under way."""
    off: set[str] = set()
    host = make_host()
    gate, op = Gate(host, lambda name: "by a flag" if name in off else None), FakeOp()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            gate.verdict(op, 0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as pool:
            asking = [pool.submit(ask) for _ in range(3)]
            try:
                for _ in range(300):
                    off.add("toy")
                    gate.forget()
                    assert host.opened() == set()
                    off.clear()
                    gate.verdict(op, 0)
            finally:
                stop.set()
            for future in asking:
                future.result(30)
    finally:
        sys.setswitchinterval(interval)


# ---- the public view -------------------------------------------------------------------------------------------------


def test_explain_looks_and_does_not_run(machine, make_host):
    host = machine(make_host((9, 0), (7, 5)))
    verdict = prequal.explain("rms_norm", X)
    assert of(verdict) == NOT_QUALIFIED
    assert prequal.stats() == {}
    prequal.rms_norm(X)
    verdict = prequal.explain("rms_norm", X)
    assert of(verdict) == FAST
    assert verdict.variant == "90"
    assert of(prequal.explain("rms_norm", device="cuda:1")) == ("reference", "arch_not_built")
    assert of(prequal.explain("rms_norm", device="cpu")) == ("reference", "unsupported_input:cuda")
    assert of(prequal.explain("rms_norm", device=torch.device("cuda"))) == FAST
    assert host.quick_runs == {("rms_norm", 0): 1}


def test_explain_names_the_need_that_a_call_does_not_meet(machine, make_host):
    machine(make_host())
    prequal.rms_norm(X)
    verdict = prequal.explain("rms_norm", X.double())
    assert of(verdict) == ("reference", "unsupported_input:dtype")
    assert verdict.detail == "the kernel needs x in float32, float16, bfloat16"
    with pytest.raises(TypeError, match="x: expected a floating dtype"):
        prequal.explain("rms_norm", X.long())


def test_explain_without_a_gpu_says_so_whatever_is_asked():
    if state.gate.host.native_problem() is None and state.gate.host.cuda_problem() is None:
        pytest.skip("there is a GPU")
    for device in (None, "cpu", "cuda", "cuda:3"):
        assert prequal.explain("rms_norm", device=device).reason in (Reason.NO_NATIVE_MODULE, Reason.NO_CUDA)


def test_a_row_is_plain_data_for_every_op_and_device(machine, make_host):
    host = machine(make_host(*MIXED))
    rows = prequal.runtime.gate.rows(run=True)
    assert [(row["op"], row["device"]) for row in rows] == [
        (op, f"cuda:{device}") for op in state.native_ops for device in range(len(MIXED))
    ]
    for row in rows:
        serves = state.native_ops[row["op"]].contract.kind != "bitwise"  # that one, once it is qualified
        assert (row["path"] == "fast") == (serves and VARIANTS[int(row["device"][5:])] is not None)
    assert all(row["reason"] is None or is_reason(row["reason"]) for row in rows)
    assert set(host.quick_runs.values()) == {1}


@pytest.mark.gpu
@pytest.mark.usefixtures("bitwise_paths_serve")
def test_the_verdict_of_this_gpu_is_fast_and_names_its_variant(cuda):
    for name in state.native_ops:
        sample = next(iter(OPS[name].samples(cuda)))
        getattr(prequal, name)(*sample.args)
        verdict = prequal.explain(name, device=cuda)
        assert of(verdict) == FAST
        assert verdict.variant == variant_for(state.gate.host.manifest, torch.cuda.get_device_capability(cuda))


@pytest.mark.gpu
def test_many_threads_at_first_use_on_the_gpu_agree(cuda):
    state.gate.unqualify()
    x = torch.ones(16, 64, device=cuda)
    want = OPS["rms_norm"].reference(x)
    barrier = threading.Barrier(8)

    def work(_: int) -> torch.Tensor:
        barrier.wait(30)
        return prequal.rms_norm(x)

    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(work, range(8)):
            assert OPS["rms_norm"].contract.compare(got, want) is None
    assert prequal.stats()["rms_norm"][str(cuda)] == {"fast": 8, "reference": {}}

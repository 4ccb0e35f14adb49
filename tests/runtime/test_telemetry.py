"""Every call is counted once, under its reason, whoever calls; a new reason is said once; strict mode raises."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import prequal
from prequal import runtime_state as state
from prequal.registry import OPS
from prequal.runtime.reasons import Reason, is_reason
from prequal.runtime.telemetry import Counted, Telemetry

X = torch.ones(2, 8)


def run_python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environ}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


@pytest.fixture
def fast() -> dict[tuple[str, str], int]:
    """What the native side counted."""
    return {}


@pytest.fixture
def telemetry(fast) -> Telemetry:
    return Telemetry(lambda: fast)


# ---- counters --------------------------------------------------------------------------------------------------------


def test_stats_are_counts_by_op_device_path_and_reason(telemetry, fast):
    fast["knn", "cuda:0"] = 3
    telemetry.fell_back("knn", "cuda:0", "not_qualified")
    telemetry.fell_back("knn", "cuda:0", "unsupported_input:dtype")
    telemetry.fell_back("knn", "cuda:0", "unsupported_input:dtype")
    telemetry.fell_back("knn", "cpu", "no_cuda", "in words")
    telemetry.failed("rms_norm", "cuda:1", "runtime_error", "CUDA said no")
    assert telemetry.stats() == {
        "knn": {
            "cpu": {"fast": 0, "reference": {"no_cuda": 1}},
            "cuda:0": {"fast": 3, "reference": {"not_qualified": 1, "unsupported_input:dtype": 2}},
        },
        "rms_norm": {"cuda:1": {"fast": 0, "reference": {}, "failed": {"runtime_error": 1}}},
    }


def test_stats_are_ready_for_json_and_a_copy(telemetry):
    telemetry.fell_back("knn", "cpu", Reason.NO_CUDA)
    first = telemetry.stats()
    assert json.loads(json.dumps(first)) == first
    assert type(next(iter(first["knn"]["cpu"]["reference"]))) is str
    first["knn"]["cpu"]["reference"]["no_cuda"] = 100
    first["knn"]["cpu"]["fast"] = 100
    assert telemetry.stats() == {"knn": {"cpu": {"fast": 0, "reference": {"no_cuda": 1}}}}


def test_reset_starts_every_counter_of_stats_anew_and_leaves_the_totals(telemetry, fast):
    fast["knn", "cuda:0"] = 3
    telemetry.fell_back("knn", "cpu", "no_cuda")
    telemetry.failed("knn", "cuda:0", "runtime_error")
    telemetry.reset()
    assert telemetry.stats() == {}
    fast["knn", "cuda:0"] = 5
    telemetry.fell_back("knn", "cpu", "no_cuda")
    assert telemetry.stats() == {
        "knn": {"cpu": {"fast": 0, "reference": {"no_cuda": 1}}, "cuda:0": {"fast": 2, "reference": {}}}
    }
    assert telemetry.totals() == {
        Counted("knn", "cuda:0", "fast", ""): 5,
        Counted("knn", "cuda:0", "failed", "runtime_error"): 1,
        Counted("knn", "cpu", "reference", "no_cuda"): 2,
    }


class Slow(str):
    """A name whose hash is Python code: threads may change places between reading a counter and writing it."""

    __slots__ = ()

    def __hash__(self) -> int:
        for _ in range(200):
            pass
        return super().__hash__()


def test_counters_are_exact_under_threads(telemetry):
    threads, calls = 8, 1000
    barrier = threading.Barrier(threads)
    interval = sys.getswitchinterval()

    def work(i: int) -> None:
        barrier.wait(30)
        for call in range(calls):
            telemetry.fell_back(Slow("knn"), "cpu", ("no_cuda", f"unsupported_input:need{i}")[call % 2])
            if call % 500 == 0:
                telemetry.stats()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, range(threads)))
    finally:
        sys.setswitchinterval(interval)
    counted = telemetry.stats()["knn"]["cpu"]["reference"]
    assert counted.pop("no_cuda") == threads * calls // 2
    assert counted == {f"unsupported_input:need{i}": calls // 2 for i in range(threads)}


def test_a_reset_between_two_readings_loses_no_call(telemetry):
    """Four threads count, one reads and resets: what was read and what is left is what was called."""
    seen: list[int] = []
    calls = 3000
    counting = threading.Barrier(5)

    def count(_: int) -> None:
        counting.wait(30)
        for _ in range(calls):
            telemetry.fell_back("knn", "cpu", "no_cuda")

    with ThreadPoolExecutor(5) as pool:
        working = [pool.submit(count, i) for i in range(4)]
        counting.wait(30)
        while not all(future.done() for future in working):
            before = telemetry.totals().get(Counted("knn", "cpu", "reference", "no_cuda"), 0)
            seen.append(before)
            telemetry.reset()
    assert seen == sorted(seen)
    assert telemetry.totals() == {Counted("knn", "cpu", "reference", "no_cuda"): 4 * calls}


def test_public_calls_are_counted_exactly_under_threads(machine, make_host):
    """Fast calls, fallbacks of two kinds and wrong calls, mixed."""
    machine(make_host())
    threads, calls = 6, 60

    def work(_: int) -> None:
        for call in range(calls):
            if call % 3 == 0:
                prequal.rms_norm(X)
            elif call % 3 == 1:
                with prequal.reference("rms_norm"):
                    prequal.rms_norm(X)
            else:
                with pytest.raises(TypeError):
                    prequal.rms_norm(X.long())
                prequal.rms_norm(X.double())

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    each = threads * calls // 3
    assert prequal.stats()["rms_norm"]["cuda:0"] == {
        "fast": each,
        "reference": {"disabled_by_flag": each, "unsupported_input:dtype": each},
    }


def test_a_wrong_call_is_not_counted_whichever_way_the_gate_stands(machine, make_host):
    for host in (make_host(), make_host((7, 5)), make_host(native="none")):
        machine(host)
        with pytest.raises(TypeError, match="x: expected a floating dtype, got int64"):
            prequal.rms_norm(X.long())
        with prequal.reference("rms_norm"), pytest.raises(TypeError):
            prequal.rms_norm(X.long())
        assert prequal.stats() == {}


def test_stats_may_be_asked_for_inside_a_log_handler_or_a_signal_handler():
    """Both run on the thread that is counting just now."""
    code = """if True:
        import logging, signal, torch, prequal
        from prequal import runtime_state as state
        seen = []

        class Ask(logging.Handler):
            def emit(self, record):
                seen.append(prequal.stats())

        logging.getLogger("prequal").addHandler(Ask())
        signal.signal(signal.SIGALRM, lambda *_: prequal.stats())
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        for _ in range(20000):
            state.telemetry.fell_back("rms_norm", "cpu", "no_cuda")
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(len(seen), prequal.stats()["rms_norm"]["cpu"]["reference"]["no_cuda"])
    """
    found = run_python(code)
    assert (found.returncode, found.stdout) == (0, "1 20000\n"), found.stderr


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_another_thread_counts_can_count_itself(telemetry):
    locked, done = threading.Event(), threading.Event()

    def hold() -> None:
        with telemetry._lock:
            locked.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    locked.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends the child if it waits for ever
        telemetry.fell_back("knn", "cpu", "no_cuda")
        os._exit(0 if telemetry.stats()["knn"]["cpu"]["reference"] == {"no_cuda": 1} else 1)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert telemetry.stats() == {}


# ---- the log ---------------------------------------------------------------------------------------------------------


def said(caplog) -> list[tuple[str, str, str]]:
    return [
        (record.prequal_op, record.prequal_device, record.prequal_reason)
        for record in caplog.records
        if record.name == "prequal"
    ]


def test_one_record_for_each_new_op_device_and_reason(telemetry, caplog):
    caplog.set_level(logging.WARNING, logger="prequal")
    calls = [
        *(("knn", "cuda:0", "not_qualified"), ("knn", "cuda:1", "not_qualified"), ("knn", "cuda:0", "runtime_error")),
        *(("rms_norm", "cuda:0", "not_qualified"), ("rms_norm", "cuda:0", "unsupported_input:dtype")),
        ("rms_norm", "cuda:0", "unsupported_input:size"),
    ]
    for _ in range(3):
        for call in calls:
            telemetry.fell_back(*call, "in words")
        telemetry.reset()  # does not make a reason new
    assert said(caplog) == calls
    record = caplog.records[0]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "knn on cuda:0 goes to its PyTorch reference: not_qualified (in words)"
    assert record.prequal_detail == "in words"


def test_a_record_without_detail_has_no_empty_brackets(telemetry, caplog):
    caplog.set_level(logging.WARNING, logger="prequal")
    telemetry.fell_back("knn", "cpu", Reason.NO_CUDA)
    assert caplog.records[0].getMessage() == "knn on cpu goes to its PyTorch reference: no_cuda"


def test_one_record_whichever_thread_is_first(telemetry, caplog):
    caplog.set_level(logging.WARNING, logger="prequal")
    barrier = threading.Barrier(8)

    def work(_: int) -> None:
        barrier.wait(30)
        telemetry.fell_back("knn", "cpu", "no_cuda")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert said(caplog) == [("knn", "cpu", "no_cuda")]


def test_the_log_of_public_calls_says_the_detail_of_the_gate(machine, make_host, caplog, monkeypatch):
    caplog.set_level(logging.WARNING, logger="prequal")
    monkeypatch.setattr(state.telemetry, "_said", set())
    host = machine(make_host((7, 5), (9, 0)))
    for _ in range(3):
        prequal.rms_norm(X)
    host.current = 1
    for _ in range(3):
        prequal.rms_norm(X)
        with prequal.reference("rms_norm"):
            prequal.rms_norm(X)
    assert said(caplog) == [("rms_norm", "cuda:0", "arch_not_built"), ("rms_norm", "cuda:1", "disabled_by_flag")]
    assert "compute capability 7.5; this wheel holds sm_80" in caplog.records[0].getMessage()
    assert "by prequal.reference() in this scope" in caplog.records[1].getMessage()


# ---- strict mode -----------------------------------------------------------------------------------------------------


def test_strict_mode_raises_with_op_device_and_reason(machine, make_host):
    host = machine(make_host((9, 0), (7, 5)))
    with prequal.strict():
        prequal.rms_norm(X)
        host.current = 1
        with pytest.raises(prequal.FallbackError) as caught:
            prequal.rms_norm(X)
    error = caught.value
    assert (error.op, error.device, error.reason) == ("rms_norm", "cuda:1", "arch_not_built")
    assert error.detail.startswith("compute capability 7.5")
    assert str(error) == (
        "rms_norm on cuda:1: the fast path does not serve: arch_not_built (compute capability 7.5; this wheel holds "
        "sm_80, sm_86, sm_89, sm_90); strict mode allows no fallback"
    )
    assert prequal.stats()["rms_norm"].keys() == {"cuda:0"}  # nobody answered on the other


def test_strict_mode_says_a_wrong_call_first():
    with prequal.strict(), pytest.raises(TypeError, match="x: expected a floating dtype"):
        prequal.rms_norm(X.long())


def test_strict_mode_runs_no_reference(machine, make_host, monkeypatch):
    machine(make_host((7, 5)))
    ran = []
    monkeypatch.setattr(OPS["rms_norm"], "reference", lambda *args, **kwargs: ran.append(args))
    with prequal.strict(), pytest.raises(prequal.FallbackError):
        prequal.rms_norm(X)
    assert ran == []


def test_strict_mode_holds_through_torch_ops_and_autograd():
    weight = torch.ones(8, requires_grad=True)
    with prequal.strict():
        for call in (
            lambda: torch.ops.prequal.rms_norm(X, None, 1e-6),
            lambda: prequal.rms_norm(X, weight),
            lambda: torch.vmap(prequal.rms_norm)(torch.ones(2, 3, 8)),
        ):
            with pytest.raises(prequal.FallbackError):
                call()


# ---- a failure at run time -------------------------------------------------------------------------------------------


def test_after_a_failure_every_call_is_counted_and_says_that_the_process_must_restart(
    machine, make_host, caplog, monkeypatch
):
    caplog.set_level(logging.WARNING, logger="prequal")
    monkeypatch.setattr(state.telemetry, "_said", set())
    host = machine(make_host((9, 0), (9, 0)))
    prequal.rms_norm(X)
    text = "rms_norm on cuda:0: an illegal memory access was encountered"
    runs = []

    def fail(op, args):
        runs.append(op)
        host.failures[op, host.current] = text
        raise RuntimeError(text)

    host.kernel = fail
    with pytest.raises(RuntimeError, match="an illegal memory access"):
        prequal.rms_norm(X)
    for _ in range(2):
        prequal.rms_norm(X)
    assert runs == ["rms_norm"]  # the kernel is never tried again
    assert prequal.stats()["rms_norm"]["cuda:0"] == {
        "fast": 1,
        "reference": {"runtime_error": 2},
        "failed": {"runtime_error": 1},
    }
    assert said(caplog) == [("rms_norm", "cuda:0", "runtime_error")]
    words = f"rms_norm on cuda:0 failed and is closed: runtime_error ({text}; restart the process)"
    assert caplog.records[0].getMessage() == words
    host.current, host.kernel = 1, lambda op, args: OPS[op]._call(OPS[op].reference, args)
    prequal.rms_norm(X)
    assert prequal.stats()["rms_norm"]["cuda:1"] == {"fast": 1, "reference": {}}
    host.current = 0
    with prequal.strict(), pytest.raises(prequal.FallbackError, match=r"runtime_error .*restart the process"):
        prequal.rms_norm(X)


def test_a_failure_on_the_straight_way_to_the_kernel_is_counted_too(machine, make_host, monkeypatch):
    host = machine(make_host())

    def fail(*args):
        host.failures["rms_norm", 0] = "CUDA said no"
        raise RuntimeError("CUDA said no")

    monkeypatch.setitem(prequal.rms_norm.__globals__, "native", fail)
    with pytest.raises(RuntimeError, match="CUDA said no"):
        prequal.rms_norm(X)
    assert prequal.stats()["rms_norm"]["cuda:0"] == {"fast": 0, "reference": {}, "failed": {"runtime_error": 1}}


def test_an_error_that_is_not_cudas_closes_and_counts_nothing(machine, make_host):
    """Out of memory, say: the next call may fit."""
    host = machine(make_host())
    prequal.rms_norm(X)
    works = host.kernel

    def fail(op, args):
        raise torch.OutOfMemoryError("no more")

    host.kernel = fail
    with pytest.raises(torch.OutOfMemoryError):
        prequal.rms_norm(X)
    host.kernel = works
    prequal.rms_norm(X)
    assert prequal.stats()["rms_norm"]["cuda:0"] == {"fast": 2, "reference": {}}


# ---- this process ----------------------------------------------------------------------------------------------------


def test_calls_on_the_cpu_are_counted_under_one_reason_of_the_enumeration():
    for _ in range(3):
        prequal.rms_norm(X)
    torch.ops.prequal.rms_norm(X, None, 1e-6)
    prequal.rms_norm(X.requires_grad_(False), torch.ones(8, requires_grad=True)).sum().backward()
    seen = prequal.stats()["rms_norm"]["cpu"]
    assert seen["fast"] == 0
    assert len(seen["reference"]) == 1
    ((reason, calls),) = seen["reference"].items()
    assert is_reason(reason)
    assert calls == 5


@pytest.mark.gpu
def test_fast_calls_on_the_gpu_are_counted_exactly_under_threads(cuda):
    x = torch.ones(4, 64, device=cuda)
    prequal.rms_norm(x)
    prequal.reset_stats()
    before = state.telemetry.totals()
    threads, calls = 8, 500

    def work(_: int) -> None:
        for _ in range(calls):
            prequal.rms_norm(x)
            with pytest.raises(TypeError):
                prequal.rms_norm(x.long())
        prequal.rms_norm(x.double())

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    assert prequal.stats()["rms_norm"][str(cuda)] == {
        "fast": threads * calls,
        "reference": {"unsupported_input:dtype": threads},
    }
    key = Counted("rms_norm", str(cuda), "fast", "")
    assert state.telemetry.totals()[key] - before[key] == threads * calls

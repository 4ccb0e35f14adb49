"""The harness on a fake clock: who is timed, in what order, and what is said of whom."""

from __future__ import annotations

import pytest
import torch
from making_evidence import FakeClock, FakeGpu

import prequal
from prequal.bench import cases as lists
from prequal.bench.cases import Case, Other, Peer, contract_of
from prequal.bench.evidence import problems
from prequal.bench.runner import (
    ROUNDS,
    Candidate,
    DeviceLost,
    Options,
    bound_call,
    first_line,
    floor_us,
    measure,
    replays,
    rotated,
    run,
)
from prequal.errors import UnknownOpError
from prequal.registry import OPS

lists.shape_lists()  # costs are declared beside the shapes
OP = OPS["rms_norm"]


def right(got, want, args):
    return contract_of(OP)(got, want, args)


def data(device):
    return torch.ones(4, 8), None, 1e-6


def case_of(*others: Other, **more) -> Case:
    return Case("rms_norm", "ones", data, quick=True, others=others, **more)


def taking(clock: FakeClock, us, log: list[str] | None = None, name: str = ""):
    """The reference, in so many microseconds of the fake clock."""
    times = iter(us) if not isinstance(us, float) else None

    def answer(*args):
        clock.advance_us(us if times is None else next(times))
        if log is not None:
            log.append(name)
        return OP.reference(*args)

    return answer


def quiet(**more) -> Options:
    return Options(compile=False, **more)


def test_times_are_those_of_the_clock(clock, gpu):
    row = measure(case_of(Other("slow", taking(clock, 250.0), right)), gpu, quiet())
    slow = row["by"]["slow"]
    assert slow["device_us"] == {"median": 250.0, "q1": 250.0, "q3": 250.0, "runs": 100}
    assert slow["wall_us"]["median"] == slow["graph_us"]["median"] == 250.0
    assert slow["peak_bytes"] == 4096


def test_a_row_fits_the_schema_and_tells_bytes_and_flops_of_the_declaration(clock, gpu):
    row = measure(case_of(Other("slow", taking(clock, 250.0), right)), gpu, quiet())
    assert (row["bytes"], row["flops"]) == (2 * 32 * 4, 3 * 32)
    assert row["by"]["slow"]["TB_s"] == round(256 / 250 / 1e6, 3)
    record = {"schema": 1, "rows": [row]}
    assert not [line for line in problems(record) if line.startswith("rows")]


def test_a_wrong_answer_is_reported_and_never_timed(clock, gpu):
    calls = []

    def wrong(*args):
        calls.append(1)
        return OP.reference(*args) + 1

    row = measure(case_of(Other("liar", wrong, right), Other("honest", taking(clock, 30.0), right)), gpu, quiet())
    assert "liar" not in row["by"]
    assert "honest" in row["by"]
    assert "32 of 32 values differ" in row["wrong"]["liar"]
    assert len(calls) == 1


def test_a_failure_of_one_is_reported_and_the_others_are_measured(clock, gpu):
    def broken(*args):
        raise RuntimeError("no kernel image\nand a long story")

    row = measure(case_of(Other("broken", broken, right), Other("ok", taking(clock, 30.0), right)), gpu, quiet())
    assert row["failed"] == {"broken": "RuntimeError: no kernel image"}
    assert "ok" in row["by"]


@pytest.mark.parametrize("who", ["broken", "prequal"])
def test_a_gpu_that_is_gone_ends_the_run_and_is_laid_to_who_was_the_first_to_fail(clock, monkeypatch, who):
    gpu = FakeGpu(clock)
    gone = []

    def broken(*args):
        gone.append(True)
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "answers", lambda: not gone)
    case = case_of(Other("broken", broken, right), Other("ok", taking(clock, 30.0), right))
    if who == "prequal":
        monkeypatch.setattr("prequal.bench.runner._time", broken)
        case = case_of(Other("ok", taking(clock, 30.0), right))
    kept = []
    with pytest.raises(DeviceLost, match=r"no longer answers after .*: RuntimeError: an illegal memory access"):
        run([case, case], gpu, quiet(), lambda case, row: kept.append(row))
    (row,) = kept
    assert row["failed"] == {who: "RuntimeError: an illegal memory access was encountered"}
    assert row["by"] == {}


def test_rounds_are_interleaved(clock):
    log: list[str] = []
    gpu = FakeGpu(clock, graphs=False)
    others = [Other(name, taking(clock, 2000.0, log, name), right) for name in ("a", "b")]
    measure(case_of(*others), gpu, quiet())
    turns = [name for i, name in enumerate(log) if i == 0 or log[i - 1] != name]
    # compared, warmed up, a turn in every round, peak memory
    assert turns == ["a", "b"] * (2 + ROUNDS + 1)


def test_what_cannot_be_captured_is_named_and_keeps_its_other_times(clock):
    gpu = FakeGpu(clock, graphs=False)
    row = measure(case_of(Other("syncs", taking(clock, 30.0), right)), gpu, quiet())
    assert row["not_capturable"]["syncs"] == "RuntimeError: operation not permitted when stream is capturing"
    assert "graph_us" not in row["by"]["syncs"]
    assert row["by"]["syncs"]["device_us"]["median"] == 30.0


def test_a_run_that_drifts_is_labelled_noisy(clock, gpu):
    # 1 comparison, 8 warm-ups, then rounds of 2 + 20 + 20 calls
    times = [50.0] * (1 + 8 + 2 * 42) + [50.0] * 42 + [80.0] * 5000
    row = measure(case_of(Other("drifts", taking(clock, times), right)), gpu, quiet())
    assert row["by"]["drifts"]["noisy"] is True
    row = measure(case_of(Other("steady", taking(clock, 50.0), right)), gpu, quiet())
    assert "noisy" not in row["by"]["steady"]


def test_who_is_slow_is_measured_fewer_times_and_who_takes_seconds_not_at_all(clock, gpu):
    us = {"quick": 4_000.0, "slow": 12_500.0, "slower": 150_000.0, "slowest": 300_000.0, "endless": 2_500_000.0}
    log: list[str] = []
    row = measure(case_of(*(Other(name, taking(clock, t, log, name), right) for name, t in us.items())), gpu, quiet())
    assert {name: by["device_us"]["runs"] for name, by in row["by"].items() if name in us} == {
        "quick": 100,
        "slow": 40,
        "slower": 20,
        "slowest": 5,
    }
    assert row["by"]["slower"]["wall_us"]["runs"] == 20
    assert row["failed"] == {"endless": "2.5 s a call: not measured"}
    assert log.count("endless") == 2  # compared, and tried once
    assert log.count("slowest") <= 2 + 2 * 5 + 1  # and what a call takes of memory


def test_a_graph_of_long_calls_is_replayed_a_few_times_and_of_short_ones_as_often_as_they_run():
    def replayed(us: float) -> int:
        return replays(Candidate("one", print, right, "peer", device_us=[us]), 20, ROUNDS)

    assert [replayed(us) for us in (1.0, 50.0, 100.0, 250.0, 999.0)] == [20, 20, 10, 4, 4]


def test_the_quick_list_compiles_one_case_of_each_file_of_ops_and_the_full_list_all():
    ops = lists.chosen_ops(None)
    quick, full = (
        [OPS[case.op].basename for case in lists.cases_of(ops, tier) if case.compiled is not None]
        for tier in ("quick", "full")
    )
    assert len(quick) == len(set(quick))
    assert set(quick) <= set(full)
    assert len(full) > 3 * len(quick)
    everything = [case for case in lists.cases_of(ops, "full") if case.quick]
    assert [case.name for case in lists.cases_of(ops, "quick")] == [case.name for case in everything]


def test_a_reference_that_answers_in_our_name_is_said_to(clock, gpu):
    row = measure(case_of(), gpu, quiet())
    assert row["by"]["prequal"]["path"].startswith("reference: ")


def test_absent_peers_are_listed_with_why(clock, gpu):
    def builds():
        return taking(clock, 40.0)

    peers = [
        Peer("no_such_package_at_all", "rms_norm", builds, right),
        Peer("torch", "rms_norm", builds, right),
        Peer("json", "rms_norm", builds, right, lambda args: "takes no ones"),
        Peer("math", "rms_norm", lambda: 1 / 0, right),
        Peer("no_such_package_either", "knn", builds, right),
    ]
    row = measure(case_of(), gpu, quiet(peers=peers))
    assert row["absent"] == {
        "no_such_package_at_all": "not installed",
        "json": "takes no ones",
        "math": "cannot be imported: ZeroDivisionError: division by zero",
    }
    assert row["by"]["torch"]["kind"] == "peer"
    assert row["by"]["torch"]["device_us"]["median"] == 40.0


def test_only_the_first_rows_are_compared_where_the_reference_cannot_do_all(clock, gpu):
    def wrong_at_the_end(x, weight, eps):
        out = OP.reference(x, weight, eps)
        out[-1] = 0
        return out

    row = measure(case_of(Other("other", wrong_at_the_end, right), rows=2), gpu, quiet())
    assert "other" in row["by"]


@pytest.mark.parametrize(
    ("cache", "copies", "cold"),
    [(0, 1, False), (63, 1, True), (64, 1, True), (100, 2, True), (256, 4, True), (2000, 1, False)],
)
def test_buffers_are_rotated_where_that_makes_a_graph_cold_and_the_row_says_which(cache, copies, cold):
    args = (torch.ones(4, 8), None, 1e-6)  # 128 bytes
    found, is_cold = rotated(args, cache)
    assert (len(found), is_cold) == (copies, cold)
    places = {one[0].data_ptr() for one in found}
    assert len(places) == copies
    assert all(torch.equal(one[0], args[0]) for one in found)


def test_the_floor_is_whichever_ceiling_binds():
    ceilings = {"copy_TB_s": 4.0, "fp32_TFLOP_s": 50.0}
    assert floor_us({"bytes": 4_000_000}, ceilings) == pytest.approx(1.0)
    assert floor_us({"bytes": 4_000_000, "flops": 10**9, "flops_unit": "fp32"}, ceilings) == pytest.approx(20.0)
    assert floor_us({"bytes": None}, ceilings) is None
    assert floor_us({"bytes": 4_000_000}, {}) is None


def test_what_is_done_is_kept_when_interrupted(clock, gpu):
    def interrupted(*args):
        raise KeyboardInterrupt

    kept = []
    cases = [case_of(), case_of(Other("stop", interrupted, right)), case_of()]
    said: list[str] = []
    finished = run(cases, gpu, quiet(), lambda case, row: kept.append(row), said.append)
    assert not finished
    assert len(kept) == 1
    assert said[0] == "[1/3] rms_norm: ones"
    assert said[-1] == "interrupted: what is done is written"


def test_a_case_that_cannot_be_made_is_a_row_that_says_so_and_the_next_is_measured(clock, gpu):
    def too_large(device):
        raise MemoryError("no room")

    kept = []
    assert run([Case("rms_norm", "huge", too_large), case_of()], gpu, quiet(), lambda case, row: kept.append(row))
    assert kept[0] == {"case": "huge", "op": "rms_norm", "by": {}, "failed": {"prequal": "MemoryError: no room"}}
    assert "prequal" in kept[1]["by"]


def test_no_case_is_started_after_the_budget(clock, gpu):
    kept = []
    answers = iter([True, False])
    finished = run([case_of()] * 3, gpu, quiet(), lambda c, r: kept.append(r), may_go_on=lambda: next(answers))
    assert (finished, len(kept)) == (False, 1)


# ---- the lists -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(OPS))
def test_every_op_has_a_quick_case(name):
    cases = lists.cases_of([OPS[name]], "quick")
    assert cases
    assert all(case.op == name for case in cases)


def test_names_of_cases_are_unique_in_a_basename():
    for basename in {op.basename for op in OPS.values()}:
        names = [case.name for case in lists.cases_of(lists.chosen_ops([basename]), "full")]
        assert len(names) == len(set(names))


def test_an_op_without_a_shape_list_is_measured_on_its_quick_sample(clock, gpu):
    (case,) = lists.sample_cases(OPS["knn"])
    row = measure(case, gpu, quiet(rounds=1, runs=2))
    assert set(row["by"]) == {"prequal", "torch eager"}


def test_ops_are_chosen_by_name_and_by_basename():
    assert [op.name for op in lists.chosen_ops(["knn"])] == [
        "knn",
        "knn_gather",
        "knn_interpolate",
        "radius",
        "knn_index",
    ]
    assert [op.name for op in lists.chosen_ops(["knn_gather"])] == ["knn_gather"]
    assert lists.chosen_ops(None) == list(OPS.values())
    with pytest.raises(UnknownOpError, match="did you mean rms_norm"):
        lists.chosen_ops(["rmsnorm"])


def test_shape_lists_are_of_ops_that_exist():
    for basename, module in lists.shape_lists().items():
        assert {case.op for case in module.cases()} <= {op.name for op in OPS.values() if op.basename == basename}
        assert {peer.op for peer in getattr(module, "PEERS", ())} <= set(OPS)


def test_another_neighbour_at_the_same_distance_is_right_and_a_far_one_is_wrong():
    from prequal.bench.shapes.knn import cdist, nearest_enough

    generator = torch.Generator().manual_seed(0)
    q, r = torch.rand(50, 3, generator=generator), torch.rand(80, 3, generator=generator)
    want = prequal.knn(q, r, 4)
    assert nearest_enough(cdist(q, r, 4), want, (q, r, 4)) is None
    doubled = (q, torch.cat([r, r]), 1)
    first = prequal.knn(*doubled)
    assert nearest_enough(first[1] + len(r), first, doubled) is None
    assert "are not the nearest" in nearest_enough((want[1] + 1) % 80, want, (q, r, 4))
    q, r = 64 + q, 64 + r  # far from zero, half precision cannot tell them apart
    in_half = (q[:, None].half() - r.half()).square().sum(-1).topk(4, largest=False).indices
    assert "are not the nearest" in nearest_enough(in_half, prequal.knn(q, r, 4), (q, r, 4))
    assert "outside" in nearest_enough(want[1] - 80, want, (q, r, 4))
    assert "shape" in nearest_enough(want[1][:, :2], want, (q, r, 4))


@pytest.mark.parametrize("kind", ["all scales", "centre of a sphere"])
def test_neighbours_whose_distances_overflow_or_nearly_tie_are_compared(kind):
    from prequal.bench.cases import contract_of
    from prequal.bench.shapes.knn import cloud, nearest_enough

    q, r = cloud(kind, 1500, 1000)
    args = (q, r, 2)
    want = prequal.knn(*args)
    assert want[0].isinf().any() == (kind == "all scales")
    assert contract_of(OPS["knn"])(want, want, args) is None
    assert nearest_enough(want[1], want, args) is None
    far = torch.zeros(1500, dtype=torch.bool)
    far[1::7] = (q.square().sum(1) + want[0][:, 1]).isfinite()[1::7]
    other = (q[:, None].double() - r.double()).square().sum(-1).argmax(1)[:, None].expand(-1, 2)
    got = torch.where(far[:, None], other, want[1])
    assert f"{2 * int(far.sum())} of 3000 neighbours are not the nearest" in nearest_enough(got, want, args)
    assert contract_of(OPS["knn"])((want[0], got), want, args) is not None


@pytest.mark.parametrize("name", ["knn", "rms_norm", "pairwise_direct", "pairwise_argmin", "pairwise_from_products_"])
def test_the_other_ways_of_a_shape_list_hold_their_standard_on_its_sample(name):
    op = OPS[name]
    module = lists.shape_lists()[op.basename]
    sample = next(iter(op.samples(torch.device("cpu"))))
    case = next(case for case in module.cases() if case.op == name)
    args = op.bind(sample.args, sample.kwargs)
    want = op.outcome(lambda every: op._call(op.reference, every), args)
    for other in case.others:
        got = op.outcome(lambda every: bound_call(op, other.function, every, case.named)(), args)  # noqa: B023
        assert other.compare(got, want, args) is None


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("/opt/env/lib/include/dialect.h(40): error", "dialect.h(40): error"),
        ("no '/home/me/lib.so', as /lib/a.so", "no 'lib.so', as a.so"),
        ("see https://pytorch.org/docs/x.html, a/b or 1 / 2", "see https://pytorch.org/docs/x.html, a/b or 1 / 2"),
        ("", ""),
    ],
)
def test_what_failed_names_files_without_the_folders_of_a_machine(said, told):
    assert first_line(RuntimeError(said)) == f"RuntimeError: {told}"


# ---- the GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(OPS))
def test_a_gpu_is_measured_with_every_figure(name, cuda):
    from prequal.bench.device import Cuda

    (case,) = lists.sample_cases(OPS[name])
    row = measure(case, Cuda(), Options(compile=False, runs=20))
    ours = row["by"]["prequal"]
    assert ours["path"] == "fast"
    assert {"device_us", "wall_us", "graph_us", "peak_bytes"} <= ours.keys()
    assert all(ours[kind]["median"] > 0 for kind in ("device_us", "wall_us", "graph_us"))


@pytest.mark.gpu
def test_the_ceilings_of_a_gpu_are_measured(cuda):
    from prequal.bench.device import Cuda

    found = Cuda().ceilings()
    assert set(found) == {
        *("copy_TB_s", "bf16_TFLOP_s", "fp32_TFLOP_s", "empty_launch_wall_us", "empty_graph_replay_us"),
    }
    assert all(value > 0 for value in found.values())

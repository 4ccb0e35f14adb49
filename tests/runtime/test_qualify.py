"""Qualification: what passes opens, what fails or crashes closes, the others go on; every outcome without a GPU."""

import json
from contextlib import contextmanager
from types import MappingProxyType

import pytest
import torch

import prequal
from prequal import TensorSpec
from prequal import runtime_state as state
from prequal.contracts import Exact
from prequal.errors import LockError, UnknownOpError
from prequal.registry import Sample
from prequal.runtime import lock as lock_file
from prequal.runtime import qualify as q
from prequal.runtime.fingerprint import Fingerprint
from prequal.runtime.gate import Gate, Qualification
from prequal.runtime.manifest import CudaBuild, Manifest, OpBuild

MANIFEST = Manifest(
    schema=1,
    version="0.1.0",
    cuda=CudaBuild("13.0", "13.0.88", "580"),
    archs=("80", "90"),
    ops=MappingProxyType({"ops": OpBuild("a" * 64, ("90",))}),
)


class Host:
    """A worker of these compute capabilities."""

    def __init__(self, *capabilities, cuda=None):
        self.manifest = MANIFEST
        self.capabilities = capabilities or ((9, 0),)
        self.cuda = cuda
        self.failures = {}
        self.is_capturing = False
        self.opened = {}

    def native_problem(self):
        return None

    def cuda_problem(self):
        return self.cuda

    def driver(self):
        return "580.95.05"

    def devices(self):
        return list(range(len(self.capabilities)))

    def capability(self, device):
        return self.capabilities[device]

    def loading_problem(self, basename, device):
        return None

    def capturing(self):
        return self.is_capturing

    def failure(self, op, device):
        return self.failures.get((op, device))

    def open(self, op, device, is_open):
        self.opened[op, device] = is_open


class Runner:
    """The CPU in the place of every device; a device in `dead` cannot be used after a failure."""

    def __init__(self, preload=7, dead=()):
        self.kernels, self.dead = preload, dead
        self.log = []

    def target(self, device):
        return torch.device("cpu")

    def preload(self, device):
        self.log.append(f"preload {device}")
        if isinstance(self.kernels, Exception):
            raise self.kernels
        return self.kernels

    @contextmanager
    def scope(self, device):
        self.log.append(f"enter {device}")
        try:
            yield
        finally:
            self.log.append(f"leave {device}")

    def finish(self, device):
        self.log.append(f"finish {device}")

    def recover(self, device):
        self.log.append(f"recover {device}")
        return "the context is gone" if device in self.dead else None


class Op:
    """Doubles its argument, or does what `kernel` does instead."""

    basename = "ops"

    def __init__(self, name, kernel=lambda x: 2 * x, kind=None, samples=4):
        self.name, self.kernel, self.count = name, kernel, samples
        self.contract = Exact(ties="none")
        if kind:
            object.__setattr__(self.contract, "kind", kind)
        self.seen = []

    def quick_case(self, device):
        return None

    def samples(self, device):
        for n in range(self.count):
            yield Sample("quick" if n == 0 else f"sample {n}", (torch.arange(n + 1, device=device),))

    def bind(self, args, kwargs=None):
        if len(args) + len(kwargs or {}) != 1:
            raise TypeError("missing a required argument: 'x'")
        return (*args, *(kwargs or {}).values())

    def validate(self, args):
        if not isinstance(args[0], torch.Tensor):
            raise TypeError(f"x: expected a torch.Tensor, got {type(args[0]).__name__}")
        if args[0].dim() != 1:
            raise ValueError(f"x: expected shape [N], got {list(args[0].shape)}")

    def compare_paths(self, sample):
        (x,) = self.bind(sample.args, sample.kwargs)
        self.seen.append((sample.name, x.clone(), x.stride(), x.storage_offset()))
        got = self.kernel(x)
        return got if isinstance(got, str) else self.contract.compare(got, 2 * x)


def off_by_one_at_three(x):
    return 2 * x + (x == 3)


def raising(error):
    def kernel(x):
        raise error

    return kernel


class Clock:
    """A second passes each time somebody looks."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def run(*ops, host=None, runner=None, devices=None, policy="strict", key=None, **given):
    host = host or Host()
    gate = Gate(host, policy=policy)
    gate.read_key = key or (lambda device: key_of(device))
    given.setdefault("clock", Clock())
    devices = host.devices() if devices is None else devices
    report = q.qualify(gate, ops, devices, runner or Runner(), **given)
    return gate, report


def key_of(device, tf32=False):
    described = {"name": f"GPU {device}", "capability": "9.0"}
    return Fingerprint.of({"schema": 1, "runtime": {"flags": {"tf32": tf32}, "libraries": {}}, "device": described})


def outcomes(report):
    return [(row.op, row.device, row.outcome) for row in report.rows]


# ---- outcomes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["auto", "strict", "trust"])
@pytest.mark.parametrize("kind", ["exact", "bitwise"])
def test_what_passes_is_opened_under_every_contract_and_policy(kind, policy):
    op = Op("double", kind=kind)
    gate, report = run(op, policy=policy)
    assert (report.ok, report.exit_code, outcomes(report)) == (True, 0, [("double", 0, "qualified")])
    verdict = gate.verdict(op, 0)
    assert (verdict.path, verdict.qualification.by) == ("fast", "qualification, 4 cases")
    assert verdict.qualification.when == report.rows[0].when


def test_a_wrong_op_is_closed_with_the_comparators_sentence_and_the_others_go_on():
    first, wrong, last = Op("first"), Op("wrong", off_by_one_at_three, samples=6), Op("last")
    gate, report = run(first, wrong, last, policy="trust")
    assert [row.outcome for row in report.rows] == ["qualified", "failed", "qualified"]
    assert report.exit_code == 1
    sentence = (
        "sample 3: output 0 at [3]: got 7, want 6 (must be equal; ties: none; 1 of 4 values differ) (and 2 more cases)"
    )
    assert report.rows[1].detail == sentence
    verdict = gate.verdict(wrong, 0)
    assert (verdict.reason, verdict.detail) == ("qualification_failed", sentence)
    assert [gate.verdict(op, 0).path for op in (first, last)] == ["fast", "fast"]
    assert sentence in " ".join(report.table().replace("\n ", "").split())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nadvice\nadvice"),
        RuntimeError("double on cuda:0: an illegal memory access was encountered"),
        ZeroDivisionError(),
    ],
)
def test_a_qualification_that_crashes_closes_that_op_and_says_so(error):
    crashing, good = Op("crashing", raising(error)), Op("good")
    gate, report = run(crashing, good, policy="trust")
    assert [row.outcome for row in report.rows] == ["failed", "qualified"]
    detail = gate.verdict(crashing, 0).detail
    assert detail.startswith(f"qualification crashed (case 'quick'): {type(error).__name__}")
    assert "advice" not in detail
    assert gate.verdict(good, 0).path == "fast"


def test_a_crash_while_making_the_cases_or_after_the_last_is_told_as_such():
    class NoCases(Op):
        def samples(self, device):
            raise MemoryError("no room")
            yield

    class Late(Runner):
        @contextmanager
        def scope(self, device):
            yield
            raise RuntimeError("late")

    rows = run(NoCases("none"))[1].rows + run(Op("late"), runner=Late())[1].rows
    assert [row.detail for row in rows] == [
        "qualification crashed (making its first case): MemoryError: no room",
        "qualification crashed (after case 'sample 3'): RuntimeError: late",
    ]


def test_a_case_of_the_callers_that_cannot_be_made_is_named(monkeypatch):
    def no_room(self, target):
        raise torch.OutOfMemoryError("CUDA out of memory")

    op = Op("double")
    given = cases_of(op, Sample("huge", (TensorSpec((8,)),)))
    monkeypatch.setattr(TensorSpec, "make", no_room)
    detail = run(op, cases=given)[1].rows[0].detail
    assert detail == "qualification crashed (case 'huge (yours)'): OutOfMemoryError: CUDA out of memory"


def test_nothing_more_is_run_on_a_device_whose_context_is_gone():
    ops = [Op("good"), Op("killer", raising(RuntimeError("illegal access"))), Op("next"), Op("last")]
    gate, report = run(*ops, host=Host((9, 0), (8, 0)), runner=Runner(dead={0}), policy="trust")
    assert [row.outcome for row in report.rows[:4]] == ["qualified", "failed", "not run", "not run"]
    assert len(ops[2].seen) == 4  # on the other device
    verdict = gate.verdict(ops[2], 0)
    assert verdict.reason == "qualification_failed"
    assert verdict.detail == ("cuda:0 cannot be used any more after killer (the context is gone); restart the process")
    assert [row.outcome for row in report.rows[4:]] == ["qualified", "failed", "qualified", "qualified"]


def test_what_the_kernel_refuses_is_reported_and_no_failure():
    def odd_only(x):
        return "unsupported_input:dtype" if len(x) % 2 == 0 else 2 * x

    gate, report = run(op := Op("picky", odd_only))
    row = report.rows[0]
    assert (row.outcome, row.cases) == ("qualified", 2)
    assert row.refused == ("sample 1: unsupported_input:dtype", "sample 3: unsupported_input:dtype")
    assert gate.verdict(op, 0).path == "fast"


def test_an_op_none_of_whose_cases_reached_the_kernel_is_not_qualified():
    gate, report = run(op := Op("shy", lambda x: "unsupported_input:rank"), policy="trust")
    assert report.rows[0].outcome == "failed"
    assert gate.verdict(op, 0).detail == "no case reached the kernel: quick: unsupported_input:rank"
    assert run(Op("empty", samples=0))[1].rows[0].detail == "no case reached the kernel: there is none"


def test_an_op_that_failed_in_this_process_is_not_tried_again():
    host = Host()
    host.failures["sticky", 0] = "sticky on cuda:0: launch failed"
    _, report = run(op := Op("sticky"), host=host)
    assert (report.rows[0].outcome, op.seen) == ("failed", [])
    assert "launch failed; restart the process" in report.rows[0].detail


def test_a_device_without_code_is_refused_and_the_rest_qualified():
    gate, report = run(op := Op("double"), host=Host((9, 0), (12, 0)))
    assert [row.outcome for row in report.rows] == ["qualified", "refused"]
    assert report.rows[1].detail.startswith("arch_not_built: compute capability 12.0")
    assert report.exit_code == 1
    assert gate.verdict(op, 1).reason == "arch_not_built"
    assert run(op, host=Host((12, 0)))[1].exit_code == 2


# ---- how it is run ---------------------------------------------------------------------------------------------------


def test_every_kernel_is_loaded_before_the_first_case_and_every_case_waited_for():
    runner = Runner()
    report = run(Op("a", samples=2), Op("b", samples=1), runner=runner)[1]
    assert runner.log == [
        *("preload 0", "enter 0", "finish 0", "finish 0", "leave 0"),
        *("enter 0", "finish 0", "leave 0"),
    ]
    assert report.kernels == {0: 7}


def test_a_kernel_that_cannot_be_loaded_closes_the_device():
    op = Op("double")
    runner = Runner(preload=RuntimeError("preload on cuda:0: no kernel image"))
    gate, report = run(op, runner=runner, policy="trust")
    assert (outcomes(report), op.seen) == ([("double", 0, "not run")], [])
    assert gate.verdict(op, 0).detail == "RuntimeError: preload on cuda:0: no kernel image"


def test_a_spent_budget_starts_no_case_and_opens_nothing_unfinished():
    ops = [Op("first"), Op("second"), Op("third")]
    gate, report = run(*ops, budget_s=10, clock=Clock())
    assert [row.outcome for row in report.rows] == ["qualified", "not finished", "not finished"]
    assert (len(ops[0].seen), 0 < len(ops[1].seen) < 4, ops[2].seen) == (4, True, [])
    assert report.exit_code == 1
    assert gate.verdict(ops[1], 0).reason == "not_qualified"
    assert "the budget of 10 s was spent after 0 cases" in report.rows[2].detail
    assert run(Op("double"), budget_s=0)[1].rows[0].outcome == "not finished"


def test_a_breach_counts_though_the_budget_ends_the_op():
    op = Op("wrong", lambda x: 2 * x + 1)
    gate, report = run(op, budget_s=5, clock=Clock())
    assert (report.rows[0].outcome, len(op.seen) < 4) == ("failed", True)
    assert gate.verdict(op, 0).reason == "qualification_failed"


def test_not_finishing_takes_nothing_from_what_was_qualified_before():
    host, op = Host(), Op("double")
    gate = Gate(host, policy="strict", key=key_of)
    q.qualify(gate, [op], [0], Runner())
    q.qualify(gate, [op], [0], Runner(), budget_s=0)
    assert gate.verdict(op, 0).path == "fast"


@pytest.mark.parametrize("budget", [-1, float("nan"), "5"])
def test_a_budget_that_is_none_is_an_error(budget):
    with pytest.raises(ValueError, match="budget_s: expected seconds, 0 or more, got"):
        run(Op("double"), budget_s=budget)


def test_progress_names_every_case_and_every_end():
    steps = []
    run(Op("a", samples=2), Op("b", samples=1), progress=steps.append)
    assert [(s.done, s.total, s.op, s.number, s.case, s.row and s.row.outcome) for s in steps] == [
        (0, 2, "a", 1, "quick", None),
        (0, 2, "a", 2, "sample 1", None),
        (1, 2, "a", 0, "", "qualified"),
        (1, 2, "b", 1, "quick", None),
        (2, 2, "b", 0, "", "qualified"),
    ]


def test_inside_a_capture_it_is_an_error_and_nothing_is_run():
    host, op = Host(), Op("double")
    host.is_capturing = True
    with pytest.raises(RuntimeError, match="CUDA graph is being captured"):
        run(op, host=host)
    assert op.seen == []


def test_with_no_cuda_there_is_nothing_to_qualify():
    _, report = run(Op("double"), host=Host(cuda="torch sees no GPU"), devices=[])
    assert (report.exit_code, report.rows) == (2, ())
    assert report.problem == "no_cuda (torch sees no GPU)"
    assert "every op is answered by its PyTorch reference" in report.table()


# ---- the fingerprint moved -------------------------------------------------------------------------------------------


def test_a_fingerprint_that_moved_voids_what_this_run_does_not_renew():
    flags = {"tf32": False}
    gate = Gate(Host(), policy="strict", key=lambda device: key_of(device, **flags))
    a, b = Op("a"), Op("b")
    assert q.qualify(gate, [a, b], [0], Runner()).moved == {}
    flags["tf32"] = True
    assert gate.verdict(b, 0).path == "fast"
    report = q.qualify(gate, [a], [0], Runner())
    assert report.moved == {0: "runtime.flags.tf32: was false, now true"}
    assert gate.verdict(a, 0).path == "fast"
    assert "runtime.flags.tf32: was false, now true" in gate.verdict(b, 0).detail
    assert "qualified anew, for runtime.flags.tf32" in report.table()


def test_what_was_found_wrong_stays_wrong_when_the_fingerprint_moves():
    flags = {"tf32": False}
    gate = Gate(Host(), policy="trust", key=lambda device: key_of(device, **flags))
    wrong = Op("wrong", lambda x: x)
    q.qualify(gate, [wrong], [0], Runner())
    flags["tf32"] = True
    assert gate.look_again(0)
    assert gate.verdict(wrong, 0).reason == "qualification_failed"


def test_a_fingerprint_that_cannot_be_read_closes_the_device():
    def broken(device):
        raise OSError("no maps")

    gate, report = run(op := Op("double"), key=broken, policy="trust")
    assert (outcomes(report), gate.verdict(op, 0).detail) == ([("double", 0, "not run")], "OSError: no maps")


# ---- the caller's cases ----------------------------------------------------------------------------------------------


def cases_of(op, *given):
    return q.chosen_cases([op], {op.name: given}, [op.name, "other"])


def test_the_callers_cases_run_after_the_samples_on_every_device():
    op = Op("double", samples=1)
    given = cases_of(
        op, (torch.tensor([5, 6]),), Sample("mine", (), {"x": torch.tensor([7])}), [TensorSpec((3,), "int32")]
    )
    run(op, host=Host((9, 0), (8, 0)), cases=given)
    names = [name for name, *_ in op.seen]
    assert names == ["quick", "case 0", "mine", "case 2"] * 2
    assert torch.equal(op.seen[1][1], op.seen[5][1])
    assert torch.equal(op.seen[3][1], op.seen[7][1])


def test_a_case_of_the_callers_that_breaks_the_contract_closes_the_op():
    op = Op("wrong", off_by_one_at_three, samples=2)
    gate, report = run(op, cases=cases_of(op, (torch.tensor([1, 3]),)))
    assert gate.verdict(op, 0).reason == "qualification_failed"
    assert report.rows[0].detail.startswith("case 0 (yours): output 0 at [1]: got 7, want 6")


@pytest.mark.parametrize(
    ("case", "error", "says"),
    [
        (([1],), TypeError, r"cases\['double'\]\[0\]: x: expected a torch.Tensor, got list"),
        ((torch.ones(2, 2),), ValueError, r"x: expected shape \[N\], got \[2, 2\]"),
        ((TensorSpec((2, 2)),), ValueError, r"x: expected shape \[N\], got \[2, 2\]"),
        ((), TypeError, "missing a required argument: 'x'"),
        (3, TypeError, "expected a Sample or a tuple of arguments, got int"),
    ],
)
def test_a_case_that_is_no_right_call_is_an_error_before_anything_runs(case, error, says):
    with pytest.raises(error, match=says):
        cases_of(Op("double"), case)


@pytest.mark.parametrize(
    ("cases", "error", "says"),
    [
        ({"doubel": []}, UnknownOpError, "cases: .*'doubel'; did you mean double"),
        ({"other": []}, ValueError, "cases of the ops to qualify, got some of other"),
        ([1], TypeError, "cases: expected a mapping from op to its cases, got list"),
        ({"double": 3}, TypeError, r"cases\['double'\]: expected cases, got int"),
        ({"double": "abc"}, TypeError, "expected cases, got str"),
    ],
)
def test_cases_of_a_wrong_shape_are_an_error(cases, error, says):
    with pytest.raises(error, match=says):
        q.chosen_cases([Op("double")], cases, ["double", "other"])


LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:1].expand(5, -1),
    "misaligned": lambda x: x.flatten()[3:],
    "far inside": lambda x: x.flatten()[150:].view(-1, 2),
    "no rows": lambda x: x[:0],
    "a number": lambda x: x[2, 3],
    "conjugate": lambda x: torch.complex(x, -x).conj(),
    "negative": lambda x: torch.complex(x, -x).conj().imag,
    "a gradient asked for": lambda x: x.clone().requires_grad_(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_tensor_moves_with_its_values_strides_and_misalignment(layout, where):
    x = LAYOUTS[layout](torch.arange(240.0).view(20, 12))
    plain = x.detach().resolve_conj().resolve_neg()
    got = q.copied_to(x, torch.device(where))
    assert (got.shape, got.dtype, got.stride(), got.device.type) == (x.shape, x.dtype, plain.stride(), where)
    assert not got.requires_grad
    if where != "meta":
        assert torch.equal(got.cpu(), plain)
        assert got.numel() == 0 or got.data_ptr() != x.data_ptr()
    if x.numel():
        assert got.storage_offset() % 64 == plain.storage_offset() % 64
        assert got.untyped_storage().nbytes() <= plain.untyped_storage().nbytes()


def test_what_lies_in_lists_moves_and_what_is_no_tensor_stays():
    x = torch.ones(2)
    moved = q.moved_to([x, (x, 3), None, TensorSpec((4,))], torch.device("meta"))
    assert [moved[0].device.type, moved[1][0].device.type, moved[1][1], moved[2]] == ["meta", "meta", 3, None]
    assert moved[3].shape == (4,)
    assert q.moved_to(x, torch.device("cpu")) is x


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float64", "float8_e4m3fn", "complex64", "int64", "uint8", "bool"]
)
def test_a_spec_makes_the_same_tensor_each_time(dtype):
    spec = TensorSpec((5, 7), dtype)
    first, second = spec.make("cpu"), spec.make("cpu")
    assert (first.shape, first.dtype) == ((5, 7), getattr(torch, dtype))
    assert torch.equal(first.view(torch.uint8), second.view(torch.uint8))
    assert spec.make("meta").shape == (5, 7)
    strided = TensorSpec((5, 7), dtype, (14, 2)).make("cpu")
    assert (strided.stride(), len(strided.untyped_storage()) // strided.element_size()) == ((14, 2), 69)


def test_a_spec_of_whole_numbers_stays_below_its_bound():
    assert int(TensorSpec((1000,), "int64", high=3).make("cpu").max()) == 2


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shape": (2, -1)}, "shape: expected whole numbers"),
        ({"shape": 3}, "shape: expected whole numbers"),
        ({"shape": (True,)}, "shape: expected whole numbers"),
        ({"shape": (2,), "dtype": "float31"}, "dtype: expected the name of one of torch's dtypes, got 'float31'"),
        ({"shape": (2,), "dtype": "nn"}, "dtype: expected the name"),
        ({"shape": (2,), "stride": (1, 1)}, "stride: expected 1 numbers like shape, got 2"),
        ({"shape": (2,), "high": 0}, "high: expected a whole number of at least 1, got 0"),
    ],
)
def test_a_spec_of_nonsense_is_an_error(given, says):
    with pytest.raises(ValueError, match=says):
        TensorSpec(**given)


# ---- the report, and the lock made of it -----------------------------------------------------------------------------


def test_the_report_is_json_and_a_table():
    report = run(Op("double"), Op("wrong", lambda x: x, samples=3))[1]
    data = json.loads(report.json())
    assert (data["ok"], data["exit_code"], data["preloaded"]) == (False, 1, {"cuda:0": 7})
    assert [(row["op"], row["device"], row["outcome"], row["cases"], row["wrong"]) for row in data["rows"]] == [
        ("double", "cuda:0", "qualified", 4, 0),
        ("wrong", "cuda:0", "failed", 1, 2),
    ]
    assert set(data["fingerprint_sha256"]) == {"cuda:0"}
    lines = report.table().splitlines()
    assert lines[0].split() == ["op", "device", "outcome", "passed", "wrong", "refused", "seconds"]
    assert lines[1].split()[:3] == ["double", "cuda:0", "qualified"]
    assert lines[-1].startswith("1 of 2 qualified in ")


def test_a_lock_of_a_report_opens_what_passed_and_closes_what_did_not(tmp_path):
    good, wrong, unfinished = Op("good", kind="bitwise"), Op("wrong", lambda x: x), Op("unfinished")
    report = run(good, wrong, unfinished, budget_s=14, clock=Clock())[1]
    assert [row.outcome for row in report.rows] == ["qualified", "failed", "not finished"]
    report.write_lock(tmp_path / "lock")

    gate = Gate(Host(), policy="auto", key=key_of)
    gate.use_lock(lock_file.read(tmp_path / "lock"))
    assert gate.verdict(good, 0).path == "fast"
    assert gate.verdict(wrong, 0).reason == "qualification_failed"
    assert gate.verdict(unfinished, 0).qualification.by == "release evidence for sm_90"
    gate.set_policy("strict")
    assert gate.verdict(unfinished, 0).reason == "not_qualified"


def test_a_report_of_nothing_makes_no_lock(tmp_path):
    with pytest.raises(LockError, match="nothing was qualified"):
        run(Op("double"), budget_s=0)[1].write_lock(tmp_path / "lock")
    assert list(tmp_path.iterdir()) == []


def test_a_device_on_which_nothing_was_run_is_not_in_the_lock():
    class Second(Runner):
        def preload(self, device):
            if device == 1:
                raise RuntimeError("no kernel image")
            return 7

    report = run(Op("double"), host=Host((9, 0), (9, 0)), runner=Second())[1]
    assert set(report.lock().fingerprint.data["devices"]) == {"0"}


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_ops_are_chosen_by_name_in_the_order_of_the_tables():
    known = {name: Op(name) for name in ("a", "bc", "d")}
    assert [op.name for op in q.chosen_ops(known, None)] == ["a", "bc", "d"]
    assert [op.name for op in q.chosen_ops(known, ["d", "a", "d"])] == ["a", "d"]
    assert [op.name for op in q.chosen_ops(known, "bc")] == ["bc"]
    with pytest.raises(UnknownOpError, match=r"ops: .*'bd'; did you mean"):
        q.chosen_ops(known, ["bd"])


def test_devices_are_chosen_by_number_name_or_torch_device():
    assert q.chosen_devices([0, 1, 2], None) == [0, 1, 2]
    assert q.chosen_devices([0, 1, 2], [2, "0", "cuda:1", torch.device("cuda", 2)]) == [2, 0, 1]
    assert q.chosen_devices([0, 1, 2], 1) == q.chosen_devices([0, 1, 2], torch.device("cuda", 1)) == [1]
    for wrong in (3, "cuda", "cpu", -1, True, "x"):
        with pytest.raises(ValueError, match=r"devices: expected some of those here \(cuda:0, cuda:1\), got"):
            q.chosen_devices([0, 1], [wrong])


# ---- this process ----------------------------------------------------------------------------------------------------


def test_without_a_gpu_the_public_call_says_so():
    if state.gate.host.devices():
        pytest.skip("there is a GPU here")
    report = prequal.qualify()
    assert (report.exit_code, report.ok) == (2, False)
    assert report.table().startswith("nothing to qualify: no_")
    with pytest.raises(UnknownOpError, match="did you mean rms_norm"):
        prequal.qualify(ops="rms_nrom")


@pytest.mark.gpu
def test_every_op_qualifies_here_and_no_call_is_counted():
    state.gate.unqualify()
    report = prequal.qualify()
    assert report.ok, report.table()
    assert prequal.stats() == {}
    assert all(count >= len(state.native_ops) for count in report.kernels.values())
    assert {row.op for row in report.rows} == set(state.native_ops)
    for row in report.rows:
        assert isinstance(state.gate.qualification(row.op, row.device), Qualification)


@pytest.mark.gpu
def test_the_callers_state_is_none_of_the_samples_business(cuda):
    before = torch.get_default_dtype()
    stream = torch.cuda.current_stream()
    try:
        torch.set_default_device(cuda)
        torch.set_default_dtype(torch.bfloat16)
        with torch.autocast("cuda", dtype=torch.float16), torch.inference_mode():
            report = prequal.qualify("rms_norm", cuda)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)
    assert report.ok, report.table()
    assert torch.cuda.current_stream() == stream


@pytest.mark.gpu
def test_out_of_memory_in_a_case_closes_that_op_only(cuda):
    free, _ = torch.cuda.mem_get_info(cuda)
    rows = free // 4096 // 2 * 3  # one tensor of 1.5 times what is free
    report = prequal.qualify(["rms_norm", "knn"], cuda, cases={"rms_norm": [(TensorSpec((rows, 1024), "float32"),)]})
    by_op = {row.op: row for row in report.rows}
    assert {name: row.outcome for name, row in by_op.items()} == {"knn": "qualified", "rms_norm": "failed"}
    assert "case 0 (yours)" in by_op["rms_norm"].detail
    assert "OutOfMemoryError" in by_op["rms_norm"].detail
    assert prequal.explain("rms_norm", device=cuda).reason == "qualification_failed"
    assert prequal.explain("knn", device=cuda).path == "fast"


@pytest.mark.gpu
def test_after_qualifying_a_first_call_can_be_captured(cuda):
    state.gate.unqualify()
    prequal.qualify("rms_norm", cuda)
    x = torch.randn(8, 64, device=cuda)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prequal.rms_norm(x)
    graph.replay()
    assert prequal.rms_norm.op.contract.compare(out, prequal.rms_norm.op.reference(x)) is None
    assert prequal.stats()["rms_norm"][str(cuda)] == {"fast": 1, "reference": {}}

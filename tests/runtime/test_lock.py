"""The lock: what is right is believed on equal workers only; what is wrong is one sentence and a closed gate."""

import copy
import json
import logging
import multiprocessing
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import torch

import prequal
from prequal import runtime_state as state
from prequal.errors import LockError
from prequal.runtime import lock as lock_file
from prequal.runtime.fingerprint import DeviceProperties, TorchInfo, collect
from prequal.runtime.gate import Gate, Qualification
from prequal.runtime.loaded import LoadedLibrary
from prequal.runtime.lock import Entry, Lock, digest_of, key_of
from prequal.runtime.manifest import CudaBuild, Manifest, OpBuild
from prequal.runtime.nvml import Gpu

HOPPER = DeviceProperties(0, "NVIDIA H200", (9, 0), 132, 60 << 20, 232448, 233472, 150_754_820_096, "4377-a")
AMPERE = DeviceProperties(0, "NVIDIA A10", (8, 6), 72, 6 << 20, 101376, 102400, 23_609_475_072, "86-b")
CUBLAS = LoadedLibrary("cublas", "/a/libcublas.so.13", "libcublas.so.13", "13.1.0")
NVRTC = LoadedLibrary("nvrtc", "/a/libnvrtc.so.13", "libnvrtc.so.13", "13.0")
WHEN = "2026-05-04T03:02:01+00:00"
MANIFEST = Manifest(
    schema=1,
    version="0.1.0",
    cuda=CudaBuild("13.0", "13.0.88", "580"),
    archs=("80", "86", "90"),
    ops=MappingProxyType({"norm": OpBuild("a" * 64, ()), "gemm": OpBuild("b" * 64, ())}),
)


class Nvml:
    def driver_version(self):
        return "580.95.05"

    def gpus(self):
        return (Gpu(0, "GPU-4377", "NVIDIA H200", (9, 0)),)


class Probe:
    def __init__(self, device, flags=None, libraries=(CUBLAS,), environ=None):
        self._device, self._libraries = device, libraries
        self._flags = {"cuda_matmul_allow_tf32": False} if flags is None else flags
        self._environ = environ or {}

    def device(self):
        return self._device

    def libraries(self):
        return self._libraries

    def flags(self):
        return self._flags

    def environment(self):
        return self._environ


def stage_a(torch="2.13.0+cu130", environ=None):
    return collect(Nvml(), environ or {}, TorchInfo(torch, "abc", "13.0"))


def key(device=HOPPER, index=0, torch="2.13.0+cu130", **probe):
    device = replace(device, index=index)
    return key_of(stage_a(torch).with_device(Probe(device, **probe)), index)


def op(name, kind="tolerance", quick=None, contract=None):
    class Contract:
        def __str__(self):
            return contract or f"{kind} of {name}"

    Contract.kind = kind
    return SimpleNamespace(name=name, basename=name, contract=Contract(), quick_case=lambda device: quick)


NORM, GEMM = op("norm"), op("gemm", "bitwise")


def entry(of=NORM, device="0", **changed):
    built = MANIFEST.ops.get(of.basename)
    made = Entry(
        of.name,
        of.basename,
        built.digest if built else None,
        str(of.contract),
        device,
        "NVIDIA H200",
        "9.0",
        77,
        2,
        WHEN,
    )
    return made._replace(**changed)


def lock_of(keys=None, entries=None):
    return Lock.of({0: key()} if keys is None else keys, entries or [entry(NORM), entry(GEMM)], "0.1.0")


@pytest.fixture
def path(tmp_path):
    """A good lock of one H200."""
    lock_file.write(tmp_path / "prequal.lock.json", lock_of())
    return str(tmp_path / "prequal.lock.json")


class Host:
    def __init__(self, *devices):
        self.manifest = MANIFEST
        self.capabilities = [device.capability for device in devices or (HOPPER,)]
        self.opened = {}

    def native_problem(self):
        return None

    cuda_problem = native_problem

    def driver(self):
        return "580.95.05"

    def devices(self):
        return list(range(len(self.capabilities)))

    def capability(self, device):
        return self.capabilities[device]

    def loading_problem(self, basename, device):
        return None

    def capturing(self):
        return False

    def failure(self, op, device):
        return None

    def open(self, op, device, is_open):
        self.opened[op, device] = is_open


def gate_on(*devices, policy="auto", **probe):
    devices = devices or (HOPPER,)
    gate = Gate(Host(*devices), policy=policy)
    gate.read_key = lambda device: key(devices[device], device, **probe)
    return gate


def load(gate, path, devices=(), **stage):
    return lock_file.load(path, gate, lambda: stage_a(**stage), devices)


# ---- a valid lock ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["auto", "strict", "trust"])
@pytest.mark.parametrize("of", [NORM, GEMM], ids=["tolerance", "bitwise"])
def test_a_valid_lock_opens_every_contract_under_every_policy(path, of, policy):
    gate = gate_on(policy=policy)
    assert load(gate, path).ok
    verdict = gate.verdict(of, 0)
    assert (verdict.path, verdict.qualification) == ("fast", Qualification(f"lock {path}", WHEN))
    assert gate.host.opened[of.name, 0]


def test_a_lock_is_believed_on_an_equal_device_of_another_index_and_uuid(path):
    gate = gate_on(AMPERE, replace(HOPPER, uuid="other", memory_bytes=HOPPER.memory_bytes - 4096), policy="strict")
    load(gate, path)
    assert gate.verdict(NORM, 1).path == "fast"
    assert 'device.name: was "NVIDIA H200", now "NVIDIA A10"' in gate.verdict(NORM, 0).detail


def test_a_lock_of_a_mixed_worker_serves_each_kind_with_what_was_found_on_it(tmp_path):
    keys = {0: key(AMPERE, 0), 1: key(HOPPER, 1)}
    found = [entry(NORM, "0", problem="wide: got 1, want 2"), entry(NORM, "1")]
    lock_file.write(tmp_path / "lock", lock_of(keys, found))
    gate = gate_on(HOPPER, AMPERE, policy="strict")
    load(gate, tmp_path / "lock")
    assert gate.verdict(NORM, 0).path == "fast"
    failed = gate.verdict(NORM, 1)
    assert (failed.reason, failed.detail) == ("qualification_failed", "wide: got 1, want 2")


def test_of_equal_boards_the_one_that_was_wrong_speaks_for_all(tmp_path):
    keys = {0: key(HOPPER, 0), 1: key(HOPPER, 1)}
    lock_file.write(tmp_path / "lock", lock_of(keys, [entry(NORM, "0"), entry(NORM, "1", problem="wrong bits")]))
    gate = gate_on(policy="trust")
    load(gate, tmp_path / "lock")
    assert gate.verdict(NORM, 0).reason == "qualification_failed"


def test_the_key_leaves_out_what_comes_and_goes_by_itself():
    quiet = key()
    assert key(libraries=(CUBLAS, NVRTC)) == quiet
    before_cuda, after_cuda = stage_a(), stage_a(environ={"CUDA_MODULE_LOADING": "LAZY"})
    assert key_of(before_cuda) == key_of(after_cuda)
    lazy = Probe(HOPPER, environ={"CUDA_MODULE_LOADING": "LAZY"})
    assert key_of(before_cuda.with_device(lazy), 0) == key_of(after_cuda.with_device(lazy), 0)
    assert key(environ={"CUBLAS_WORKSPACE_CONFIG": ":16:8"}) != quiet


def test_a_written_lock_is_read_back_the_same(path):
    read = lock_file.read(path)
    assert (read.path, replace(read, path="", made="")) == (path, replace(lock_of(), made=""))


def test_what_the_lock_does_not_name_is_left_to_the_policy(tmp_path):
    lock_file.write(tmp_path / "lock", lock_of(entries=[entry(NORM)]))
    unnamed = op("gemm", quick=None)
    gate = gate_on()
    load(gate, tmp_path / "lock")
    assert gate.verdict(unnamed, 0).qualification.by == "quick case at first use"
    gate.set_policy("strict")
    assert "does not name gemm" in gate.verdict(unnamed, 0).detail
    assert "does not name gemm" in gate.verdict(GEMM, 0).detail


@pytest.mark.parametrize(
    ("changed", "says"),
    [({"source": "c" * 64}, "sources of norm"), ({"contract": "Tolerance (looser)"}, "contract of norm")],
)
def test_an_op_whose_sources_or_contract_moved_is_not_qualified_by_the_lock(tmp_path, changed, says):
    lock_file.write(tmp_path / "lock", lock_of(entries=[entry(NORM, **changed), entry(GEMM)]))
    gate = gate_on(policy="strict")
    load(gate, tmp_path / "lock")
    assert gate.verdict(GEMM, 0).path == "fast"
    verdict = gate.verdict(NORM, 0)
    assert verdict.reason == "not_qualified"
    assert says in verdict.detail


# ---- a stale lock ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"torch": "2.14.0"}, 'torch.version: was "2.13.0+cu130", now "2.14.0"'),
        ({"device": AMPERE}, 'device.name: was "NVIDIA H200", now "NVIDIA A10"'),
        ({"flags": {"cuda_matmul_allow_tf32": True}}, "runtime.flags.cuda_matmul_allow_tf32: was false, now true"),
        ({"libraries": (CUBLAS._replace(version="13.2"),)}, 'cublas.0.version: was "13.1.0", now "13.2"'),
        ({"environ": {"NVIDIA_TF32_OVERRIDE": "0"}}, 'NVIDIA_TF32_OVERRIDE: was absent, now "0"'),
    ],
)
@pytest.mark.parametrize("policy", ["auto", "strict", "trust"])
def test_a_stale_lock_closes_the_gate_and_names_what_moved(path, changed, field, policy):
    changed = dict(changed)
    gate = gate_on(changed.pop("device", HOPPER), policy=policy, **changed)
    status = load(gate, path, [0], torch=changed.get("torch", "2.13.0+cu130"))
    assert not status.ok
    assert field in str(status)
    for of in (NORM, GEMM):
        verdict = gate.verdict(of, 0)
        assert (verdict.path, verdict.reason) == ("reference", "not_qualified")
        assert field in verdict.detail
        assert path in verdict.detail


def test_a_stale_lock_is_one_line_in_the_log_however_many_devices(path, caplog):
    gate = gate_on(HOPPER, HOPPER, flags={"cuda_matmul_allow_tf32": True})
    assert load(gate, path).ok  # nothing was asked of a device yet
    with caplog.at_level(logging.ERROR, "prequal"):
        for device in (0, 1, 0):
            gate.verdict(NORM, device)
    assert [record.levelname for record in caplog.records] == ["ERROR"]


def test_an_explicit_qualification_outlives_a_stale_lock(path):
    gate = gate_on()
    gate.record("norm", 0, Qualification("qualification, 3 cases", WHEN))
    load(gate, path, torch="2.14.0")
    assert gate.verdict(NORM, 0).qualification.by == "qualification, 3 cases"
    assert gate.verdict(GEMM, 0).reason == "not_qualified"


def test_a_lock_does_not_whitewash_a_quick_case_that_failed_here(path):
    gate = gate_on()
    broken = op("norm", quick="quick: got 1, want 2")
    assert gate.verdict(broken, 0).reason == "qualification_failed"
    load(gate, path)
    assert gate.verdict(broken, 0).reason == "qualification_failed"


def test_loading_a_lock_forgets_what_the_one_before_had_said(path, tmp_path):
    lock_file.write(tmp_path / "other", lock_of(entries=[entry(NORM, problem="wrong"), entry(GEMM)]))
    gate = gate_on()
    load(gate, tmp_path / "other")
    assert gate.verdict(NORM, 0).reason == "qualification_failed"
    load(gate, path)
    assert gate.verdict(NORM, 0).path == "fast"
    gate.use_lock(None)
    assert gate.verdict(GEMM, 0).reason == "not_qualified"


def test_a_device_that_cannot_be_described_keeps_the_gate_closed(path):
    gate = gate_on(policy="trust")
    load(gate, path)

    def broken(device):
        raise RuntimeError("CUDA says no")

    gate.read_key = broken
    assert "cannot be checked: RuntimeError: CUDA says no" in gate.verdict(NORM, 0).detail


# ---- the fingerprint moves in a running process ----------------------------------------------------------------------


def test_a_flag_that_moves_is_noticed_where_somebody_looks_and_voids_the_lock(path):
    flags = {"cuda_matmul_allow_tf32": False}
    gate = gate_on(flags=flags)
    load(gate, path)
    assert gate.verdict(GEMM, 0).path == "fast"
    flags["cuda_matmul_allow_tf32"] = True
    assert gate.verdict(GEMM, 0).path == "fast"  # no call pays for watching
    (moved,) = gate.look_again_where_used()[0]
    assert moved.field == "runtime.flags.cuda_matmul_allow_tf32"
    assert gate.host.opened["gemm", 0] is False
    assert "allow_tf32: was false, now true" in gate.verdict(GEMM, 0).detail
    flags["cuda_matmul_allow_tf32"] = False
    gate.look_again(0)
    assert gate.verdict(GEMM, 0).path == "fast"


def test_a_flag_that_moves_voids_an_explicit_qualification_of_that_device_only():
    flags = {0: {"x": 1}, 1: {"x": 1}}
    gate = gate_on(HOPPER, HOPPER, policy="strict")
    gate.read_key = lambda device: key(HOPPER, device, flags=dict(flags[device]))
    for device in (0, 1):
        gate.look_again(device)
        gate.record("gemm", device, Qualification("qualification, 3 cases", WHEN))
    flags[0]["x"] = 2
    assert list(gate.look_again_where_used()) == [0]
    verdict = gate.verdict(GEMM, 0)
    assert verdict.reason == "not_qualified"
    assert "the fingerprint moved in this process: runtime.flags.x: was 1, now 2" in verdict.detail
    assert gate.verdict(GEMM, 1).path == "fast"


# ---- a broken lock ---------------------------------------------------------------------------------------------------


def good():
    return json.loads(json.dumps(lock_of().data()))


def resealed(change):
    data = good()
    change(data)
    data["fingerprint_sha256"] = data.get("fingerprint_sha256") and _sha(data)
    del data["digest"]
    return json.dumps({**data, "digest": digest_of(data)})


def _sha(data):
    return digest_of(data["fingerprint"]) if isinstance(data.get("fingerprint"), dict) else "0" * 64


def edited(change):
    data = good()
    change(data)
    return json.dumps(data)


BROKEN = {
    "empty": ("", "the file is empty"),
    "blank": (" \n", "the file is empty"),
    "truncated": (json.dumps(good())[:-400], "is broken"),
    "not JSON": ("qualified = true", "is broken: Expecting value"),
    "two documents": (json.dumps(good()) + "{}", "Extra data"),
    "not UTF-8": (b'{"schema": "\xff"}', "utf-8"),
    "UTF-16": (json.dumps(good()).encode("utf-16"), "utf-8"),
    "byte order mark": (b"\xef\xbb\xbf{}", "BOM"),
    "NaN": (json.dumps(good()).replace('"cases": 77', '"cases": NaN'), "NaN is not JSON"),
    "Infinity": (json.dumps(good()).replace('"cases": 77', '"cases": -Infinity'), "-Infinity is not JSON"),
    "a number beyond floats": (json.dumps(good()).replace('"cases": 77', '"cases": 1e999'), "is broken"),
    "a number beyond sense": (json.dumps(good()).replace('"cases": 77', '"cases": ' + "9" * 5000), "is broken"),
    "the same key twice": (json.dumps(good()).replace('"made":', '"made": "x", "made":'), '"made" is there twice'),
    "nested too deeply": ("[" * 200_000, "is broken"),
    "a list": ("[]", "expected an object"),
    "null": ("null", "expected an object"),
    "no schema": (edited(lambda data: data.pop("schema")), "schema: expected 1, found null"),
    "future schema": (edited(lambda data: data.update(schema=2)), "found 2 .a newer prequal wrote it"),
    "schema true": (edited(lambda data: data.update(schema=True)), "schema: expected 1, found true"),
    "edited by hand": (edited(lambda data: data["qualified"][0].update(cases=78)), "edited by hand"),
    "a problem taken out by hand": (edited(lambda data: data["qualified"][0].update(problem="x")), "edited by hand"),
    "the fingerprint edited": (edited(lambda data: data["fingerprint"].update(schema=7)), "edited by hand"),
    "no digest": (edited(lambda data: data.pop("digest")), "digest: missing"),
    "digest null": (edited(lambda data: data.update(digest=None)), "digest: expected text like"),
    "another field": (edited(lambda data: data.update(trust="me")), "trust: not a field of schema 1"),
    "no ops": (resealed(lambda data: data.update(qualified=[])), "qualified: expected a list of at least one"),
    "ops as object": (resealed(lambda data: data.update(qualified={})), "qualified: expected a list"),
    "op as text": (resealed(lambda data: data.update(qualified=["norm"])), "qualified.0: expected an object"),
    "no device": (resealed(lambda data: data["fingerprint"].update(devices={})), "devices: expected at least one"),
    "device as text": (resealed(lambda data: data["fingerprint"].update(devices={"0": "H200"})), "devices.0: expected"),
    "no runtime": (resealed(lambda data: data["fingerprint"].pop("runtime")), "fingerprint.runtime: expected"),
    "fingerprint as text": (resealed(lambda data: data.update(fingerprint="x")), "fingerprint: expected an object"),
    "cases as text": (resealed(lambda data: data["qualified"][0].update(cases="77")), "qualified.0.cases: expected"),
    "cases true": (resealed(lambda data: data["qualified"][0].update(cases=True)), "qualified.0.cases: expected"),
    "qualified by no case": (resealed(lambda data: data["qualified"][0].update(cases=0)), "at least 1, found 0"),
    "refused below 0": (resealed(lambda data: data["qualified"][0].update(refused=-1)), "refused: expected"),
    "when unknown": (resealed(lambda data: data["qualified"][0].update(when="yesterday")), "when: expected text"),
    "source cut": (resealed(lambda data: data["qualified"][0].update(source="abc")), "source: expected text"),
    "a device that is not there": (resealed(lambda data: data["qualified"][0].update(device="3")), "device: expected"),
    "an empty problem": (resealed(lambda data: data["qualified"][0].update(problem="")), "problem: expected text"),
    "a field missing": (resealed(lambda data: data["qualified"][0].pop("contract")), "qualified.0.contract: missing"),
    "a field more": (resealed(lambda data: data["qualified"][0].update(open=True)), "qualified.0.open: not a field"),
}


def write_broken(folder, kind):
    content = BROKEN[kind][0]
    path = folder / "prequal.lock.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("policy", ["auto", "trust"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_lock_is_one_clear_error_and_a_closed_gate(tmp_path, kind, policy):
    path, gate = write_broken(tmp_path, kind), gate_on(policy=policy)
    with pytest.raises(LockError, match=BROKEN[kind][1]) as caught:
        load(gate, path)
    text = str(caught.value)
    assert str(path) in text
    assert len(text.splitlines()) == 1
    assert len(text) < 600
    for of in (NORM, GEMM):
        verdict = gate.verdict(of, 0)
        assert (verdict.path, verdict.reason, text in verdict.detail) == ("reference", "not_qualified", True)


def test_a_lock_cut_at_any_byte_is_an_error(tmp_path):
    whole = json.dumps(lock_of().data())
    path = tmp_path / "lock"
    for length in range(0, len(whole), 97):
        path.write_text(whole[:length])
        with pytest.raises(LockError):
            lock_file.read(path)


def test_one_changed_letter_anywhere_is_an_error_or_the_same_lock(tmp_path):
    whole = json.dumps(lock_of().data())
    path = tmp_path / "lock"
    for place in range(0, len(whole), 53):
        path.write_text(whole[:place] + ("1" if whole[place] != "1" else "2") + whole[place + 1 :])
        with pytest.raises(LockError):
            lock_file.read(path)


def test_no_file_a_folder_and_a_file_of_no_rights_are_told_apart(tmp_path, path, monkeypatch):
    with pytest.raises(LockError, match="cannot be read: No such file"):
        lock_file.read(tmp_path / "absent")
    with pytest.raises(LockError, match=r"cannot be read: Is a directory|found a directory"):
        lock_file.read(tmp_path)
    with pytest.raises(LockError, match="cannot be read: Not a directory"):
        lock_file.read(f"{path}/lock")
    if os.geteuid() != 0:
        os.chmod(path, 0)
        with pytest.raises(LockError, match="cannot be read: Permission denied"):
            lock_file.read(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LockError, match="expected a regular file"):
        lock_file.read(tmp_path / "pipe")


def test_a_huge_file_is_refused_by_its_size_alone(tmp_path):
    with open(tmp_path / "huge", "wb") as file:
        file.truncate(1 << 40)  # sparse: reading it would not end in this test's life
    with pytest.raises(LockError, match="expected at most 4,194,304 bytes, found 1,099,511,627,776"):
        lock_file.read(tmp_path / "huge")


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_often(path, version, times):
    lock = replace(lock_of(entries=[entry(NORM, cases=1 + n) for n in range(200)]), version=version)
    for _ in range(times):
        lock_file.write(path, lock)


def test_several_writers_and_a_reader_never_see_a_torn_lock(path):
    spawn = multiprocessing.get_context("fork" if sys.version_info < (3, 12) else "forkserver")
    writers = [spawn.Process(target=write_often, args=(path, f"writer{n}", 25)) for n in range(4)]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        seen.add(lock_file.read(path).version)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    last = lock_file.read(path)
    assert last.version in {"writer0", "writer1", "writer2", "writer3"}
    assert len(last.entries) == 200
    assert seen
    assert os.listdir(os.path.dirname(path)) == [os.path.basename(path)]


def test_a_lock_keeps_the_rights_that_the_umask_gives_and_follows_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "lock")
    before = os.umask(0o022)
    try:
        lock_file.write(tmp_path / "link", lock_of())
    finally:
        os.umask(before)
    assert (tmp_path / "link").is_symlink()
    assert stat.S_IMODE(os.stat(tmp_path / "real" / "lock").st_mode) == 0o644


def test_a_write_that_fails_leaves_the_old_lock_and_no_rest(tmp_path, path):
    before = Path(path).read_bytes()
    (tmp_path / "folder").mkdir()
    with pytest.raises(LockError, match="folder cannot be written: Is a directory"):
        lock_file.write(tmp_path / "folder", lock_of())
    with pytest.raises(LockError, match="cannot be written: No such file"):
        lock_file.write(tmp_path / "absent" / "lock", lock_of())
    assert Path(path).read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["folder", "prequal.lock.json"]


def test_no_lock_is_made_of_nothing_or_of_two_states():
    with pytest.raises(LockError, match="nothing was qualified"):
        Lock.of({}, [], "0.1.0")
    keys = {0: key(), 1: key(HOPPER, 1, flags={"cuda_matmul_allow_tf32": True})}
    with pytest.raises(LockError, match=r"moved while qualifying: .*allow_tf32: was false, now true"):
        lock_of(keys)


def test_the_content_is_sealed_whatever_the_order_of_its_keys(tmp_path):
    data = lock_of().data()
    (tmp_path / "lock").write_text(json.dumps(dict(reversed(list(copy.deepcopy(data).items())))))
    assert lock_file.read(tmp_path / "lock").data() == data


# ---- this process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_lock_after():
    yield
    state.gate.use_lock(None)


def test_load_lock_raises_and_closes_for_a_broken_file(tmp_path, no_lock_after):
    with pytest.raises(LockError, match="expected an object"):
        prequal.load_lock(write_broken(tmp_path, "null"))
    assert "expected an object" in state.gate.lock_problem


def test_load_lock_of_another_worker_says_what_moved(path, no_lock_after):
    status = prequal.load_lock(path)
    assert not status.ok
    assert "torch.version" in {change.field for change in status.moved}
    assert "is not valid here" in str(status)


def run_python(code, **environ):
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("kind", ["truncated", "future schema", "edited by hand", "nested too deeply"])
def test_a_broken_lock_in_the_environment_is_one_line_and_no_crash(tmp_path, kind):
    path = write_broken(tmp_path, kind)
    code = (
        "import torch, prequal; from prequal import runtime_state as s\n"
        "print(s.gate.lock_problem); print(prequal.rms_norm(torch.ones(2, 4), eps=0.0).sum().item())\n"
        "assert not torch.cuda.is_initialized()"
    )
    done = run_python(code, PREQUAL_LOCK=str(path))
    problem, total = done.stdout.splitlines()
    assert (done.returncode, total) == (0, "8.0"), done.stderr
    assert problem.startswith(f"PREQUAL_LOCK: lock {path} ")
    errors = [line for line in done.stderr.splitlines() if "PREQUAL_LOCK" in line]
    assert errors == [f"{problem}; until prequal.qualify() the reference answers"]


def test_a_lock_in_the_environment_is_read_at_import_and_compared_at_first_use(path):
    code = (
        "import torch, prequal; from prequal import runtime_state as s\n"
        "print(s.gate.lock.path, s.gate.lock_problem, s._fingerprint, torch.cuda.is_initialized())"
    )
    done = run_python(code, PREQUAL_LOCK=path)
    assert (done.stdout.strip(), done.stderr) == (f"{path} None None False", "")


@pytest.fixture(scope="module")
def lock_of_this_worker(tmp_path_factory):
    path = tmp_path_factory.mktemp("lock") / "prequal.lock.json"
    done = subprocess.run(
        [sys.executable, "-m", "prequal", "qualify", "--write", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(path)


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["", "torch.ones(1, device='cuda')\n"], ids=["prequal first", "CUDA first"])
def test_a_lock_made_here_opens_every_op_in_a_new_process(lock_of_this_worker, first):
    """torch sets CUDA_MODULE_LOADING as it initialises CUDA: the key is the same on either side of that."""
    code = (
        f"import torch\n{first}import prequal\n"
        "from prequal.runtime import gate\n"
        f"assert torch.cuda.is_initialized() == {bool(first)}\n"
        "prequal.rms_norm(torch.ones(2, 4, device='cuda'))\n"
        "print(prequal.stats()['rms_norm'])\n"
        "print({row['path'] for row in gate.rows(run=False)}, {row['qualified'] for row in gate.rows(run=False)})\n"
    )
    done = run_python(code, PREQUAL_LOCK=lock_of_this_worker, PREQUAL_POLICY="strict")
    assert (done.returncode, done.stderr) == (0, "")
    calls, rows = done.stdout.splitlines()
    assert calls == "{'cuda:0': {'fast': 1, 'reference': {}}}"
    assert rows.startswith(f"{{'fast'}} {{'lock {lock_of_this_worker}, ")


@pytest.mark.gpu
def test_a_numeric_flag_of_torch_makes_the_lock_stale(lock_of_this_worker, cuda, no_lock_after):
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = not before
        status = prequal.load_lock(lock_of_this_worker, [cuda])
        assert any("allow_tf32" in str(change) for change in status.devices[cuda.index])
        assert "allow_tf32" in prequal.explain("rms_norm", device=cuda).detail
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
def test_explain_finds_the_lock_of_this_worker_valid(lock_of_this_worker):
    command = [sys.executable, "-m", "prequal", "lock", "explain", lock_of_this_worker]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "valid" in done.stdout) == (0, True), done.stdout + done.stderr

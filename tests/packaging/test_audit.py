"""Every audit of ci/audit_wheel.py is seen to fail on a wheel that is wrong in that respect, and to pass otherwise."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "ci")]  # programs and helpers, no package

from making_wheels import ARCHS, ENTRY_POINT, KERNEL, MODULE, READABLE, compiler, cuobjdump, make_wheel, shared_object

import audit_wheel
import kernel_resources
from audit_wheel import AUDITS, BrokenWheel, NotApplicable, NoTool

SHOWN: set[str] = set()
INFO = "prequal-1.0.dist-info"


def shows(audit: str):
    """Marks a test that shows this audit failing."""
    SHOWN.add(audit)
    return lambda test: test


@pytest.fixture(scope="module")
def module(tmp_path_factory) -> bytes:
    return shared_object(tmp_path_factory.mktemp("module"))


def budget(kernels=None, *, frames=(), wheel_bytes=100_000) -> dict:
    usual = {READABLE: {arch: [32, 0, 0] for arch in ARCHS}}
    return {
        "schema": 1,
        "wheel_bytes": wheel_bytes,
        "frames": dict.fromkeys(frames, "meant"),
        "toolkits": {"13.0": usual if kernels is None else kernels},
    }


def findings(audit: str, wheel: pathlib.Path, *, against=None, dump=None, forbidden=()) -> list[str]:
    held_against = budget() if against is None else against
    made = audit_wheel.subject(wheel, wheel.parent, budget=held_against, dump=dump or cuobjdump(), forbidden=forbidden)
    return list(AUDITS[audit](made))


# ---- what is right passes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("audit", AUDITS)
def test_a_right_wheel_passes_every_audit(audit, module, tmp_path):
    try:
        assert findings(audit, make_wheel(tmp_path, module=module)) == []
    except NoTool as missing:
        assert audit == "abi3"
        pytest.skip(str(missing))


@pytest.mark.parametrize("audit", AUDITS)
def test_a_right_cpu_wheel_passes_every_audit_that_applies(audit, tmp_path):
    binary = {"needed", "versions", "exports", "abi3", "machine_code", "limits", "budget"}
    if audit in binary:
        with pytest.raises(NotApplicable, match="CPU build"):
            findings(audit, make_wheel(tmp_path))
    else:
        assert findings(audit, make_wheel(tmp_path)) == []


def test_every_audit_is_shown_failing():
    assert set(AUDITS) == SHOWN


# ---- the file as a whole ---------------------------------------------------------------------------------------------


@shows("record")
def test_a_tampered_member_is_found(tmp_path):
    wheel = make_wheel(tmp_path)
    record = audit_wheel.Wheel(wheel).members[f"{INFO}/RECORD"]
    (line,) = findings("record", make_wheel(tmp_path, members={"prequal/py.typed": "x", f"{INFO}/RECORD": record}))[:1]
    assert line.startswith("prequal/py.typed: RECORD has sha256=")


@shows("record")
def test_members_that_record_does_not_list_and_rows_without_member_are_found(tmp_path):
    record = audit_wheel.Wheel(make_wheel(tmp_path)).members[f"{INFO}/RECORD"]
    members = {"prequal/extra.py": "", "prequal/py.typed": None, f"{INFO}/RECORD": record}
    assert findings("record", make_wheel(tmp_path, members=members)) == [
        "prequal/py.typed: in RECORD, not in the archive",
        "prequal/extra.py: in the archive, not in RECORD",
    ]


@shows("record")
def test_a_name_that_leads_out_of_the_folder_is_found(tmp_path):
    (line,) = findings("record", make_wheel(tmp_path, members={"../up.py": ""}))
    assert line == "../up.py: a name that leads out of the folder it is unpacked in"


@shows("tag")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"manifest": {"python_abi": "cp311"}}, "the module is for cp311, the file's name says cp312-abi3"),
        ({"manifest": {"version": "0.9"}}, "the file's name has 1.0, the manifest has 0.9"),
        ({"tag": "cp312-abi3-win_amd64"}, "expected linux or manylinux"),
        ({"members": {f"{INFO}/WHEEL": "Tag: cp312-abi3-linux_x86_64\n"}}, "WHEEL has ['cp312-abi3-linux_x86_64']"),
        ({"module": None, "tag": "cp312-abi3-linux_x86_64"}, "expected py3-none-any of a CPU build"),
    ],
)
def test_a_tag_that_contradicts_the_wheel_is_found(change, said, tmp_path):
    assert any(said in line for line in findings("tag", make_wheel(tmp_path, **({"module": b""} | change))))


@shows("contents")
@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"prequal/py.typed": None}, "prequal/py.typed: missing"),
        ({f"{INFO}/licenses/LICENSE": None}, f"{INFO}/licenses/LICENSE: missing"),
        ({"prequal/knn.cu": ""}, "prequal/knn.cu: does not belong into a wheel"),
        ({"tests/x.py": ""}, f"tests/x.py: expected only prequal/ and {INFO}/"),
        ({"prequal.libs/libcudart.so.13": b""}, f"prequal.libs/libcudart.so.13: expected only prequal/ and {INFO}/"),
    ],
)
def test_what_is_missing_or_does_not_belong_is_found(members, said, tmp_path):
    assert findings("contents", make_wheel(tmp_path, members=members)) == [said]


@shows("paths")
def test_a_path_of_the_building_machine_in_a_binary_is_found(tmp_path):
    source = 'const char* where(void) { return "/tmp/pip-build-env-x1/overlay/nanobind.h"; }' + ENTRY_POINT
    wheel = make_wheel(tmp_path, module=shared_object(tmp_path, source))
    assert findings("paths", wheel) == [f"{MODULE}: /tmp/pip-build-env-x1/overlay/nanobind.h"]


@shows("paths")
def test_a_path_in_a_text_and_a_forbidden_folder_of_ones_own_are_found(tmp_path):
    members = {"prequal/_native.pyi": "# made in /home/somebody/prequal", "prequal/a.py": "PLACE = '/srv/build/x.py'"}
    wheel = make_wheel(tmp_path, members=members)
    assert findings("paths", wheel) == ["prequal/_native.pyi: /home/somebody/prequal"]
    assert findings("paths", wheel, forbidden=["/srv/build"])[1:] == ["prequal/a.py: /srv/build/x.py"]


def test_an_address_on_the_network_is_no_path_of_a_machine(tmp_path):
    wheel = make_wheel(tmp_path, members={"prequal/a.py": "# https://example.org/home/page and ../tmp/file"})
    assert findings("paths", wheel) == []


@shows("size")
def test_an_oversize_wheel_is_found_with_its_largest_members(tmp_path):
    wheel = make_wheel(tmp_path, members={"prequal/noise.bin": os.urandom(5000)})
    (line,) = findings("size", wheel, against=budget(wheel_bytes=4000))
    assert line.startswith(f"{wheel.stat().st_size:,} bytes, the budget has 4,000")
    assert "prequal/noise.bin" in line.splitlines()[1]
    assert len(line.splitlines()) <= 11


@shows("size")
def test_a_budget_beyond_the_matrix_is_found(tmp_path):
    (line,) = findings("size", make_wheel(tmp_path), against=budget(wheel_bytes=2**30))
    assert line.startswith("the budget allows 1024.0 MiB, ci/matrix.toml")


@shows("sbom")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "missing"),
        ("{", "not a bill of prequal's"),
        ('{"bomFormat": "CycloneDX"}', "not a bill of prequal's"),
    ],
)
def test_a_missing_or_broken_bill_of_materials_is_found(text, said, tmp_path):
    (line,) = findings("sbom", make_wheel(tmp_path, members={f"{INFO}/sboms/prequal.cdx.json": text}))
    assert said in line


@shows("sbom")
def test_a_bill_that_forgets_cudart_or_a_licence_is_found(tmp_path):
    part = {"name": "nanobind", "version": "3", "properties": [{"name": "prequal:bundled", "value": "true"}]}
    about = {"component": {"name": "prequal", "version": "0.9"}}
    text = json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.6", "metadata": about, "components": [part]})
    found = findings("sbom", make_wheel(tmp_path, module=b"", members={f"{INFO}/sboms/prequal.cdx.json": text}))
    assert found == [
        "sbom: expected prequal 1.0, found prequal 0.9",
        "sbom: nanobind has no licence",
        "sbom: expected cudart_static with a version among what is inside, found ['nanobind']",
    ]


# ---- the module as a shared object -----------------------------------------------------------------------------------


@shows("needed")
@pytest.mark.parametrize(
    "library", ["libcudart.so.13", "libcuda.so.1", "libtorch.so", "libc10.so", "libpython3.12.so.1.0"]
)
def test_a_module_that_needs_a_library_of_others_is_found(library, tmp_path):
    shared_object(tmp_path, "int borrowed(void) { return 1; }", f"-Wl,-soname,{library}", name="lib.so")
    source = "int borrowed(void); int PyInit__native(void) { return borrowed(); }"
    wheel = make_wheel(tmp_path, module=shared_object(tmp_path, source, "./lib.so"))
    assert findings("needed", wheel) == [f"{MODULE}: needs {library}"]


@shows("needed")
@pytest.mark.parametrize("kind", ["--disable-new-dtags", "--enable-new-dtags"])
def test_a_module_that_searches_a_folder_is_found(kind, tmp_path):
    module = shared_object(tmp_path, ENTRY_POINT, f"-Wl,{kind},-rpath,/usr/local/cuda/lib64")
    (line,) = findings("needed", make_wheel(tmp_path, module=module))
    assert line == f"{MODULE}: expected no RPATH or RUNPATH, found '/usr/local/cuda/lib64'"


def versioned(folder: pathlib.Path, version: str) -> bytes:
    """A module that demands a symbol version of a library that pretends to be the C library."""
    (folder / "map").write_text(f"{version} {{ global: borrowed; }};")
    shared_object(
        folder, "int borrowed(void) { return 1; }", "-Wl,--version-script,map", "-Wl,-soname,libc.so.6", name="lib.so"
    )
    return shared_object(folder, "int borrowed(void); int PyInit__native(void) { return borrowed(); }", "./lib.so")


@shows("versions")
@pytest.mark.parametrize(
    ("version", "platform", "limit"),
    [
        ("GLIBC_2.34", "manylinux_2_28", "GLIBC_2.28"),
        ("GLIBC_2.28", "manylinux_2_27", "GLIBC_2.27"),
        ("GLIBC_2.18", "manylinux2014", "GLIBC_2.17"),
        ("GLIBCXX_3.4.26", "manylinux_2_28", "GLIBCXX_3.4.24"),
        ("CXXABI_1.3.13", "manylinux_2_28", "CXXABI_1.3.11"),
        ("GCC_12.0.0", "manylinux_2_28", "GCC_7.0.0"),
    ],
)
def test_a_symbol_version_newer_than_the_tag_is_found(version, platform, limit, tmp_path):
    wheel = make_wheel(tmp_path, module=versioned(tmp_path, version), tag=f"cp312-abi3-{platform}_x86_64")
    said = f"{MODULE}: needs {version}, {platform}_x86_64 promises at most {limit}"
    assert said in findings("versions", wheel)


def test_a_symbol_version_as_old_as_the_tag_passes_and_the_older_of_two_tags_counts(tmp_path):
    module = versioned(tmp_path, "GLIBC_2.28")
    assert not findings("versions", make_wheel(tmp_path, module=module, tag="cp312-abi3-manylinux_2_28_x86_64"))
    both = make_wheel(tmp_path, module=module, tag="cp312-abi3-manylinux_2_28_x86_64.manylinux_2_27_x86_64")
    assert findings("versions", both)
    with pytest.raises(NotApplicable, match="linux_x86_64 promises nothing"):
        findings("versions", make_wheel(tmp_path, module=module, tag="cp312-abi3-linux_x86_64"))


@shows("exports")
def test_a_module_that_exports_cudart_or_lacks_its_entry_point_is_found(tmp_path):
    module = shared_object(tmp_path, "int cudaMalloc(void) { return 0; }")
    assert findings("exports", make_wheel(tmp_path, module=module)) == [
        f"{MODULE}: expected PyInit__native among the exported symbols",
        f"{MODULE}: exports cudaMalloc",
    ]


@shows("abi3")
def test_symbols_outside_the_limited_api_and_newer_than_the_tag_are_found(tmp_path):
    pytest.importorskip("abi3audit")
    source = """
int _PyLong_Sign(void*); int PyUnicode_EqualToUTF8(void*, void*);
int PyInit__native(void) { return _PyLong_Sign(0) + PyUnicode_EqualToUTF8(0, 0); }
"""
    assert findings("abi3", make_wheel(tmp_path, module=shared_object(tmp_path, source))) == [
        f"{MODULE}: _PyLong_Sign is not in the limited API",
        f"{MODULE}: PyUnicode_EqualToUTF8 is in the limited API from 3.13 on, the tag says 3.12",
    ]


def test_abi3_is_asked_of_abi3_wheels_alone(module, tmp_path):
    with pytest.raises(NotApplicable, match="cp311-cp311 is for one Python"):
        findings("abi3", make_wheel(tmp_path, module=module, tag="cp311-cp311-linux_x86_64"))


def test_a_module_that_is_no_elf_file_or_is_cut_off_fails_with_its_name(module, tmp_path):
    for data in (b"MZ", module[:200], module[:-100]):
        with pytest.raises(BrokenWheel, match=r"prequal/_native\.abi3\.so: "):
            findings("needed", make_wheel(tmp_path, module=data))


@pytest.mark.parametrize("audit", ["needed", "machine_code"])
def test_a_cpu_build_with_a_binary_in_it_fails(audit, tmp_path):
    with pytest.raises(BrokenWheel, match=r"built without CUDA, and there is prequal/x\.so"):
        findings(audit, make_wheel(tmp_path, members={"prequal/x.so": b"\x7fELF"}))


# ---- the machine code in it ------------------------------------------------------------------------------------------


def of_all(**use: int) -> dict:
    return {arch: {KERNEL: use} for arch in ARCHS}


@shows("machine_code")
def test_an_architecture_of_the_manifest_that_a_kernel_lacks_is_found(tmp_path):
    dump = cuobjdump(kernels={arch: {KERNEL: {}} for arch in ("80", "90")})
    (line,) = findings("machine_code", make_wheel(tmp_path, module=b""), dump=dump)
    assert line == f"{READABLE}: machine code for sm_80, sm_90, the manifest says sm_80, sm_86, sm_89, sm_90"


@shows("machine_code")
def test_ptx_in_the_module_and_in_the_manifest_are_found(tmp_path):
    wheel = make_wheel(tmp_path, module=b"", manifest={"ptx": ["90"]})
    assert findings("machine_code", wheel, dump=cuobjdump(ptx=["_native.1.sm_90.ptx"])) == [
        "the manifest lists PTX for ['90']",
        f"{MODULE}: holds PTX (PTX file    1: _native.1.sm_90.ptx)",
    ]


@shows("machine_code")
def test_a_module_without_kernels_is_found(tmp_path):
    assert findings("machine_code", make_wheel(tmp_path, module=b""), dump=cuobjdump(kernels={})) == [
        f"{MODULE}: no kernel"
    ]


@shows("limits")
def test_more_static_shared_memory_than_a_block_has_is_found(tmp_path):
    dump = cuobjdump(kernels={"80": {KERNEL: {"SHARED": 49152}}, "86": {KERNEL: {"SHARED": 49153}}})
    assert findings("limits", make_wheel(tmp_path, module=b""), dump=dump) == [
        f"{READABLE} on sm_86: 49153 bytes of static shared memory, a block has 49152"
    ]


@shows("limits")
def test_registers_that_the_largest_declared_block_cannot_have_are_found(tmp_path):
    wheel = make_wheel(tmp_path, module=b"")
    assert not findings("limits", wheel, dump=cuobjdump(kernels=of_all(REG=64), blocks={KERNEL: 1024}))
    assert not findings("limits", wheel, dump=cuobjdump(kernels=of_all(REG=200)))
    found = findings("limits", wheel, dump=cuobjdump(kernels=of_all(REG=65), blocks={KERNEL: 1024}))
    assert found[0] == (f"{READABLE} on sm_80: 65 registers for 1024 threads make 73728, a multiprocessor has 65536")


@shows("budget")
@pytest.mark.parametrize(
    ("use", "said"),
    [
        ({"REG": 41}, "41 registers, the budget has 32 + 8"),
        ({"SHARED": 129}, "129 bytes of shared memory, the budget has 0"),
        ({"STACK": 16}, "16 bytes of stack or local memory a thread, the budget has 0"),
        ({"LOCAL": 8}, "8 bytes of stack or local memory a thread, the budget has 0"),
    ],
)
def test_more_registers_shared_memory_or_stack_than_the_budget_is_found_by_the_kernels_name(use, said, tmp_path):
    dump = cuobjdump(kernels=of_all() | {"86": {KERNEL: use}})
    assert f"{READABLE} on sm_86: {said}" in findings("budget", make_wheel(tmp_path, module=b""), dump=dump)


def test_registers_within_the_slack_pass(tmp_path):
    dump = cuobjdump(kernels=of_all(REG=40, SHARED=128))
    assert findings("budget", make_wheel(tmp_path, module=b""), dump=dump) == []


@shows("budget")
def test_a_spill_needs_a_reason_even_where_the_numbers_of_the_budget_have_it(tmp_path):
    wheel, dump = make_wheel(tmp_path, module=b""), cuobjdump(kernels=of_all(STACK=568))
    spilled = {READABLE: {arch: [32, 568, 0] for arch in ARCHS}}
    (line,) = findings("budget", wheel, dump=dump, against=budget(spilled))
    assert line.startswith(f"{READABLE}: 568 bytes of stack or local memory a thread: registers spill")
    assert findings("budget", wheel, dump=dump, against=budget(spilled, frames=[r"::search_kernel<"])) == []


@shows("budget")
def test_a_reason_that_no_kernel_needs_any_more_is_found(tmp_path):
    (line,) = findings("budget", make_wheel(tmp_path, module=b""), against=budget(frames=["::search_kernel<"]))
    assert line.endswith("has a frame; take it out")


@shows("budget")
def test_an_unknown_kernel_and_one_that_is_gone_tell_how_to_update(tmp_path):
    dump = cuobjdump(kernels={arch: {"_ZN7prequal3newEv": {}} for arch in ARCHS})
    assert findings("budget", make_wheel(tmp_path, module=b""), dump=dump) == [
        f"{READABLE}: in the budget, not in the module; --update-budget takes it out",
        "prequal::new: not in the budget; --update-budget puts it in",
    ]


@shows("budget")
def test_the_default_toolkit_needs_a_budget_and_another_says_that_nothing_was_compared(tmp_path):
    empty = budget() | {"toolkits": {}}
    assert findings("budget", make_wheel(tmp_path, module=b""), against=empty) == [
        "the budget holds nothing for CUDA 13.0: --update-budget"
    ]
    with pytest.raises(NotApplicable, match=r"nothing for CUDA 12\.9"):
        findings("budget", make_wheel(tmp_path, module=b"", toolkit="12.9"), against=empty)


# ---- names of kernels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        (KERNEL, READABLE),
        (KERNEL.replace("33be34da", "fad7d3f7").replace("9fb13d09", "00000000"), READABLE),
        (
            "_ZN7prequal3ops44_GLOBAL__N__97d4362d_11_rms_norm_cu_88ef2c2610block_rowsI13__nv_bfloat16Li1ELi4EEEvPKT_",
            "prequal::ops::rms_norm.cu::block_rows<__nv_bfloat16,1,4>",
        ),
        ("_ZN1a1kIfLb1ELin3EKPdEEvv", "a::k<float,true,-3,double* const>"),
        ("_ZN1a1kISt4pairIifEEEvv", "a::k<std::pair<int,float>>"),
        ("_Z5plainv", "plain"),
        ("_Z9templatedIjEvv", "templated<uint>"),
        ("no_mangling", "no_mangling"),
        (
            "_ZN3cub29CUB_300001_SM_800_860_890_9006detail11EmptyKernelIvEEvv",
            "cub::CUB::detail::EmptyKernel<void>",
        ),
        ("_ZN1a1kIXadL_Z3addEEEEvv", "_ZN1a1kIXadL_Z3addEEEEvv"),  # beyond the reader: as it is
    ],
)
def test_names_are_readable_and_free_of_hashes(mangled, name):
    assert kernel_resources.stable_name(mangled) == name


def test_two_kernels_never_share_a_name():
    names = kernel_resources.stable_names(["_ZN1a1kIiEEvi", "_ZN1a1kIiEEvf", "_ZN1a1hEv"])
    assert len(set(names.values())) == 3
    assert names["_ZN1a1hEv"] == "a::h"


def test_of_a_kernel_that_two_files_made_the_larger_counts():
    once = [" Function k:", "  REG:10 STACK:8 SHARED:0 LOCAL:0", " Function k:", "  REG:20 STACK:0 SHARED:4 LOCAL:0"]
    dump = {"-res-usage": ["arch = sm_80", *once], "-elf": []}
    assert kernel_resources.resources(lambda option: dump[option]) == {
        "k": {"80": kernel_resources.Use(20, 8, 4)},
    }


# ---- with the real compiler ------------------------------------------------------------------------------------------


def test_real_ptx_and_a_real_frame_are_found_in_what_nvcc_made(tmp_path):
    compiler()
    try:
        nvcc = kernel_resources.find_tool("nvcc")
        kernel_resources.find_tool("cuobjdump")
    except NoTool as missing:
        pytest.skip(str(missing))
    (tmp_path / "k.cu").write_text(
        "namespace prequal { __global__ void __launch_bounds__(64) framed(int* p) {"
        " int a[500]; for (int i = 0; i < 500; ++i) a[p[i]] = i; p[0] = a[p[1]]; } }"
    )
    code = ["-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=compute_90"]
    subprocess.run([nvcc, "-c", *code, "k.cu", "-o", "k.o"], check=True, capture_output=True, cwd=tmp_path)
    wheel = make_wheel(tmp_path, module=(tmp_path / "k.o").read_bytes(), manifest={"archs": ["80"]})
    made = audit_wheel.subject(wheel, tmp_path, budget=budget({}))

    assert any("holds PTX" in line for line in AUDITS["machine_code"](made))
    assert made.kernels["prequal::framed"]["80"].block == 64
    assert any("prequal::framed: 2000 bytes of stack" in line for line in AUDITS["budget"](made))


# ---- the program -----------------------------------------------------------------------------------------------------


@pytest.fixture
def canned(monkeypatch):
    """The program, with cuobjdump's answers made up and without the audit that needs abi3audit."""
    monkeypatch.setattr(audit_wheel, "dump_of", lambda module: cuobjdump())
    monkeypatch.setattr(audit_wheel, "AUDITS", {name: audit for name, audit in AUDITS.items() if name != "abi3"})


def test_it_exits_with_0_1_and_2(canned, module, tmp_path, capsys):
    file = tmp_path / "budget.json"
    good = make_wheel(tmp_path / "good", module=module)
    assert audit_wheel.main([str(good), "--budget", str(file), "--update-budget"]) == 0
    assert "record: passed" in capsys.readouterr().out

    bad = make_wheel(tmp_path / "bad", module=module, members={"prequal/py.typed": None})
    assert audit_wheel.main([str(bad), "--budget", str(file)]) == 1
    assert "contents: failed\n  prequal/py.typed: missing" in capsys.readouterr().out

    (tmp_path / "prequal-1.0-py3-none-any.whl").write_text("no archive")
    assert audit_wheel.main([str(tmp_path / "prequal-1.0-py3-none-any.whl"), "--budget", str(file)]) == 2
    assert "expected a readable wheel" in capsys.readouterr().err


def test_an_audit_that_could_not_be_made_is_not_a_pass(canned, module, tmp_path, monkeypatch, capsys):
    def missing(subject):
        raise NoTool("no such program")
        yield

    monkeypatch.setitem(audit_wheel.AUDITS, "limits", missing)
    arguments = [str(make_wheel(tmp_path, module=module)), "--budget", str(tmp_path / "b.json"), "--update-budget"]
    assert audit_wheel.main(arguments) == 2
    assert "limits: not audited\n  no such program" in capsys.readouterr().out


def test_the_report_as_json_has_every_audit_and_the_largest_members(canned, module, tmp_path, capsys):
    wheel = make_wheel(tmp_path, module=module)
    audit_wheel.main([str(wheel), "--budget", str(tmp_path / "b.json"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["audits"].keys() == audit_wheel.AUDITS.keys()
    assert report["audits"]["size"]["state"] == "failed"
    assert report["bytes"] == wheel.stat().st_size
    assert report["largest"][0]["name"] == MODULE


def test_updating_keeps_reasons_and_other_toolkits_and_reads_back_as_written(canned, module, tmp_path, capsys):
    file = tmp_path / "budget.json"
    other = {"old": {"80": [1, 2, 3]}}
    before = budget({"gone": {"80": [1, 0, 0]}}, frames=["::x<"]) | {"wheel_bytes": 1}
    before["toolkits"]["12.9"] = other
    file.write_text(audit_wheel.budget_text(before))
    wheel = make_wheel(tmp_path, module=module)
    audit_wheel.main([str(wheel), "--budget", str(file), "--update-budget"])
    after = audit_wheel.load_budget(file)
    assert after["frames"] == {"::x<": "meant"}
    assert after["toolkits"] == {"12.9": other, "13.0": {READABLE: {arch: [32, 0, 0] for arch in ARCHS}}}
    assert wheel.stat().st_size < after["wheel_bytes"] <= 65536
    assert len([line for line in file.read_text().splitlines() if '": {"80": [' in line]) == 2  # a line for each kernel


def test_a_budget_is_not_made_from_a_wheel_for_some_architectures(canned, module, tmp_path, capsys):
    wheel = make_wheel(tmp_path, module=module, manifest={"archs": ["90"]})
    assert audit_wheel.main([str(wheel), "--budget", str(tmp_path / "b.json"), "--update-budget"]) == 2
    assert "this one is for sm_90" in capsys.readouterr().err
    assert not (tmp_path / "b.json").exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1}'])
def test_a_broken_budget_is_an_error(text, tmp_path, capsys):
    (tmp_path / "b.json").write_text(text)
    assert audit_wheel.main([str(make_wheel(tmp_path)), "--budget", str(tmp_path / "b.json")]) == 2
    assert "b.json" in capsys.readouterr().err


def test_the_committed_budget_reads_and_is_written_as_the_program_writes_it():
    assert audit_wheel.BUDGET.read_text() == audit_wheel.budget_text(audit_wheel.load_budget())


def test_it_runs_as_a_program(tmp_path):
    program = HERE.parent.parent / "ci" / "audit_wheel.py"
    command = [sys.executable, str(program), str(make_wheel(tmp_path))]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "needed: not applicable\n  a CPU build" in ran.stdout

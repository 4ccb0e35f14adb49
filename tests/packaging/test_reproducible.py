"""ci/compare_wheels.py sees every difference and shows the first; the double build itself is `nox -s reproducible`."""

from __future__ import annotations

import pathlib
import sys
import zipfile

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "ci")]  # programs and helpers, no package

from making_wheels import ENTRY_POINT, MODULE, make_wheel, shared_object

import compare_wheels


def compared(a: pathlib.Path, b: pathlib.Path, capsys: pytest.CaptureFixture) -> tuple[int, str]:
    status = compare_wheels.main([str(a), str(b)])
    said = capsys.readouterr()
    return status, said.out + said.err


def packed(path: pathlib.Path, out: pathlib.Path, change) -> pathlib.Path:
    """The same members, packed anew with `change` made to each entry."""
    out.mkdir()
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out / path.name, "w", zipfile.ZIP_DEFLATED) as target:
        for info in source.infolist():
            data = source.read(info)
            change(info)
            target.writestr(info, data)
    return out / path.name


def test_two_wheels_of_the_same_bytes_are_the_same(tmp_path, capsys):
    status, said = compared(make_wheel(tmp_path / "a"), make_wheel(tmp_path / "b"), capsys)
    assert status == 0
    assert said.startswith("the same ")


def test_the_first_byte_that_differs_is_shown_with_its_section(tmp_path, capsys):
    source = 'const char* who(void) { return "made by Anna"; }' + ENTRY_POINT
    sources = [source, source.replace("Anna", "Otto")]
    modules = [shared_object(tmp_path, source, "-Wl,--build-id=none") for source in sources]
    wheels = [make_wheel(tmp_path / name, module=module) for name, module in zip("ab", modules, strict=True)]
    status, said = compared(*wheels, capsys)
    lines = said.splitlines()
    assert status == 1
    assert (
        lines[1]
        == f"{MODULE}: byte {modules[0].index(b'Anna')} of {len(modules[0])} and {len(modules[1])}, section .rodata"
    )
    assert "| 41 6e 6e 61" in lines[2]
    assert "made by Anna" in lines[2]
    assert "| 4f 74 74 6f" in lines[3]
    assert "RECORD: byte" in lines[5]  # the consequence comes after the cause


def test_a_difference_in_a_text_is_shown_with_its_line(tmp_path, capsys):
    a, b = (make_wheel(tmp_path / name, members={"prequal/a.py": f"x = 1\ny = '{name}'\n"}) for name in "ab")
    status, said = compared(a, b, capsys)
    assert status == 1
    assert "prequal/a.py: byte 11 of 14 and 14, line 2" in said


def test_a_member_that_is_cut_short_and_one_that_is_missing_are_shown(tmp_path, capsys):
    a = make_wheel(tmp_path / "a", members={"prequal/a.py": "x = 1\n", "prequal/b.py": ""})
    b = make_wheel(tmp_path / "b", members={"prequal/a.py": "x = 1"})
    status, said = compared(a, b, capsys)
    assert status == 1
    assert said.splitlines()[1] == f"prequal/b.py: only in {a}"
    assert "prequal/a.py: byte 5 of 6 and 5" in said


def later(info: zipfile.ZipInfo) -> None:
    info.date_time = (2021, 1, 1, 0, 0, 0)


def group_writable(info: zipfile.ZipInfo) -> None:
    info.external_attr = 0o100664 << 16


def stored(info: zipfile.ZipInfo) -> None:
    info.compress_type = zipfile.ZIP_STORED


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (later, "date_time (2020, 1, 1, 0, 0, 0) against (2021, 1, 1, 0, 0, 0)"),
        (group_writable, "external_attr 0o600 against 0o100664"),
        (stored, "compress_type"),
    ],
)
def test_times_permissions_and_compression_of_members_count(change, said, tmp_path, capsys):
    a = make_wheel(tmp_path / "a")
    status, text = compared(a, packed(a, tmp_path / "b", change), capsys)
    assert status == 1
    assert f"prequal/__init__.py: {said}" in text


def test_the_order_of_members_counts(tmp_path, capsys):
    a = make_wheel(tmp_path / "a")
    (tmp_path / "b").mkdir()
    with zipfile.ZipFile(a) as source, zipfile.ZipFile(tmp_path / "b" / a.name, "w", zipfile.ZIP_DEFLATED) as target:
        for info in reversed(source.infolist()):
            target.writestr(info, source.read(info))
    status, said = compared(a, tmp_path / "b" / a.name, capsys)
    assert status == 1
    assert "order of members: number 0 is prequal/__init__.py against prequal-1.0.dist-info/RECORD" in said


def test_bytes_around_the_members_count(tmp_path, capsys):
    a, b = make_wheel(tmp_path / "a"), make_wheel(tmp_path / "b")
    with zipfile.ZipFile(b, "a") as archive:
        archive.comment = b"made on Tuesday"
    status, said = compared(a, b, capsys)
    assert status == 1
    assert "the archive around its members: byte" in said


def test_another_name_counts(tmp_path, capsys):
    a = make_wheel(tmp_path)
    b = tmp_path / "prequal-1.0-1-py3-none-any.whl"
    b.write_bytes(a.read_bytes())
    status, said = compared(a, b, capsys)
    assert status == 1
    assert f"name: {a.name} against {b.name}" in said


def test_what_is_no_wheel_is_an_error_of_its_own(tmp_path, capsys):
    (tmp_path / "prequal-1.0-py3-none-any.whl").write_text("")
    status, said = compared(make_wheel(tmp_path / "a"), tmp_path / "prequal-1.0-py3-none-any.whl", capsys)
    assert status == 2
    assert "expected a readable wheel" in said

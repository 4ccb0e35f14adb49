"""The process-wide state: what the gate asks of this very machine."""

from __future__ import annotations

import pytest

from prequal import runtime_state as state


@pytest.mark.parametrize(
    ("line", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (root@host)",
            "580.95.05",
        ),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.12  Wed Aug 20 01:58:59 UTC 2025", "535.104.12"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  525.60  Wed", "525.60"),
        ("something else", None),
        ("", None),
    ],
)
def test_the_kernel_modules_version_is_read_from_its_file(tmp_path, line, version):
    path = tmp_path / "version"
    path.write_text(line + "\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    assert state.kernel_module_version(str(path)) == version


def test_without_the_file_nobody_says(tmp_path):
    assert state.kernel_module_version(str(tmp_path / "absent")) is None

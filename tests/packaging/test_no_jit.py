"""Nothing is compiled, translated, fetched or left behind: import and one call of every op, watched by strace.

What `import torch` alone does is no doing of ours: it is measured beside, on this machine, and let through by name.
The interpreter's own bytecode cache is switched off, since whoever installs a wheel has it written then.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

WRITING = re.compile(r"\bO_(?:WRONLY|RDWR|CREAT|TRUNC|APPEND)\b")
OPENS = ("open", "openat", "openat2")
CHANGES = (
    *("creat", "mkdir", "mkdirat", "mknod", "mknodat", "truncate", "unlink", "unlinkat", "rmdir"),
    *("rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat"),
)
TRACED = ("execve", "execveat", "socket", *OPENS, *CHANGES)
# Character devices and the process's own entries: nothing written there stays.
HARMLESS = re.compile(r"/dev/(null|tty|zero|full)$|/proc/(self|thread-self|\d+)/")

CALL = re.compile(r"^(?:\[pid\s+)?(?:(?P<pid>\d+)\]?\s+)?(?P<name>\w+)\((?P<rest>.*)$")
STRING = re.compile(r'(?:(?:AT_FDCWD|\d+)<(?P<folder>[^>]*)>, )?"(?P<text>(?:[^"\\]|\\.)*)"')


def offences(log: str, allowed: pathlib.Path) -> Iterator[str]:
    """What a trace of `strace -f -y` shows beyond reading: programs, network sockets, changes outside `allowed`.

    An attempt counts, failed or not: a compiler that is not installed here is installed elsewhere.
    """
    started = False
    for line in log.splitlines():
        call = CALL.match(line)
        if call is None or call["name"] not in TRACED:
            continue  # signals, exits, the second half of an interrupted call
        name, rest = call["name"], call["rest"]
        if name in ("execve", "execveat"):
            program = STRING.search(rest)
            if started:
                yield f"exec {program['text'] if program else rest}"
            started = True  # the first one is the traced program itself
        elif name == "socket":
            if family := re.match(r"AF_INET6?\b|AF_PACKET\b", rest):
                yield f"socket {family[0]}"
        elif name not in OPENS or WRITING.search(rest):
            for found in STRING.finditer(rest):
                path = os.path.normpath(os.path.join(found["folder"] or str(allowed), found["text"]))
                if not HARMLESS.match(path) and not pathlib.PurePath(path).is_relative_to(allowed):
                    yield f"{name} {path}"


@pytest.fixture
def allowed(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = (tmp_path / "temporary").resolve()
    folder.mkdir()
    return folder


def traced(code: str, allowed: pathlib.Path, *, check: bool = True) -> str:
    if shutil.which("strace") is None:
        pytest.skip("no strace")
    trial = subprocess.run(["strace", "-f", "-o", os.devnull, "true"], capture_output=True, text=True, check=False)
    if trial.returncode:
        pytest.skip(f"strace may not trace here: {trial.stderr.strip()}")
    home, log = allowed.parent / "home", allowed.parent / "log"
    home.mkdir(exist_ok=True)
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "TORCH", "TRITON", "CUDA"))
    }
    env |= {"TMPDIR": str(allowed), "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    # ?: a call that this machine does not have is no error
    calls = ",".join(f"?{name}" for name in TRACED)
    command = ["strace", "-f", "-y", "-qq", "-s", "4096", "-e", f"trace={calls}", "-e", "signal=none"]
    out = subprocess.run(
        [*command, "-o", str(log), sys.executable, "-c", code],
        cwd=allowed,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if check:
        assert out.returncode == 0, out.stderr
    return log.read_text()


# ---- the product ----------------------------------------------------------------------------------------------------

IMPORT = "import torch, prequal; prequal.rms_norm"
EVERY_OP = """
import torch, prequal
from prequal.registry import OPS

for name, op in OPS.items():
    sample = next(iter(op.samples(torch.device("cpu"))))
    getattr(prequal, name)(*sample.args, **sample.kwargs)
assert set(prequal.stats()) == set(OPS), (set(OPS) - set(prequal.stats()))
prequal.fingerprint().sha256
"""


@pytest.mark.parametrize("code", [IMPORT, EVERY_OP], ids=["import", "one call of every op"])
def test_nothing_is_run_fetched_or_written_beyond_what_torch_alone_does(code, allowed):
    missing = [name for name in ("torch", "prequal") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed here: {', '.join(missing)}")
    torch_alone = set(offences(traced("import torch", allowed), allowed))
    ours = [line for line in offences(traced(code, allowed), allowed) if line not in torch_alone]
    assert not ours, f"torch alone: {sorted(torch_alone)}"


# ---- the watcher ----------------------------------------------------------------------------------------------------

START = '100 execve("/usr/bin/python3", ["python3"], 0x7ffe /* 20 vars */) = 0\n'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('101 execve("/usr/bin/gcc", ["gcc", "-shared"], 0x7f /* 9 vars */) = 0', "exec /usr/bin/gcc"),
        (
            '101 execve("/usr/local/bin/nvcc", ["nvcc"], 0x7f /* 9 vars */) = -1 ENOENT (No such file)',
            "exec /usr/local/bin/nvcc",
        ),
        (
            '101 execve("/opt/cuda/nvvm/bin/cicc", ["cicc"], 0x7f /* 9 vars */ <unfinished ...>',
            "exec /opt/cuda/nvvm/bin/cicc",
        ),
        ('[pid   101] execve("/opt/cuda/bin/ptxas", ["ptxas"], 0x7f /* 9 vars */) = 0', "exec /opt/cuda/bin/ptxas"),
        ('101 execveat(5</usr/bin/ninja>, "", ["ninja"], 0x7f /* 9 vars */, AT_EMPTY_PATH) = 0', "exec "),
        ("100 socket(AF_INET, SOCK_STREAM|SOCK_CLOEXEC, IPPROTO_IP) = 3<TCP:[1]>", "socket AF_INET"),
        ("100 socket(AF_INET6, SOCK_DGRAM, IPPROTO_IP) = 3<UDPv6:[1]>", "socket AF_INET6"),
        (
            '100 openat(AT_FDCWD</tmp/t>, "/home/me/.nv/index", O_RDWR|O_CREAT, 0600) = 3</home/me/.nv/index>',
            "openat /home/me/.nv/index",
        ),
        ('100 openat(AT_FDCWD</home/me>, "lock", O_WRONLY|O_CREAT <unfinished ...>', "openat /home/me/lock"),
        ('100 openat(7</home/me/.cache>, "lock", O_WRONLY) = 3</home/me/.cache/lock>', "openat /home/me/.cache/lock"),
        ('100 openat(AT_FDCWD</tmp/t>, "../escaped", O_WRONLY|O_CREAT, 0600) = 3', "openat /tmp/escaped"),
        (
            '100 mkdir("/home/me/.cache/torch_extensions", 0777) = 0',
            "mkdir /home/me/.cache/torch_extensions",
        ),
        ('100 rename("/tmp/t/a", "/home/me/b") = 0', "rename /home/me/b"),
        ('100 unlink("/home/me/lock") = 0', "unlink /home/me/lock"),
    ],
)
def test_a_trace_with_this_line_is_caught(line, said):
    assert list(offences(f"{START}{line}\n", pathlib.Path("/tmp/t"))) == [said]


@pytest.mark.parametrize(
    "line",
    [
        '100 openat(AT_FDCWD</tmp/t>, "/usr/lib/libc.so.6", O_RDONLY|O_CLOEXEC) = 3</usr/lib/libc.so.6>',
        '100 openat(AT_FDCWD</tmp/t>, "/dev/null", O_RDWR) = 3</dev/null>',
        '100 openat(AT_FDCWD</tmp/t>, "/proc/self/task/100/comm", O_RDWR) = 3',
        '100 openat(AT_FDCWD</tmp/t>, "scratch", O_RDWR|O_CREAT, 0600) = 3</tmp/t/scratch>',
        "100 socket(AF_UNIX, SOCK_STREAM, 0) = 3<UNIX:[1]>",
        "101 <... execve resumed>) = 0",
        "100 +++ exited with 0 +++",
        "100 --- SIGCHLD {si_signo=SIGCHLD} ---",
    ],
)
def test_a_trace_with_this_line_passes(line):
    assert list(offences(f"{START}{line}\n", pathlib.Path("/tmp/t"))) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import subprocess; subprocess.run(['cc', '--version'])", r"exec \S*/cc$"),
        ("import os; os.system('ninja --version')", r"exec \S*/sh$"),
        ("import socket; socket.socket(socket.AF_INET)", r"socket AF_INET$"),
        ("import pathlib; (pathlib.Path.home() / '.cache').mkdir()", r"mkdir \S*/home/\.cache$"),
        ("import pathlib; (pathlib.Path.home() / 'kernel.so').write_bytes(b'')", r"open\w* \S*/home/kernel\.so$"),
        (
            "import threading, os; t = threading.Thread(target=os.system, args=('true',)); t.start(); t.join()",
            r"exec \S*/sh$",
        ),
    ],
)
def test_a_process_that_really_does_this_is_caught(code, said, allowed):
    found = list(offences(traced(code, allowed, check=False), allowed))
    assert any(re.match(said, line) for line in found), found


def test_a_process_that_only_writes_to_its_temporary_folder_passes(allowed):
    code = "import tempfile; f = tempfile.NamedTemporaryFile(); f.write(b'x'); f.flush(); open('here', 'w').close()"
    assert list(offences(traced(code, allowed), allowed)) == []

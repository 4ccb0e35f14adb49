"""Put a Python of this machine into the root of an older system, where it runs on its own loader and C library.

usage: graft_python.py ROOT PATCHELF PREFIX...

PREFIX/bin/python3.X goes to ROOT/opt/python/cp3X-cp3X, the layout of a manylinux image. Whatever it and its extension
modules link goes to ROOT/opt/python/host, found by a DT_RPATH in the interpreter alone: the compilers that this Python
starts still run, and link, against the older system. Symbol versions in a wheel come from there, which is the point.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys

HOST = pathlib.PurePosixPath("/opt/python/host")
# What extension modules and wheels link. The interpreter is made to need them all: a library with its own run path,
# as torch's have, does not look where the interpreter does, and would mix the old system's libdl with the new libc.
PRELOADED = [
    "libdl.so.2",
    "libpthread.so.0",
    "librt.so.1",
    "libutil.so.1",
    "libm.so.6",
    "libresolv.so.2",
    "libgcc_s.so.1",
    "libstdc++.so.6",
]
# dlopened by libc itself
RESOLVERS = ["libnss_dns.so.2", "libnss_files.so.2"]
LEFT_OUT = {"test", "tests", "idlelib", "tkinter", "turtledemo", "site-packages", "__pycache__"}


def said(*command: str | pathlib.Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def linked(file: pathlib.Path) -> dict[str, pathlib.Path]:
    """soname -> file, as this machine resolves it."""
    out = subprocess.run(["ldd", str(file)], check=False, capture_output=True, text=True).stdout
    return {name: pathlib.Path(path) for name, path in re.findall(r"^\s*(\S+) => (/\S+) ", out, re.M)}


def main() -> None:
    root, patchelf = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    host = root / HOST.relative_to("/")
    host.mkdir(parents=True, exist_ok=True)
    for given in sys.argv[3:]:
        prefix = pathlib.Path(given).resolve()
        (interpreter,) = (f for f in prefix.glob("bin/python3.*") if re.fullmatch(r"python3\.\d+", f.name))
        version = interpreter.name.removeprefix("python")
        tag = "cp" + version.replace(".", "")
        home = root / "opt/python" / f"{tag}-{tag}"
        (home / "bin").mkdir(parents=True)
        shutil.copy(interpreter, home / "bin")
        for link in ("python", "python3"):
            (home / "bin" / link).symlink_to(interpreter.name)
        shutil.copytree(prefix / "include", home / "include")
        shutil.copytree(
            prefix / "lib" / f"python{version}",
            home / "lib" / f"python{version}",
            ignore=lambda folder, names: [n for n in names if n in LEFT_OUT or n.startswith("config-")],
        )
        (home / "lib" / f"python{version}" / "site-packages").mkdir()

        modules = [f for f in (home / f"lib/python{version}/lib-dynload").glob("*.so") if "_tkinter" not in f.name]
        needed: dict[str, pathlib.Path] = {}
        for file in (interpreter, *((prefix / "lib" / f"python{version}" / "lib-dynload" / m.name) for m in modules)):
            needed |= linked(file)
        libc = needed["libc.so.6"].parent
        preloaded = [name for name in PRELOADED if (libc / name).exists()]
        needed |= {name: libc / name for name in (*preloaded, *RESOLVERS) if (libc / name).exists()}
        for name, path in needed.items():
            shutil.copy(path, (home / "lib") if name.startswith("libpython") else host)
        loader = pathlib.Path(said(patchelf, "--print-interpreter", interpreter).strip())
        shutil.copy(loader.resolve(), host / loader.name)

        # a run path of their own would hide the interpreter's from what they link
        for file in (*modules, *(home / "lib").glob("libpython*.so*")):
            said(patchelf, "--remove-rpath", file)
        own = pathlib.PurePosixPath("/") / home.relative_to(root)
        copy = home / "bin" / interpreter.name
        said(patchelf, "--set-interpreter", str(HOST / loader.name), copy)
        said(patchelf, "--force-rpath", "--set-rpath", f"{own}/lib:{HOST}", copy)
        said(patchelf, *(word for name in preloaded for word in ("--add-needed", name)), copy)
        print(f"{tag}: {sum(f.stat().st_size for f in home.rglob('*') if f.is_file()) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()

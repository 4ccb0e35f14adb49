"""What cuobjdump says of the kernels in a native module, under names that stay the same from build to build."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator

# An option of cuobjdump -> the lines that it prints for the module. Tests put canned lines here.
Dump = Callable[[str], Iterable[str]]


class NoTool(Exception):
    """A program that this needs is not installed."""


@functools.cache
def find_tool(name: str) -> str:
    """A program of the CUDA toolkit: of NVIDIA's PyPI packages beside this Python, else from PATH."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        for found in sorted(pathlib.Path(root).glob(f"cu*/bin/{name}"), reverse=True):
            return str(found)
    if on_path := shutil.which(name):
        return on_path
    raise NoTool(f"no {name}: `pip install 'nvidia-cuda-{name}>=13.2,<14'` brings one")


def dump_of(module: pathlib.Path) -> Dump:
    def dump(option: str) -> Iterator[str]:
        command = [find_tool("cuobjdump"), option, str(module)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            yield from process.stdout  # line by line: -elf prints megabytes
            said = process.stderr.read()
        if process.returncode:
            raise NoTool(f"{' '.join(command)} failed with {process.returncode}: {said.strip()}")

    return dump


@dataclasses.dataclass(frozen=True)
class Use:
    """Of one kernel on one architecture."""

    registers: int  # a thread
    frame: int  # bytes of stack and local memory a thread: spilled registers or an array
    shared: int  # static bytes a block
    block: int | None = None  # the largest block it declares (__launch_bounds__), if it does


def resources(dump: Dump) -> dict[str, dict[str, Use]]:
    """{kernel: {architecture: use}}, from `cuobjdump -res-usage` and, for the blocks, `-elf`."""
    found: dict[str, dict[str, Use]] = {}
    blocks = _blocks(dump("-elf"))
    for kernel, arch, value in _uses(dump("-res-usage")):
        use = Use(
            value["REG"],
            value.get("STACK", 0) + value.get("LOCAL", 0),
            value.get("SHARED", 0),
            blocks.get((kernel, arch)),
        )
        of_kernel = found.setdefault(kernel, {})
        if before := of_kernel.get(arch):  # a library's kernel that two files made: the larger counts
            use = Use(
                *(
                    max(pair) if None not in pair else use.block
                    for pair in zip(dataclasses.astuple(before), dataclasses.astuple(use), strict=True)
                )
            )
        of_kernel[arch] = use
    names = stable_names(found)
    return dict(sorted((names[kernel], uses) for kernel, uses in found.items()))


def _uses(lines: Iterable[str]) -> Iterator[tuple[str, str, dict[str, int]]]:
    arch = kernel = None
    for line in lines:
        if header := re.match(r"arch = sm_(\w+)", line):
            arch = header[1]
        elif function := re.match(r"\s*Function (\S+):", line):
            kernel = function[1]
        elif arch and kernel and "REG:" in line:
            yield kernel, arch, {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", line)}
            kernel = None


def _blocks(lines: Iterable[str]) -> dict[tuple[str, str], int]:
    found = {}
    arch = kernel = None
    waiting = False
    for line in lines:
        if header := re.match(r"arch = sm_(\w+)", line):
            arch = header[1]
        elif section := re.match(r"\.nv\.info\.(\S+)", line):
            kernel = section[1]
        elif "Attribute:" in line:
            waiting = "EIATTR_MAX_THREADS" in line
        elif waiting and "Value:" in line and arch and kernel:
            x, y, z = (int(part, 16) for part in line.split()[1:4])
            found[kernel, arch] = x * y * z
            waiting = False
    return found


def ptx_files(dump: Dump) -> list[str]:
    return [line.strip() for line in dump("--list-ptx") if ".ptx" in line]


# ---- names -----------------------------------------------------------------------------------------------------------

# fmt: off
_BUILTIN = {
    "v": "void", "b": "bool", "c": "char", "a": "int8", "h": "uint8", "s": "int16", "t": "uint16", "i": "int",
    "j": "uint", "l": "int64", "m": "uint64", "x": "int64", "y": "uint64", "f": "float", "d": "double",
}
# fmt: on
# nvcc: a hash of the path, the length, the file, a hash of what is in it
_FILE = re.compile(r"_GLOBAL__N__[0-9a-f]{8}_\d+_(\w+)_cu_\w*$")


def stable_names(mangled: Iterable[str]) -> dict[str, str]:
    """Readable names without hashes of file and folder; where two would be one, both stay mangled (less the hash)."""
    names = {kernel: stable_name(kernel) for kernel in mangled}
    count: dict[str, int] = {}
    for name in names.values():
        count[name] = count.get(name, 0) + 1
    return {kernel: name if count[name] == 1 else _without_hashes(kernel) for kernel, name in names.items()}


def stable_name(mangled: str) -> str:
    """`_ZN7prequal3ops38_GLOBAL__N__..._6_knn_cu_...13search_kernelILi32...`: `prequal::ops::knn.cu::search_kernel<32>`

    Not a demangler: parameters are left out and back references stay as they are, so that the name does not depend on
    which demangler is installed.
    """
    try:
        return _Mangled(mangled).function()
    except _NotUnderstood:
        return _without_hashes(mangled)


def _without_hashes(mangled: str) -> str:
    name = re.sub(r"_GLOBAL__N__[0-9a-f]{8}_(\d+_\w+?_cu)_[0-9a-f]{8}", r"_GLOBAL__N__\1", mangled)
    return re.sub(r"CUB_\d+_SM(_\d+)+?(?=\d*detail)", "CUB", name)


class _NotUnderstood(Exception):
    pass


class _Mangled:
    """The part of the Itanium grammar that names of kernels use."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern).match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def function(self) -> str:
        if not self.take("_Z"):
            return self.text  # extern "C"
        return self.name()

    def name(self) -> str:
        if not self.take("N[rVK]*"):
            return self.part() + self.arguments()
        parts: list[str] = []
        while not self.take("E"):
            if self.text[self.at : self.at + 1] == "I" and parts:
                parts[-1] += self.arguments()
            else:
                parts.append(self.part())
        return "::".join(parts)

    def part(self) -> str:
        if length := self.take(r"[1-9]\d*"):
            end = self.at + int(length[0])
            word, self.at = self.text[self.at : end], end
            if file := _FILE.match(word):
                return f"{file[1]}.cu"
            return "CUB" if re.fullmatch(r"CUB_\d+_SM(_\d+)+", word) else word
        if reference := self.take(r"S[0-9A-Z]*_"):
            return reference[0].rstrip("_")
        if self.take("St"):
            return "std"
        raise _NotUnderstood

    def arguments(self) -> str:
        if not self.take("I"):
            return ""
        found = []
        while not self.take("E"):
            found.append(self.argument())
        return f"<{','.join(found)}>"

    def argument(self) -> str:
        if self.take("L"):
            kind = self.type()
            value = self.take(r"(n?)(\d+)E")
            if not value:
                raise _NotUnderstood
            if kind == "bool":
                return "true" if value[2] == "1" else "false"
            number = ("-" if value[1] else "") + value[2]
            return number if kind in _BUILTIN.values() else f"({kind}){number}"
        if self.take("J"):
            found = []
            while not self.take("E"):
                found.append(self.argument())
            return ",".join(found)
        return self.type()

    def type(self) -> str:
        if prefix := self.take("[PROK]"):
            inner = self.type()
            return f"{inner} const" if prefix[0] == "K" else inner + {"P": "*", "R": "&", "O": "&&"}[prefix[0]]
        if self.take("DF16b"):
            return "bfloat16"
        if self.take("Dh|DF16_"):
            return "half"
        if builtin := self.take("[vbcahstijlmxyfd]"):
            return _BUILTIN[builtin[0]]
        name = self.name()
        # `St` and `S1_` may be the first half of a name
        while name == "std" or (self.text[self.at : self.at + 1] == "I"):
            name = f"std::{self.part()}" if name == "std" else name + self.arguments()
        return name

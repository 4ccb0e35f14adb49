"""Compare two wheels byte for byte and show where they first differ.

usage: python ci/compare_wheels.py A.whl B.whl

Exit status: 0 the same bytes; 1 they differ; 2 one of them cannot be read.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import sys
from collections.abc import Iterator

from elf_file import Elf, NotElf
from wheel_file import BrokenWheel, Wheel

AROUND = 16  # bytes shown before and after the first that differs
SHOWN = 20  # differences at most; two builds that share nothing have hundreds


def differences(a: Wheel, b: Wheel) -> Iterator[str]:
    """From the cause to the consequence: what the members hold, then how they are packed."""
    if a.path.name != b.path.name:
        yield f"name: {a.path.name} against {b.path.name}"
    for wheel, other in ((a, b), (b, a)):
        for name in wheel.members:
            if name not in other.members:
                yield f"{name}: only in {wheel.path}"

    common = [name for name in a.members if name in b.members]
    # RECORD repeats what all others hold
    for name in sorted(common, key=lambda name: name.endswith(".dist-info/RECORD")):
        if a.members[name] != b.members[name]:
            yield content(name, a.members[name], b.members[name])

    order = [[info.filename for info in wheel.infos] for wheel in (a, b)]
    if sorted(order[0]) == sorted(order[1]) and order[0] != order[1]:
        at = next(i for i, (one, two) in enumerate(zip(*order, strict=True)) if one != two)
        yield f"order of members: number {at} is {order[0][at]} against {order[1][at]}"
    of_b = {info.filename: info for info in b.infos}
    for info in a.infos:
        if (its := of_b.get(info.filename)) is None:
            continue
        for what in ("date_time", "external_attr", "create_system", "compress_type", "flag_bits", "extra", "comment"):
            one, two = getattr(info, what), getattr(its, what)
            if one != two:
                shown = (oct(one >> 16), oct(two >> 16)) if what == "external_attr" else (one, two)
                yield f"{info.filename}: {what} {shown[0]} against {shown[1]}"


def content(name: str, a: bytes, b: bytes) -> str:
    at = first_difference(a, b)
    lines = [f"{name}: byte {at} of {len(a)} and {len(b)}{where(a, at)}"]
    start = max(0, at - AROUND)
    for side, data in (("A", a), ("B", b)):
        piece = data[start : at + AROUND]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in piece)
        lines.append(f"  {side} {piece[: at - start].hex(' ')} | {piece[at - start :].hex(' ') or '(end)'}  {text}")
    return "\n".join(lines)


def first_difference(a: bytes, b: bytes) -> int:
    low, high = 0, min(len(a), len(b))  # by halves: equal prefixes compare fast, bytes one at a time do not
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def where(data: bytes, at: int) -> str:
    try:
        section = Elf(data).section_at(at)
        return f", section {section}" if section else ", in the headers of the ELF file"
    except NotElf:
        return f", line {data[:at].count(10) + 1}" if b"\0" not in data[:4096] else ""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("a", type=pathlib.Path, metavar="A.whl")
    parser.add_argument("b", type=pathlib.Path, metavar="B.whl")
    args = parser.parse_args(arguments)
    try:
        a, b = Wheel(args.a), Wheel(args.b)
        one, two = args.a.read_bytes(), args.b.read_bytes()
    except (BrokenWheel, OSError) as error:
        print(f"compare_wheels: {error}", file=sys.stderr)
        return 2

    found = list(differences(a, b))
    if one != two and not found:
        found = [content("the archive around its members", one, two)]
    if not found:
        print(f"the same {len(one):,} bytes, sha256 {hashlib.sha256(one).hexdigest()}")
        return 0
    print("the first difference:")
    print(found[0])
    if len(found) > 1:
        print(f"and {len(found) - 1} more:")
        for line in found[1:SHOWN]:
            print("  " + line.splitlines()[0])
        if len(found) > SHOWN:
            print("  ...")
    return 1


if __name__ == "__main__":
    sys.exit(main())

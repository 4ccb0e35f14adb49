"""What a 64-bit little-endian shared object needs, demands and offers. Standard library only."""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Iterator

_DYNAMIC, _NOBITS, _DYNSYM, _VERNEED = 6, 8, 11, 0x6FFFFFFE
_NEEDED, _RPATH, _RUNPATH = 1, 15, 29


class NotElf(Exception):
    """The bytes are not what this reader reads."""


@dataclasses.dataclass(frozen=True)
class Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int
    entry: int


class Elf:
    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
            raise NotElf(f"expected a 64-bit little-endian ELF file, got {data[:6]!r} and {len(data)} bytes")
        self.data = data
        try:
            self.sections = self._read_sections()
        except (struct.error, IndexError, ValueError) as error:
            raise NotElf(f"the section table is cut off or broken: {error}") from error

    def _read_sections(self) -> list[Section]:
        (table,) = struct.unpack_from("<Q", self.data, 40)
        entry, count, names = struct.unpack_from("<HHH", self.data, 58)
        raw = [struct.unpack_from("<IIQQQQIIQQ", self.data, table + entry * i) for i in range(count)]
        text = raw[names][4] if raw else 0
        return [Section(self._string(text + r[0]), r[1], r[4], r[5], r[6], r[9]) for r in raw]

    def _string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode("utf-8", "replace")

    def _of(self, kind: int) -> Iterator[tuple[Section, int]]:
        """Sections of a kind, each with the offset of its strings."""
        for section in self.sections:
            if section.kind == kind:
                yield section, self.sections[section.link].offset

    def section_at(self, offset: int) -> str | None:
        """The name of the section that holds this byte of the file."""
        for section in self.sections:
            if section.kind != _NOBITS and section.offset <= offset < section.offset + section.size:
                return section.name
        return None

    def _dynamic(self, *tags: int) -> list[str]:
        found = []
        for section, text in self._of(_DYNAMIC):
            for offset in range(section.offset, section.offset + section.size, 16):
                tag, value = struct.unpack_from("<QQ", self.data, offset)
                if tag in tags:
                    found.append(self._string(text + value))
        return found

    @functools.cached_property
    def needed(self) -> list[str]:
        return self._dynamic(_NEEDED)

    @functools.cached_property
    def search_paths(self) -> list[str]:
        return self._dynamic(_RPATH, _RUNPATH)

    @functools.cached_property
    def versions(self) -> set[str]:
        """Symbol versions demanded of other libraries: GLIBC_2.17, GLIBCXX_3.4.21, ..."""
        found = set()
        for section, text in self._of(_VERNEED):
            library = section.offset
            while True:
                _, count, _, first, following = struct.unpack_from("<HHIII", self.data, library)
                version = library + first
                for _ in range(count):
                    _, _, _, name, step = struct.unpack_from("<IHHII", self.data, version)
                    found.add(self._string(text + name))
                    version += step
                if not following:
                    break
                library += following
        return found

    @functools.cached_property
    def exported(self) -> list[str]:
        """Names of the dynamic symbols that this object defines."""
        found = []
        for section, text in self._of(_DYNSYM):
            for offset in range(section.offset, section.offset + section.size, section.entry or 24):
                name, _, _, where = struct.unpack_from("<IBBH", self.data, offset)
                if where and name:
                    found.append(self._string(text + name))
        return sorted(found)

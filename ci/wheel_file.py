"""A wheel, read once: members, names, metadata and prequal's own manifest. Standard library only."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import re
import zipfile
from email.parser import HeaderParser
from typing import Any


class BrokenWheel(Exception):
    """The file cannot be read as a wheel of prequal."""


class Wheel:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                self.infos = [info for info in archive.infolist() if not info.is_dir()]
                self.members = {info.filename: archive.read(info) for info in self.infos}
        except (OSError, zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, NotImplementedError) as error:
            raise BrokenWheel(f"{path.name}: expected a readable wheel: {error}") from error

        found = re.fullmatch(r"([^-]+)-([^-]+)(?:-(\d[^-]*))?-([^-]+)-([^-]+)-([^-]+)\.whl", path.name)
        if not found:
            raise BrokenWheel(f"{path.name}: expected a name like prequal-VERSION-PYTHON-ABI-PLATFORM.whl")
        self.name, self.version, self.build, self.python, self.abi, self.platform = found.groups()

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    @property
    def tags(self) -> set[str]:
        parts = [part.split(".") for part in (self.python, self.abi, self.platform)]
        return {"-".join(tag) for tag in itertools.product(*parts)}

    def read(self, name: str) -> bytes:
        try:
            return self.members[name]
        except KeyError:
            raise BrokenWheel(f"{self.path.name}: expected a member {name}, found none") from None

    @property
    def dist_info(self) -> str:
        return f"{self.name}-{self.version}.dist-info"

    @functools.cached_property
    def metadata_bytes(self) -> bytes:
        return self.read(f"{self.dist_info}/METADATA")

    @functools.cached_property
    def metadata(self) -> Any:
        return HeaderParser().parsestr(self.metadata_bytes.decode())

    @functools.cached_property
    def manifest(self) -> dict[str, Any]:
        """What the build wrote about itself."""
        try:
            manifest = json.loads(self.read(f"{self.name}/_build.json"))
        except ValueError as error:
            raise BrokenWheel(f"{self.path.name}: {self.name}/_build.json is not JSON: {error}") from error
        if not isinstance(manifest, dict) or not {"schema", "version", "cuda", "archs", "ptx"} <= manifest.keys():
            raise BrokenWheel(f"{self.path.name}: {self.name}/_build.json lacks keys of a manifest")
        return manifest

    @property
    def binaries(self) -> list[str]:
        return [name for name in self.members if re.search(r"\.so(\.\d+)*$", name)]

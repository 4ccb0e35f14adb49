"""Write a static package index for a folder of wheels: one sub-index for each CUDA major, and one for CPU builds.

usage: python ci/make_index.py FOLDER OUT [--base-url URL]

  OUT/cu13/simple/index.html, index.json              the projects (PEP 503; PEP 691 as JSON)
  OUT/cu13/simple/prequal/index.html, index.json      the files, each with its sha256
  OUT/cu13/files/NAME.whl, NAME.whl.metadata          the wheels, and their METADATA alone (PEP 658)

`pip install --index-url https://HOST/cu13/simple prequal`. Any static server will do. A server that can negotiate may
answer with index.json, as application/vnd.pypi.simple.v1+json.

Which CUDA a wheel is for is read from the manifest inside it. With --base-url the wheels are not copied: the index
links to URL/NAME.whl, and what lies in OUT/*/files (the .metadata files) has to be put beside them. OUT is written
whole under another name and then takes its place; a folder that this program did not write is never replaced.
Standard library only.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import html
import json
import pathlib
import re
import shutil
import sys
import tempfile
import urllib.parse
from typing import Any

from wheel_file import BrokenWheel, Wheel

MARK = ".made-by-make-index"
API = "1.1"  # PEP 691 with the sizes and versions of PEP 700


class CannotIndex(Exception):
    """There is no index to be made of this; the message says why."""


@dataclasses.dataclass(frozen=True)
class File:
    path: pathlib.Path
    project: str
    version: str
    index: str  # cu12, cu13, cpu
    size: int
    sha256: str
    requires_python: str | None
    metadata: bytes

    @property
    def metadata_sha256(self) -> str:
        return hashlib.sha256(self.metadata).hexdigest()


def read(path: pathlib.Path) -> File:
    wheel = Wheel(path)
    named, inside = wheel.metadata["Name"], wheel.metadata["Version"]
    if not named or normalised(named) != normalised(wheel.name) or inside != wheel.version:
        raise BrokenWheel(f"{path.name}: the name says {wheel.name} {wheel.version}, METADATA says {named} {inside}")
    cuda = wheel.manifest["cuda"]
    return File(
        path,
        normalised(wheel.name),
        wheel.version,
        "cpu" if cuda is None else f"cu{cuda['toolkit'].split('.')[0]}",
        wheel.size,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel.metadata["Requires-Python"],
        wheel.metadata_bytes,
    )


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def collect(folder: pathlib.Path, base_url: str | None) -> dict[str, list[File]]:
    """{sub-index: its files}; everything that is wrong is told at once."""
    if not folder.is_dir():
        raise CannotIndex(f"{folder}: expected a folder of wheels")
    paths = sorted(folder.rglob("*.whl"))
    if not paths:
        raise CannotIndex(f"{folder}: expected wheels, found none")
    found: dict[str, list[File]] = {}
    wrong = []
    taken: dict[str, pathlib.Path] = {}
    for path in paths:
        try:
            file = read(path)
        except (BrokenWheel, KeyError, TypeError, UnicodeDecodeError) as error:
            wrong.append(str(error) if isinstance(error, BrokenWheel) else f"{path.name}: {error!r}")
            continue
        # behind one base URL a name can be had once; in sub-indexes of their own, once in each
        key = path.name if base_url else f"{file.index}/{path.name}"
        if key in taken:
            wrong.append(f"{path.name}: twice, as {taken[key]} and {path}")
        taken[key] = path
        found.setdefault(file.index, []).append(file)
    if wrong:
        raise CannotIndex("\n".join(wrong))
    return dict(sorted(found.items()))


def page(title: str, links: list[str]) -> str:
    body = "\n".join(f"    {link}<br>" for link in links)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n  <head>\n    <meta charset="utf-8">\n'
        f'    <meta name="pypi:repository-version" content="{API}">\n    <title>{html.escape(title)}</title>\n'
        f"  </head>\n  <body>\n{body}\n  </body>\n</html>\n"
    )


def link(file: File, url: str) -> str:
    attributes = {"href": f"{url}#sha256={file.sha256}"}
    if file.requires_python:
        attributes["data-requires-python"] = file.requires_python
    # the first name is the one that older installers know (PEP 714)
    for name in ("data-dist-info-metadata", "data-core-metadata"):
        attributes[name] = f"sha256={file.metadata_sha256}"
    text = " ".join(f'{name}="{html.escape(value)}"' for name, value in attributes.items())
    return f"<a {text}>{html.escape(file.path.name)}</a>"


def entry(file: File, url: str) -> dict[str, Any]:
    made: dict[str, Any] = {
        "filename": file.path.name,
        "url": url,
        "hashes": {"sha256": file.sha256},
        "size": file.size,
        "core-metadata": {"sha256": file.metadata_sha256},
        "yanked": False,
    }
    return made | ({"requires-python": file.requires_python} if file.requires_python else {})


def write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps({"meta": {"api-version": API}} | value, indent=1, sort_keys=True) + "\n")


def write(files: dict[str, list[File]], out: pathlib.Path, base_url: str | None) -> None:
    for index, of_index in files.items():
        simple, store = out / index / "simple", out / index / "files"
        simple.mkdir(parents=True)
        store.mkdir()
        projects = sorted({file.project for file in of_index})
        (simple / "index.html").write_text(page("projects", [f'<a href="{name}/">{name}</a>' for name in projects]))
        write_json(simple / "index.json", {"projects": [{"name": name} for name in projects]})
        for project in projects:
            here = [file for file in of_index if file.project == project]
            urls = {}
            for file in here:
                quoted = urllib.parse.quote(file.path.name)
                urls[file] = f"{base_url.rstrip('/')}/{quoted}" if base_url else f"../../files/{quoted}"
                if not base_url:
                    shutil.copyfile(file.path, store / file.path.name)
                (store / f"{file.path.name}.metadata").write_bytes(file.metadata)
            folder = simple / project
            folder.mkdir()
            (folder / "index.html").write_text(page(project, [link(file, urls[file]) for file in here]))
            value = {
                "name": project,
                "versions": sorted({file.version for file in here}),
                "files": [entry(file, urls[file]) for file in here],
            }
            write_json(folder / "index.json", value)


def replace(out: pathlib.Path, made: pathlib.Path) -> None:
    """`made` takes the place of `out`. Between the two renames there is no index, never half of one."""
    if not out.exists():
        made.rename(out)
        return
    old = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.old-", dir=out.parent))
    moved = out.rename(old / out.name)
    try:
        made.rename(out)
    except OSError:
        moved.rename(out)
        raise
    finally:
        shutil.rmtree(old)


def make_index(folder: pathlib.Path, out: pathlib.Path, base_url: str | None = None) -> dict[str, list[File]]:
    if base_url and not re.match(r"https?://[^/]", base_url):
        raise CannotIndex(f"--base-url: expected http:// or https:// and a host, got {base_url!r}")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise CannotIndex(f"{out}: expected a folder or nothing, found something else")
    if out.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise CannotIndex(f"{out}: holds the wheels; an index replaces its folder whole")
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise CannotIndex(f"{out}: not empty, and not an index that this program wrote; it stays as it is")
    files = collect(folder, base_url)
    out.parent.mkdir(parents=True, exist_ok=True)
    made = pathlib.Path(tempfile.mkdtemp(prefix=f".{out.name}.new-", dir=out.parent))
    try:
        made.chmod(0o755)  # mkdtemp's is for its owner alone; a server has to read it
        (made / MARK).touch()
        write(files, made, base_url)
        replace(out, made)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return files


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path, help="wheels, in sub-folders too")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--base-url", help="where the wheels lie, when not under OUT")
    args = parser.parse_args(arguments)
    try:
        files = make_index(args.folder, args.out, args.base_url)
    except (CannotIndex, OSError) as error:
        print(f"make_index: {error}", file=sys.stderr)
        return 1
    for index, of_index in files.items():
        print(f"{index}: {len(of_index)} wheels, {sum(file.size for file in of_index):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

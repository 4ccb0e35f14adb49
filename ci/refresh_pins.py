"""Ask the registries which digests the build images have today, and write them into ci/matrix.toml and pyproject.toml.

usage: python ci/refresh_pins.py [--check]

Run it where the registries can be reached, look at the diff, and commit it: an image changes by a commit and by nothing
else. Images of PyPA follow the cibuildwheel that is installed, which carries digests that it was tested with: run this
with the `wheels` dependency group (`pip install --group wheels`). Others are asked of their registry, by their tag.
--check writes nothing and exits 1 where a digest has moved.
"""

from __future__ import annotations

import argparse
import configparser
import importlib.util
import json
import pathlib
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable

import matrix

MANIFESTS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in ("oci.image.index.v1", "docker.distribution.manifest.list.v2", "oci.image.manifest.v1")
)


def ask_registry(name: str, tag: str, *, scheme: str = "https") -> tuple[str, str]:
    """(tag, digest) of `registry/repository` by the registry's own protocol, anonymously."""
    registry, _, repository = name.partition("/")
    request = urllib.request.Request(f"{scheme}://{registry}/v2/{repository}/manifests/{tag}", method="HEAD")
    request.add_header("Accept", MANIFESTS + ", application/vnd.docker.distribution.manifest.v2+json")
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        challenge = dict(re.findall(r'(\w+)="([^"]*)"', error.headers.get("WWW-Authenticate", "")))
        error.close()
        if error.code != 401 or "realm" not in challenge:
            raise
        query = urllib.parse.urlencode(
            {"service": challenge.get("service", registry), "scope": f"repository:{repository}:pull"}
        )
        with urllib.request.urlopen(f"{challenge['realm']}?{query}", timeout=60) as answer:
            given = json.load(answer)
        request.add_header("Authorization", f"Bearer {given.get('token') or given['access_token']}")
        response = urllib.request.urlopen(request, timeout=60)
    with response:
        digest = response.headers["Docker-Content-Digest"]
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest or ""):
        raise SystemExit(f"{name}:{tag}: expected a sha256 digest, got {digest!r}")
    return tag, digest


def of_cibuildwheel() -> dict[str, tuple[str, str]]:
    """name -> (tag, digest), from the list that the installed cibuildwheel carries; empty where there is none."""
    spec = importlib.util.find_spec("cibuildwheel")
    if spec is None or spec.origin is None:
        return {}
    text = (pathlib.Path(spec.origin).parent / "resources" / "pinned_docker_images.cfg").read_text()
    parser = configparser.ConfigParser(strict=False)
    parser.read_string(text)
    lines = (value for section in parser.sections() for value in parser[section].values())
    found = (re.fullmatch(r"(\S+)@(sha256:[0-9a-f]{64})\s*#\s*(\S+)", line) for line in lines)
    return {match[1]: (match[3], match[2]) for match in found if match}


def refreshed(text: str, key: str, tag: str, digest: str) -> str:
    """The text of ci/matrix.toml with another tag and digest for one image; comments and order stay."""
    pattern = re.compile(rf'(\[images\."{re.escape(key)}"\]\n(?:name = .*\n))tag = ".*"\ndigest = ".*"\n')
    new, count = pattern.subn(rf'\g<1>tag = "{tag}"\ndigest = "{digest}"\n', text)
    if count != 1:
        raise SystemExit(f"ci/matrix.toml: no image {key} with the lines name, tag, digest in this order")
    return new


def refresh(root: pathlib.Path, resolve: Callable[[str, str], tuple[str, str]]) -> list[str]:
    """Rewrite both files under `root`; answer what moved."""
    file, project = root / "ci" / "matrix.toml", root / "pyproject.toml"
    text, project_text = file.read_text(), project.read_text()
    moved = []
    for key, image in matrix.Matrix(matrix.tomllib.loads(text)).data["images"].items():
        tag, digest = resolve(image["name"], image["tag"])
        if (tag, digest) != (image["tag"], image["digest"]):
            moved.append(f"{image['name']}: {image['tag']} {image['digest']} -> {tag} {digest}")
        text = refreshed(text, key, tag, digest)
        project_text = re.sub(
            rf"{re.escape(image['name'])}@sha256:[0-9a-f]{{64}}", f"{image['name']}@{digest}", project_text
        )
    file.write_text(text)
    project.write_text(project_text)
    return moved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    known = of_cibuildwheel()

    def resolve(name: str, tag: str) -> tuple[str, str]:
        return known.get(name) or ask_registry(name, tag)

    if not args.check:
        for line in refresh(matrix.ROOT, resolve):
            print(line)
        return 0
    behind = [
        f"{image['name']}: {image['digest']} -> {digest}"
        for image in matrix.Matrix().data["images"].values()
        if (digest := resolve(image["name"], image["tag"])[1]) != image["digest"]
    ]
    for line in behind:
        print(line, file=sys.stderr)
    return 1 if behind else 0


if __name__ == "__main__":
    raise SystemExit(main())

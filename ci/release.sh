#!/bin/bash
# The steps of a release that a workflow and a person run alike. `gh` and GH_TOKEN where GitHub is asked.
#
#   ci/release.sh check-tag TAG          the tag is v and the project's version
#   ci/release.sh gate FOLDER            exactly the wheels of the matrix, each right, none too large
#   ci/release.sh index-files FOLDER TO  the wheels of the default toolkit, those that the package index gets
#   ci/release.sh draft TAG FOLDER       a draft release with every asset and their digests, checked after the upload
#   ci/release.sh publish TAG            make the draft public
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

digests() { # the wheels of a folder, as sha256sum prints them
  (cd "$1" && sha256sum -- *.whl)
}

case "${1:-}" in
  check-tag)
    version=$(python3 "$here/matrix.py" version)
    if [ "$2" != "v$version" ]; then
      echo "release.sh: expected the tag v$version, got $2" >&2
      exit 1
    fi
    ;;
  gate)
    python3 "$here/matrix.py" check-release "$2"
    ;;
  index-files)
    mkdir -p "$3"
    python3 "$here/matrix.py" index-files "$2" | while IFS= read -r wheel; do cp -- "$2/$wheel" "$3/"; done
    ls -l "$3"
    ;;
  draft)
    digests "$3" > "$3/SHA256SUMS"
    state=$(gh release view "$2" --json isDraft --jq .isDraft 2> /dev/null || echo none)
    case "$state" in
      none) gh release create "$2" --draft --verify-tag --title "prequal ${2#v}" --notes "See CHANGELOG.md." ;;
      true) ;; # a run that broke off: fill it up
      *) echo "release.sh: $2 is public already" >&2; exit 1 ;;
    esac
    gh release upload "$2" --clobber "$3"/*.whl "$3/SHA256SUMS"
    # what is there is what was meant, or nobody gets it
    back=$(mktemp -d)
    gh release download "$2" --dir "$back"
    digests "$back" | diff "$3/SHA256SUMS" -
    ;;
  publish)
    gh release edit "$2" --draft=false
    ;;
  *)
    sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2
    exit 2
    ;;
esac

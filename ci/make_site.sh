#!/bin/bash
# The static site: the wheels of every public release as an index for each CUDA major, and the pages of docs/.
#
#   ci/make_site.sh OUT            wheels come from the project's releases, by `gh`
#   ci/make_site.sh OUT FOLDER     wheels come from a folder
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
out=$1 wheels=${2:-}
if [ -z "$wheels" ]; then
  wheels=$(mktemp -d)
  gh release list --exclude-drafts --json tagName --jq '.[].tagName' | while IFS= read -r tag; do
    gh release download "$tag" --pattern '*.whl' --dir "$wheels"
  done
fi
python3 "$here/make_index.py" "$wheels" "$out" # it makes the folder, and replaces only one of its own
mkdir -p "$out/docs"
cp "$here"/../docs/*.md "$out/docs/"

#!/bin/bash
# What cibuildwheel runs on a finished wheel, in a fresh environment inside the build container.
#
#   ci/test_wheel.sh prepare     before the wheel is installed: pytest, and a torch where PREQUAL_TEST_TORCH offers one
#   ci/test_wheel.sh run WHEEL   the packaging tests on the file; with a torch, every CPU test on what was installed
#
# PREQUAL_TEST_TORCH: what pip shall install ("torch --index-url https://download.pytorch.org/whl/cpu"), or a folder of
# wheels that may hold a torch for this Python. Without it nothing here imports torch: its CUDA build has over 2 GB.
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

case "$1" in
  prepare)
    unset PIP_NO_DEPS # set for the wheel's own requirement, which is torch
    # cuobjdump of the PyPI toolkit reads what any nvcc wrote
    python -m pip install -q "pytest>=8" "pytest-timeout>=2" "nvidia-cuda-cuobjdump>=13.2,<14"
    offer=${PREQUAL_TEST_TORCH:-}
    if [ -d "$offer" ]; then
      tag=$(python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
      folder=$offer
      # the file itself: pip would prefer a newer torch of the index
      offer=$(compgen -G "$folder/torch-*-$tag-*.whl" | head -n 1) || offer=""
      offer=${offer:+--find-links $folder $offer}
    fi
    if [ -n "$offer" ]; then
      # shellcheck disable=SC2086 # words for pip
      python -m pip install -q $offer "nvidia-ml-py>=12" --group "$project/pyproject.toml:test" "cmake>=3.29" ninja
    fi
    ;;
  run)
    export PREQUAL_TEST_WHEEL=$2
    python -m pytest -c /dev/null --noconftest -q -p no:cacheprovider "$project/tests/packaging/test_wheel.py"
    if python -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"; then
      python -m prequal doctor || [ $? = 1 ] # 1: the reference answers, as it must where no GPU is
      cd "$project/tests" # away from the sources: what is tested is what was installed
      python -m pytest -q -p no:cacheprovider
    else
      echo "test_wheel.sh: no torch was offered for $(python -V): the packaging tests are all"
    fi
    ;;
  *)
    echo "test_wheel.sh: expected prepare or run, got $1" >&2
    exit 2
    ;;
esac

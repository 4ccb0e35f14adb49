#!/bin/bash
# The GPU lane, on any machine with an NVIDIA GPU and PyTorch: install, doctor, GPU tests, sanitizer, benchmark, evidence.
#
#   ci/gpu_lane.sh [--wheel FILE] [--out DIR] [--archs "90"] [--ptx 80] [--steps test,sanitize,demo,qualify,bench] [--quick]
#               [--ops knn,rms_norm] [--shards 4] [--only knn,losses]
#
# Without --wheel it builds from source with the machine's own toolkit (CUDACXX, or nvcc on PATH) and the build tools of
# its Python. --ptx NN builds the test-only variant that runs the code of another architecture on this GPU; never shipped.
# --only runs the tests whose file or name has one of these words: what has changed since a lane that ran them all.
# --shards runs the tests in so many processes side by side, each of which sees all GPUs and begins with another one. A
# step that fails fails the lane, after the others have run.
set -uo pipefail
cd "$(dirname "$0")/.."

wheel="" out="gpu-lane" archs="" ptx="" steps="test,sanitize,demo,qualify,bench" quick="" ops="" shards=1 only=""
while [ $# -gt 0 ]; do
  case "$1" in
    --wheel) wheel=$2; shift 2 ;;
    --out) out=$2; shift 2 ;;
    --archs) archs=$2; shift 2 ;;
    --ptx) ptx=$2; shift 2 ;;
    --steps) steps=$2; shift 2 ;;
    --quick) quick=--quick; shift ;;
    --ops) ops=$2; shift 2 ;;
    --shards) shards=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    *) echo "gpu_lane.sh: unknown option $1" >&2; exit 2 ;;
  esac
done
mkdir -p "$out"
out=$(cd "$out" && pwd)
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
wants() { [[ ",$steps," == *",$1,"* ]]; }
failed=()

echo "== install"
if [ -n "$wheel" ]; then
  "$python" -m pip install -q --no-index --no-deps --target "$site" "$wheel" || exit 1
else
  CUDACXX=${CUDACXX:-$(command -v nvcc)} || { echo "gpu_lane.sh: no nvcc: set CUDACXX or give --wheel" >&2; exit 2; }
  export CUDACXX PREQUAL_CUDA_ARCHS=${archs:-90} PREQUAL_TEST_PTX=$ptx
  "$python" -m pip install -q --no-index --no-deps --no-build-isolation --target "$site" . || exit 1
fi
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PREQUAL_GPU_LANE=1
[ -n "$ptx" ] && export PREQUAL_FORCE_ARCH=$ptx
cd tests || exit 1 # away from the sources: what is tested is what was installed

echo "== doctor"
"$python" -m prequal doctor
"$python" -m prequal doctor --json > "$out/doctor.json"

tests="not run"
if wants test; then
  echo "== tests"
  tests=passed pids=()
  gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
  visible=${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}
  threads=$(($(nproc) / shards)) # of each: with all the processors' threads in every process they wait for each other
  words=(-m pytest -q --tb short --show-capture no --durations 10 -p no:cacheprovider -m gpu --ignore packaging -k "${only//,/ or }")
  for ((shard = 0; shard < shards; ++shard)); do
    [ "$gpus" -gt 1 ] && visible="${visible#*,},${visible%%,*}"
    own=(CUDA_VISIBLE_DEVICES="$visible" PREQUAL_TEST_SHARD="$shard/$shards" OMP_NUM_THREADS=$((threads > 0 ? threads : 1)))
    env "${own[@]}" PYTHONUNBUFFERED=1 "$python" "${words[@]}" . > "$out/gpu-tests-$shard.txt" 2>&1 &
    pids+=($!)
  done
  for shard in "${!pids[@]}"; do
    wait "${pids[$shard]}" || { [ $? = 5 ] && [ -n "$only" ]; } || { # 5: this share has none of those tests
      tests=failed
      cat "$out/gpu-tests-$shard.txt"
    }
    tail -n 1 "$out/gpu-tests-$shard.txt"
  done
  cat "$out"/gpu-tests-*.txt > "$out/gpu-tests.txt"
  rm "$out"/gpu-tests-*.txt
  [ $tests = passed ] || failed+=(test)
fi
touch "$out/gpu-tests.txt"
"$python" - "$tests" "$only" "$out/gpu-tests.txt" > "$out/gpu-tests.json" << 'PY'
import json, pathlib, re, sys, torch
from prequal import runtime_state as state

_, outcome, only, said = sys.argv
digests = {name: op.digest for name, op in state.gate.host.manifest.ops.items()}
failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", pathlib.Path(said).read_text(), re.MULTILINE)
ran = {"only": only.split(",") if only else None, "failed": sorted(set(failed))}
print(json.dumps({"outcome": outcome, **ran, "gpu": torch.cuda.get_device_name(), "digests": digests}))
PY
if wants sanitize && command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck; do
    echo "== compute-sanitizer $tool"
    compute-sanitizer --tool $tool --error-exitcode 9 --kernel-name-exclude kernel_substring=at:: \
      "$python" ../ci/sanitize_calls.py > "$out/sanitizer-$tool.txt" 2>&1 || failed+=("$tool")
    tail -n 3 "$out/sanitizer-$tool.txt"
  done
fi
if wants demo; then
  echo "== demo"
  "$python" -m prequal transfer-labels demo:knot --device cuda --out "$out/labelled.ply" --json | tee "$out/demo.json" || failed+=(demo)
  rm -f "$out/labelled.ply"
fi
if wants qualify; then
  echo "== qualify, and start from the lock"
  "$python" -m prequal qualify > "$out/qualify.txt" || failed+=(qualify)
  tail -n 8 "$out/qualify.txt"
  "$python" ../benchmarks/gate.py --out "$out/gate.json" || failed+=(gate)
fi
if wants bench; then
  echo "== benchmark"
  "$python" ../benchmarks/run.py --out "$out" --gpu-tests "$tests" $quick ${ops:+--ops "$ops"} || failed+=(bench)
fi

if [ ${#failed[@]} -gt 0 ]; then
  echo "GPU lane FAILED: ${failed[*]}"
  exit 1
fi
echo "GPU lane passed (tests: $tests)"

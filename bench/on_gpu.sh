#!/usr/bin/env bash
# Runs the GPU queue unattended: bash bench/on_gpu.sh 1 | 2 | ... | 8 | all. Each part takes less than eight minutes.
#
# Needs a GPU and a python3 with CuPy (torch for parts 1 and 3 to 6); nothing is installed. Results go to $OUT (default
# bench/out/gpu), for each step a log beside them and a line in steps.jsonl. A step that has passed is not run again;
# after a failed one the next goes on, and the exit status tells. What ran out of time (status 3) goes on when run again.
set -u
cd "$(dirname "$0")/.." || exit 1
OUT=${OUT:-bench/out/gpu}
PYTHON=${PYTHON:-python3}
SWEEP=${SWEEP:-410} # seconds of a sweep; the regimes of bench/marks.py come first
CONFORMANCE=${CONFORMANCE:-tests/conformance/gpu} # what the simulator is held to, here and ever after
mkdir -p "$OUT"
export PYTHONPATH="$PWD:$PWD/tests" PYTHONUNBUFFERED=1 COLUMNS=250 CUPY_FLASH_CACHE_DIR="${CUPY_FLASH_CACHE_DIR:-$PWD/bench/out/kernels}"

if ! nvidia-smi -L >"$OUT/gpu.txt" 2>&1; then
  echo "on_gpu.sh: there is no GPU here (nvidia-smi -L: $(head -n 1 "$OUT/gpu.txt"))" >&2
  exit 2
fi

failed=0

step() { # step NAME SECONDS COMMAND...
  local name=$1 seconds=$2 status begin=$SECONDS
  shift 2
  if [ -e "$OUT/$name.passed" ]; then
    echo "$name: has passed before"
    return
  fi
  echo "$name: $*"
  timeout -k 10 "$seconds" "$@" >"$OUT/$name.log" 2>&1
  status=$?
  tail -n 3 "$OUT/$name.log"
  printf '{"step": "%s", "status": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - begin)) >>"$OUT/steps.jsonl"
  if [ "$status" -eq 0 ]; then touch "$OUT/$name.passed"; else failed=1; fi
}

tests() { "$PYTHON" -c 'import xdist' 2>/dev/null && parallel="-n 8" || parallel=""; }

part_1() { # the host's share of a call, and first calls, cold and warm
  step overhead 60 "$PYTHON" -m bench overhead --out "$OUT"
  step first 300 "$PYTHON" -m bench first --out "$OUT"
}

part_2() { # what the instructions do, and the simulator held to it
  step conformance 200 "$PYTHON" -m conformance.on_gpu "$OUT/conformance"
  mkdir -p "$CONFORMANCE" && cp "$OUT"/conformance/*.npz "$CONFORMANCE"/
  step simulator 200 "$PYTHON" -m pytest -q -W default tests/test_simulator_conformance_gpu.py
}

part_3() { # the tests on the GPU
  tests
  step gpu-tests 100 "$PYTHON" -m pytest -q -W default tests/gpu --ignore tests/gpu/test_gpu_half.py \
    --ignore tests/gpu/test_gpu_adapters.py
  step adapters 60 "$PYTHON" -m pytest -q -W default tests/gpu/test_gpu_adapters.py # needs transformers
  # shellcheck disable=SC2086 # several words
  step behaviour 310 "$PYTHON" -m pytest -q -W default $parallel -k cuda \
    tests/test_attention.py tests/test_backward.py tests/test_varlen.py tests/gpu/test_gpu_half.py
}

part_4() { # fp32 and fp64 without tensor cores: every tile beside every peer, forward and backward
  local direction dtype
  for direction in forward backward; do
    for dtype in float32 float64; do
      step "simt-$direction-$dtype" 115 "$PYTHON" -m bench $direction --sweep --dtype $dtype --head-dim 64 \
        --seqlens 1024,2048 --seconds 60 --out "$OUT"
    done
  done
}

part_5() { # tensor cores: every tile of every engine beside every peer
  step sweep-forward $((SWEEP + 60)) "$PYTHON" -m bench forward --sweep --seconds "$SWEEP" --out "$OUT"
}

part_6() { # and of the backward
  step sweep-backward $((SWEEP + 60)) "$PYTHON" -m bench backward --sweep --seconds "$SWEEP" --out "$OUT"
}

part_7() { # compute-sanitizer on a few cases
  local cases='
import cases, cupy_flash, on_gpu
for name in on_gpu.FUNCTIONS:
    setattr(cupy_flash, name, on_gpu.moving(getattr(cupy_flash, name)))
for name in ("plain", "causal", "window", "bias", "mask", "sink", "dropout", "q-lengths"):
    if name in cases.OPTIONS:
        cases.check(cases.OPTIONS[name], backend="cuda")
        print(name, flush=True)
'
  for tool in memcheck synccheck; do
    step "$tool" 220 compute-sanitizer --tool "$tool" --error-exitcode 9 "$PYTHON" -c "$cases"
  done
}

part_8() { # what bounds the fastest tiles of parts 5 and 6, and what the sweeps say of written costs
  step bounds 460 "$PYTHON" -m bench bounds "$OUT/sweep-forward.json" "$OUT/sweep-backward.json" --seconds 400 --out "$OUT"
  step costs-forward 120 "$PYTHON" -m bench costs "$OUT/sweep-forward.json"
  step costs-backward 120 "$PYTHON" -m bench costs "$OUT/sweep-backward.json"
}

case ${1:-} in
  [1-8]) "part_$1" ;;
  all) for part in 3 5 6 2 8 7 4 1; do "part_$part"; done ;; # what others wait for first
  *)
    echo "usage: bash bench/on_gpu.sh 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | all" >&2
    exit 1
    ;;
esac
exit $failed

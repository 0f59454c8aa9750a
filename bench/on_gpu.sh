#!/usr/bin/env bash
# Runs the GPU queue unattended: bash bench/on_gpu.sh 1 | 2 | ... | 10 | all. Each part takes less than eight minutes.
#
# Needs a GPU and a python3 with CuPy (torch for parts 1, 3 to 7 and 10); installs nothing. Results and logs go to $RESULTS
# (default bench/out/gpu), and each step appends a line to steps.jsonl. Steps that have passed are skipped. After a
# failed step the next one runs, and the exit status is 1. A step that ran out of time (status 3) resumes when run again.
set -u
cd "$(dirname "$0")/.." || exit 1
RESULTS=${RESULTS:-bench/out/gpu}
PYTHON=${PYTHON:-python3}
SWEEP=${SWEEP:-410} # seconds per sweep, which starts with the regimes of kernel_development/marks.py
CONFORMANCE=${CONFORMANCE:-tests/conformance/gpu} # GPU results against which the simulator is tested
mkdir -p "$RESULTS"
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/helpers" PYTHONUNBUFFERED=1 COLUMNS=250 CUPY_FLASH_CACHE_DIR="${CUPY_FLASH_CACHE_DIR:-$PWD/bench/out/kernels}"

if ! nvidia-smi -L >"$RESULTS/gpu.txt" 2>&1; then
  echo "on_gpu.sh: found no GPU (nvidia-smi -L: $(head -n 1 "$RESULTS/gpu.txt"))" >&2
  exit 2
fi

failed=0

step() { # step NAME SECONDS COMMAND...
  local name=$1 seconds=$2 status begin=$SECONDS
  shift 2
  if [ -e "$RESULTS/$name.passed" ]; then
    echo "$name: already passed"
    return
  fi
  echo "$name: $*"
  timeout -k 10 "$seconds" "$@" >"$RESULTS/$name.log" 2>&1
  status=$?
  tail -n 3 "$RESULTS/$name.log"
  printf '{"step": "%s", "status": %d, "seconds": %d}\n' "$name" "$status" $((SECONDS - begin)) >>"$RESULTS/steps.jsonl"
  if [ "$status" -eq 0 ]; then touch "$RESULTS/$name.passed"; else failed=1; fi
}

tests() { "$PYTHON" -c 'import xdist' 2>/dev/null && parallel="-n $(getconf _NPROCESSORS_ONLN)" || parallel=""; }

part_1() { # host time of a call, and of first calls with a cold and a warm cache
  step overhead 60 "$PYTHON" -m bench overhead --out "$RESULTS"
  step decode 200 "$PYTHON" -m bench decode --gpu --out "$RESULTS"
  step first 250 "$PYTHON" -m bench first --out "$RESULTS"
}

part_2() { # instruction conformance: record the GPU's results, then test the simulator against them
  step conformance 250 "$PYTHON" -m conformance.on_gpu "$RESULTS/conformance"
  mkdir -p "$CONFORMANCE" && cp "$RESULTS"/conformance/*.npz "$CONFORMANCE"/
  step simulator 200 "$PYTHON" -m pytest -q -W default tests/simulator/test_simulator_conformance_gpu.py
}

part_3() { # tests on the GPU; compiled kernels stay in the cache, so that a second run is faster
  tests
  # jax would preallocate most of the GPU's memory; these tests use jax arrays on the CPU only.
  set -- env KERNELS="$CUPY_FLASH_CACHE_DIR" JAX_PLATFORMS=cpu OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
  # A hanging kernel makes pytest-timeout end its worker process and report the test.
  # shellcheck disable=SC2086 # $parallel is a list of arguments
  set -- "$@" "$PYTHON" -m pytest -q -W default -o timeout=100 -o timeout_method=thread $parallel
  step gpu-tests 160 "$@" tests/gpu --ignore tests/gpu/test_gpu_half.py --ignore tests/gpu/test_gpu_adapters.py
  step half 170 "$@" tests/gpu/test_gpu_half.py
  step behaviour 80 "$@" -k cuda tests/behaviour/test_attention.py tests/behaviour/test_backward.py tests/behaviour/test_varlen.py
  step adapters 60 "$@" tests/gpu/test_gpu_adapters.py # needs transformers
}

part_4() { # fp32 and fp64 without tensor cores: every tile and every other implementation, forward and backward
  local direction dtype
  for direction in forward backward; do
    for dtype in float32 float64; do
      step "simt-$direction-$dtype" 115 "$PYTHON" -m bench $direction --sweep --dtype $dtype --head-dim 64 \
        --seqlens 1024,2048 --seconds 60 --out "$RESULTS"
    done
  done
}

part_5() { # forward with tensor cores: every tile of every engine and every other implementation
  step sweep-forward $((SWEEP + 60)) "$PYTHON" -m bench forward --sweep --seconds "$SWEEP" --out "$RESULTS"
}

part_6() { # the same for the backward
  step sweep-backward $((SWEEP + 60)) "$PYTHON" -m bench backward --sweep --seconds "$SWEEP" --out "$RESULTS"
}

part_7() { # compute-sanitizer on short calls of every engine; resumes when run again
  local end=$((SECONDS + 460)) engine
  within() { # within NAME COMMAND...: run a step in the remaining time of this part
    local left=$((end - SECONDS))
    if [ "$left" -ge 20 ]; then
      step "$1" $((left < 120 ? left : 120)) "${@:2}"
    elif [ ! -e "$RESULTS/$1.passed" ]; then
      echo "$1: out of time, run again to resume"
      failed=1
    fi
  }
  within calls "$PYTHON" -m sanitize # fills the kernel cache, and fails early without a sanitizer
  for engine in simt mma wgmma fp8 cache derivatives; do
    within "memcheck-$engine" compute-sanitizer --tool memcheck --error-exitcode 9 "$PYTHON" -m sanitize "$engine"
    within "synccheck-$engine" compute-sanitizer --tool synccheck --error-exitcode 9 "$PYTHON" -m sanitize "$engine"
  done
  # Racecheck does not know that mbarriers order bulk copies and would report false races in wgmma and fp8.
  for engine in simt mma cache derivatives; do
    within "racecheck-$engine" compute-sanitizer --tool racecheck --error-exitcode 9 "$PYTHON" -m sanitize "$engine"
  done
}

part_8() { # bottlenecks of the fastest tiles of parts 5 and 6, and the cost models compared with these sweeps
  step bounds 460 "$PYTHON" -m bench bounds "$RESULTS/sweep-forward.json" "$RESULTS/sweep-backward.json" --seconds 400 --out "$RESULTS"
  step costs-forward 120 "$PYTHON" -m bench costs "$RESULTS/sweep-forward.json"
  step costs-backward 120 "$PYTHON" -m bench costs "$RESULTS/sweep-backward.json"
}

part_9() { # what every user can run: the engines proved, the tiles of a few shapes measured, and all of it in one file
  step check 200 "$PYTHON" -m cupy_flash check
  step tune 120 "$PYTHON" -m cupy_flash tune --causal --seqlens 2048,8192 --backward --minutes 1.5
  step tune-decode 90 "$PYTHON" -m cupy_flash tune --decode --page 16 --seqlens 8192,32768 --minutes 1
  step report 30 "$PYTHON" -m cupy_flash report --out "$RESULTS/report.json"
}

part_10() { # mods beside FlexAttention
  step mods 200 "$PYTHON" -m bench mods --gpu --out "$RESULTS"
}

case ${1:-} in
  [1-9] | 10) "part_$1" ;;
  all) for part in 3 9 10 5 6 2 8 7 4 1; do "part_$part"; done ;; # later parts read results of earlier ones
  *)
    echo "usage: bash bench/on_gpu.sh 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | 10 | all" >&2
    exit 1
    ;;
esac
exit $failed

"""Runs tests with the real CuPy on devices made of NumPy: each row of RUNS is a process in which pytest runs them.

`python -m gpu_in_numpy --archs sm_80 tests/gpu` runs tests by hand. A process imports CuPy and parses kernels once, so
each row has many tests.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import FEATURES
from tiers import in_tiers

ROOT = Path(__file__).resolve().parents[2]
ORDERED = [f"tests/gpu/test_gpu_{name}.py" for name in ("streams", "graphs", "cupy")]
INSIDE = "tests/gpu_in_numpy/inside"
BEHAVIOUR = [f"tests/behaviour/test_{name}.py" for name in ("attention", "backward", "varlen", "merge")]

# These rows of SIMULATED_PAIRS contain every feature.
EVERY_FEATURE = [
    "causal+window+scale+softcap+alibi+bias",
    "dropout+top-left+bhsd+bfloat16+kv-lengths+grouped",
    "grouped+mask+q-lengths+more-queries+huge+float64",
    "bias+sink+wide-values+float64+more-queries+top-left",
]
COVERING = [
    f"tests/behaviour/test_{module}.py::test_all_pairs_of_options[cuda-{row}]"
    for module in ("attention", "backward")
    for row in EVERY_FEATURE
]
PACKED = [f"tests/behaviour/test_varlen.py::test_packed[cuda-{name}]" for name in ("causal", "bfloat16")]

# A launch takes about 0.04 s, so the tests with the longest sequences and loops run for one engine only.
SHORT = "-k=not (mma and (streams or threads or graphs)) and not (simt and (twenty or linear))"

RUNS = {
    "sm_80": (
        "--archs=sm_80,sm_80", "--seeds=5", "tests/gpu", INSIDE, *COVERING, *PACKED,
        "--ignore=tests/gpu/test_gpu_half.py", SHORT,
    ),
    "sm_75": ("--archs=sm_75", "tests/gpu/test_gpu_engine.py", "-k=results_are_arrays"),
    "sm_90a": (
        "--archs=sm_90a", "tests/gpu/test_gpu_engine.py::test_results_are_arrays_of_the_callers_library[wgmma-cupy]",
        "tests/gpu/test_gpu_half.py::test_wgmma_on_cuda[window-causal-any-order]",
        "tests/gpu/test_gpu_half.py::test_wgmma_on_cuda[packed-sink-deterministic]",
        f"{INSIDE}/test_tensor_maps.py", f"{INSIDE}/test_clusters.py",
    ),
    "sm_80-behaviour": ("--archs=sm_80", *BEHAVIOUR, "-k=cuda", "--exhaustive"),
    "sm_75-behaviour": ("--archs=sm_75", *BEHAVIOUR, "-k=cuda", "--exhaustive"),
    "sm_80-half": ("--archs=sm_80", "tests/gpu/test_gpu_half.py", "--exhaustive"),
    "sm_90a-half": ("--archs=sm_90a", "tests/gpu/test_gpu_half.py", "-k=wgmma", "--exhaustive"),
    "sm_80-all": ("--archs=sm_80,sm_80", "tests/gpu", INSIDE, "--ignore=tests/gpu/test_gpu_half.py", "--exhaustive"),
    "sm_90a-all": ("--archs=sm_90a,sm_90a", "tests/gpu", INSIDE, "--ignore=tests/gpu/test_gpu_half.py", "--exhaustive"),
    "simt-orders": ("--archs=sm_80,sm_80", "--seeds=200", *ORDERED, "-k=not mma", "--exhaustive"),
    "mma-orders": ("--archs=sm_80,sm_80", "--seeds=200", *ORDERED, "-k=mma", "--exhaustive"),
    "wgmma-orders": ("--archs=sm_90a,sm_90a", "--seeds=200", *ORDERED, "-k=wgmma", "--exhaustive"),
}  # fmt: skip


def test_the_covering_set_has_every_feature() -> None:
    assert {feature for row in EVERY_FEATURE for feature in row.split("+")} == set(FEATURES)


if importlib.util.find_spec("cupy"):  # CuPy has no wheels for macOS

    @pytest.mark.parametrize("arguments", in_tiers(RUNS, default=["sm_80", "sm_75", "sm_90a"]))
    def test_in_a_process_of_its_own(arguments: tuple[str, ...], tmp_path: Path) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
            "KERNELS": os.environ["CUPY_FLASH_CACHE_DIR"],
        }
        command = [sys.executable, "-m", "gpu_in_numpy", "-q", f"--basetemp={tmp_path / 'inside'}", *arguments]
        ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert re.search(r"^\d+ passed(, \d+ deselected)? in ", ran.stdout, re.MULTILINE), ran.stdout

"""python -m gpu_in_numpy [--archs sm_80,sm_80] [--seeds 5] [pytest's arguments]: run tests on devices made of NumPy.

In tests/gpu all tests of CuPy arrays run; those of torch need a card. Compiled kernels are kept in the folder KERNELS.
"""

import argparse
import os
import sys
from pathlib import Path

import pytest

import gpu_in_numpy


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_in_numpy", description=__doc__)
    parser.add_argument("--archs", default="sm_80,sm_80", help="the architecture of each device")
    parser.add_argument("--seeds", type=int, default=1, help="orders of execution for tests of streams")
    options, arguments = parser.parse_known_args()
    if "KERNELS" in os.environ:
        os.environ["CUPY_CACHE_DIR"] = str(Path(os.environ["KERNELS"]) / "cupy")
    gpu_in_numpy.install(tuple(options.archs.split(",")))
    from gpu_in_numpy.plugin import Plugin

    return pytest.main(arguments, plugins=[Plugin(gpu_in_numpy.machine(), options.seeds)])


sys.exit(main())

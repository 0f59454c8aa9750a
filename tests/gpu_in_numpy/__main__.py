"""Runs tests on devices made of NumPy.

python -m gpu_in_numpy [--archs sm_80,sm_80] [--seeds 5] [arguments of pytest]

Of tests/gpu it runs the tests of CuPy arrays; those of torch need a card. Compiled kernels are kept in the folder
KERNELS.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import pytest

import gpu_in_numpy


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_in_numpy", description=__doc__)
    parser.add_argument("--archs", default="sm_80,sm_80", help="the architecture of each device")
    parser.add_argument("--seeds", type=int, default=1, help="orders of execution for tests of streams")
    options, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        # CuPy's own kernels are PTX here, which must not get into CuPy's usual cache folder.
        os.environ["CUPY_CACHE_DIR"] = str(Path(os.environ.get("KERNELS") or folder) / "cupy")
        machine = gpu_in_numpy.install(tuple(options.archs.split(",")))
        from gpu_in_numpy.plugin import Plugin  # this imports CuPy

        return pytest.main(arguments, plugins=[Plugin(machine, options.seeds)])


sys.exit(main())

"""Print the tables of docs/simulator_evidence.md: `python -m other_kernels`, from tests/."""

import os
import sys
import tempfile
from pathlib import Path


def main():
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "helpers")]
    from .cases import DEFAULT
    from .mutations import evidence, table

    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("CUPY_FLASH_CACHE_DIR", folder)
        print(table(evidence(DEFAULT)))


main()

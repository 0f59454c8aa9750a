"""Write which kernel confirms which form of an instruction, for `python -m cupy_flash ptx --evidence`.

python -m other_kernels.instruction_forms, from tests/, writes the table after a change of a kernel or of Triton.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from cupy_flash.measure.checks.evidence import FILE, forms


def table(cases, default):
    """Return {form: the first case with it}; cases of the default tests come before the others."""
    from .launching import compiled_kernel

    found = {}
    for name in sorted(cases, key=lambda name: name not in default):
        for form in forms(compiled_kernel(cases[name]()).ptx):
            found.setdefault(form, name)
    return dict(sorted(found.items()))


def main():
    sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "helpers")]
    from .cases import CASES, DEFAULT

    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("CUPY_FLASH_CACHE_DIR", folder)
        FILE.write_text(json.dumps(table(CASES, DEFAULT), indent=0) + "\n", "ascii")


if __name__ == "__main__":
    main()

"""The simulator's stored results of every micro-kernel, with which a check on a GPU compares its own.

`simulated.json` has for each kernel a digest of its text and inputs, and its results: their digest if all bits must
agree, or the numbers if an error bound applies. Kernels whose results the PTX ISA states are not in it. To write the
file after a change of a micro-kernel or of the simulator, run `python -m cupy_flash.measure.checks.simulated`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np

from .micro_kernels import Array, Kernel, difference, kernels, simulate

FILE = Path(__file__).with_name("simulated.json")
Entry = tuple[str, str]  # the digest of a kernel, its results


def wrong(kernel: Kernel, out: Array) -> str | None:
    """Describe how a GPU's results differ from the PTX ISA's or else the simulator's; return None if they agree."""
    if kernel.expected is not None:
        return difference(out, kernel.expected, kernel.relative, "PTX ISA")
    digest, results = stored().get(kernel.name, ("", ""))
    if digest == digest_of(kernel):
        if kernel.relative is not None:
            expected = np.frombuffer(base64.b64decode(results), out.dtype).reshape(out.shape)
            return difference(out, expected, kernel.relative)
        if results == _digest(_canonical(out)):
            return None
    # The stored digest cannot name the wrong number, and belongs to other inputs if this release of NumPy draws other
    # random numbers. So simulate the kernel.
    return difference(out, simulate(kernel), kernel.relative)


def entry_of(kernel: Kernel) -> Entry:
    """Return the entry of a kernel in the file."""
    out = _canonical(simulate(kernel))
    results = _digest(out) if kernel.relative is None else base64.b64encode(out.tobytes()).decode()
    return digest_of(kernel), results


def digest_of(kernel: Kernel) -> str:
    """Return the digest of a kernel's text, launch, inputs and the initial values of its output."""
    launch = f"{kernel.text} {kernel.blocks} {kernel.threads} {kernel.rows} {kernel.dynamic}"
    return _digest(np.frombuffer(launch.encode(), np.uint8), *kernel.inputs, kernel.out)


@cache
def stored() -> dict[str, Entry]:
    """Return the entries of the file by kernel name."""
    return {name: (digest, results) for name, (digest, results) in json.loads(FILE.read_text("ascii")).items()}


def text_of(every: Iterable[Kernel]) -> str:
    """Return the text of the file for these kernels, one line for each."""
    lines = (f"{json.dumps(kernel.name)}: {json.dumps(entry_of(kernel))}" for kernel in every)
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _canonical(out: Array) -> Array:
    """Return the numbers with one bit pattern for all NaNs, because PTX does not define a NaN's payload."""
    return np.where(np.isnan(out), np.array(np.nan, out.dtype), out) if out.dtype.kind == "f" else out


def _digest(*arrays: Array) -> str:
    return sha256(b"".join(f"{x.dtype} {x.shape} ".encode() + x.tobytes() for x in arrays)).hexdigest()[:32]


if __name__ == "__main__":
    FILE.write_text(text_of(kernel for kernel in kernels() if kernel.expected is None), "ascii")

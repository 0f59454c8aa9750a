"""python -m bench sass: the machine code of other implementations' kernels beside ours, on the same counters.

The cubins are the user's, for example from `cuobjdump -xelf all` of a wheel's library; nothing of them is stored. A
kernel computes one exponential per score, so that counters per score need no knowledge of its tile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble

from ..gpu import Regime
from ..report import NOTHING, Table
from . import cycles, sass
from .predict import ARCH, DTYPES, launch_of

COLUMNS = (
    "kernel", "instructions", "a score", "FMA/ALU/uniform", "ldmatrix", "exps before waits", "tensor clocks",
    "shared clocks", "alone", "overlap",
)  # fmt: skip


def ours(regimes: Iterable[Regime]) -> dict[str, bytes]:
    """Compile the kernel of every regime of the Hopper engine, and return the cubins by its name."""
    cubins = {}
    for regime in regimes:
        if regime.dtype in DTYPES:
            launch = launch_of(regime)
            text = assemble(launch.kernel, dict(launch.constants), dict(launch.headers))
            cubins[regime.name] = nvrtc.compile(text, launch.kernel, ARCH).code
    return cubins


def theirs(folder: Path) -> dict[str, bytes]:
    """Return the cubins of a folder by the names of their files."""
    return {path.stem: path.read_bytes() for path in sorted(folder.glob("*.cubin"))}


def table(cubins: dict[str, bytes]) -> Table:
    """Return the table of the steady mainloops; kernels without matrix instructions or exponentials are left out."""
    rows = [[name, *counters(code)] for name, code in cubins.items() if sass.has_mainloop(code)]
    return Table("SASS of a steady mainloop step, per thread; clocks of two consumer warpgroups", list(COLUMNS), rows)


def counters(cubin: bytes) -> list[str]:
    """Return the cells of a kernel, in the order of COLUMNS after its name."""
    mainloop = sass.mainloop(cubin)
    loop = mainloop.steady
    counts, units = mainloop.counts(), Counter(cycles.decode(text).unit for text in loop)
    exps = max(counts["exp"], 1)
    waits = [str(wait.exps) for wait in mainloop.waits() if "WARPGROUP" in wait.instruction]
    cells = [
        str(len(loop)),
        f"{len(loop) / exps:.2f}",
        "/".join(f"{units[unit] / exps:.1f}" for unit in ("FMA", "ALU", "UNIFORM")),
        f"{counts['ldmatrix'] / exps:.2f}",
        f"{', '.join(waits)} of {exps}" if waits else NOTHING,
    ]
    if not any(sass.opcode(text) in cycles.PRODUCTS for text in loop):
        return [*cells, *4 * [NOTHING]]
    # Named barriers are left out: whom they make wait follows from code outside of the loop.
    free = [text for text in loop if sass.opcode(text) != "BAR"]
    shared = sum(map(cycles.shared_bytes, loop)) / cycles.SHARED_BYTES
    clocks = 2 * cycles.clocks_of_iteration(free, 1), cycles.clocks_of_iteration(free, 2)
    return [*cells, *(f"{each:.0f}" for each in (2 * cycles.tensor_clocks(loop), 2 * shared, *clocks))]

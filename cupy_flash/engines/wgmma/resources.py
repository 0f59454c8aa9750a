"""Resources of Hopper that the engine's kernels share: tile granularity, registers, the cost model's throughputs."""

from ...problem.records import Problem
from ..shared import loads_by_score

ARCH = "sm_90a"
LARGEST = 256  # maximum head dimension
WARPGROUP_ROWS = 64  # M of a warpgroup's wgmma
WARP_ROWS = 16  # rows of a warpgroup's wgmma in one warp's registers
PANEL = 64  # columns of a TMA box of 16-bit elements: 128 bytes, one swizzle row
COLUMNS = (64, 96, 128, 192, 256)  # accumulator widths: the N of wgmma in hopper.cuh; fragments_of in wgmma/tile.cuh

# Cost model, per SM and clock, from data sheets: not measured on a GPU yet.
MULTIPLY_ADDS = 2048
EXPONENTIALS = 16
SHARED_BYTES = 128  # shared-memory bandwidth
CACHE_BYTES = 32  # L2 bandwidth
STEP = 100  # clocks of waits and signals per mainloop step
BLOCK = 2000  # clocks of prologue and epilogue per block
CLOCK = 1.5e9
CLEAR = 2e-6  # seconds of the launch that clears the tile scheduler's counter


def needs_registers(problem: Problem) -> bool:
    """Return whether the forward needs registers for lengths, modified scores, masks, a left window or dropout."""
    masks = problem.dense_mask is not None or problem.mask_mod or problem.mask.left is not None
    modifies_scores = problem.is_modified or masks
    return problem.has_lengths or modifies_scores or problem.dropout > 0


def live_in_loads(problem: Problem, keys: int) -> int:
    """Return the registers per thread for the values that mods load per score, in a forward step of `keys` keys.

    Values of a key alone are staged in shared memory.
    """
    if not loads_by_score(problem):
        return 0
    return keys * 3 // 4 + 8 if problem.mask_mod else keys // 2 + 4


def columns(dim: int) -> int:
    """Return the smallest accumulator width of COLUMNS that holds `dim`."""
    return min(columns for columns in COLUMNS if columns >= min(dim, LARGEST))

"""Hopper constants that the engine's kernels share: tile granularity and the cost model's throughputs."""

from ...problem import Problem
from ..fragments import is_modified
from ..shared import loads_by_score

ARCH = "sm_90a"
LARGEST = 256  # head dimension
WARPGROUP_ROWS = 64  # M of a warpgroup's wgmma
RECORD_BYTES = 16  # under a mask_mod: the records of tiles, of all stages (forward.cuh), or of one (backward.cuh)
WARP_ROWS = 16  # rows of a warpgroup's wgmma that one warp holds
PANEL = 64  # columns of a TMA box of 16-bit elements: 128 bytes, one swizzle row
COLUMNS = (64, 96, 128, 192, 256)  # accumulator widths, those of the wgmma N in hopper.cuh; fragments_of in tile.cuh

# Cost model, per SM and clock. Not measured on a GPU by this project yet.
MULTIPLY_ADDS = 2048
EXPONENTIALS = 16
SHARED_BYTES = 128  # shared-memory bandwidth
CACHE_BYTES = 32  # L2 bandwidth
STEP = 100  # clocks of waits and signals per mainloop step
BLOCK = 2000  # clocks of prologue and epilogue per block
CLOCK = 1.5e9
CLEAR = 2e-6  # seconds of the launch that clears the tile scheduler's counter


def needs_registers(problem: Problem) -> bool:
    """Whether lengths, a score modification, masks, a left window or dropout raise the forward's register need."""
    masks = problem.dense_mask is not None or problem.mask_mod or problem.mask.left is not None
    modifies_scores = is_modified(problem) or masks
    return problem.has_lengths or modifies_scores or problem.dropout > 0


def live_in_loads(problem: Problem, keys: int) -> int:
    """Registers per thread for the numbers that mods load per score, in a forward step of so many keys (static gate).

    Those of a key alone are in shared memory.
    """
    if not loads_by_score(problem):
        return 0
    return keys * 3 // 4 + 8 if problem.mask_mod else keys // 2 + 4


def columns(dim: int) -> int:
    """The smallest accumulator width of COLUMNS that holds `dim`."""
    return min(columns for columns in COLUMNS if columns >= min(dim, LARGEST))

"""What every kernel of the engine knows of Hopper: its tiles' units, and what the written costs are made of."""

from ...problem import Problem
from ..fragments import is_modified

ARCH = "sm_90a"
LARGEST = 256  # head dimension
WARPGROUP_ROWS = 64  # rows of a warpgroup's products
WARP_ROWS = 16  # and of each of its warps
PANEL = 64  # columns of a box: rows of 128 bytes
COLUMNS = (64, 96, 128, 192, 256)  # of an operand's tile, by the products that hopper.cuh has; tile.cuh's fragments_of

# Of one multiprocessor and clock. Nothing here was measured on a GPU by this project yet.
MULTIPLY_ADDS = 2048
EXPONENTIALS = 16
SHARED_BYTES = 128
CACHE_BYTES = 32  # from the second-level cache
STEP = 100  # clocks of a step for waiting and signalling
BLOCK = 2000  # clocks of a block before its first product and after its last
NEXT_TILE = 1000  # and of the next tile of a block, whose keys come while the last one's result leaves
CLOCK = 1.5e9
CLEAR = 2e-6  # seconds of a launch that clears a counter


def asks_for_registers(problem: Problem) -> bool:
    """Whether the forward of a problem needs more registers than the bare one: for lengths, what scores go through, or
    bits of dropout."""
    of_scores = is_modified(problem) or problem.dense_mask is not None or problem.mask.left is not None
    return problem.has_lengths or of_scores or problem.dropout > 0


def columns(dim: int) -> int:
    """Of a product that has `dim` columns to make: as many as there is an instruction for."""
    return min(columns for columns in COLUMNS if columns >= min(dim, LARGEST))

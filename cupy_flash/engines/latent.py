"""Tiles of values inside keys whose warps divide the columns of O (mma/latent.cuh): of a decode, and of a forward."""

# No `from __future__ import annotations`, as in records.py.
from collections.abc import Iterator

from ..problem.records import Problem
from .shared import Grid, has_options, has_prefixes, sequences

FORWARD = "latent_forward"  # the kernel of a forward
DECODE_OF_WARPGROUPS = "wgmma/latent_decode"  # that of a decode whose warpgroups take turns (wgmma/latent.cuh)
WIDEST = 256  # columns of O of a warp in mma/forward.cu; beyond them several warps compute the same scores
KEYS = 32  # of a tile
ROWS = 64, 32, 16  # (query, head) pairs of a tile, in order of preference for a forward
MOST_ROWS_IN_REGISTERS = 32  # rows of a tile with Q in registers, where it arrives through a slot
ROWS_OF_WARPGROUPS = 64  # of a tile of two warpgroups, which also has 64 keys
COLUMNS_OF_WARPGROUPS = 128  # O has a multiple of these: whole panels of 64 for each warpgroup
MOST_COLUMNS_OF_WARPGROUPS = 512
MOST_COLUMNS_IN_OPTIONS = 256  # the same if scores are modified or masked, so that no register is spilled
MULTIPLY_ADDS_OF_WGMMA = 2048  # per SM and clock
ACCUMULATORS = 128  # maximum registers per thread for O
ACCUMULATORS_IN_OPTIONS = 140  # maximum registers per thread for O and S, if scores are modified or masked


def serves(problem: Problem) -> bool:
    """Return whether a problem is a forward without dropout on keys of 16 bits, with more than WIDEST columns of O."""
    others = problem.backward or problem.derivative or problem.weights or problem.selected is not None
    codes = problem.cache is not None and problem.cache.dtype != problem.dtype
    plain = not (others or codes or problem.dropout or has_prefixes(problem))
    return plain and problem.shared_kv and problem.head_dim_v > WIDEST


def shapes(problem: Problem, arch: str) -> Iterator[tuple[int, int, bool]]:
    """Yield (rows, threads, whether Q is in registers) of the tiles of a forward that fit the registers."""
    modified = has_options(problem)
    for rows in ROWS[-1:] if arch == "sm_75" else ROWS:  # two groups of warps need two slots
        accumulators, scores, _ = live(problem, rows)
        if accumulators <= ACCUMULATORS and not (modified and accumulators + scores > ACCUMULATORS_IN_OPTIONS):
            yield rows, 32 * warps(rows), rows <= MOST_ROWS_IN_REGISTERS


def warps(rows: int) -> int:
    """Return the warps of a tile: one or two groups of four, which divide its rows."""
    return 4 * min(rows // 16, 2)


def threads(rows: int, *, tma: bool) -> int:
    """Return the threads that compute a tile; with a producer warp they are two warpgroups."""
    return 256 if tma else 32 * warps(rows)


def has_warpgroups(problem: Problem) -> bool:
    """Return whether the columns of O are whole panels for each of two warpgroups, which find no statistics."""
    most = MOST_COLUMNS_IN_OPTIONS if has_options(problem) else MOST_COLUMNS_OF_WARPGROUPS
    return problem.head_dim_v % COLUMNS_OF_WARPGROUPS == 0 and problem.head_dim_v <= most and not problem.statistics


def live(problem: Problem, rows: int) -> tuple[int, int, int]:
    """Return the registers per thread for O, for S, and for all of Q: the warps of a group divide their columns."""
    m = rows * 4 // 16 // warps(rows)
    return m * -(-problem.head_dim_v // 64) * 8, m * 8, m * -(-problem.head_dim // 32) * 4


def live_of_warpgroups(problem: Problem) -> tuple[int, int, int]:
    """Return the registers per thread for O, for S, and for Q, which is in shared memory, of two warpgroups."""
    return problem.head_dim_v // 4, ROWS_OF_WARPGROUPS // 2, 0


def read_bytes(rows: int, columns: tuple[int, int], *, q_in_registers: bool) -> int:
    """Return the bytes of shared memory that a block reads in a step, for `columns` of Q and of O.

    Each group of warps reads K and V, its rows of Q once for each 16 keys, and those of P once a warp.
    """
    of_tile = warps(rows) // 4 * 2 * KEYS * sum(columns) + 4 * 2 * rows * KEYS
    return of_tile + (0 if q_in_registers else 2 * 2 * rows * columns[0])


def read_bytes_of_warpgroups(columns: tuple[int, int]) -> int:
    """Return the bytes of shared memory that two warpgroups read in a step, for `columns` of Q and of O.

    The warpgroup whose turn it is reads Q and K, both read half of V, and P is written and read once.
    """
    k, v = columns
    return 2 * ROWS_OF_WARPGROUPS * (2 * k + v + 2 * ROWS_OF_WARPGROUPS)


def grid(problem: Problem, rows: int) -> Grid:
    """Return the grid of a forward with tiles of `rows` rows."""
    return max(-(-problem.q_len * problem.group // rows), 1), problem.kv_heads, sequences(problem)

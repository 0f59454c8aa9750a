"""A model of how much the semaphores of a deterministic backward, by which blocks wait for each other, slow it down.

Every block adds to the tiles of dQ that it visits after the blocks of higher keys (kernels_cu/wgmma/backward.cuh).
Blocks start in the order in which they draw their keys, each on the SM that is free first, and a step takes the same
time in all of them. WAIT and PASS are estimates from latencies of the L2 cache; no GPU has confirmed them.
"""

from __future__ import annotations

import heapq

import numpy as np

from ..gpu import Regime

# WAIT: clocks from the release of a turn until the consumers of the waiting block may add to dQ. PASS: clocks from then
# until they have added and the block releases the next turn.
WAIT, PASS = 1000, 1300
GROUP_BLOCKS = 256  # heads are processed in groups with about this many blocks, as in the kernel


def efficiency(regime: Regime, block_q: int, block_kv: int, clocks: float, overhead: float, units: int) -> float:
    """Return the time of a non-deterministic backward divided by that of a deterministic one with the same steps.

    A step takes `clocks` clocks, the start of a block as long as `overhead` steps. A non-deterministic backward starts
    with the first keys, which most queries see under a causal mask.
    """
    in_any_order = _clocks(regime, block_q, block_kv, clocks, overhead, units, deterministic=False)
    return in_any_order / _clocks(regime, block_q, block_kv, clocks, overhead, units, deterministic=True)


def _clocks(
    regime: Regime, block_q: int, block_kv: int, clocks: float, overhead: float, units: int, deterministic: bool
) -> float:
    """Return the clocks until the last block has ended."""
    keys = range(0, regime.seqlen, block_kv)
    heads = range(regime.batch * regime.heads)
    q_tiles = -(-regime.seqlen // block_q)
    free = [0.0] * units  # clock at which each SM is free
    passed = np.full((len(heads), q_tiles), -np.inf)  # clock at which the last turn of each tile of dQ was released
    if deterministic:
        group = max(GROUP_BLOCKS // len(keys), 1)
        groups = [heads[first : first + group] for first in range(0, len(heads), group)]
        order = [(start, head) for of_group in groups for start in reversed(keys) for head in of_group]
    else:
        order = [(start, head) for head in heads for start in keys]
    for kv_start, head in order:
        first = kv_start // block_q if regime.causal else 0
        steps = clocks * (overhead + np.arange(1, q_tiles - first + 1))
        # A step that waits delays all later ones.
        waits = (
            np.maximum(passed[head, first:] + WAIT - steps, free[0]) if deterministic else np.full(len(steps), free[0])
        )
        added = np.maximum.accumulate(waits) + steps
        passed[head, first:] = added + PASS
        heapq.heapreplace(free, float(added[-1]))
    return max(free)

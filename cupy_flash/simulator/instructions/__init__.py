"""Instructions that execute at once: arithmetic, moves, ld, st, atomics, warp collectives, mma."""

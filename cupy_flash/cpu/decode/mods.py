"""score_mod and mask_mod on the scores of a chunk of keys, all heads at once."""

from __future__ import annotations

import numpy as np

from ...mods.numpy_code import mask_function, score_function
from ...problem.records import Operands, Problem
from .sequences import RowTile


class Mods:
    """The mods of a call, with the arrays and numbers that they capture."""

    def __init__(self, problem: Problem, operands: Operands) -> None:
        self.problem = problem
        self.score = score_function(problem.mods) if problem.score_mod else None
        self.mask = mask_function(problem.mods) if problem.mask_mod else None
        self.constants = tuple(x.numpy() for x in operands.captured), operands.numbers, problem.accumulation.type

    def apply(self, S: np.ndarray, tile: RowTile, start: int) -> None:
        """Modify the scores (Hk, rows, keys) of the keys from `start` on, and set those that mask_mod hides to -inf.

        A chunk may reach past the capacity, where captured arrays have nothing: these keys count as the last one, and
        are hidden by their position.
        """
        kv_heads, rows, keys = S.shape
        group = self.problem.group
        h = np.arange(kv_heads, dtype=np.int32)[:, None, None] * np.int32(group)
        h = h + (np.arange(rows, dtype=np.int32) % group)[:, None]
        kv = np.minimum(np.arange(start, start + keys, dtype=np.int32), self.problem.kv_len - 1)[None]
        inputs = np.int32(tile.sequence.batch), h, tile.row_indices(self.problem), kv
        if self.score is not None:
            S[...] = self.score(S, *inputs, *self.constants)[0]
        if self.mask is not None:
            np.copyto(S, -np.inf, where=~np.asarray(self.mask(S, *inputs, *self.constants)[0], np.bool_))

"""Online softmax of the engine cpu, over one query tile."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .blas import Products
from .statistics import RowStatistics

# A query tile whose |scores| are at most BOUND needs no running row max: m stays 0. The exponentials then lie between
# exp(-20) and exp(20) = 5e8, and their products with values whose magnitudes lie in MAGNITUDES stay in fp32's range:
# none underflows, and no sum over 2^31 keys, each scaled by up to 2^16 for dropout, overflows.
BOUND = 20.0


class Softmax:
    """Online softmax over one query tile: row max m and row sum l (rows,), both including the sink.

    Every m gives that result; the running maximum keeps the exponents in range. With `bounded`, the scores are known
    to lie within BOUND: m stays 0, and nothing is rescaled. It may have `statistics`, which are not bounded.
    """

    statistics: RowStatistics | None = None

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        sink: np.ndarray | None,
        bounded: bool,
        products: Products | None = None,
    ) -> None:
        self.products = Products() if products is None else products
        self.bounded = bounded and (sink is None or bool((abs(sink) <= BOUND).all()))
        if sink is None:
            self.m = np.full(shape, 0 if self.bounded else -np.inf, dtype)
            self.l = np.zeros(shape, dtype)
        else:
            # The sink acts as a first key of score `sink` and value 0.
            self.m = np.full(shape, 0 if self.bounded else sink, dtype)
            self.l = np.full(shape, np.exp(sink) if self.bounded else 1, dtype)

    def update(self, S: np.ndarray, O: np.ndarray, hide: Callable[[float], None], kv_start: int = 0) -> None:
        """Turn S into unnormalised probabilities in place, add them to l, and rescale O and l to the new m.

        `hide(value)` sets the hidden scores of S to `value`. Its first key is `kv_start`.
        """
        exponents = S
        if not self.bounded:
            hide(-np.inf)
            m = np.maximum(self.m, self.products.row_max(S))
            # A row that has seen no key has m = -inf; subtracting any finite number makes its exponentials 0.
            reference = np.where(m == -np.inf, 0, m)
            rescale = np.exp(self.m - reference)
            if self.statistics is not None:
                self.statistics.see(S, kv_start)
                self.statistics.rescale(reference - self.m, rescale, self.l)
            self.products.subtract(S, reference)
            O *= rescale[..., None]
            self.l *= rescale
            self.m = m
        if self.statistics is not None:
            exponents = S.copy()
        self.products.exp(S, self.bounded)
        if self.statistics is not None:
            self.statistics.add(exponents, S)
        if self.bounded:
            hide(0)
        self.l += self.products.row_sum(S)

    def finish(self, O: np.ndarray, out: np.ndarray, lse: np.ndarray) -> None:
        """Write out = O / l and lse = m + log l. A row that saw no key gets out 0 and lse -inf, or lse = sink."""
        self.products.divide(O, np.where(self.l == 0, 1, self.l))
        out[...] = O
        lse[...] = self.m + np.log(self.l)
        if self.statistics is not None:
            self.statistics.finish(self.l)

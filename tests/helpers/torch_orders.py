"""Runs of torch whose sums have other orders: the error of a single low-precision run is a matter of chance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")
aten = torch.ops.aten
EPS = torch.finfo(torch.float32).eps
MATMULS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}


class InAnotherOrder(TorchDispatchMode):
    """Permutes the terms of every matmul and sum, also in the backward, and adds a rounding of fp32 to some results.

    FlashAttention rounds scores again where it computes them again, which the formula does not, and its delta is
    rowsum(dO * O) instead of rowsum(dP * P): every matmul, and delta in the gradient of a softmax, get this rounding.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in MATMULS:
            *rest, a, b = args
            order = torch.randperm(a.shape[-1], generator=self.generator)
            product = function(*rest, a[..., order], b[..., order, :], **(kwargs or {}))
            return product + self.rounding(product)
        if function == aten._softmax_backward_data.default:
            dP, P, dim, _ = args
            return function(*args) + P * self.rounding((dP * P).sum(dim, keepdim=True))
        if function == aten.sum.dim_IntList:
            x, dims, *rest = args
            for dim in range(x.ndim) if dims is None else dims:
                x = x.index_select(dim, torch.randperm(x.shape[dim], generator=self.generator))
            args = x, dims, *rest
        return function(*args, **(kwargs or {}))

    def rounding(self, x):
        """Return a random number for each element, up to one rounding of fp32."""
        return x * (EPS * (2 * torch.rand(x.shape, generator=self.generator) - 1)).to(x.dtype)


def in_several_orders(run: Callable[[], Result], orders: int = 4) -> Iterator[Result]:
    """Yield results of `run` with torch's own order of summation, then with other orders and SDPA's math backend."""
    yield run()
    for seed in range(1, orders):
        with sdpa_kernel(SDPBackend.MATH), InAnotherOrder(seed):
            yield run()


def furthest(exact: torch.Tensor, *runs: torch.Tensor) -> torch.Tensor:
    """Return for each element the value of the run that is furthest from the exact value."""
    each = torch.stack([run.to(exact.dtype) for run in runs])
    return each.gather(0, (each - exact).abs().argmax(0, keepdim=True))[0]

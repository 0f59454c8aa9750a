"""Analytic model of attention: FLOPs, minimum bytes and roofline time."""

from __future__ import annotations

from dataclasses import dataclass

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True)
class Case:
    """One problem of the bench: self-attention of `seqlen` queries and keys."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    seqlen: int
    dtype: str
    causal: bool

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """The shape of q, out and their gradients: (B, Hq, S, D)."""
        return self.batch, self.heads, self.seqlen, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        """The shape of k, v and their gradients: (B, Hk, S, D)."""
        return self.batch, self.kv_heads, self.seqlen, self.head_dim


@dataclass(frozen=True)
class Ceilings:
    """Peak rates of this machine, measured in the same process."""

    flops_per_second: float  # rate of a large matmul
    bytes_per_second: float  # rate of a large copy, reads plus writes


def forward_flops(case: Case) -> float:
    """Return the FLOPs of two matmuls of 2 S S D per head, halved when causal: FlashAttention's convention."""
    full = 4 * case.batch * case.heads * case.seqlen**2 * case.head_dim
    return full / 2 if case.causal else full


def backward_flops(case: Case) -> float:
    """Return the FLOPs of five matmuls, among them the recomputed scores; the forward has two."""
    return 2.5 * forward_flops(case)


def forward_bytes(case: Case) -> int:
    """Return the minimum traffic of a forward: reads q, k, v and writes out, lse once."""
    return 2 * _q_bytes(case) + 2 * _kv_bytes(case) + _lse_bytes(case)


def backward_bytes(case: Case) -> int:
    """Return the minimum traffic of a backward: reads q, k, v, out, dout, lse and writes dq, dk, dv once."""
    return 4 * _q_bytes(case) + 4 * _kv_bytes(case) + _lse_bytes(case)


def scores_bytes(case: Case) -> int:
    """Return the bytes of the S x S score matrices of all heads, which standard attention materializes."""
    return case.batch * case.heads * case.seqlen**2 * _accumulation_size(case)


def result_bytes(case: Case, gradients: bool) -> int:
    """Return the bytes of out and lse, with `gradients` also of dq, dk, dv."""
    forward = _q_bytes(case) + _lse_bytes(case)
    return forward + _q_bytes(case) + 2 * _kv_bytes(case) if gradients else forward


def roofline_seconds(flops: float, bytes_moved: float, ceilings: Ceilings) -> float:
    """Return the lower bound on the time: the slower of computing and moving."""
    return max(flops / ceilings.flops_per_second, bytes_moved / ceilings.bytes_per_second)


def _q_bytes(case: Case) -> int:
    return case.batch * case.heads * case.seqlen * case.head_dim * ITEMSIZE[case.dtype]


def _kv_bytes(case: Case) -> int:
    return case.batch * case.kv_heads * case.seqlen * case.head_dim * ITEMSIZE[case.dtype]


def _lse_bytes(case: Case) -> int:
    return case.batch * case.heads * case.seqlen * _accumulation_size(case)


def _accumulation_size(case: Case) -> int:
    return 8 if case.dtype == "float64" else 4

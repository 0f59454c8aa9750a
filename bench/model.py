"""What attention costs on paper: FLOPs, bytes and the roofline. Pure arithmetic, no measurement."""

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
        return self.batch, self.heads, self.seqlen, self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.kv_heads, self.seqlen, self.head_dim


@dataclass(frozen=True)
class Ceilings:
    """What this machine reaches at best, measured in the same process."""

    flops_per_second: float  # a large matrix product
    bytes_per_second: float  # a large copy, bytes read plus bytes written


def forward_flops(case: Case) -> float:
    """Two matrix products of 2 S S D each per head, half of that when causal: the convention of FlashAttention."""
    full = 4 * case.batch * case.heads * case.seqlen**2 * case.head_dim
    return full / 2 if case.causal else full


def backward_flops(case: Case) -> float:
    """Five matrix products where the forward has two, one of them the scores again."""
    return 2.5 * forward_flops(case)


def forward_bytes(case: Case) -> int:
    """The least a forward can move: q, k, v read, out and lse written, once each."""
    return 2 * _q_bytes(case) + 2 * _kv_bytes(case) + _lse_bytes(case)


def backward_bytes(case: Case) -> int:
    """The least a backward can move: q, k, v, out, dout, lse read, dq, dk, dv written, once each."""
    return 4 * _q_bytes(case) + 4 * _kv_bytes(case) + _lse_bytes(case)


def scores_bytes(case: Case) -> int:
    """One matrix of scores of every head, as standard attention holds it."""
    return case.batch * case.heads * case.seqlen**2 * _accumulation_size(case)


def result_bytes(case: Case, gradients: bool) -> int:
    """out and lse, and with `gradients` dq, dk, dv."""
    forward = _q_bytes(case) + _lse_bytes(case)
    return forward + _q_bytes(case) + 2 * _kv_bytes(case) if gradients else forward


def roofline_seconds(flops: float, moved: float, ceilings: Ceilings) -> float:
    """The least time that the ceilings allow."""
    return max(flops / ceilings.flops_per_second, moved / ceilings.bytes_per_second)


def _q_bytes(case: Case) -> int:
    return case.batch * case.heads * case.seqlen * case.head_dim * ITEMSIZE[case.dtype]


def _kv_bytes(case: Case) -> int:
    return case.batch * case.kv_heads * case.seqlen * case.head_dim * ITEMSIZE[case.dtype]


def _lse_bytes(case: Case) -> int:
    return case.batch * case.heads * case.seqlen * _accumulation_size(case)


def _accumulation_size(case: Case) -> int:
    return 8 if case.dtype == "float64" else 4

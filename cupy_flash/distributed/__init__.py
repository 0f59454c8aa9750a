"""Attention over a sequence that is spread over several devices, by torch.distributed: NCCL on GPUs, gloo on CPUs."""

from .ring import ring_attention, ring_attention_varlen
from .shards import packed_rows, positions
from .ulysses import ulysses_attention, ulysses_attention_varlen

__all__ = [
    "packed_rows",
    "positions",
    "ring_attention",
    "ring_attention_varlen",
    "ulysses_attention",
    "ulysses_attention_varlen",
]

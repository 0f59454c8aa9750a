"""Context parallelism with torch.distributed: attention over a sequence sharded across ranks (NCCL; gloo on CPUs)."""

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

"""Published TFLOP/s of kernels that cannot be installed everywhere: quoted, not measured here."""

from __future__ import annotations

from typing import NamedTuple

from cupy_flash.problem.records import FP8

from ..gpu import Regime

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# FlashAttention-3 (arXiv 2407.08608, figures 5 and 6): 16-bit dtypes, H100 SXM5, 16384 tokens, hidden size 2048.
# (backward, head dimension, causal) -> TFLOP/s at each of LENGTHS.
FLASH_ATTENTION_3 = {
    (False, 64, False): (333, 392, 460, 476, 496, 497),
    (False, 64, True): (197, 265, 371, 420, 460, 473),
    (False, 128, False): (467, 565, 625, 638, 646, 648),
    (False, 128, True): (292, 423, 521, 579, 602, 616),
    (False, 256, False): (482, 639, 707, 736, 746, 756),
    (False, 256, True): (286, 427, 537, 612, 628, 642),
    (True, 64, False): (272, 363, 422, 453, 472, 474),
    (True, 128, False): (316, 424, 501, 542, 559, 561),
}


class Mainloop(NamedTuple):
    """The steady loop of FlashAttention-3's sm_90a cubins, at 16384 tokens."""

    tile: tuple[int, int]
    instructions: float  # SASS instructions of a thread per score
    alone: int  # TFLOP/s that cycles.py finds without overlap of consumer warpgroups
    overlapping: int  # TFLOP/s that it finds with overlap
    published: int | None  # TFLOP/s by its authors, on an H100 (backward of D 256: on an H200)


# (fp8, backward, head dimension, causal): the cubins of xformers 0.0.32.post2 (CUDA 12.8) and, for fp8, flash_attn3_jax
# 0.2.3 (CUDA 12.4), disassembled by nvdisasm 13.5. The published speed of fp8 is from arXiv 2407.08608, figure 7.
FLASH_ATTENTION_3_MAINLOOPS = {
    (False, False, 64, False): Mainloop((192, 192), 6.44, 424, 829, 497),
    (False, False, 64, True): Mainloop((192, 128), 6.52, 408, 874, 473),
    (False, False, 128, False): Mainloop((128, 176), 6.59, 646, 1044, 648),
    (False, False, 128, True): Mainloop((128, 128), 7.11, 651, 1038, 616),
    (False, False, 256, False): Mainloop((128, 80), 11.50, 802, 1062, 756),
    (True, False, 128, False): Mainloop((128, 224), 5.98, 795, 1454, 1008),
    (False, True, 64, False): Mainloop((128, 128), 10.98, 745, 821, 474),
    (False, True, 128, False): Mainloop((80, 128), 12.60, 860, 989, 561),
    (False, True, 128, True): Mainloop((64, 128), 15.03, 852, 976, None),
    (False, True, 256, False): Mainloop((64, 80), 25.5, 788, 788, 480),
}


def flash_attention_3_mainloop(regime: Regime) -> Mainloop | None:
    """Return the mainloop of FlashAttention-3 for a regime of 16384 tokens; None if it was not disassembled."""
    if regime.deterministic or regime.seqlen != 16384 or regime.head_dim_v not in (None, regime.head_dim):
        return None
    return FLASH_ATTENTION_3_MAINLOOPS.get((regime.dtype == FP8, regime.backward, regime.head_dim, regime.causal))


def flash_attention_3(regime: Regime) -> int | None:
    """Return the published TFLOP/s; None if there is no figure for this regime."""
    if (
        regime.deterministic
        or regime.dtype not in ("float16", "bfloat16")
        or regime.head_dim_v not in (None, regime.head_dim)
    ):
        return None
    speeds = FLASH_ATTENTION_3.get((regime.backward, regime.head_dim, regime.causal), ())
    return dict(zip(LENGTHS, speeds, strict=False)).get(regime.seqlen)

"""What others published of kernels that cannot be installed everywhere, in TFLOP/s: quoted, not measured here."""

from __future__ import annotations

from .gpu import Regime

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# FlashAttention-3 (arXiv 2407.08608, figures 5 and 6): 16-bit numbers on an H100 SXM5, 16384 tokens of width 2048.
# (backward, head dimension, causal): by LENGTHS.
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


def flash_attention_3(regime: Regime) -> int | None:
    """The published TFLOP/s; None where none was published."""
    if (
        regime.deterministic
        or regime.dtype not in ("float16", "bfloat16")
        or regime.head_dim_v not in (None, regime.head_dim)
    ):
        return None
    speeds = FLASH_ATTENTION_3.get((regime.backward, regime.head_dim, regime.causal), ())
    return dict(zip(LENGTHS, speeds, strict=False)).get(regime.seqlen)

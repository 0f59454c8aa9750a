"""Published TFLOP/s of kernels that cannot be installed everywhere: quoted, not measured here."""

from __future__ import annotations

from .gpu import Regime

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

"""The checks of `merge`, which joins partial results over disjoint sets of keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Array
from .checks import ArrayFacts, Requirements, check_places, is_float, is_one_of, read
from .records import DTYPES, LAYOUTS

if TYPE_CHECKING:
    from ..arrays import AnyArray

PARTS = ("out_a", "lse_a", "out_b", "lse_b")


def pose_merge(
    parts: tuple[AnyArray, AnyArray, AnyArray, AnyArray], layout: str
) -> tuple[str, tuple[Array, Array, Array, Array]]:
    """Return the layout ("thd" for packed results) and the arrays of a merge, or raise one error with all reasons."""
    requirements = Requirements("merge")
    require, require_type = requirements.require, requirements.require_type
    arrays = read(requirements, dict(zip(PARTS, parts, strict=True)))
    check_places(
        requirements, {name: ArrayFacts(x.shape, x.dtype, x.device, x.framework) for name, x in arrays.items()}
    )
    require(is_one_of(layout, LAYOUTS), f'layout must be "bshd" or "bhsd", not {layout!r}')
    if len(arrays) == len(PARTS) and isinstance(layout, str):
        out_a, lse_a, out_b, lse_b = (arrays[name] for name in PARTS)
        layout = "thd" if len(out_a.shape) == 3 else layout
        for name, out in (("out_a", out_a), ("out_b", out_b)):
            require_type(is_float(out.dtype), f"{name} must be {', '.join(DTYPES)}, not {out.dtype.name}")
        require(out_a.shape == out_b.shape, "out_a and out_b must have one shape")
        if require(len(out_a.shape) in (3, 4), "out_a must be (B, S, H, Dv) in the layout, or (T, H, Dv)"):
            *leading, a, b, _ = out_a.shape
            rows = (*leading, a, b) if layout == "bhsd" else (*leading, b, a)
            accumulation = np.dtype(np.float64 if out_a.dtype == np.float64 else np.float32)
            for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
                require(lse.shape == rows, f"{name} must be {rows} beside out {out_a.shape}, not {lse.shape}")
                right = lse.dtype == accumulation
                require_type(right, f"{name} must be {accumulation.name}, not {lse.dtype.name}")
    requirements.raise_if_unmet(arrays)
    return layout, (arrays["out_a"], arrays["lse_a"], arrays["out_b"], arrays["lse_b"])

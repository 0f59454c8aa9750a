"""The checks of `merge`, which joins partial results over disjoint sets of keys."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import Array
from .checks import ArrayFacts, Requirements, check_places, is_float, is_one_of, read
from .records import DTYPES, LAYOUTS, LONGEST, Statistics

if TYPE_CHECKING:
    from ..arrays import AnyArray, ArrayT

PARTS = ("out_a", "lse_a", "out_b", "lse_b")


def pose_merge(
    parts: tuple[AnyArray, AnyArray, AnyArray, AnyArray],
    layout: str,
    statistics: tuple[Statistics[ArrayT] | None, Statistics[ArrayT] | None] = (None, None),
    key_offset_b: int = 0,
) -> tuple[str, tuple[Array, Array, Array, Array], tuple[Statistics[Array], Statistics[Array]]]:
    """Return the layout ("thd" for packed results), the arrays and the statistics of a merge.

    Raises one error with all reasons.
    """
    requirements = Requirements("merge")
    require, require_type = requirements.require, requirements.require_type
    given = dict(zip(PARTS, parts, strict=True)) | _given_statistics(requirements, statistics)
    _check_offset(requirements, key_offset_b)
    arrays = read(requirements, given)
    check_places(
        requirements, {name: ArrayFacts(x.shape, x.dtype, x.device, x.framework) for name, x in arrays.items()}
    )
    require(is_one_of(layout, LAYOUTS), f'layout must be "bshd" or "bhsd", not {layout!r}')
    if set(PARTS) <= arrays.keys() and isinstance(layout, str):
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
            for name, array in arrays.items():
                if name not in PARTS:
                    dtype = np.dtype(np.int32) if name.startswith("argmax") else accumulation
                    require(array.shape == rows, f"{name} must be {rows} as lse, not {array.shape}")
                    require_type(array.dtype == dtype, f"{name} must be {dtype.name}, not {array.dtype.name}")
    requirements.raise_if_unmet(arrays)
    of_a, of_b = (Statistics(*(arrays.get(f"{name}_{part}") for name in Statistics._fields)) for part in "ab")
    return layout, (arrays["out_a"], arrays["lse_a"], arrays["out_b"], arrays["lse_b"]), (of_a, of_b)


def _given_statistics(
    requirements: Requirements, statistics: tuple[Statistics[ArrayT] | None, Statistics[ArrayT] | None]
) -> dict[str, AnyArray]:
    """Return the statistics of both parts by name, such as "max_a"."""
    given: dict[str, AnyArray] = {}
    fields: list[tuple[str, ...] | None] = []
    for part, of_part in zip("ab", statistics, strict=True):
        if of_part is None:
            fields.append(None)
            continue
        if not requirements.require_type(
            isinstance(of_part, Statistics), f"statistics_{part} must be Statistics, not {of_part!r}"
        ):
            return {}
        present: dict[str, AnyArray] = {
            name: x for name in Statistics._fields if (x := getattr(of_part, name)) is not None
        }
        fields.append(tuple(present))
        given |= {f"{name}_{part}": x for name, x in present.items()}
    requirements.require(fields[0] == fields[1], "statistics_a and statistics_b must have the same fields")
    by_max = all(names is None or "argmax" not in names or "max" in names for names in fields)
    requirements.require(by_max, "the argmax of a part is merged by its max, which must be given beside it")
    return given


def _check_offset(requirements: Requirements, given: int) -> None:
    """Require a whole number of keys."""
    try:
        offset = operator.index(given)
    except Exception:  # a foreign object may raise anything
        requirements.require_type(False, f"key_offset_b must be a whole number, not {given!r}")
        return
    requirements.require(0 <= offset <= LONGEST, f"key_offset_b must be in [0, {LONGEST}], not {offset}")

"""Logical combinations of mask_mods."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from typing import Any, TypeAlias

MaskMod: TypeAlias = Callable[[Any, Any, Any, Any], Any]  # (b, h, q_idx, kv_idx), of any type that computes


def noop_mask(b: object, h: object, q_idx: object, kv_idx: object) -> bool:
    """Return True: the mask_mod that hides no key.

    Args:
        b: index of the sequence.
        h: query head.
        q_idx: position of the query.
        kv_idx: position of the key.
    """
    return True


def and_masks(*mask_mods: MaskMod) -> MaskMod:
    """Return the mask_mod that is True where all `mask_mods` are True; without any, everywhere.

    Args:
        *mask_mods: functions of (b, h, q_idx, kv_idx), True = attend.

    >>> import numpy as np, cupy_flash
    >>> ids = np.array([0, 0, 1, 1, 1])
    >>> def causal(b, h, q_idx, kv_idx):
    ...     return q_idx >= kv_idx
    >>> def document(b, h, q_idx, kv_idx):
    ...     return ids[q_idx] == ids[kv_idx]
    >>> q = k = v = np.ones((1, 5, 2, 8), np.float32)
    >>> cupy_flash.attention(q, k, v, mask_mod=cupy_flash.and_masks(causal, document)).shape
    (1, 5, 2, 8)
    """

    def and_mask(b: object, h: object, q_idx: object, kv_idx: object) -> object:
        return reduce(and_, (mask_mod(b, h, q_idx, kv_idx) for mask_mod in mask_mods), True)

    return and_mask


def or_masks(*mask_mods: MaskMod) -> MaskMod:
    """Return the mask_mod that is True where any of `mask_mods` is True; without any, nowhere.

    Args:
        *mask_mods: functions of (b, h, q_idx, kv_idx), True = attend.
    """

    def or_mask(b: object, h: object, q_idx: object, kv_idx: object) -> object:
        return reduce(or_, (mask_mod(b, h, q_idx, kv_idx) for mask_mod in mask_mods), False)

    return or_mask


def not_mask(mask_mod: MaskMod) -> MaskMod:
    """Return the mask_mod that is True where another is False.

    Args:
        mask_mod: a function of (b, h, q_idx, kv_idx), True = attend.
    """

    def inverted(b: object, h: object, q_idx: object, kv_idx: object) -> object:
        return mask_mod(b, h, q_idx, kv_idx) ^ True

    return inverted

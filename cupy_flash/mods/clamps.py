"""Folds the clamps of an index, and the clamp to its dimension, into one whose limits are the same for all scores.

    table[clip(q - kv, -64, 64) + 64]    reads element    clip(q - kv + 64, low, high)

A chain of minima, maxima and sums with numbers equals one clamp of one sum if no sum wraps. A chain in which a sum may
wrap stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

from .ir import INT, INT32, LONG, Node


def folded(
    index: Node, last: Node, is_early: Callable[[Node], bool], may_wrap: Callable[[Node], bool]
) -> tuple[Node, Node, Node] | None:
    """Return (x, low, high) with clip(x, low, high) == clip(index, 0, last), or None if the index has no clamp to fold.

    Args:
        index: an int or long.
        last: the last index of the dimension.
        is_early: whether a node is the same for all scores.
        may_wrap: whether an integer operation may overflow its kind.
    """
    make = index.graph.make
    x, shift, low, high = _as_int(index), index.graph.const(0), index.graph.const(0), last
    has_clamp, result = False, None
    # Invariant: clip(index, 0, last) == clip(x + shift, low, high) and 0 <= low, high <= last, all without wrapping.
    while x.op in ("min", "max", "add", "sub"):
        left, right = map(_as_int, x.args)
        if x.op != "sub" and is_early(left):
            left, right = right, left
        if not is_early(right) or right.kind != INT:
            break
        if x.op in ("min", "max"):
            limit = make("add", right, shift)
            if _wraps(limit, may_wrap):
                break
            limit = make("min", make("max", limit, low), high)
            low, high = (low, limit) if x.op == "min" else (limit, high)
        else:
            shift = make(x.op, shift, right)
            if may_wrap(x) or _wraps(shift, may_wrap):
                break
        has_clamp, x = has_clamp or x.op in ("min", "max"), left
        total = make("add", x, shift)
        if x.kind == INT and not _wraps(total, may_wrap) and has_clamp:
            result = total, low, high
    return result


def _as_int(x: Node) -> Node:
    """Return a long as the int that it was converted from, if it was."""
    if x.kind != LONG:
        return x
    if x.op == LONG and x.args[0].kind == INT:
        return x.args[0]
    return x.graph.const(x.value, INT) if x.op == "const" and x.value in INT32 else x


def _wraps(x: Node, may_wrap: Callable[[Node], bool]) -> bool:
    return x.op in ("add", "sub", "neg") and may_wrap(x)

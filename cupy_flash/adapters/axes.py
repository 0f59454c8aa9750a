"""Letters for the axes of a call's operands and results.

Sharding splits a call along such an axis, and vmap folds its own axis into one. The letters are those of
features.SIZES: b sequences, h query heads, g key/value heads, i queries, j keys, d and e the head dimensions, and "."
for an axis that is none of them.
"""

from __future__ import annotations

from ..problem import records

LAYOUTS = {
    "bshd": {"q": "bihd", "k": "bjgd", "v": "bjge", "out": "bihe", "lse": "bhi"},
    "bhsd": {"q": "bhid", "k": "bgjd", "v": "bgje", "out": "bhie", "lse": "bhi"},
    "thd": {"q": "ihd", "k": "jgd", "v": "jge", "out": "ihe", "lse": "hi"},
}
FEATURES = {feature.name: feature for feature in records.ARRAYS}
TANGENTS = ("t", "u")  # prefixes: tq is a tangent of q, uq a second tangent beside it
BROADCAST = frozenset(feature.name for feature in records.ARRAYS if feature.broadcast)


def axes_of(name: str, rank: int, layout: str) -> str:
    """Return the axes of an operand or a result; a gradient (dq) and a tangent (tq) have those of their operand."""
    shared = LAYOUTS[layout]
    if name in shared:
        return shared[name]
    if name in FEATURES:
        longest = max(FEATURES[name].axes, key=len).lower()
        return longest[len(longest) - rank :]
    if name == "starts":
        return "b."
    if name[:1] in (*TANGENTS, "d") and name[1:] != "":
        return axes_of(name[1:], rank, layout)
    return "." * rank


def sizes_of(shapes: dict[str, tuple[int, ...]], layout: str) -> dict[str, int]:
    """Return the size of each axis of q, k and v, by its letter; a call that returns weights has no v."""
    given = (name for name in "qkv" if name in shapes)
    return {letter: size for name in given for letter, size in zip(LAYOUTS[layout][name], shapes[name], strict=True)}

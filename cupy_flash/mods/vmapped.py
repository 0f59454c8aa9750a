"""Merges the mods of independent calls into one mod, for calls that are stacked along the batch or the heads."""

from __future__ import annotations

import functools

from .ir import Element, Graph, Node, Program, order, parse


@functools.lru_cache(maxsize=256)
def side_by_side(text: str, axis: str, size: int, slots: frozenset[int]) -> str:
    """Return the text of a program in which each run of `size` sequences or heads is one of the calls.

    Args:
        text: text of the program of one call.
        axis: "b" or "h", the input along which the calls are stacked.
        size: number of sequences, or heads, of one call.
        slots: the captured arrays with a leading axis of calls; the others are shared by all calls.
    """
    program, graph = parse(text), Graph()
    place, length = graph.input(axis), graph.const(size)
    call = graph.make("floordiv", place, length)
    nodes: dict[Node, Node] = {}
    for node in order(program.roots):
        args = tuple(nodes[arg] for arg in node.args)
        if node.op == axis:
            nodes[node] = graph.make("mod", place, length)
        elif node.op == "load" and node.value in slots:
            nodes[node] = graph.load(node.value, (call, *args), node.kind)
        else:
            nodes[node] = graph.node(node.op, node.kind, args, node.value)
    arrays = tuple(
        Element(element.dtype, element.rank + (slot in slots)) for slot, element in enumerate(program.arrays)
    )
    score, mask = (None if root is None else nodes[root] for root in (program.score, program.mask))
    return Program(score, mask, arrays, program.numbers).text

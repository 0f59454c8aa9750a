"""Micro-kernels of tensor memory: every shape of tcgen05.ld and .st, and allocation by more blocks than fit an SM."""

from __future__ import annotations

import numpy as np

from .case import BARRIER, DEALLOC, BlackwellCase, allocate, move

# {shape: registers of a thread for each repetition, immediate operand}
SHAPES = {"32x32b": (1, ""), "16x32bx2": (1, ", 40"), "16x64b": (1, ""), "16x128b": (2, ""), "16x256b": (4, "")}
COLUMNS = 96
BLOCKS = 320  # at least two for each SM


def _body(*moves: str, columns: int = 128) -> str:
    return "\n".join([allocate(columns), *moves, BARRIER, DEALLOC.format(columns=columns)])


def _cases_of(shape: str, lanes: int) -> list[BlackwellCase]:
    """Return a load and a store of a shape; whole rows of all lanes are moved by the shape 32x32b."""
    each, split = SHAPES[shape]
    repeated = 4 if each > 1 else 8

    def one(direction: str, pointer: int) -> str:
        return move(direction, pointer, repeated, shape=shape, each=each, lanes=lanes, split=split)

    words = np.arange(128 * COLUMNS, dtype=np.uint32).reshape(128, COLUMNS)
    new = np.arange(128 * repeated * each, dtype=np.uint32).reshape(128, -1) + 1_000_000
    load = _body(move("st", 0, COLUMNS), one("ld", 1))
    store = _body(move("st", 0, COLUMNS), one("st", 1), move("ld", 2, COLUMNS))
    name = f"{shape}{'-upper' * bool(lanes)}"
    return [
        BlackwellCase(f"tcgen05.ld.{name}", load, (words,), np.zeros_like(new)),
        BlackwellCase(f"tcgen05.st.{name}", store, (words, new), np.zeros_like(words)),
    ]


def _contention() -> BlackwellCase:
    """Return blocks that allocate all columns, so that those of an SM take turns, and read what they have written."""
    rows = np.arange(BLOCKS * 128 * 32, dtype=np.uint32).reshape(BLOCKS, 128, 32)
    place = f"mad.wide.u32 %p{{0}}, %block, {4 * 128 * 32}, %p{{0}};"
    body = _body(place.format(0), move("st", 0, 32), place.format(1), move("ld", 1, 32), columns=512)
    return BlackwellCase("tcgen05.alloc.turns", body, (rows,), np.zeros_like(rows), blocks=BLOCKS, expected=rows)


CASES = [
    *(
        case
        for shape in SHAPES
        for lanes in (0, 16)
        if shape != "32x32b" or not lanes
        for case in _cases_of(shape, lanes)
    ),
    _contention(),
]

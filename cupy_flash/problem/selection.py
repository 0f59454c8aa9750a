"""The option selected=: the shapes of its lists, its facts, and the checks of its entries.

Padded lists are (B or 1, Hs, ceil(Sq / rows), n). In a packed batch, (Hs, Tq // rows + B, n), the lists of sequence b
begin at cu_seqlens_q[b] // rows + b, which leaves room for a last list with fewer rows; lists between are never read.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..arrays import Array, as_array, to_host
from .checks import ArrayFacts, Length, Requirements, Settings, Sizes
from .mask import Selection
from .records import LONGEST, Operands, Problem

CHUNK = 2**20  # entries that are checked at once, to bound memory


class Place(NamedTuple):
    """The place of the lists of one sequence in `selected`."""

    batch: int  # index along the first axis, 0 if all sequences share it and in a packed batch
    first: int
    number: int  # of lists

    def of(self, selected: np.ndarray) -> np.ndarray:
        """Return the lists of the sequence, a view (Hs, number, n)."""
        one: np.ndarray = selected if selected.ndim == 3 else selected[self.batch]
        return one[:, self.first : self.first + self.number]


def axes_of_lists(settings: Settings, sizes: Sizes, packed: bool, tokens: int | None = None) -> dict[str, Length]:
    """Return the legal sizes of the axes of `selected`; `tokens` are the packed queries of a call on a KV cache."""
    rows = settings.others["selected_rows"] or 1
    lengths: dict[str, Length] = {"x": (1, sizes.kv_heads, sizes.heads), "w": range(LONGEST + 1)}
    if packed:
        return lengths | {"u": (sizes.q_len if tokens is None else tokens) // rows + sizes.batch}
    return lengths | {"B": (1, sizes.batch), "l": -(-sizes.q_len // rows)}


def check_units(requirements: Requirements, given: bool, settings: Settings) -> None:
    """Require that selected_block and selected_rows, other than 1, come with lists."""
    for name in ("selected_block", "selected_rows"):
        requirements.require(given or settings.others[name] in (None, 1), f"{name} is for a call with selected")


def selection_of(lists: ArrayFacts | None, settings: Settings) -> Selection | None:
    """Return the facts of the lists; None if there are none, or if their shape is wrong."""
    if lists is None or len(lists.shape) < 3:
        return None
    block, rows = settings.others["selected_block"] or 1, settings.others["selected_rows"] or 1
    return Selection(lists.shape[-3], lists.shape[-1], block, rows)


def most_keys(problem: Problem | None, longest: int | None) -> int | None:
    """Return the number of keys that the entries of a list may name; without lists `longest`, that of a sequence."""
    if problem is None or problem.selected is None:
        return longest
    return problem.selected.entries * problem.selected.block


def places_of(selection: Selection, shape: tuple[int, ...], spans: list[tuple[int, int]], packed: bool) -> list[Place]:
    """Return the place of the lists of each sequence; `spans` are its first row among packed rows, and its rows."""
    rows = selection.rows
    if packed:
        return [Place(0, start // rows + b, -(-count // rows)) for b, (start, count) in enumerate(spans)]
    return [Place(b if shape[0] > 1 else 0, 0, -(-count // rows)) for b, (_, count) in enumerate(spans)]


def spans_of_queries(problem: Problem, operands: Operands) -> list[tuple[int, int]]:
    """Return (first row among packed rows, rows) of each sequence, read from cu_seqlens_q or q_lengths."""
    if operands.cu_seqlens_q is not None:
        bounds = operands.cu_seqlens_q.numpy().astype(np.int64)
        return list(zip(bounds[:-1].tolist(), np.diff(bounds).tolist(), strict=True))
    if operands.q_lengths is not None:
        return [(0, length) for length in operands.q_lengths.numpy().tolist()]
    return [(0, problem.q_len)] * problem.batch


def check_entries(
    requirements: Requirements, problem: Problem | None, call: dict[str, Array], on_gpu: bool = False
) -> None:
    """Require that each list in host memory, or with `on_gpu` anywhere, names no key twice and none past the longest.

    A backward does not check the lists of its forward again. Those in a program of jax are never checked.
    """
    if "selected" not in call or problem is None or problem.selected is None or problem.backward or requirements.unmet:
        return
    array, selection = call["selected"], problem.selected
    bounds = [call.get(name) for name in ("cu_seqlens_q", "q_lengths")]
    if array.framework == "xla" or not (on_gpu or all(x is None or x.device == "cpu" for x in (array, *bounds))):
        return
    cu_seqlens_q, q_lengths = (None if x is None else as_array(to_host(x), "bounds") for x in bounds)
    operands = Operands(call["q"], call["q"], call["q"], cu_seqlens_q=cu_seqlens_q, q_lengths=q_lengths)
    spans = spans_of_queries(problem, operands)
    blocks, selected = -(-problem.kv_len // selection.block), to_host(array)
    what = "key" if selection.block == 1 else "block"
    for place in dict.fromkeys(places_of(selection, array.shape, spans, problem.layout == "thd")):
        for head, lists in enumerate(place.of(selected)):
            wrong = first_wrong(lists, blocks)
            if wrong is not None:
                index, entry = wrong
                here = f"{'' if selected.ndim == 3 else f'{place.batch}, '}{head}, {place.first + index}"
                reason = f"names {what} {entry} twice" if entry < blocks else f"names {what} {entry} of {blocks}"
                requirements.require(False, f"selected[{here}] {reason}")
                return


def first_wrong(lists: np.ndarray, blocks: int) -> tuple[int, int] | None:
    """Return (index of a list, entry) of an entry of (lists, n) that is too large or stands twice in its list."""
    step = max(CHUNK // max(lists.shape[1], 1), 1)
    for start in range(0, len(lists), step):
        wrong = _first_wrong(lists[start : start + step], blocks)
        if wrong is not None:
            return start + wrong[0], wrong[1]
    return None


def _first_wrong(lists: np.ndarray, blocks: int) -> tuple[int, int] | None:
    if lists.size == 0:
        return None
    if lists.max() >= blocks:
        index, place = np.argwhere(lists >= blocks)[0].tolist()
        return index, int(lists[index, place])
    # Most lists are in ascending order, with the entries that name nothing at the end: these need no sort.
    late = lists[:, 1:]
    ascending = ((late > lists[:, :-1]) & (lists[:, :-1] >= 0)) | (late < 0)
    unsorted = np.flatnonzero(~ascending.all(axis=1))
    if not unsorted.size:
        return None
    ordered = np.sort(lists[unsorted], axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if not twice.any():
        return None
    index, place = np.argwhere(twice)[0].tolist()
    return int(unsorted[index]), int(ordered[index, place])

"""Launches with the bytes of their arguments, which later calls repeat with other addresses.

`KeptLaunches` holds what a Work holds, without its arrays: of them only names, shapes and strides. All workspaces are
one allocation, the last output, because an allocation takes more time than anything else that a call does.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy import ndarray

from ..arrays import AnyArray, Array, contiguous_strides
from ..engines.launch import Box, Launch
from ..problem.records import LONGEST
from .params import ALIGNMENT, Encode, dtypes, encoded_map, with_lengths
from .run_plan import Work, shortened

MAPS = 256  # maximum maps that are kept of one operand of one launch
FIRST, SPACING = 1 << 46, 1 << 40  # the addresses with which the words that hold addresses are found
LINE = 256  # a workspace starts at a multiple of this, as the memory of an allocation does
WORKSPACES = "workspaces"  # the name of the output that has them

Outputs: TypeAlias = list[tuple[tuple[int, ...], tuple[int, ...], np.dtype]]  # (shape, strides, dtype) of each
# Returns the outputs of a call, on the device of an input, and their addresses; None if one is not aligned.
Allocate: TypeAlias = Callable[[AnyArray], "tuple[list[AnyArray], list[int]] | None"]


class _Boxed(NamedTuple):
    """An operand of a launch, with its maps by address."""

    maps: dict[int, bytes]
    box: Box
    layout: str
    place: int  # the index of the operand's address
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype

    def encode(self, address: int, encode: Encode) -> bytes:
        """Return the map for an address, and keep it."""
        if len(self.maps) >= MAPS:
            self.maps.clear()
        encoded = self.maps[address] = encoded_map(self.box, (address, *self[4:]), self.layout, encode)
        return encoded


class _Step(NamedTuple):
    """One launch."""

    launch: Launch
    shorter: np.dtype | None  # raw bytes, as many as its Params has if it is shorter than that of other launches
    boxed: tuple[_Boxed, ...]
    at: Callable[[Sequence[int]], Hashable]  # returns the addresses of its boxed operands, one or a tuple
    maps: dict[Hashable, np.ndarray]  # the argument that has all its maps, by these addresses

    def encoded(self, addresses: Sequence[int], encode: Encode) -> np.ndarray:
        """Return the argument that has all its maps, and keep it."""
        if len(self.maps) >= MAPS:
            self.maps.clear()
        maps = [of.maps.get(address := addresses[of.place]) or of.encode(address, encode) for of in self.boxed]
        of_all = self.maps[self.at(addresses)] = np.ndarray((), f"V{128 * len(maps)}", b"".join(maps))
        return of_all


class KeptLaunches:
    """The launches of a Work.

    `inputs` and `outputs` are names, in the order of the addresses that `arguments` takes. `allocate` is the array
    library's. `loaded` is the backend's: its table of loaded kernels, and the kernels of the launches from that table.
    """

    __slots__ = (
        "_bytes", "_length", "_offsets", "_places", "_words", "allocate", "arch", "device", "framework", "inputs",
        "loaded", "outputs", "steps", "written",
    )  # fmt: skip

    def __init__(self, work: Work, allocator: Callable[[Outputs], Allocate], *, has_length: bool = False) -> None:
        """Keep a work; with `has_length` the addresses of its inputs are followed by the number cache_seqlens."""
        results = [(name, x) for name, x in work.results.items() if x is not None]
        inputs = [*work.inputs.items(), *(named for named in results if named[0] in work.written)]
        inside = [named for named in results if named[0] in work.workspaces]
        outputs = [named for named in results if named[0] not in (*work.written, *work.workspaces)]
        described = [(x.shape, contiguous_strides(x.shape), x.dtype) for _, x in outputs]
        self._offsets, size = _offsets([x for _, x in inside])
        if inside:
            described.append(((size,), (1,), np.dtype(np.uint8)))
        self.inputs = tuple([name for name, _ in inputs])
        self.outputs = (*[name for name, _ in outputs], *[WORKSPACES] * bool(inside))
        self.written, self.arch, self.allocate = work.written, work.arch, allocator(described)
        self.loaded: tuple[object, list[Callable[..., object]]] = (None, [])
        self.device, self.framework = inputs[0][1].device, inputs[0][1].framework
        # In the order of addresses; None for those that are of no array of the work.
        numbered = [*inputs, *[("", None)] * has_length, *outputs, *[("", None)] * bool(inside), *inside]
        self._words, self._places = _places(work, [x for _, x in numbered])
        self._length = (*_place_of_length(), len(inputs)) if has_length else None
        if self._length is not None:
            self._words[self._length[0]] &= ~(LONGEST << self._length[1])
        self._bytes = np.dtype(f"V{8 * len(self._words)}")
        boxed = {name: (n, x.shape, x.strides, x.dtype) for n, (name, x) in enumerate(numbered) if x is not None}
        self.steps = tuple(
            _Step(
                launch,
                shortened(launch) if work.is_shortened(launch) else None,
                tuple(_Boxed({}, box, box.layout or work.layout, *boxed[box.operand]) for box in launch.boxes),
                itemgetter(*[boxed[box.operand][0] for box in launch.boxes] or [0]),
                {},
            )
            for launch in work.launches
        )

    def arguments(self, addresses: Sequence[int], encode: Encode) -> list[tuple[Launch, tuple[np.ndarray, ...]]]:
        """Return the launches and their arguments, as `Work.arguments`, for arrays at these addresses.

        Each address must be the same modulo ALIGNMENT as that with which the launches were kept.
        """
        if self._offsets:
            start = addresses[-1]
            addresses = [*addresses, *[start + offset for offset in self._offsets]]
        words = self._words[:]
        for place, index in self._places:
            words[place] = addresses[index]
        if self._length is not None:
            place, shift, index = self._length
            words[place] |= addresses[index] << shift
        params = ndarray((), self._bytes, words)
        arguments: list[tuple[Launch, tuple[np.ndarray, ...]]] = []
        for step in self.steps:
            launch, shorter, boxed, at, maps = step
            own = params if shorter is None else ndarray((), shorter, words)
            if launch.lengths is not None:
                own = with_lengths(own, launch.lengths)
            if boxed:
                of_all = maps.get(at(addresses))
                arguments.append((launch, (own, step.encoded(addresses, encode) if of_all is None else of_all)))
            else:
                arguments.append((launch, (own,)))
        return arguments


def _offsets(workspaces: list[Array]) -> tuple[tuple[int, ...], int]:
    """Return the offsets of workspaces in the array that has them all, and its size."""
    offsets, size = [], 0
    for x in workspaces:
        offsets.append(size)
        size += -(-math.prod(x.shape) * x.dtype.itemsize // LINE) * LINE
    return tuple(offsets), size


def _place_of_length() -> tuple[int, int]:
    """Return the index of the word of Params that has cache_length, and the number of its lowest bit there."""
    _, offset, *_ = dict(dtypes("", ("KV_CACHE",))["Params"].fields or {})["cache_length"]
    return offset // 8, offset % 8 * 8


def _places(work: Work, arrays: list[Array | None]) -> tuple[array[int], tuple[tuple[int, int], ...]]:
    """Return the 64-bit words of Params, and the (index of a word, index of an array) of all that hold an address.

    They are the words that differ if Params is packed with other addresses that are equal modulo ALIGNMENT.
    """
    index = {id(x): n for n, x in enumerate(arrays)}

    def packed(first: int) -> array[int]:
        params = work.params(lambda x: first + SPACING * index[id(x)] + x.pointer % ALIGNMENT)
        return array("Q", params.tobytes())

    words, others = packed(FIRST), packed(2 * FIRST)
    places = []
    for place, (word, other) in enumerate(zip(words, others, strict=True)):
        if word != other:
            of = (word - FIRST) // SPACING
            assert other - word == FIRST and 0 <= of < len(arrays)  # else the word is more than an address
            places.append((place, of))
    return words, tuple(places)


def without_memory(shape: tuple[int, ...], dtype: np.dtype, like: Array) -> Array:
    """Return an aligned array that `empty` could allocate, but without memory, to describe it in a Work."""
    return Array(FIRST, shape, contiguous_strides(shape), np.dtype(dtype), like.device, like.framework, like.owner)

"""Launches with the bytes of their arguments, which later calls repeat with other addresses.

`KeptLaunches` holds what a Work holds, without its arrays: of them only names, shapes and strides.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from ..arrays import AnyArray, Array, contiguous_strides
from ..engines.launch import Box, Launch
from .params import ALIGNMENT, Encode, encoded_map, with_lengths
from .run_plan import Work

MAPS = 256  # maximum maps that are kept of one operand of one launch
FIRST, SPACING = 1 << 46, 1 << 30  # the addresses with which the words that hold addresses are found

# Returns the outputs of a call, on the device of an input, and their addresses; None if one is not aligned.
Allocate: TypeAlias = Callable[[AnyArray], "tuple[list[AnyArray], list[int]] | None"]


class _Boxed(NamedTuple):
    """An operand of a launch, with its maps by address."""

    maps: dict[int, bytes]
    place: int  # the index of the operand's address
    box: Box
    described: tuple[tuple[int, ...], tuple[int, ...], np.dtype]
    layout: str

    def encode(self, address: int, encode: Encode) -> bytes:
        """Return the map for an address, and keep it."""
        if len(self.maps) >= MAPS:
            self.maps.clear()
        encoded = self.maps[address] = encoded_map(self.box, (address, *self.described), self.layout, encode)
        return encoded


class _Step(NamedTuple):
    """One launch."""

    launch: Launch
    boxed: tuple[_Boxed, ...]
    maps: np.dtype  # raw bytes, as many as its maps have


class KeptLaunches:
    """The launches of a Work that has no mods.

    `inputs` and `outputs` are names, in the order of the addresses that `arguments` takes; `allocate` is the array
    library's. `loaded` is the backend's: its table of loaded kernels, and the kernels of the launches from that table.
    """

    __slots__ = (
        "_bytes", "_places", "_words", "allocate", "arch", "device", "framework", "inputs", "loaded", "outputs",
        "steps", "written",
    )  # fmt: skip

    def __init__(self, work: Work, allocate: Allocate) -> None:
        arrays = [*work.inputs.values(), *(x for x in work.results.values() if x is not None)]
        self.inputs, self.outputs = tuple(work.inputs), tuple(x for x, y in work.results.items() if y is not None)
        self.written, self.arch, self.allocate = work.written, work.arch, allocate
        self.loaded: tuple[object, list[Callable[..., object]]] = (None, [])
        self.device, self.framework = arrays[0].device, arrays[0].framework
        self._words, self._places = _places(work, arrays)
        self._bytes = np.dtype(f"V{8 * len(self._words)}")
        named = dict(zip((*self.inputs, *self.outputs), enumerate(arrays), strict=True))
        self.steps = tuple(
            _Step(
                launch,
                tuple(_boxed(*named[box.operand], box, box.layout or work.layout) for box in launch.boxes),
                np.dtype(f"V{128 * len(launch.boxes)}"),
            )
            for launch in work.launches
        )

    def arguments(self, addresses: Sequence[int], encode: Encode) -> list[tuple[Launch, tuple[np.ndarray, ...]]]:
        """Return the launches and their arguments, as `Work.arguments`, for arrays at these addresses.

        Each address must be the same modulo ALIGNMENT as that with which the launches were kept.
        """
        words = self._words[:]
        for place, index in self._places:
            words[place] = addresses[index]
        params = np.ndarray((), self._bytes, words)
        arguments: list[tuple[Launch, tuple[np.ndarray, ...]]] = []
        for launch, boxed, size in self.steps:
            own = params if launch.lengths is None else with_lengths(params, launch.lengths)
            if not boxed:
                arguments.append((launch, (own,)))
                continue
            maps = [of[0].get(address := addresses[of[1]]) or of.encode(address, encode) for of in boxed]
            arguments.append((launch, (own, np.ndarray((), size, b"".join(maps)))))
        return arguments


def _boxed(place: int, of: Array, box: Box, layout: str) -> _Boxed:
    return _Boxed({}, place, box, (of.shape, of.strides, of.dtype), layout)


def _places(work: Work, arrays: list[Array]) -> tuple[array[int], tuple[tuple[int, int], ...]]:
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

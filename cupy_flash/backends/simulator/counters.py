"""What a launch did: instructions by class and line, shared-memory wavefronts, global bytes and sectors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .ptx import TYPE_BYTES, Function, Instruction

_CLASSES = {
    "mufu": {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"},
    "mma": {"mma", "wgmma"},
    "memory": {"ld", "st", "atom", "red", "ldmatrix", "stmatrix", "cp", "prefetch"},
    "control": {"bra", "brx", "ret", "exit", "trap"},
    "sync": {"bar", "barrier", "membar", "fence", "mbarrier", "nanosleep", "setmaxnreg"},
    "warp": {"shfl", "vote", "match", "redux", "elect", "activemask"},
    "convert": {"cvt"},
    "move": {"mov", "cvta", "mapa"},
}


def instruction_class(instruction: Instruction) -> str:
    """fma, float, mufu, alu, mma, memory, control, sync, warp, convert, move or double."""
    for name, opcodes in _CLASSES.items():
        if instruction.opcode in opcodes:
            return name
    types = [m for m in instruction.modifiers if m in TYPE_BYTES]
    last = types[-1] if types else ""
    if last == "f64":
        return "double"
    if instruction.opcode == "fma":
        return "fma"
    return "float" if last.startswith(("f", "bf")) else "alu"


@dataclass(slots=True)
class SharedAccess:
    """Wavefronts that the requests of one instruction took, and what they would take without bank conflicts."""

    requests: int = 0
    wavefronts: int = 0
    ideal: int = 0


@dataclass(slots=True)
class GlobalAccess:
    """Requests (one per warp) of one instruction, the 32-byte sectors they touched, the bytes they asked for."""

    requests: int = 0
    sectors: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Counters:
    """All counts of one launch, in warp instructions unless named otherwise."""

    function: Function
    warp_instructions: npt.NDArray[np.int64] = field(init=False)
    thread_instructions: npt.NDArray[np.int64] = field(init=False)
    shared: dict[int, SharedAccess] = field(default_factory=lambda: defaultdict(SharedAccess))
    global_: dict[int, GlobalAccess] = field(default_factory=lambda: defaultdict(GlobalAccess))
    global_bytes_read: int = 0
    global_bytes_written: int = 0

    def __post_init__(self) -> None:
        self.warp_instructions = np.zeros(len(self.function.instructions), np.int64)
        self.thread_instructions = np.zeros(len(self.function.instructions), np.int64)

    def by_class(self) -> dict[str, int]:
        """Warp instructions of each class."""
        found: dict[str, int] = defaultdict(int)
        for instruction, count in zip(self.function.instructions, self.warp_instructions, strict=True):
            found[instruction_class(instruction)] += int(count)
        return {name: count for name, count in sorted(found.items()) if count}

    def by_source_line(self) -> dict[tuple[str, int], dict[str, int]]:
        """Warp instructions of each class for each (file, line) of the source."""
        found: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for instruction, count in zip(self.function.instructions, self.warp_instructions, strict=True):
            if count and instruction.source:
                found[instruction.source][instruction_class(instruction)] += int(count)
        return {line: dict(classes) for line, classes in sorted(found.items())}

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts beyond the ideal, over all instructions."""
        return sum(access.wavefronts - access.ideal for access in self.shared.values())

    def conflicting(self) -> list[tuple[Instruction, SharedAccess]]:
        """The instructions with bank conflicts, worst first."""
        found = [(self.function.instructions[i], a) for i, a in self.shared.items() if a.wavefronts > a.ideal]
        return sorted(found, key=lambda pair: pair[1].ideal - pair[1].wavefronts)

    def sectors_per_request(self) -> dict[int, float]:
        """Mean 32-byte sectors per warp request of each global access, by PTX line."""
        code = self.function.instructions
        return {code[i].line: access.sectors / access.requests for i, access in sorted(self.global_.items())}

    def count_block(self, start: int, stop: int, warps: int, threads: int) -> None:
        """Count one execution of instructions [start, stop)."""
        self.warp_instructions[start:stop] += warps
        self.thread_instructions[start:stop] += threads

    def count_shared(
        self, number: int, words: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None, width: int, copies: int = 1
    ) -> None:
        """Count `copies` equal shared accesses: `words` (warps, 32) are the first 4-byte words that the lanes touch."""
        wavefronts, ideal = shared_wavefronts(words, mask, width)
        access = self.shared[number]
        access.requests += copies * (len(words) if mask is None else int(mask.any(1).sum()))
        access.wavefronts += copies * wavefronts
        access.ideal += copies * ideal

    def count_global(
        self, number: int, addresses: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None, width: int, *, writes: bool
    ) -> None:
        """Count a global access of `width` bytes per lane at addresses (warps, 32)."""
        lanes = addresses.size if mask is None else int(mask.sum())
        access = self.global_[number]
        access.requests += len(addresses) if mask is None else int(mask.any(1).sum())
        access.sectors += _distinct_per_row(addresses >> 5, mask)
        access.bytes += lanes * width
        if writes:
            self.global_bytes_written += lanes * width
        else:
            self.global_bytes_read += lanes * width

    def count_bulk(self, number: int, addresses: npt.NDArray[Any], width: int, *, writes: bool) -> None:
        """Count pieces of `width` bytes at the global addresses that bulk copies move."""
        access = self.global_[number]
        access.requests += 1
        access.sectors += len(np.unique(addresses >> 5))
        access.bytes += addresses.size * width
        if writes:
            self.global_bytes_written += addresses.size * width
        else:
            self.global_bytes_read += addresses.size * width


def _distinct_per_row(values: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None) -> int:
    """Distinct values of each row's active lanes, summed over the rows."""
    if mask is not None:
        rows = mask.any(1)
        values, mask = values[rows], mask[rows]
        # An inactive lane repeats an active one.
        first = np.take_along_axis(values, mask.argmax(1)[:, None], 1)
        values = np.where(mask, values, first)
    values = np.sort(values, axis=1)
    return len(values) + int((values[:, 1:] != values[:, :-1]).sum())


def shared_wavefronts(words: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None, width: int) -> tuple[int, int]:
    """(wavefronts, ideal) of warp requests to 32 banks of 4 bytes.

    Up to 4 bytes per lane a warp is one request; of 8 bytes each half, of 16 bytes each quarter warp is one (every lane
    its 2 or 4 words): one wavefront delivers one word of every bank, to any number of lanes.
    """
    parts, per_lane = {8: (2, 2), 16: (4, 4)}.get(width, (1, 1))
    lanes = 32 // parts
    words = np.asarray(words).reshape(-1, lanes)
    active = None if mask is None else mask.reshape(-1, lanes)
    if active is not None:
        some = active.any(1)
        words, active = words[some], active[some]
        first = np.take_along_axis(words, active.argmax(1)[:, None], 1)
        words = np.where(active, words, first)
    if not len(words):
        return 0, 0
    touched = (words[:, :, None] + np.arange(per_lane)).reshape(len(words), -1)
    # Sorted by bank, then by word: a change of word is one more word in its bank.
    key = np.sort((touched & 31) << 32 | touched >> 5, axis=1)
    fresh = np.ones(key.shape, bool)
    fresh[:, 1:] = key[:, 1:] != key[:, :-1]
    row = np.arange(len(key))[:, None] * 32
    per_bank = np.bincount((row + (key >> 32))[fresh], minlength=32 * len(key)).reshape(-1, 32)
    return int(per_bank.max(1).sum()), len(key)

"""Counters of a launch: instructions by class and source line, shared-memory wavefronts, global bytes and sectors."""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .machine.ptx import TYPE_BYTES, Function, Instruction

_CLASSES = {
    "mufu": {"ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh"},
    "mma": {"mma", "wgmma"},
    "memory": {"ld", "st", "atom", "red", "ldmatrix", "stmatrix", "cp", "prefetch"},
    "control": {"bra", "brx", "ret", "exit", "trap", "pmevent"},
    "sync": {"bar", "barrier", "membar", "fence", "mbarrier", "nanosleep", "setmaxnreg"},
    "warp": {"shfl", "vote", "match", "redux", "elect", "activemask"},
    "convert": {"cvt"},
    "move": {"mov", "cvta", "mapa"},
}


def instruction_class(instruction: Instruction) -> str:
    """Return the class: fma, float, mufu, alu, mma, memory, control, sync, warp, convert, move or double."""
    if instruction.opcode == "tcgen05":
        return {"mma": "mma", "ld": "memory", "st": "memory", "cp": "memory"}.get(instruction.modifiers[0], "sync")
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
    """Requests of one instruction to shared memory, their wavefronts, and the wavefronts without bank conflicts."""

    requests: int = 0
    wavefronts: int = 0
    ideal: int = 0


@dataclass(slots=True)
class GlobalAccess:
    """Requests (one per warp) of one instruction to global memory, 32-byte sectors touched, bytes requested."""

    requests: int = 0
    sectors: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Counters:
    """The counts of one launch, in warp instructions unless named otherwise; `print` shows their sums."""

    function: Function = field(repr=False)
    warp_instructions: npt.NDArray[np.int64] = field(init=False)
    thread_instructions: npt.NDArray[np.int64] = field(init=False)
    shared: dict[int, SharedAccess] = field(default_factory=lambda: defaultdict(SharedAccess))
    global_: dict[int, GlobalAccess] = field(default_factory=lambda: defaultdict(GlobalAccess))
    global_bytes_read: int = 0
    global_bytes_written: int = 0
    mma_clocks: int = 0  # of tcgen05.mma at the rate of their operands: N / 2 for each K 16
    operand_bytes: int = 0  # that tcgen05.mma and .cp read from shared memory
    tensor_memory_bytes_read: int = 0  # by tcgen05.ld
    tensor_memory_bytes_written: int = 0  # by tcgen05.st and .cp

    def __post_init__(self) -> None:
        self.warp_instructions = np.zeros(len(self.function.instructions), np.int64)
        self.thread_instructions = np.zeros(len(self.function.instructions), np.int64)

    def __str__(self) -> str:
        classes = ", ".join(f"{count} {name}" for name, count in self.by_class().items())
        requests = sum(access.requests for access in self.global_.values())
        sectors = sum(access.sectors for access in self.global_.values())
        wavefronts = sum(access.wavefronts for access in self.shared.values())
        return (
            f"{self.function.name}: {self.warp_instructions.sum()} warp instructions ({classes})\n"
            f"global memory: {self.global_bytes_read} bytes read, {self.global_bytes_written} written, "
            f"{requests} requests of {sectors} sectors\n"
            f"shared memory: {wavefronts} wavefronts, {self.bank_conflicts} of them for bank conflicts"
            + self._of_tensor_memory()
        )

    def _of_tensor_memory(self) -> str:
        if not (self.mma_clocks or self.tensor_memory_bytes_read or self.tensor_memory_bytes_written):
            return ""
        return (
            f"\ntensor memory: {self.tensor_memory_bytes_read} bytes read, {self.tensor_memory_bytes_written} written; "
            f"{self.mma_clocks} clocks of mma, which read {self.operand_bytes} bytes of shared memory"
        )

    def by_class(self) -> dict[str, int]:
        """Return the warp instructions per class."""
        counts: dict[str, int] = defaultdict(int)
        for instruction, count in zip(self.function.instructions, self.warp_instructions, strict=True):
            counts[instruction_class(instruction)] += int(count)
        return {name: count for name, count in sorted(counts.items()) if count}

    def by_source_line(self) -> dict[tuple[str, int], dict[str, int]]:
        """Return the warp instructions per class for each (file, line) of the source."""
        counts: dict[tuple[str, int], dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for instruction, count in zip(self.function.instructions, self.warp_instructions, strict=True):
            if count and instruction.source:
                counts[instruction.source][instruction_class(instruction)] += int(count)
        return {line: dict(classes) for line, classes in sorted(counts.items())}

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts in excess of the ideal, summed over all instructions."""
        return sum(access.wavefronts - access.ideal for access in self.shared.values())

    def conflicting(self) -> list[tuple[Instruction, SharedAccess]]:
        """Return the instructions with bank conflicts, worst first."""
        conflicts = [(self.function.instructions[i], a) for i, a in self.shared.items() if a.wavefronts > a.ideal]
        return sorted(conflicts, key=lambda pair: pair[1].ideal - pair[1].wavefronts)

    def sectors_per_request(self) -> dict[int, float]:
        """Mean 32-byte sectors per request of each global access, by PTX line."""
        code = self.function.instructions
        return {code[i].line: access.sectors / access.requests for i, access in sorted(self.global_.items())}

    def count_block(self, start: int, stop: int, warps: int, threads: int) -> None:
        """Count executions of instructions [start, stop) by this many warps and threads in all."""
        self.warp_instructions[start:stop] += warps
        self.thread_instructions[start:stop] += threads

    def count_shared(
        self, number: int, words: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None, width: int, copies: int = 1
    ) -> None:
        """Count `copies` equal shared accesses; `words` (warps, 32) is each lane's first 4-byte word."""
        wavefronts, ideal = shared_wavefronts(words, mask, width)
        access = self.shared[number]
        access.requests += copies * (len(words) if mask is None else int(np.count_nonzero(mask.any(1))))
        access.wavefronts += copies * wavefronts
        access.ideal += copies * ideal

    def count_global(
        self, number: int, addresses: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None, width: int, *, writes: bool
    ) -> None:
        """Count a global access of `width` bytes per lane at addresses (warps, 32)."""
        lanes = addresses.size if mask is None else int(np.count_nonzero(mask))
        access = self.global_[number]
        access.requests += len(addresses) if mask is None else int(np.count_nonzero(mask.any(1)))
        access.sectors += _distinct_per_row(addresses >> 5, mask)
        access.bytes += lanes * width
        if writes:
            self.global_bytes_written += lanes * width
        else:
            self.global_bytes_read += lanes * width

    def count_mma(self, blocks: int, columns: int, operand_bytes: int) -> None:
        """Count one tcgen05.mma with K 16 of this many blocks; one of 64 rows takes as long as one of 128."""
        self.mma_clocks += blocks * columns // 2
        self.operand_bytes += blocks * operand_bytes

    def count_copy(self, bytes_read: int, bytes_written: int) -> None:
        """Count one tcgen05.cp, which writes rows once for each of their copies."""
        self.operand_bytes += bytes_read
        self.tensor_memory_bytes_written += bytes_written

    def count_tensor_memory(self, number: int, *, writes: bool) -> None:
        """Count the bytes that tcgen05.ld or .st moves."""
        if writes:
            self.tensor_memory_bytes_written += number
        else:
            self.tensor_memory_bytes_read += number

    def count_bulk(self, number: int, addresses: npt.NDArray[Any], width: int, *, writes: bool) -> None:
        """Count one bulk copy: pieces of `width` bytes at these global addresses."""
        access = self.global_[number]
        access.requests += 1
        access.sectors += len(np.unique(addresses >> 5))
        access.bytes += addresses.size * width
        if writes:
            self.global_bytes_written += addresses.size * width
        else:
            self.global_bytes_read += addresses.size * width


def _distinct_per_row(values: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None) -> int:
    """Return the number of distinct values among each row's active lanes, summed over the rows."""
    if mask is not None:
        rows = mask.any(1)
        values, mask = values[rows], mask[rows]
        # Fill inactive lanes with the value of the first active one.
        first = np.take_along_axis(values, mask.argmax(1)[:, None], 1)
        values = np.where(mask, values, first)
    steps = values[:, 1:] - values[:, :-1]
    if np.count_nonzero(steps < 0):
        values = np.sort(values, axis=1)
        steps = values[:, 1:] - values[:, :-1]
    return len(values) + int(np.count_nonzero(steps))


def shared_wavefronts(words: npt.NDArray[Any], mask: npt.NDArray[np.bool_] | None, width: int) -> tuple[int, int]:
    """Return (wavefronts, ideal) of warp requests to 32 banks of 4 bytes.

    A warp is one request up to 4 bytes per lane, a half warp at 8 bytes, a quarter warp at 16 bytes. A wavefront
    delivers one word from every bank, to any number of lanes.
    """
    words = np.asarray(words, np.int64)
    # Words at the same distances from each other have the same conflicts, and loops repeat a few patterns.
    if mask is None:
        return _wavefronts((words - np.minimum.reduce(words, axis=None)).tobytes(), None, width)
    if not np.count_nonzero(mask):
        return 0, 0
    return _wavefronts(np.where(mask, words - words[mask].min(), 0).tobytes(), mask.tobytes(), width)


@functools.lru_cache(maxsize=512)
def _wavefronts(words_of_lanes: bytes, mask: bytes | None, width: int) -> tuple[int, int]:
    parts, per_lane = {8: (2, 2), 16: (4, 4)}.get(width, (1, 1))
    lanes = 32 // parts
    words = np.frombuffer(words_of_lanes, np.int64).reshape(-1, lanes)
    if mask is not None:
        active = np.frombuffer(mask, bool).reshape(-1, lanes)
        nonempty = active.any(1)
        words, active = words[nonempty], active[nonempty]
        first = np.take_along_axis(words, active.argmax(1)[:, None], 1)
        words = np.where(active, words, first)
    touched = (words[:, :, None] + np.arange(per_lane)).reshape(len(words), -1)
    # Sorted by bank, then by word: every change starts another distinct word of its bank.
    key = np.sort((touched & 31) << 32 | touched >> 5, axis=1)
    distinct = np.ones(key.shape, bool)
    distinct[:, 1:] = key[:, 1:] != key[:, :-1]
    row = np.arange(len(key))[:, None] * 32
    per_bank = np.bincount((row + (key >> 32))[distinct], minlength=32 * len(key)).reshape(-1, 32)
    return int(per_bank.max(1).sum()), len(key)

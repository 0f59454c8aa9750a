"""Roles of a block on a Blackwell SM: processes that wait for signals of each other and occupy units, without a GPU.

The models of the forward (`events.py`) and of the backward (`backward_events.py`) share them. The tensor cores execute
the mma in the order in which they are issued. The warps of a sub-partition share its issue slots and lanes; the four
sub-partitions do the same work. The clocks of an mma are those of a public measurement (`MMA`), and latencies are
rounded guesses.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence

from . import cycles, sass

ARCHS = {"sm_100a": 8, "sm_103a": 4}  # clocks between two exponentials of a warp
STEPS = 32  # of a work tile: the tiles of the other operand that it visits
ROWS = KEYS = 128

# Clocks of an mma with M 128 and K 16 by its columns, both operands in shared memory, and how much less it takes with A
# in tensor memory.
MMA, FROM_TENSOR_MEMORY = {64: 63.0, 128: 80.0}, 0.92
PAIR_MMA = 70.0  # of an mma of a pair of CTAs (cta_group::2) with M 256, K 16 and 128 columns, in the same measurement
PEAK = 2.0  # columns of such an mma that the tensor cores compute in a clock
SIGNAL = 40.0  # clocks from an arrival, or the end of an mma, to the instruction behind the wait for it
LOADED, STORED = 60.0, 40.0  # of tensor memory
COPIED, COPIED_BYTES = 1000.0, 64.0  # latency of a TMA load, and its bytes a clock
ISSUED = 4.0  # clocks of an instruction of the single thread that issues the mma
CHUNKS = 16  # parts of a segment of a role, between which another warp may take the units
PAIRED = ("FADD2", "FMUL2", "FFMA2")

Wait = tuple[str, int]  # a signal, and how often it must have been given
Process = Generator["float | Wait", float, None]  # yields the clock until which it runs, or what it waits for


class Roles:
    """The units and signals of a block, through which its roles depend on each other."""

    def __init__(self, mufu: int):
        self.mufu = mufu  # clocks between two exponentials of a warp
        self.free: dict[str, float] = defaultdict(float)  # clock from which a unit is free
        self.given: dict[str, list[float]] = defaultdict(list)  # clocks at which a signal is seen, in order

    def play(self, roles: Sequence[Process]) -> float:
        """Run the roles to their ends and return the clock of the last event."""
        for role in roles:
            next(role)
        ready, waiting, clock = [(0.0, n) for n in range(len(roles))], dict[int, tuple[float, Wait]](), 0.0
        while ready:
            clock, n = heapq.heappop(ready)
            try:
                asked = roles[n].send(clock)
            except StopIteration:
                asked = None
            if isinstance(asked, tuple):
                waiting[n] = clock, asked
            elif asked is not None:
                heapq.heappush(ready, (asked, n))
            for each, (since, (name, times)) in list(waiting.items()):
                if len(self.given[name]) >= times:
                    heapq.heappush(ready, (max([since, *self.given[name][times - 1 : times]]), each))
                    del waiting[each]
        assert not waiting, waiting
        return clock

    def uses(self, unit: str, clock: float, clocks: float) -> float:
        """Return the clock at which a unit that serves in order of arrival has worked for so many clocks."""
        self.free[unit] = max(self.free[unit], clock) + clocks
        return self.free[unit]

    def executes(self, clock: float, opcodes: Counter[str], part: float = 1) -> float:
        """Return the clock at which a warp has executed a part of some instructions."""
        clocks = clocks_of_units(opcodes, {"MUFU": self.mufu})
        return max(self.uses(unit, clock, part * n) for unit, n in clocks.items())


def clocks_of_mma(columns: int, pair: bool = False) -> float:
    """Return the clocks of an mma with both operands in shared memory, between the measured numbers of columns.

    That of a pair of CTAs has M 256, and is measured with 128 columns only.
    """
    if pair:
        assert columns == KEYS, columns
        return PAIR_MMA
    (low, at_low), (high, at_high) = MMA.items()
    return at_low + (at_high - at_low) * (columns - low) / (high - low)


def clocks_of_units(opcodes: Counter[str], of_unit: dict[str, int]) -> dict[str, int]:
    """Return the clocks for which each unit of a sub-partition executes the instructions of a warp."""
    clocks = Counter({"issue": opcodes.total()})
    for opcode, n in opcodes.items():
        for unit, (names, interval) in cycles.UNITS.items():
            if opcode in names:
                clocks[unit] += n * of_unit.get(unit, interval)
        clocks["FMA"] += 2 * n * (opcode in PAIRED)
    return dict(clocks)


def segments(path: Sequence[str]) -> list[Counter[str]]:
    """Return the opcodes of a path up to each arrival at an mbarrier, and of the rest."""
    counts = [Counter[str]()]
    for instruction in path:
        counts[-1][sass.opcode(instruction)] += 1
        if "SYNCS.ARRIVE" in instruction:
            counts.append(Counter())
    return counts

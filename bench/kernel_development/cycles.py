"""A cycle model of one SM sub-partition of Hopper that executes the SASS of a mainloop, for machines without a GPU.

A sub-partition has one warp scheduler and holds one warp of every consumer warpgroup; the four sub-partitions of an SM
do the same work. The scheduler issues one instruction a clock, in program order within a warp. An instruction waits for
its registers, its unit and, if it is a wait, for its event. wgmma instructions of all warps enter one queue; the tensor
cores execute them one after another: 64 x N x 16 (fp8: 64 x N x 32) takes N / 2 clocks, or the time in which shared
memory delivers the operands. Loads from global memory have arrived when they are waited for.

The model has not been compared with a GPU by this project. `predict.py` compares it with FlashAttention-3's SASS and
published speeds. Additions to dQ and stores of dS of a backward compete with the tensor cores in ways that are not
modelled.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from . import sass

# {unit: (its opcodes, clocks between two instructions of a warp)}. A sub-partition of Hopper has 32 FP32 lanes, 16
# integer lanes and 4 lanes of special functions.
UNITS = {
    "FMA": (("FFMA", "FMUL", "FADD", "IMAD"), 1),
    "ALU": (
        (
            "FMNMX", "FMNMX3", "F2FP", "LOP3", "IADD3", "PRMT", "FSETP", "ISETP", "SEL", "FSEL", "SHF", "VIADD", "LEA",
            "PLOP3", "MOV", "P2R", "R2P",
        ),
        2,
    ),
    "MUFU": (("MUFU",), 8),
    "LSU": (("LDS", "LDSM", "STS", "STSM", "SHFL", "REDG", "RED"), 2),
}  # fmt: skip
LATENCY = {"FMA": 4, "ALU": 5, "MUFU": 22, "UNIFORM": 8, "LSU": 30, "OTHER": 6}  # clocks until a result is readable
LATENCY_OF = {"SYNCS": 20, "VOTE": 12}
STALL = {"WARPGROUP": 6, "BRA": 6, "BAR": 20}  # clocks until the warp issues its next instruction
QUEUE = 4  # wgmma instructions that may wait for the tensor cores
WITHOUT_RESULT = ("BRA", "BAR", "WARPGROUP", "STS", "STSM", "RED", "REDG")
TWO_RESULTS = ("FSETP", "ISETP", "UISETP", "PLOP3", "VOTE", "R2UR")
PRODUCTS = ("HGMMA", "QGMMA")
SHARED_BYTES = 128  # bytes per clock and SM
WARPS = 4  # warps of a warpgroup
WAVEFRONTS = {"LDS": 1, "STS": 1, "LDSM": 4, "STSM": 4}  # shared-memory wavefronts of a warp
REGISTER = re.compile(r"\b(U?R\d+|U?P\d)\b")


class Instruction(NamedTuple):
    """The properties of one SASS instruction that the scheduler uses."""

    opcode: str
    unit: str
    interval: int  # clocks for which the instruction occupies its unit
    writes: tuple[str, ...]
    reads: tuple[str, ...]
    product: int  # clocks for which the tensor cores compute it
    commits: bool  # the last wgmma of its group
    pending: int | None  # of a wait: the number of groups that may still be pending after it
    arrives: bool  # arrives at a named barrier without waiting


def decode(text: str) -> Instruction:
    """Decode one line of a disassembly."""
    match = re.match(r"(@!?U?P\w+\s+)?(\S+)\s*(.*)", text)
    assert match is not None
    guard, name, rest = match.groups()
    opcode = name.split(".")[0]
    operands = [REGISTER.findall(operand) for operand in rest.split(",")]
    results = 0 if opcode in WITHOUT_RESULT else 2 if opcode in TWO_RESULTS else 1
    writes = sum(operands[:results], [])
    reads = sum(operands[results:], REGISTER.findall(guard or ""))
    unit, interval = next(
        ((unit, clocks) for unit, (opcodes, clocks) in UNITS.items() if opcode in opcodes),
        ("UNIFORM" if opcode.startswith("U") or opcode == "R2UR" else "OTHER", 1),
    )
    product = 0
    if opcode in ("HGMMA", "QGMMA"):
        unit, product = "TENSOR", max(columns_of(text) // 2, shared_bytes(text) // SHARED_BYTES)
    pending = int(rest.split()[-1], 16) if "DEPBAR" in name and "gsb" in rest else None
    return Instruction(
        opcode, unit, interval, tuple(writes), tuple(reads), product, bool(product) and "gsb0" in rest, pending,
        opcode == "BAR" and ".ARV" in name,
    )  # fmt: skip


def columns_of(wgmma: str) -> int:
    """Return N of a wgmma instruction."""
    shape = re.search(r"64x(\d+)x\d+", wgmma)
    assert shape is not None, wgmma
    return int(shape[1])


def tensor_clocks(loop: Sequence[str]) -> int:
    """Return the clocks for which one iteration of one warpgroup occupies the tensor cores."""
    return sum(columns_of(text) // 2 for text in loop if sass.opcode(text) in PRODUCTS)


def shared_bytes(text: str) -> int:
    """Return the bytes of shared memory that one instruction of a warpgroup reads or writes."""
    opcode = sass.opcode(text)
    if opcode in PRODUCTS:
        a_rows = 0 if re.search(r"\sR\d+, R\d+, gdesc", text) else 64  # no reads of A if it is in registers
        return (a_rows + columns_of(text)) * 32  # 32 bytes along K
    return WARPS * WAVEFRONTS.get(opcode, 0) * SHARED_BYTES


class _Warp:
    """One warp: its position, the clock at which each register is readable, and its groups of wgmma."""

    def __init__(self, start: int):
        self.position, self.iterations, self.stalled = 0, 0, start
        self.readable: dict[str, int] = {}
        self.groups: deque[list[int]] = deque()  # [unfinished wgmma, committed] of each group, oldest first
        self.arrived = False  # has arrived at the named barrier of its current instruction
        self.starts: list[int] = []  # clock at which each iteration starts

    def advance(self, length: int, clock: int) -> None:
        """Go to the next instruction of a loop of `length` instructions."""
        self.position += 1
        if self.position == length:
            self.position = 0
            self.iterations += 1
            self.starts.append(clock)


class _SubPartition:
    """A sub-partition that executes a loop with one warp of each warpgroup."""

    def __init__(self, code: Sequence[Instruction], warpgroups: int, stagger: int):
        self.codes = [code] * warpgroups  # of each warp
        self.warps = [_Warp(stagger * number) for number in range(warpgroups)]
        self.last = 0  # the warp that issued last
        self.free: dict[str, int] = {}  # clock from which a unit accepts an instruction
        # The tensor cores' queue holds (clocks, group) of each wgmma; the wgmma that executes has (end, group).
        self.queue: deque[tuple[int, list[int]]] = deque()
        self.running: tuple[int, list[int]] | None = None
        # Of named barriers: the number of warps that have arrived and, in a ping-pong, the turns that each warp may
        # take.
        self.arrivals = 0
        self.ping_pong = any(instruction.arrives for instruction in code)
        self.turns = [int(number == 0) for number in range(warpgroups)]

    def run_tensor_cores(self, clock: int) -> None:
        """Finish the wgmma that ends at this clock, and start the next one of the queue."""
        if self.running is not None and clock >= self.running[0]:
            self.running[1][0] -= 1
            self.running = None
        if self.running is None and self.queue:
            clocks, group = self.queue.popleft()
            self.running = clock + clocks, group

    def issue(self, clock: int, iterations: int) -> None:
        """Issue the instruction of the first warp that can issue; the search starts after the last warp that did."""
        for number in (*range(self.last + 1, len(self.warps)), *range(self.last + 1)):
            warp = self.warps[number]
            if warp.iterations >= iterations or warp.stalled > clock:
                continue
            instruction = self.codes[number][warp.position]
            if any(warp.readable.get(register, 0) > clock for register in instruction.reads):
                continue
            if self._starts(number, instruction, clock):
                warp.stalled = clock + STALL.get(instruction.opcode, 1)
                self.last = number
                warp.advance(len(self.codes[number]), clock)
                return

    def _starts(self, number: int, instruction: Instruction, clock: int) -> bool:
        """Start an instruction whose operands are readable; return False if it must wait for its unit or event."""
        warp = self.warps[number]
        if instruction.product:
            return self._enters_queue(warp, instruction)
        if instruction.pending is not None:
            while warp.groups and warp.groups[0] == [0, 1]:
                warp.groups.popleft()
            return len(warp.groups) <= instruction.pending
        if instruction.opcode == "BAR":
            return self._takes_turn(number, instruction) if self.ping_pong else self._passes_barrier(warp)
        if self.free.get(instruction.unit, 0) > clock:
            return False
        self.free[instruction.unit] = clock + instruction.interval
        latency = LATENCY_OF.get(instruction.opcode, LATENCY.get(instruction.unit, 0))
        warp.readable.update(dict.fromkeys(instruction.writes, clock + latency))
        return True

    def _enters_queue(self, warp: _Warp, wgmma: Instruction) -> bool:
        if len(self.queue) >= QUEUE:
            return False
        if not warp.groups or warp.groups[-1][1]:
            warp.groups.append([0, 0])
        warp.groups[-1][0] += 1
        warp.groups[-1][1] = int(wgmma.commits)
        self.queue.append((wgmma.product, warp.groups[-1]))
        return True

    def _takes_turn(self, number: int, barrier: Instruction) -> bool:
        """Execute a ping-pong barrier: an arrive gives the next warp a turn, a sync takes this warp's turn."""
        if barrier.arrives:
            self.turns[(number + 1) % len(self.warps)] += 1
            return True
        if self.turns[number] == 0:
            return False
        self.turns[number] -= 1
        return True

    def _passes_barrier(self, warp: _Warp) -> bool:
        """Arrive at the barrier of all warps; return whether all have arrived."""
        if not warp.arrived:
            warp.arrived = True
            self.arrivals += 1
        if self.arrivals < len(self.warps):
            return False
        warp.arrived = False
        if not any(each.arrived for each in self.warps):
            self.arrivals = 0
        return True


def clocks_of_iteration(loop: Sequence[str], warpgroups: int, *, stagger: int = 0, iterations: int = 12) -> float:
    """Return the clocks of one iteration of a loop that `warpgroups` warpgroups execute `iterations` times.

    `stagger` clocks lie between the starts of two warpgroups. Named barriers are those of all consumer warpgroups,
    except for a ping-pong (a loop with BAR.ARV): there a warpgroup waits for its turn and passes it to the next.
    """
    partition = _SubPartition([decode(text) for text in loop], warpgroups, stagger)
    clock = 0
    while min(warp.iterations for warp in partition.warps) < iterations:
        partition.run_tensor_cores(clock)
        partition.issue(clock, iterations)
        clock += 1
    # The first third of the iterations fills the pipeline.
    first = iterations // 3
    return max((warp.starts[-1] - warp.starts[first]) / (iterations - 1 - first) for warp in partition.warps)

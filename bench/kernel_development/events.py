"""A model of events of the Blackwell forward: its roles, barriers and slots over whole work tiles, without a GPU.

Each role of kernels_cu/tcgen05/forward.cu is a process that waits for signals of the others and occupies units of the
SM. The tensor cores execute the mma in the order in which they are issued. A sub-partition has one warp of each
softmax, one of the correction, and shares its issue slots and lanes among them; the four do the same work. The numbers
of instructions of a step of the softmax are those of the kernel's own SASS, the clocks of an mma those of a public
measurement (`MMA`), and latencies are rounded guesses. The schedule that FlashAttention-4 publishes goes through the
same model: its published fraction of the peak at D 128 over the model's multiplies every prediction. Only a GPU can
confirm them (bench/gpu_queue.md).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

from cupy_flash import device
from cupy_flash.engines.launch import Launch
from cupy_flash.gpu import ahead
from cupy_flash.jit import nvrtc
from cupy_flash.jit.source import assemble

from ..report import NOTHING, Table
from ..run import Progress
from . import cycles, sass
from .fingerprint import fingerprint

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128))
ARCHS = {"sm_100a": 8, "sm_103a": 4}  # clocks between two exponentials of a warp
SHARES = (0, 2, 4, 5)  # of 16 exponentials that a polynomial computes (POLYNOMIALS of config.cuh)
FIRST_MARKS = {(64, 64): 0.45, (128, 128): 0.58, (192, 128): 0.60}  # fractions of the peak of the tensor cores
PUBLISHED = 0.71  # of the peak, by FlashAttention-4 (arXiv 2603.05451) on a B200 at D 128
STEPS, WORK_TILES = 32, 4  # keys of a work tile, in tiles; work tiles that a block computes
ROWS = KEYS = 128

# Clocks of an mma with M 128 and K 16 by its columns, both operands in shared memory, and how much less it takes with A
# in tensor memory.
MMA, FROM_TENSOR_MEMORY = {64: 63.0, 128: 80.0}, 0.92
PEAK = 2.0  # columns of such an mma that the tensor cores compute in a clock
# Clocks from an arrival, or the end of an mma, to the instruction behind the wait for it; the same for the factors of
# FlashAttention-4, which uses a named barrier per warp.
SIGNAL, NAMED_BARRIER = 40.0, 20.0
LOADED, STORED = 60.0, 40.0  # of tensor memory
COPIED, COPIED_BYTES = 1000.0, 64.0  # latency of a TMA load, and its bytes a clock
ISSUED = 4.0  # clocks of an instruction of the single thread that issues the mma
CORRECTED, STORED_COLUMN = 17, 3.1  # instructions of the correction: of a step of one tile, and of a column of O
FINISHED = 120  # instructions of the softmax at the end of a work tile
CHUNKS = 16  # parts of a segment of the softmax, between which another warp may take the units
# FlashAttention-4: instructions of a polynomial of degree 3 for a pair of exponentials, and its share at D 128.
POLYNOMIAL, SHARE = Counter({"FADD2": 3, "FFMA2": 3, "FMNMX": 2, "LEA": 2}), 1 / 8
PAIRED = ("FADD2", "FMUL2", "FFMA2")


class Softmax(NamedTuple):
    """The opcodes of a step of the softmax: before it signals the factor, then to each of two signals of P."""

    segments: tuple[Counter[str], ...]

    @classmethod
    def of(cls, path: Sequence[str]) -> Softmax:
        """Return the segments of a path through the loop, which ends with the second signal of P."""
        segments = [Counter[str]()]
        for instruction in path:
            segments[-1][sass.opcode(instruction)] += 1
            if "SYNCS.ARRIVE" in instruction:
                segments.append(Counter())
        *segments, rest = segments
        assert len(segments) == 3, len(segments)
        return cls((segments[0] + rest, *segments[1:]))

    def emulating(self, share: float) -> Softmax:
        """Return the step with a share of its exponentials computed by the polynomial."""
        changed = []
        for segment in self.segments:
            emulated = round(share * segment["MUFU"] / 2)
            polynomials = Counter({name: n * emulated for name, n in POLYNOMIAL.items()})
            changed.append(segment + polynomials - Counter({"MUFU": 2 * emulated}))
        return Softmax(tuple(changed))


class Schedule(NamedTuple):
    """The constants of a kernel's roles: head dimensions, slots of its ring, instructions and latencies."""

    dims: tuple[int, int]
    slots: int  # of K and V together
    softmax: Softmax
    issue: float  # instructions of the issuing thread for an mma
    mufu: int  # clocks between two exponentials of a warp
    factors: float  # latency of the signals between softmax and correction


Wait = tuple[str, int]  # a signal, and how often it must have been given
Process = Generator["float | Wait", float, None]  # yields the clock until which it runs, or what it waits for


class Block:
    """A block that computes work tiles of two tiles of queries: its units, its signals and its roles."""

    def __init__(self, schedule: Schedule, steps: int = STEPS):
        self.schedule, self.steps = schedule, steps
        self.free: dict[str, float] = defaultdict(float)  # clock from which a unit is free
        self.given: dict[str, list[float]] = defaultdict(list)  # clocks at which a signal is seen, in order
        self.stored: list[float] = []  # clocks at which work tiles are stored

    def run(self) -> float:
        """Return the clocks of a work tile between two others."""
        roles = [self.load(), self.issue(), self.correct(), self.softmax(0), self.softmax(1)]
        for role in roles:
            next(role)
        ready, waiting = [(0.0, n) for n in range(len(roles))], dict[int, tuple[float, Wait]]()
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
        return self.stored[-2] - self.stored[-3]

    def uses(self, unit: str, clock: float, clocks: float) -> float:
        """Return the clock at which a unit that serves in order of arrival has worked for so many clocks."""
        self.free[unit] = max(self.free[unit], clock) + clocks
        return self.free[unit]

    def executes(self, clock: float, opcodes: Counter[str], part: float = 1) -> float:
        """Return the clock at which a warp has executed a part of some instructions."""
        mufu = {"MUFU": self.schedule.mufu}
        return max(self.uses(unit, clock, part * n) for unit, n in clocks_of_units(opcodes, mufu).items())

    def load(self) -> Process:
        """Load Q, and K and V by turns, into slots that are empty."""
        (dim, dim_v), slots = self.schedule.dims, self.schedule.slots
        k_slots, v_slots = (slots + 1) // 2, slots // 2

        def copied(clock: float, columns: int) -> float:
            return self.uses("copies", clock, 2 * columns * KEYS / COPIED_BYTES) + COPIED + SIGNAL

        clock = yield 0.0
        for tile in range(WORK_TILES):
            begin, end = tile * self.steps, (tile + 1) * self.steps
            for step in range(begin - 1, end):  # K of the next step, then V of this one
                if step + 1 < end:
                    clock = yield "K read", max(step + 2 - k_slots, 0)
                    self.given["K"].append(copied(clock, dim))
                for t in range(2 * (step < begin)):
                    clock = yield f"Q{t} read", tile
                    self.given[f"Q{t}"].append(copied(clock, dim))
                if step >= begin:
                    clock = yield "V read", max(step + 1 - v_slots, 0)
                    self.given["V"].append(copied(clock, dim_v))

    def issue(self) -> Process:
        """Issue S of both tiles, then for each PV and the next S of its tile."""
        dim, dim_v = self.schedule.dims
        qk, pv = clocks_of_mma(KEYS), FROM_TENSOR_MEMORY * clocks_of_mma(dim_v)

        def issued(clock: float, count: int, clocks: float, *signals: str) -> float:
            own = ISSUED * self.schedule.issue
            end = max(self.uses("tensor cores", clock + own, count * clocks), clock + own * count + clocks)
            for name in signals:
                self.given[name].append(end + SIGNAL)
            return clock + own * count

        clock = yield 0.0
        for step in range(WORK_TILES * self.steps):
            first, last = step % self.steps == 0, step % self.steps == self.steps - 1
            tile, ends = step // self.steps, self.steps == 1 or (step + 1) % self.steps == self.steps - 1
            if first:
                clock = yield "K", step + 1
                for t in range(2):
                    clock = yield f"Q{t}", tile + 1
                    read = [f"Q{t} read"] * (self.steps == 1) + ["K read"] * t
                    clock = yield issued(clock, dim // 16, qk, f"S{t}", *read)
            clock = yield "V", step + 1
            if not last:
                clock = yield "K", step + 2
            for t in range(2):
                clock = yield f"P{t}", step + 1
                clock = yield f"rescaled{t}", step + 1
                clock = yield issued(clock, 6, pv)
                clock = yield f"all P{t}", step + 1
                clock = yield issued(clock, 2, pv, *["V read"] * t, *[f"O{t}"] * last)
                if not last:
                    read = [f"Q{t} read"] * ends + ["K read"] * t
                    clock = yield issued(clock, dim // 16, qk, f"S{t}", *read)

    def softmax(self, t: int) -> Process:
        """Send the factor of each step, and store P in two parts."""
        factors = self.schedule.factors
        clock = yield 0.0
        for step in range(WORK_TILES * self.steps):
            sent = step + step // self.steps
            clock = yield f"S{t}", step + 1
            clock = yield clock + LOADED
            for n, opcodes in enumerate(self.schedule.softmax.segments):
                for _ in range(CHUNKS):
                    clock = yield self.executes(clock, opcodes, 1 / CHUNKS)
                if n == 0:
                    clock = yield f"factor{t} read", sent
                    self.given[f"factor{t}"].append(clock + factors)
                else:
                    clock = yield clock + STORED
                    self.given["all P" * (n == 2) + "P" * (n == 1) + str(t)].append(clock + SIGNAL)
            if step % self.steps == self.steps - 1:
                clock = yield self.executes(clock, Counter({"rest": FINISHED}))
                clock = yield f"factor{t} read", sent + 1
                self.given[f"factor{t}"].append(clock + factors)

    def correct(self) -> Process:
        """Rescale O, which few steps need, and store it after the last step."""
        clock = yield 0.0
        for received in range(WORK_TILES * (self.steps + 1)):
            last = received % (self.steps + 1) == self.steps
            for t in range(2):
                clock = yield f"factor{t}", received + 1
                clock = yield self.executes(clock, Counter({"rest": CORRECTED}))
                self.given[f"factor{t} read"].append(clock + self.schedule.factors)
                if not last:
                    self.given[f"rescaled{t}"].append(clock + SIGNAL)
                    continue
                clock = yield f"O{t}", received // (self.steps + 1) + 1
                for _ in range(CHUNKS):
                    part = Counter({"rest": round(STORED_COLUMN * self.schedule.dims[1] / CHUNKS)})
                    clock = yield self.executes(clock + LOADED / CHUNKS, part)
            if last:
                self.stored.append(clock)


def clocks_of_mma(columns: int) -> float:
    """Return the clocks of an mma with both operands in shared memory, between the measured numbers of columns."""
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


class Prediction(NamedTuple):
    """The model's speed of the forward of a head dimension on an architecture; fractions of the tensor cores' peak.

    `step` is of the kernel as it is planned, and so is the fraction whose share is `planned`.
    """

    arch: str
    dims: tuple[int, int]
    tile: tuple[int, int, int]
    fingerprint: str
    step: dict[str, float]  # clocks that each unit needs for a step of 128 x 128 scores
    planned: int
    fractions: tuple[float, ...]  # PUBLISHED / the model's of FlashAttention-4 times the model's, by share (SHARES)


def launch_of(dims: tuple[int, int], arch: str) -> Launch:
    """Return the forward of a full mask with two tiles of queries."""
    on = device.named(arch, "cuda")
    words: dict[str, Any] = dict(dtype="bfloat16", head_dim=dims[0], head_dim_v=dims[1], engine="tcgen05")
    launches = ahead.launches(on, **words, backward=False)
    return next(each for each in launches if each.tile and each.tile[0] == 2 * ROWS)


def schedule_of(launch: Launch, dims: tuple[int, int], arch: str, share: int) -> Schedule:
    """Compile a kernel with a share of polynomials and return its schedule."""
    text = assemble(launch.kernel, dict(launch.constants) | {"POLYNOMIALS": share}, dict(launch.headers))
    code = nvrtc.compile(text, launch.kernel, arch).code
    issuing = sass.mainloop(code)
    issue = len(issuing.steady) / issuing.counts()["products"]
    softmax = Softmax.of(sass.row_loop(code, KEYS).steady)
    return Schedule(dims, int(dict(launch.constants)["STAGES"]), softmax, issue, ARCHS[arch], SIGNAL)


def fraction(schedule: Schedule, clocks: float) -> float:
    """Return the part of the tensor cores' peak that a work tile of so many clocks reaches."""
    products = 2 * STEPS * (schedule.dims[0] / 16 * KEYS + KEYS / 16 * schedule.dims[1])
    return products / PEAK / clocks


def flash_attention_4(ours: Schedule) -> Schedule:
    """Return FlashAttention-4's schedule at D 128 from ours without polynomials."""
    return ours._replace(factors=NAMED_BARRIER, softmax=ours.softmax.emulating(SHARE))


def predict(progress: Progress) -> list[Prediction]:
    """Compile the forward of every head dimension and architecture, and predict its speed."""
    schedules: dict[tuple[str, tuple[int, int]], dict[int, Schedule]] = {}
    launches = {(arch, dims): launch_of(dims, arch) for arch in ARCHS for dims in DIMS}
    for (arch, dims), launch in launches.items():
        progress(f"{arch}, D {dims[0]}/{dims[1]}")
        schedules[arch, dims] = {share: schedule_of(launch, dims, arch, share) for share in SHARES}
    other = flash_attention_4(schedules["sm_100a", (128, 128)][0])
    of_model = PUBLISHED / fraction(other, Block(other).run())
    predictions = []
    for (arch, dims), launch in launches.items():
        assert launch.tile is not None
        planned = int(dict(launch.constants).get("POLYNOMIALS", 0))
        shares = schedules[arch, dims]
        fractions = tuple(of_model * fraction(each, Block(each).run()) for each in shares.values())
        step = resources(shares[planned])
        predictions.append(Prediction(arch, dims, launch.tile, fingerprint(launch), step, planned, fractions))
    return predictions


def resources(schedule: Schedule) -> dict[str, float]:
    """Return the clocks that each unit needs for a step of 128 x 128 scores."""
    dim, dim_v = schedule.dims
    softmax = clocks_of_units(sum(schedule.softmax.segments, Counter()), {"MUFU": schedule.mufu})
    of_mma = dim / 16 * clocks_of_mma(KEYS) + KEYS / 16 * FROM_TENSOR_MEMORY * clocks_of_mma(dim_v)
    # Operands from shared memory: Q, K and V, and half of the copies of K and V, which serve two tiles of queries.
    shared = 2 * (ROWS * dim + KEYS * (dim + dim_v) * 1.5) / cycles.SHARED_BYTES
    return {"tensor cores": of_mma, "shared memory": shared, **softmax}


def stale(stored: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each stored row that is outdated or missing."""
    rows = {(each["arch"], tuple(each["dims"])): each["fingerprint"] for each in stored}
    today = {(arch, dims): fingerprint(launch_of(dims, arch)) for arch in ARCHS for dims in DIMS}
    return [
        f"stale: tcgen05, {arch}, D {dims[0]}/{dims[1]}"
        for arch, dims in today | rows
        if rows.get((arch, dims)) != today.get((arch, dims))
    ]


def table(predictions: Iterable[dict[str, Any]]) -> Table:
    """Return the table of predictions."""
    rows = []
    for each in predictions:
        mark, step = FIRST_MARKS.get(tuple(each["dims"])), each["step"]
        fractions = (f"{x:.2f}" for x in each["fractions"])
        clocks = (f"{step[unit]:.0f}" for unit in UNITS)
        first = NOTHING if mark is None else f"{mark:.2f}"
        bound = max(UNITS, key=step.__getitem__)
        share = f"{each['planned']} of 16"
        rows.append(["{}/{}".format(*each["dims"]), each["arch"], share, *fractions, first, bound, *clocks])
    columns = ["D", "arch", "planned", *(f"{share} of 16" for share in SHARES), "first mark", "bound by", *UNITS]
    title = (
        "Forward of tcgen05, full mask, 4096 keys: predicted fraction of the tensor cores' peak by the exponentials "
        "that a polynomial computes, and clocks that each unit needs for a step of 128 x 128 scores, as planned"
    )
    return Table(title, columns, rows)


UNITS = ("tensor cores", "MUFU", "issue", "shared memory", "FMA", "ALU")

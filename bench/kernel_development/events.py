"""A model of events of the Blackwell forward: its roles, barriers and slots over whole work tiles, without a GPU.

Each role of kernels_cu/tcgen05/forward.cu is a process that waits for signals of the others and occupies units of the
SM (`roles.py`). A sub-partition has one warp of each softmax and one of the correction. The numbers of instructions of
a step of the softmax are those of the kernel's own SASS. The schedule that FlashAttention-4 publishes goes through the
same model: its published fraction of the peak at D 128 over the model's multiplies every prediction. Only a GPU can
confirm them (bench/gpu_queue.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cupy_flash import device
from cupy_flash.engines.launch import Launch
from cupy_flash.gpu import ahead
from cupy_flash.jit import nvrtc
from cupy_flash.jit.shared_memory import kernel_constant
from cupy_flash.jit.source import assemble

from ..report import NOTHING, Table
from ..run import Progress
from . import cycles, sass
from .fingerprint import fingerprint
from .roles import (
    ARCHS,
    CHUNKS,
    COPIED,
    COPIED_BYTES,
    FROM_TENSOR_MEMORY,
    ISSUED,
    KEYS,
    LOADED,
    PEAK,
    ROWS,
    SIGNAL,
    STEPS,
    STORED,
    Process,
    Roles,
    clocks_of_mma,
    clocks_of_units,
    segments,
)

DIMS = ((64, 64), (96, 96), (128, 128), (192, 128))
PAIR_DIMS = ((128, 128), (192, 128))  # those whose mma all have 128 columns
SHARES = (0, 2, 4, 5)  # of 16 exponentials that a polynomial computes (POLYNOMIALS of config.cuh)
FIRST_MARKS = {(64, 64): 0.45, (128, 128): 0.58, (192, 128): 0.60}  # fractions of the peak of the tensor cores
PUBLISHED = 0.71  # of the peak, by FlashAttention-4 (arXiv 2603.05451) on a B200 at D 128
WORK_TILES = 4  # that a block computes
NAMED_BARRIER = 20.0  # SIGNAL of the factors of FlashAttention-4, which uses a named barrier per warp
CORRECTED, STORED_COLUMN = 17, 3.1  # instructions of the correction: of a step of one tile, and of a column of O
FINISHED = 120  # instructions of the softmax at the end of a work tile
# FlashAttention-4: instructions of a polynomial of degree 3 for a pair of exponentials, and its share at D 128.
POLYNOMIAL, SHARE = Counter({"FADD2": 3, "FFMA2": 3, "FMNMX": 2, "LEA": 2}), 1 / 8


class Softmax(NamedTuple):
    """The opcodes of a step of the softmax: before it signals the factor, then to each of two signals of P.

    If P does not lie over S, it signals behind the factor that it has read S.
    """

    segments: tuple[Counter[str], ...]

    @classmethod
    def of(cls, path: Sequence[str], p_over_s: bool) -> Softmax:
        """Return the segments of a path through the loop, which ends with the second signal of P."""
        *parts, rest = segments(path)
        assert len(parts) == (3 if p_over_s else 4), len(parts)
        return cls((parts[0] + rest, *parts[1:]))

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
    slots: int  # of K and V together, or three in whose memory they take turns
    softmax: Softmax
    issue: float  # instructions of the issuing thread for an mma
    mufu: int  # clocks between two exponentials of a warp
    factors: float  # latency of the signals between softmax and correction
    p_over_s: bool = True  # S of the next keys is issued behind PV; else before, once the softmax has read S
    strict: bool = False  # S of the next keys waits for PV, whose P it overwrites
    pair: bool = False  # of CTAs, each of which holds half of K and V in slots of half the size


class Block(Roles):
    """A block that computes work tiles of two tiles of queries: its roles."""

    def __init__(self, schedule: Schedule, steps: int = STEPS):
        super().__init__(schedule.mufu)
        self.schedule, self.steps = schedule, steps
        self.stored: list[float] = []  # clocks at which work tiles are stored

    def run(self) -> float:
        """Return the clocks of a work tile between two others."""
        self.play([self.load(), self.issue(), self.correct(), self.softmax(0), self.softmax(1)])
        return self.stored[-2] - self.stored[-3]

    def load(self) -> Process:
        """Load Q, and K and V by turns, into slots that are empty.

        K is a step ahead, unless K and V take turns in the memory of three slots: then V takes the place of K before,
        and K that of what is left of K, and of V before.
        """
        (dim, dim_v), parts = self.schedule.dims, 1 + self.schedule.pair
        slots = parts * self.schedule.slots
        k_slots, v_slots, by_turns = (slots + 1) // 2, slots // 2, slots == 3

        def copied(clock: float, columns: float) -> float:
            return self.uses("copies", clock, 2 * columns * KEYS / COPIED_BYTES) + COPIED + SIGNAL

        def load_K(step: int) -> Process:
            clock = yield "K read", max(step + 1 - k_slots, 0)
            if by_turns:
                copied(clock, dim - dim_v)
                clock = yield "V read", max(step - 1, 0)
            self.given["K"].append(copied(clock, dim_v if by_turns else dim / parts))

        def load_V(step: int) -> Process:
            clock = yield ("K read", step) if by_turns else ("V read", max(step + 1 - v_slots, 0))
            self.given["V"].append(copied(clock, dim_v / parts))

        yield 0.0
        for tile in range(WORK_TILES):
            begin, end = tile * self.steps, (tile + 1) * self.steps
            yield from load_K(begin)
            for t in range(2):
                clock = yield f"Q{t} read", tile
                self.given[f"Q{t}"].append(copied(clock, dim))
            for step in range(begin, end):
                if by_turns:
                    yield from load_V(step)
                if step + 1 < end:
                    yield from load_K(step + 1)
                if not by_turns:
                    yield from load_V(step)

    def issue(self) -> Process:
        """Issue S of both tiles, then for each PV and the next S of its tile, or these in the other order."""
        (dim, dim_v), pair, over = self.schedule.dims, self.schedule.pair, self.schedule.p_over_s
        qk, pv = clocks_of_mma(KEYS, pair), FROM_TENSOR_MEMORY * clocks_of_mma(dim_v, pair)

        def issued(clock: float, count: int, clocks: float, *signals: str) -> float:
            own = ISSUED * self.schedule.issue
            end = max(self.uses("tensor cores", clock + own, count * clocks), clock + own * count + clocks)
            for name in signals:
                self.given[name].append(end + SIGNAL)
            return clock + own * count

        def issue_S(step: int, t: int) -> Process:
            clock = yield "K", step + 1
            clock = yield f"Q{t}", step // self.steps + 1
            if not over:
                clock = yield f"S{t} read", step
            read = [f"Q{t} read"] * ((step + 1) % self.steps == 0) + ["K read"] * t
            yield issued(clock, dim // 16, qk, f"S{t}", *read)

        yield 0.0
        for step in range(WORK_TILES * self.steps):
            first, last = step % self.steps == 0, step % self.steps == self.steps - 1
            for t in range(2 * first):
                yield from issue_S(step, t)
            yield "V", step + 1
            for t in range(2):
                if not (over or last):
                    yield from issue_S(step + 1, t)
                yield f"P{t}", step + 1
                clock = yield f"rescaled{t}", step + 1
                clock = yield issued(clock, 6, pv)
                clock = yield f"all P{t}", step + 1
                yield issued(clock, 2, pv, *["V read"] * t, f"PV{t}")
                if over and not last:
                    if self.schedule.strict:
                        yield f"PV{t}", step + 1
                    yield from issue_S(step + 1, t)

    def softmax(self, t: int) -> Process:
        """Send the factor of each step, and store P in two parts, the first of them once PV has read P before."""
        factors, over = self.schedule.factors, self.schedule.p_over_s
        clock = yield 0.0
        for step in range(WORK_TILES * self.steps):
            sent = step + step // self.steps
            clock = yield f"S{t}", step + 1
            clock = yield clock + LOADED
            signals = [f"factor{t}", *[f"S{t} read"] * (not over), f"P{t}", f"all P{t}"]
            for signal, opcodes in zip(signals, self.schedule.softmax.segments, strict=True):
                for n in range(CHUNKS):
                    if signal == f"P{t}" and n == CHUNKS // 3:  # one of the three parts that this signal is for
                        clock = yield f"PV{t}", step
                    clock = yield self.executes(clock, opcodes, 1 / CHUNKS)
                if signal == f"factor{t}":
                    clock = yield f"factor{t} read", sent
                    self.given[signal].append(clock + factors)
                else:
                    clock = yield clock + STORED * ("P" in signal)
                    self.given[signal].append(clock + SIGNAL)
            if step % self.steps == self.steps - 1:
                clock = yield self.executes(clock, Counter({"rest": FINISHED}))
                clock = yield f"factor{t} read", sent + 1
                self.given[f"factor{t}"].append(clock + factors)

    def correct(self) -> Process:
        """Rescale O, which few steps need, and store it after the last step."""
        clock = yield 0.0
        for received in range(WORK_TILES * (self.steps + 1)):
            tile, last = received // (self.steps + 1), received % (self.steps + 1) == self.steps
            for t in range(2):
                clock = yield f"factor{t}", received + 1
                clock = yield self.executes(clock, Counter({"rest": CORRECTED}))
                self.given[f"factor{t} read"].append(clock + self.schedule.factors)
                clock = yield f"PV{t}", received - tile
                if not last:
                    self.given[f"rescaled{t}"].append(clock + SIGNAL)
                    continue
                for _ in range(CHUNKS):
                    part = Counter({"rest": round(STORED_COLUMN * self.schedule.dims[1] / CHUNKS)})
                    clock = yield self.executes(clock + LOADED / CHUNKS, part)
            if last:
                self.stored.append(clock)


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
    strict: float | None  # that whose share is planned, with a strict order; None if it relies on no order
    pair: float | None  # the same computed by pairs of CTAs; None if an mma has fewer than 128 columns


def launch_of(dims: tuple[int, int], arch: str) -> Launch:
    """Return the forward of a full mask with two tiles of queries."""
    on = device.named(arch, "cuda")
    words: dict[str, Any] = dict(dtype="bfloat16", head_dim=dims[0], head_dim_v=dims[1], engine="tcgen05")
    launches = ahead.launches(on, **words, backward=False)
    return next(each for each in launches if each.tile and each.tile[0] == 2 * ROWS)


def schedule_of(launch: Launch, dims: tuple[int, int], arch: str, share: int) -> Schedule:
    """Compile a kernel with a share of polynomials and return its schedule."""
    constants = dict(launch.constants)
    text = assemble(launch.kernel, constants | {"POLYNOMIALS": share}, dict(launch.headers))
    code = nvrtc.compile(text, launch.kernel, arch).code
    issuing = sass.mainloop(code)
    issue = len(issuing.steady) / issuing.counts()["products"]
    p_over_s = bool(kernel_constant(launch.kernel, "P_OVER_S", constants))
    softmax = Softmax.of(sass.row_loop(code, KEYS).steady, p_over_s)
    return Schedule(dims, int(constants["STAGES"]), softmax, issue, ARCHS[arch], SIGNAL, p_over_s)


def fraction(schedule: Schedule, clocks: float) -> float:
    """Return the part of the tensor cores' peak that a work tile of so many clocks reaches."""
    products = 2 * STEPS * (schedule.dims[0] / 16 * KEYS + KEYS / 16 * schedule.dims[1])
    return products / PEAK / clocks


def flash_attention_4(ours: Schedule) -> Schedule:
    """Return FlashAttention-4's schedule at D 128 from ours without polynomials."""
    return ours._replace(factors=NAMED_BARRIER, softmax=ours.softmax.emulating(SHARE))


def published_over_model(ours: Schedule) -> float:
    """Return FlashAttention-4's published fraction of the peak over the model's, from our schedule at D 128."""
    other = flash_attention_4(ours)
    return PUBLISHED / fraction(other, Block(other).run())


def predict(progress: Progress) -> list[Prediction]:
    """Compile the forward of every head dimension and architecture, and predict its speed."""
    schedules: dict[tuple[str, tuple[int, int]], dict[int, Schedule]] = {}
    launches = {(arch, dims): launch_of(dims, arch) for arch in ARCHS for dims in DIMS}
    for (arch, dims), launch in launches.items():
        progress(f"{arch}, D {dims[0]}/{dims[1]}")
        schedules[arch, dims] = {share: schedule_of(launch, dims, arch, share) for share in SHARES}
    of_model = published_over_model(schedules["sm_100a", (128, 128)][0])

    def reached(schedule: Schedule) -> float:
        return of_model * fraction(schedule, Block(schedule).run())

    predictions = []
    for (arch, dims), launch in launches.items():
        assert launch.tile is not None
        planned = int(dict(launch.constants).get("POLYNOMIALS", 0))
        shares = schedules[arch, dims]
        fractions = tuple(map(reached, shares.values()))
        strict = reached(shares[planned]._replace(strict=True)) if shares[planned].p_over_s else None
        pair = reached(shares[planned]._replace(pair=True)) if dims in PAIR_DIMS else None
        step, of_launch = resources(shares[planned]), fingerprint(launch)
        predictions.append(Prediction(arch, dims, launch.tile, of_launch, step, planned, fractions, strict, pair))
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
        fractions = (NOTHING if x is None else f"{x:.2f}" for x in (*each["fractions"], each["strict"], each["pair"]))
        clocks = (f"{step[unit]:.0f}" for unit in UNITS)
        first = NOTHING if mark is None else f"{mark:.2f}"
        bound = max(UNITS, key=step.__getitem__)
        share = f"{each['planned']} of 16"
        rows.append(["{}/{}".format(*each["dims"]), each["arch"], share, *fractions, first, bound, *clocks])
    shares = [f"{share} of 16" for share in SHARES]
    columns = ["D", "arch", "planned", *shares, "strict", "pair", "first mark", "bound by", *UNITS]
    title = (
        "Forward of tcgen05, full mask, 4096 keys: predicted fraction of the tensor cores' peak by the exponentials "
        "that a polynomial computes, and clocks that each unit needs for a step of 128 x 128 scores, as planned; "
        "strict: S waits for PV, whose P it overwrites; pair: of CTAs that share K and V"
    )
    return Table(title, columns, rows)


UNITS = ("tensor cores", "MUFU", "issue", "shared memory", "FMA", "ALU")

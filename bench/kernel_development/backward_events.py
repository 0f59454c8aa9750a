"""A model of events of the Blackwell backward: its roles, barriers and slots over a whole block, without a GPU.

Each role of kernels_cu/tcgen05/backward.cu is a process (`roles.py`). A sub-partition has two warps that compute, each
with half of the queries of a tile, and one that adds dQ. Shared memory serves the operands of the mma, the stores of dS
and dQ, the bulk reductions and the TMA loads in order of arrival: whether loads take its clocks from operands is not
known. Instructions are those of the kernel's own SASS, and every prediction is multiplied by FlashAttention-4's factor
of the forward (`events.py`). What reductions cost in L2 is not modelled, nor are the kernels of rows around this one.
"""

from __future__ import annotations

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
from . import cycles, events, sass
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

DIMS = (64, 128)
CASES = [(arch, dim) for arch in ARCHS for dim in DIMS]
KERNEL = "tcgen05/backward"
MARKS = {64: (0.40, 0.50), 128: (0.50, 0.60)}  # first mark and goal, fractions of the peak of the tensor cores
PRODUCTS = 5  # S, dP, dV, dK, dQ
TENSOR_MEMORY = 512  # columns
STARTED = 1000.0  # clocks from the end of a block to the first load of the next one on its SM
READ = 500.0  # latency until a bulk reduction has read its part of shared memory
# The exchange of dS between a pair of CTAs: clocks of shared memory, from the FlashAttention-4 paper, and an estimated
# latency.
EXCHANGE, EXCHANGED = 384.0, 500.0
ROW_NUMBERS = 60  # instructions of the load of lse2 and delta of a tile
STORED_COLUMN = 3.7  # instructions of the epilogue for a column of dK or dV
WARPS = 4  # of each half of the computation, and of the role that adds dQ
# Clocks of shared memory for an instruction of a warp: one number for all lanes, or 16 bytes for each.
WAVEFRONTS = {"LDS": 1, "STS": 4}


class Schedule(NamedTuple):
    """The constants of a kernel's roles: head dimension, slots, the place of dQ, instructions and latencies."""

    dim: int
    slots: int  # of Q; dO has one less
    dq_buffers: int  # 0 if dQ lies over dP
    compute: tuple[Counter[str], Counter[str]]  # of half of a tile: to the signal of P, then to that of dS
    add: tuple[Counter[str], Counter[str]]  # of a warp's part of dQ: until it has left tensor memory, then its sum
    issue: float  # instructions of the issuing thread for an mma
    mufu: int  # clocks between two exponentials of a warp
    strict: bool = False  # mma wait for those whose operands they overwrite
    # Whether a pair of CTAs (cta_group::2) shares operand B, half in the shared memory of each. Each CTA then computes
    # dQ for half of the queries, from the dS of both CTAs' keys.
    pair: bool = False


class Job(NamedTuple):
    """Work of a unit that shared memory serves too: equal pieces, then signals."""

    pieces: int
    clocks: float  # of a piece
    shared: float  # of them, those of shared memory
    latency: float
    signals: tuple[str, ...]


class Block(Roles):
    """A block that computes dK and dV of a tile of keys: its roles."""

    def __init__(self, schedule: Schedule, steps: int = STEPS):
        super().__init__(schedule.mufu)
        self.schedule, self.steps = schedule, steps
        self.parts = schedule.add[1]["UBLKRED"] // (1 + schedule.pair)  # of a warp's part of dQ
        self.jobs: dict[str, list[Job]] = defaultdict(list)

    def run(self) -> float:
        """Return the clocks from the end of the block before to the end of this one."""
        steps = self.steps
        jobs = {"tensor cores": PRODUCTS * steps, "copies": 2 * steps + 2, "reductions": self.parts * steps}
        if self.schedule.pair:
            jobs["exchange"] = steps
        units = [self.serve(unit, count) for unit, count in jobs.items()]
        halves = [self.compute(0), self.compute(1)]
        return STARTED + COPIED + self.play([self.load(), self.load_rows(), self.issue(), *halves, self.add(), *units])

    def gives(self, unit: str, clock: float, job: Job) -> None:
        """Queue a job of a unit."""
        self.jobs[unit].append(job)
        self.given[unit].append(clock)

    def serve(self, unit: str, count: int) -> Process:
        """Execute the jobs of a unit in order."""
        clock = yield 0.0
        for n in range(count):
            clock = yield unit, n + 1
            job = self.jobs[unit][n]
            for _ in range(job.pieces):
                clock = yield max(clock + job.clocks, self.uses("shared memory", clock, job.shared))
            for name in job.signals:
                self.given[name].append(clock + job.latency)

    def chunks(self, clock: float, opcodes: Counter[str], parts: int = 1) -> Generator[float, float, float]:
        """Execute one of so many equal parts of the instructions of a warp in each sub-partition."""
        n = CHUNKS * parts
        wavefronts = WARPS * sum(opcodes[name] * each for name, each in WAVEFRONTS.items()) / n
        for _ in range(CHUNKS):
            clock = yield max(self.executes(clock, opcodes, 1 / n), self.uses("shared memory", clock, wavefronts))
        return clock

    def load(self) -> Process:
        """Load K and V, then Q and dO by turns, into slots that are empty."""
        clock, slots = (yield 0.0), self.schedule.slots
        tile = 2.0 * ROWS * self.schedule.dim / CHUNKS

        def copies(clock: float, name: str) -> None:
            job = Job(CHUNKS, tile / COPIED_BYTES, tile / cycles.SHARED_BYTES, COPIED + SIGNAL, (name,))
            self.gives("copies", clock, job)

        copies(clock, "K")
        copies(clock, "V")
        for step in range(self.steps):
            for name, stages in (("Q", slots), ("dO", slots - 1)):
                for reader in ("read", "seen"):
                    clock = yield f"{name} {reader}", max(step + 1 - stages, 0)
                copies(clock, name)

    def load_rows(self) -> Process:
        """Load lse2 and delta into one of two slots, and see every tile."""
        clock = yield 0.0
        for step in range(self.steps):
            for half in range(2):
                clock = yield f"rows read{half}", max(step - 1, 0)
            clock = yield self.executes(clock, Counter({"rest": ROW_NUMBERS})) + COPIED
            self.given["rows"].append(clock + SIGNAL)
            for name in ("Q", "dO"):
                clock = yield name, step + 1
                self.given[f"{name} seen"].append(clock + SIGNAL)

    def issue(self) -> Process:
        """Issue S of the next tile of queries under dS of this one, and dP of the next under P."""
        dim, over_dp = self.schedule.dim, self.schedule.dq_buffers == 0
        pair = self.schedule.pair
        of_tile, scores, sums = ROWS // 16, clocks_of_mma(KEYS, pair), clocks_of_mma(dim, pair)
        score_rows, sum_rows = ROWS + KEYS // (1 + pair), dim // (1 + pair)
        # Shared memory reads 16 columns of B, and of A if it is not in tensor memory.
        rows = 2 * 16 / cycles.SHARED_BYTES

        def issued(clock: float, count: int, clocks: float, operand_rows: int, *signals: str) -> float:
            own = ISSUED * self.schedule.issue
            job = Job(count, max(clocks, own), rows * operand_rows, SIGNAL, signals)
            self.gives("tensor cores", clock + own, job)
            return clock + own * count

        strict = ["complete"] * self.schedule.strict
        clock = yield 0.0
        for name in ("K", "V"):
            clock = yield name, 1
        for step in range(-1, self.steps):
            if step >= 0:
                for half in range(2):
                    clock = yield f"P{half}", step + 1
                clock = yield issued(clock, of_tile, FROM_TENSOR_MEMORY * sums, sum_rows, "dO read", *strict)
            if step + 1 < self.steps:
                if step >= 0 and strict:
                    clock = yield "complete", 2 * step + 1
                for name in ("rows", "Q"):
                    clock = yield name, step + 2
                clock = yield issued(clock, dim // 16, scores, score_rows, "S")
            if step >= 0:
                for half in range(2):
                    clock = yield f"dS{half}", step + 1
                clock = yield issued(clock, of_tile, FROM_TENSOR_MEMORY * sums, sum_rows, "Q read", *strict)
                if strict:
                    clock = yield "complete", 2 * step + 2
                if pair:
                    clock = yield "dS exchanged", step + 1
                if not over_dp:
                    clock = yield "dQ read", max(step + 1 - self.schedule.dq_buffers, 0)
                last = ["gradients"] * (step == self.steps - 1)
                clock = yield issued(clock, of_tile, sums, ROWS + dim, "dQ", *last)
            if step + 1 < self.steps:
                clock = yield "dO", step + 2
                if over_dp:
                    clock = yield "dQ read", step + 1
                clock = yield issued(clock, dim // 16, scores, score_rows, "dP")

    def compute(self, half: int) -> Process:
        """Compute P^T and dS^T of half of the queries; at the end store dV or dK."""
        of_P, of_dS = self.schedule.compute
        clock = yield 0.0
        for step in range(self.steps):
            for name in ("rows", "S"):
                clock = yield name, step + 1
            clock = yield clock + LOADED
            clock = yield from self.chunks(clock, of_P)
            clock = yield clock + STORED
            self.given[f"P{half}"].append(clock + SIGNAL)
            clock = yield "dP", step + 1
            clock = yield clock + LOADED
            clock = yield from self.chunks(clock, of_dS)
            clock = yield clock + STORED
            for name in ("dS", "rows read"):
                self.given[f"{name}{half}"].append(clock + SIGNAL)
            if self.schedule.pair and half:
                clocks = EXCHANGE / CHUNKS
                self.gives("exchange", clock, Job(CHUNKS, clocks, clocks, EXCHANGED + SIGNAL, ("dS exchanged",)))
        clock = yield "gradients", 1
        yield from self.chunks(clock + LOADED, Counter({"rest": round(STORED_COLUMN * self.schedule.dim)}))

    def add(self) -> Process:
        """Load a part of dQ, then add it to global memory through two buffers."""
        loaded, added = self.schedule.add
        ctas = 1 + self.schedule.pair
        part_bytes = 4.0 * ROWS / ctas * self.schedule.dim / self.parts / CHUNKS
        clock = yield 0.0
        for step in range(self.steps):
            clock = yield "dQ", step + 1
            clock = yield from self.chunks(clock + LOADED, loaded, ctas)
            self.given["dQ read"].append(clock + SIGNAL)
            for part in range(self.parts):
                clock = yield "part read", max(step * self.parts + part - 1, 0)
                clock = yield from self.chunks(clock, added, ctas * self.parts)
                job = Job(CHUNKS, part_bytes / COPIED_BYTES, part_bytes / cycles.SHARED_BYTES, READ, ("part read",))
                self.gives("reductions", clock, job)


class Prediction(NamedTuple):
    """The model's speed of the backward of a head dimension on an architecture, as a fraction of the peak."""

    arch: str
    dim: int
    tile: tuple[int, int, int]
    fingerprint: str
    step: dict[str, float]  # clocks that each unit needs for a step of 128 x 128 scores
    fraction: float  # FlashAttention-4's factor times the model's
    strict: float  # the same with a strict order
    pair: float | None  # that without it by pairs of CTAs; None if an mma has fewer than 128 columns


def launch_of(dim: int, arch: str) -> Launch:
    """Return the backward of a full mask."""
    on = device.named(arch, "cuda")
    words: dict[str, Any] = dict(dtype="bfloat16", head_dim=dim, engine="tcgen05")
    return next(each for each in ahead.launches(on, **words, backward=True) if each.kernel == KERNEL)


def schedule_of(launch: Launch, dim: int, arch: str) -> Schedule:
    """Compile a kernel and return its schedule."""
    text = assemble(launch.kernel, dict(launch.constants), dict(launch.headers))
    code = nvrtc.compile(text, launch.kernel, arch).code
    issuing = sass.mainloop(code)
    issue = len(issuing.steady) / issuing.counts()["products"]
    of_P, of_dS, release, rest = segments(sass.row_loop(code, ROWS // 2).steady)
    loaded, added = segments(sass.reduction_loop(code).steady)
    columns = 2 * KEYS + 2 * dim  # of tensor memory without dQ
    dq_buffers = 2 * (columns + 2 * dim <= TENSOR_MEMORY)
    stages = int(dict(launch.constants)["STAGES"])
    return Schedule(dim, stages, dq_buffers, (of_P + release + rest, of_dS), (loaded, added), issue, ARCHS[arch])


def fraction(schedule: Schedule, clocks: float) -> float:
    """Return the part of the tensor cores' peak that a block of so many clocks reaches."""
    return STEPS * PRODUCTS * schedule.dim / 16 * KEYS / PEAK / clocks


def predict(progress: Progress) -> list[Prediction]:
    """Compile the backward of every head dimension and architecture, and predict its speed."""
    arch, dims = "sm_100a", (128, 128)
    progress("FlashAttention-4")
    of_model = events.published_over_model(events.schedule_of(events.launch_of(dims, arch), dims, arch, 0))
    predictions = []
    for arch, dim in CASES:
        progress(f"backward, {arch}, D {dim}")
        launch = launch_of(dim, arch)
        assert launch.tile is not None
        schedule = schedule_of(launch, dim, arch)
        schedules = [schedule, schedule._replace(strict=True)]
        schedules += [schedule._replace(pair=True)] * (dim == KEYS)
        reached, strict, *pair = (of_model * fraction(each, Block(each).run()) for each in schedules)
        step, of_pair = resources(schedule), pair[0] if pair else None
        predictions.append(Prediction(arch, dim, launch.tile, fingerprint(launch), step, reached, strict, of_pair))
    return predictions


def resources(schedule: Schedule) -> dict[str, float]:
    """Return the clocks that each unit needs for a step of 128 x 128 scores."""
    dim = schedule.dim
    of_scores, of_sums = dim / 16 * clocks_of_mma(KEYS), ROWS / 16 * clocks_of_mma(dim)
    warps: Counter[str] = sum((*schedule.compute, *schedule.compute, *schedule.add), Counter())
    # Shared memory: operands of S, dP and dQ, and dO and Q under P and dS of tensor memory; dQ is read once more by
    # its reduction, and Q and dO are written.
    operands = 2 * (2 * (ROWS + KEYS) * dim + 2 * ROWS * dim + KEYS * (ROWS + dim))
    moved = 4 * ROWS * dim + 2 * 2 * ROWS * dim
    stored = WARPS * sum(warps[name] * n for name, n in WAVEFRONTS.items())
    return {
        "tensor cores": 2 * of_scores + (1 + 2 * FROM_TENSOR_MEMORY) * of_sums,
        "shared memory": (operands + moved) / cycles.SHARED_BYTES + stored,
        **clocks_of_units(warps, {"MUFU": schedule.mufu}),
    }


def stale(stored: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line for each stored row that is outdated or missing."""
    rows = {(each["arch"], each["dim"]): each["fingerprint"] for each in stored}
    today = {(arch, dim): fingerprint(launch_of(dim, arch)) for arch, dim in CASES}
    return [
        f"stale: {KERNEL}, {arch}, D {dim}"
        for arch, dim in today | rows
        if rows.get((arch, dim)) != today.get((arch, dim))
    ]


def table(predictions: Iterable[dict[str, Any]]) -> Table:
    """Return the table of predictions."""
    rows = []
    for each in predictions:
        marks, step = MARKS[each["dim"]], each["step"]
        bound = max(events.UNITS, key=step.__getitem__)
        clocks = (f"{step[unit]:.0f}" for unit in events.UNITS)
        reached = each["fraction"], each["strict"], each["pair"]
        fractions = (NOTHING if x is None else f"{x:.2f}" for x in (*reached, *marks))
        rows.append([str(each["dim"]), each["arch"], *fractions, bound, *clocks])
    title = (
        "Backward of tcgen05, full mask, 4096 queries: predicted fraction of the tensor cores' peak, and clocks that "
        "each unit needs for a step of 128 x 128 scores; strict: mma wait for those whose operands they overwrite; "
        "pair: of CTAs that share operands and exchange dS"
    )
    columns = ["D", "arch", "fraction", "strict", "pair", "first mark", "goal", "bound by", *events.UNITS]
    return Table(title, columns, rows)

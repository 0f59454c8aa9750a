"""Measures the tiles that a plan may choose and stores the measurements, which later plans prefer to predictions.

On a GPU the amount of a tile is its median time, with L2 flushed before each sample. On a simulator it is the number of
warp instructions, which only proves that tuning works.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import dispatch
from ..device import Device
from ..engines import MODULES
from ..plan import measurements, plan
from ..plan.measurements import Measured, Tune
from ..plan.plan import Plan, amount_text, candidates
from ..plan.refusals import is_on_request, refusals
from ..problem.build import pose, pose_with_cache
from ..problem.recorded_call import DESCRIPTION, NOT_REPLAYED, Json, Trial
from ..problem.records import CacheOptions, Operands, Options, Problem, Saved
from . import other_libraries
from .checks import calls
from .checks.calls import COMPILE_SECONDS, Task
from .checks.verdicts import LOSSES, SECONDS, SIMULATED_SECONDS, Report, device_of, valid_backend
from .worker_process import Announce, Lost, Worker

if TYPE_CHECKING:
    from ..arrays import Owner

SAMPLES, WARM_UP = 9, 2
FLUSHED_BYTES = 256 << 20  # more than the L2 of any GPU
APART = 2.0**-5  # tolerance relative to the largest magnitude: results that differ by more are wrong
Clock = Callable[[], float]


class Candidates(NamedTuple):
    """The bucket of a call, the tiles to measure, and the engines that are excluded before any measurement."""

    key: dict[str, Json]
    default: tuple[str, str]  # the engine and tile that the plan has without measurements
    tiles: tuple[tuple[str, str], ...]  # (engine, tile): the default first, then by predicted time
    left_out: dict[str, str]  # {engine: reason}
    predicted: dict[str, float]  # {engine: smallest predicted seconds}


class Result(NamedTuple):
    """The outcome for one call."""

    trial: Trial
    tune: Tune | None  # None if even the default tile could not be measured
    left_out: dict[str, str]  # {engine and tile: reason}
    measured_now: int  # number of tiles that this run has measured
    peers: dict[str, float | str]  # {other implementation: seconds, or the reason why it has none}

    @property
    def gain(self) -> float:
        """The speedup of the fastest tile over the default; 1 if nothing was measured."""
        if self.tune is None:
            return 1.0
        amounts = {each[:2]: each.amount for each in self.tune.measured}
        return amounts[self.tune.default] / self.tune.measured[0].amount

    def __str__(self) -> str:
        step = "backward" if self.trial.backward else "forward"
        lines = [f"{step} {self.trial}"]
        if self.tune is None:
            lines.append("  nothing was measured")
        else:
            best, unit = self.tune.measured[0], self.tune.unit
            amounts = {each[:2]: each.amount for each in self.tune.measured}
            default = amount_text(amounts[self.tune.default], unit)
            lines.append(f"  fastest  {best.engine} {best.tile}: {amount_text(best.amount, unit)}")
            lines.append(f"  default  {' '.join(self.tune.default)}: {default}; gain {self.gain:.2f}x")
            if not self.tune.complete:
                lines.append("  not all tiles are measured yet: run again to resume")
        lines += [
            f"  peer     {name}: {amount if isinstance(amount, str) else amount_text(amount, measurements.SECONDS)}"
            for name, amount in self.peers.items()
        ]
        return "\n".join(lines + [f"  left out {name}: {reason}" for name, reason in self.left_out.items()])


class NotReplayed(NamedTuple):
    """A recorded call that has no Trial, so that it is not measured."""

    call: str  # description of the call
    reason: str


class Results(NamedTuple):
    """The outcome of a tune."""

    device: Device
    results: tuple[Result, ...]
    left: int  # number of calls for which no time was left
    no_peers: str  # the reason why no other implementation was measured, or ""
    not_replayed: tuple[NotReplayed, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every tile of every call is measured, or excluded for a reason that holds in a new run too."""
        return not self.left and all(result.tune is not None and result.tune.complete for result in self.results)

    def as_json(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        cases = [
            {
                "call": result.trial.record,
                "backward": result.trial.backward,
                "gain": result.gain,
                "left_out": result.left_out,
                "peers": result.peers,
                "measured": [] if result.tune is None else [list(each) for each in result.tune.measured],
                "unit": None if result.tune is None else result.tune.unit,
                "file": None if result.tune is None else str(result.tune.path),
            }
            for result in self.results
        ]
        return {
            "device": str(self.device), "card": self.device.card, "complete": self.complete, "calls": cases,
            "no_peers": self.no_peers, "not_replayed": [each._asdict() for each in self.not_replayed],
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"measured on {self.device.card}, {self.device}", *map(str, self.results)]
        if self.no_peers:
            lines.append(f"no peers were measured for comparison: {self.no_peers}")
        if self.left:
            count = self.left + len(self.results)
            lines.append(f"out of time, {self.left} of {count} calls left: run again to resume")
        if self.not_replayed:
            lines.append(f"recorded calls that cannot be made again and are not measured: {len(self.not_replayed)}")
            lines += [f"  {each.call}: {each.reason}" for each in self.not_replayed]
        return "\n".join(lines)


def tune(
    shapes: Iterable[Mapping[str, Any]] = (),
    *,
    like: str | Path | None = None,
    backend: str = "cuda",
    minutes: float | None = None,
    report: Report | None = None,
) -> Results:
    """Measure every tile that a plan may choose for these calls; later plans use the stored measurements.

    A measurement is valid for its bucket of lengths, heads and options on this kind of card, until the text of a kernel
    or the driver changes. Candidates run in a worker process; one that hangs, crashes or has a different result than
    the plan's default tile is excluded. wgmma is a candidate once `check` has passed it. An interrupted tune resumes.

    Args:
        shapes: calls as records with the fields of `cupy_flash.problem.recorded_call.Trial`, such as
            dict(dtype="bfloat16", head_dim=128, q_len=4096, kv_len=4096, heads=32, kv_heads=8, causal=True,
            backward=False).
        like: a file that a run with CUPY_FLASH_RECORD=calls.json has written; its calls are measured too.
        backend: "cuda", or "simulator:ARCH", which counts warp instructions instead of seconds.
        minutes: start no further measurement after this many minutes.
        report: called with a line of text for each measurement.

    Returns:
        The measurements of each call and their speedup over the default, and on a GPU the times of torch's SDPA and
        flash-attn if they are installed; `print` shows them.

    Raises:
        RuntimeError: there is no GPU, or the worker process did not start.
        OSError: `like` cannot be read, or the measurements cannot be stored.
        TypeError, ValueError: a record is not a valid call, or there is none; the backend is unknown; minutes is not a
            number above 0.
    """
    given: object = shapes
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(f"shapes must be a list of calls, each a mapping of names to values, not {given!r}")
    records = list(given)
    for shape in records:
        if not isinstance(shape, Mapping):
            raise TypeError(f"a call must be a mapping of names to values, not {shape!r}")
    trials, not_replayed = ([], ()) if like is None else recorded(Path(like))
    trials = [Trial.of({"backward": False, **shape}) for shape in records] + trials
    if not trials and not_replayed:
        reasons = "".join(f"\n- {each.call}: {each.reason}" for each in not_replayed)
        raise ValueError(f"no call of {like} can be made again:{reasons}")
    results = run_tune(trials, backend, minutes, report or (lambda line: None), work)
    return results._replace(not_replayed=not_replayed)


def run_tune(
    trials: Sequence[Trial],
    backend: str,
    minutes: float | None,
    report: Report,
    work: Callable[..., Any],
    clock: Clock = time.monotonic,
    seconds: float | None = None,
) -> Results:
    """Run `tune` with a function for the worker process, a clock, and a time limit of one measurement in seconds."""
    backend = valid_backend(backend)
    if not trials:
        raise ValueError("there is no call to measure: give shapes, or a file of recorded calls")
    if minutes is not None and (isinstance(minutes, bool) or not isinstance(minutes, (int, float))):
        raise TypeError(f"minutes must be a number above 0 or None, not {minutes!r}")
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"minutes must be a number above 0 or None, not {minutes!r}")
    limit = SECONDS if backend == "cuda" else SIMULATED_SECONDS
    begin = clock()
    until = math.inf if minutes is None else begin + 60 * minutes
    trials = list(dict.fromkeys(trials))
    results: list[Result] = []
    with Worker(work) as worker:
        on = device_of(worker, backend)
        measurements.require_storable(on)
        no_peers = _no_peers(worker, backend)
        for number, trial in enumerate(trials):
            if clock() >= until:
                break
            run = _Run(worker, Task("", backend, trial=trial, seconds=seconds or limit), on, clock, until, report)
            report(f"{number + 1}/{len(trials)} {'backward' if trial.backward else 'forward'} {trial}")
            result = run.result()
            results.append(result if no_peers else result._replace(peers=run.peers()))
    plan.forget()
    return Results(on, tuple(results), len(trials) - len(results), no_peers)


def _no_peers(worker: Worker, backend: str) -> str:
    """Return why no other implementation can be measured; "" if some can."""
    try:
        return str(worker(Task("peers", backend), until=math.inf))
    except Lost as lost:  # an import of torch that fails must not end the tune
        return lost.reason


class _Run:
    """The measurements of one call."""

    def __init__(self, worker: Worker, task: Task, on: Device, clock: Clock, until: float, report: Report) -> None:
        assert task.trial is not None
        self.worker, self.task, self.trial, self.on = worker, task, task.trial, on
        self.clock, self.until, self.report = clock, until, report
        self.unit = measurements.SECONDS if task.backend == "cuda" else measurements.INSTRUCTIONS
        self.left_out: dict[str, str] = {}
        self.measured: list[Measured] = []

    def result(self) -> Result:
        """Measure the tiles that are not measured yet, and store after each, so that an interrupted run loses none."""
        try:
            found: Candidates | dict[str, str] = self.worker(self.task._replace(kind="candidates"), until=math.inf)
        except Lost as lost:
            found = {"every tile": lost.reason}
        if not isinstance(found, Candidates):
            return Result(self.trial, None, found, 0, {})
        self.left_out.update(found.left_out)
        before = measurements.tune_of(found.key, self.on)
        if before is not None and before.default == found.default:
            if before.complete and before.predicted == found.predicted:
                self.report(f"  measured before: {before.path}")
                return Result(self.trial, before, self.left_out, 0, {})
            self.measured = list(before.measured)
        known = {each[:2] for each in self.measured}
        pending = [tile for tile in found.tiles if tile not in known]
        complete = self._measure(found, pending)
        measures_default = any(each[:2] == found.default for each in self.measured)
        tune = self._store(found, complete) if measures_default else None
        return Result(self.trial, tune, self.left_out, len(self.measured) - len(known), {})

    def peers(self) -> dict[str, float | str]:
        """Return the seconds of each other implementation, or why it has none; they do not influence plans."""
        amounts: dict[str, float | str] = {}
        for name in other_libraries.names(self.trial):
            if self.clock() >= self.until:
                break
            try:
                amounts[name] = self.worker(self.task._replace(kind="peer", tile=name), until=math.inf)
            except Lost as lost:
                amounts[name] = lost.reason
        return amounts

    def _measure(self, found: Candidates, pending: list[tuple[str, str]]) -> bool:
        """Measure the pending tiles in order; return whether none is left."""
        begin, losses = self.clock(), dict.fromkeys(MODULES, 0)
        for number, (engine, tile) in enumerate(pending):
            now, name = self.clock(), f"{engine} {tile}"
            if now >= self.until:
                return False
            left = f", about {(now - begin) / number * (len(pending) - number):.0f} s left" if number else ""
            if losses[engine] >= LOSSES:
                self.left_out[name] = f"not run: {LOSSES} tiles of this engine have cost the worker process"
                continue
            try:
                amount = self.worker(self.task._replace(kind="tile", engine=engine, tile=tile), until=math.inf)
            except Lost as lost:
                losses[engine] += 1
                amount = lost.reason
            if isinstance(amount, str):
                self.left_out[name] = amount
                self.report(f"  {number + 1}/{len(pending)} {name}: left out, {amount}{left}")
                if (engine, tile) == found.default:
                    return False  # gains are relative to the default tile
                continue
            self.measured.append(Measured(engine, tile, amount))
            self._store(found, complete=False)
            self.report(f"  {number + 1}/{len(pending)} {name}: {amount_text(amount, self.unit)}{left}")
        return True

    def _store(self, found: Candidates, complete: bool) -> Tune:
        return measurements.store_tune(
            self.on, found.key, self.unit, self.measured, found.default, found.predicted, complete
        )


def recorded(file: Path) -> tuple[list[Trial], tuple[NotReplayed, ...]]:
    """Return the calls that a run with CUPY_FLASH_RECORD has written, and those that cannot be repeated.

    Raises ValueError for a line that states neither.
    """
    calls: dict[Trial | NotReplayed, None] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                calls[_recorded_call(json.loads(line.decode()))] = None
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"{file}:{number} states no call: {error}") from None
    not_replayed = tuple(call for call in calls if isinstance(call, NotReplayed))
    return [call for call in calls if isinstance(call, Trial)], not_replayed


def _recorded_call(record: object) -> Trial | NotReplayed:
    if not isinstance(record, Mapping) or NOT_REPLAYED not in record:
        return Trial.of(record)
    return NotReplayed(str(record.get(DESCRIPTION)), str(record[NOT_REPLAYED]))


# ---- in the worker process


def work(task: Task, announce: Announce) -> Any:
    """Answer a request: the device, why there are no peers, a call's Candidates, or a measurement of a tile or peer."""
    if task.kind == "device":
        return calls.find_device(task, announce)
    if task.kind == "peers":
        announce("the import of torch", COMPILE_SECONDS)
        return other_libraries.missing() if task.backend == "cuda" else "a simulator runs none"
    if task.kind == "peer":
        return measure_peer(task, announce)
    if task.kind == "candidates":
        announce("the plan of the call", COMPILE_SECONDS)
        return find_candidates(task)
    return measure(task, announce)


def find_candidates(task: Task) -> Candidates | dict[str, str]:
    """Return the tiles of every engine that may serve a call; if none does, {engine: reasons of its refusal}."""
    assert task.trial is not None
    stated, _ = _stated(task.backend, task.trial, None)
    on = dispatch.device_of(stated)
    reasons = {
        engine: "; ".join(refusals(engine, stated, on))
        for engine, module in MODULES.items()
        if on.backend in module.BACKENDS
    }
    if all(reasons.values()):
        return reasons
    chosen = plan.plan(stated, on)
    problem = plan.last_of_bucket(stated)
    default = plan.predicted(problem, on)
    tiles, left_out, predicted = [], {}, {}
    for engine, module in MODULES.items():
        named = problem._replace(engine=engine)
        if on.backend not in module.BACKENDS or refusals(engine, named, on):
            continue
        check = measurements.check_of(engine, on)
        if check is not None and not check.passed:
            left_out[engine] = f"its check failed: {check.reason}"
        elif check is None and is_on_request(engine, problem):
            left_out[engine] = f"no check has passed it on this card: {measurements.CHECK_COMMAND}"
        else:
            ranked = [(each.cost, (engine, repr(tile))) for tile, each in candidates(chosen, engine)]
            predicted[engine] = ranked[0][0]
            tiles += ranked
    first = (default.engine, repr(default.tile))
    others = [name for _, name in sorted(tiles, key=lambda each: each[0]) if name != first]
    return Candidates(plan.tune_key(problem), first, (first, *others), left_out, predicted)


def measure(task: Task, announce: Announce) -> float | str:
    """Return the measurement of one tile, or why it has none: its results differ from those of the default tile."""
    assert task.trial is not None
    announce("the arrays and the default tile", COMPILE_SECONDS)
    chosen, operands, expected = _default(task.backend, task.trial)
    by_name = {repr(tile): each for tile, each in candidates(chosen, task.engine)}
    each = by_name[task.tile]
    announce(f"compilation of {task.engine} {task.tile}", COMPILE_SECONDS)
    calls.compile_plan(each)
    announce(f"{task.engine} {task.tile}", task.seconds)
    if not _alike(_numbers(_run(each, operands)), expected):
        return "its results differ from those of the default tile"
    return METERS["cuda" if task.backend == "cuda" else "simulator"](each, operands)


def measure_peer(task: Task, announce: Announce) -> float:
    """Return the seconds of another implementation."""
    assert task.trial is not None
    announce(f"the arrays of {task.tile}", COMPILE_SECONDS)
    call = other_libraries.peer(task.tile, task.trial)
    announce(task.tile, task.seconds)
    return median_seconds(call)


def median_seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call on a GPU, in seconds, with L2 flushed before each sample.

    It is measured on the default stream, which CuPy and torch share.
    """
    import cupy

    flush = cupy.empty(FLUSHED_BYTES, cupy.uint8)
    times = []
    for sample in range(WARM_UP + SAMPLES):
        flush.fill(0)
        begin, end = (cupy.cuda.Event() for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if sample >= WARM_UP:
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
    return median(times)


def warp_instructions(chosen: Plan, operands: Operands) -> float:
    """Return the warp instructions of all launches of a plan, by the simulator."""
    from ..gpu import run_plan
    from ..simulator.run import start

    total = 0

    def count(work: run_plan.Work) -> None:
        nonlocal total
        total += sum(int(counters.warp_instructions.sum()) for counters in start(work))

    (run_plan.backward if chosen.problem.backward else run_plan.forward)(chosen, operands, count)
    return float(total)


METERS: dict[str, Callable[[Plan, Operands], float]] = {
    "cuda": lambda chosen, operands: median_seconds(partial(_run, chosen, operands)),
    "simulator": warp_instructions,
}


@lru_cache(maxsize=1)
def _default(backend: str, trial: Trial) -> tuple[Plan, Operands, list[np.ndarray]]:
    """Return the plan of a call without measurements, its operands and its results."""
    forward, operands = _posed(backend, replace(trial, backward=False), None)
    forward = plan.predicted(forward.problem, forward.device)
    calls.compile_plan(forward)
    if not trial.backward:
        return forward, operands, _numbers(_run(forward, operands))
    out, lse = dispatch.run_forward(forward, operands)
    chosen, operands = _posed(backend, trial, (out.owner, lse.owner))
    chosen = plan.predicted(chosen.problem, chosen.device)
    calls.compile_plan(chosen)
    return chosen, operands, _numbers(_run(chosen, operands))


def _posed(backend: str, trial: Trial, saved: tuple[Owner, Owner] | None) -> tuple[Plan, Operands]:
    """Return the plan and the operands of a call."""
    problem, operands = _stated(backend, trial, saved)
    return dispatch.plan_for(problem), operands


def _stated(backend: str, trial: Trial, saved: tuple[Owner, Owner] | None) -> tuple[Problem, Operands]:
    """Return a call's problem and operands; for a backward, out and lse may be any arrays of their shapes."""
    call = calls.on_backend(backend, trial.call())
    if trial.cache is not None:
        return pose_with_cache(call.q, call.k, call.v, CacheOptions.of("tune", call.options | {"backend": backend}))
    how = {"backend": backend, "deterministic": trial.deterministic}
    options = Options.of("tune", call.options | how)
    out, lse = (call.dout, call.dlse) if saved is None else saved
    posed = Saved(call.dout, out, lse, None) if trial.backward else None
    return pose("tune", (call.q, call.k, call.v), options, call.packed, posed)


def _run(chosen: Plan, operands: Operands) -> tuple[object, ...]:
    run: Callable[[Plan, Operands], tuple[object, ...]] = (
        dispatch.run_backward if chosen.problem.backward else dispatch.run_forward
    )
    return run(chosen, operands)


def _numbers(results: tuple[object, ...]) -> list[np.ndarray]:
    """Return out and lse, or the gradients, as fp32 arrays on the host."""
    arrays = [calls.on_host([each.owner])[0] for each in results if hasattr(each, "owner")]
    return [array.astype(np.float32) for array in arrays if array is not None]


def _alike(results: list[np.ndarray], others: list[np.ndarray]) -> bool:
    """Return whether two results agree within APART of the largest finite magnitude, and have the same infinities."""
    for a, b in zip(results, others, strict=True):
        finite = np.isfinite(b)
        if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(a[~finite], b[~finite], equal_nan=True):
            return False
        if finite.any() and np.abs(a[finite] - b[finite]).max() > APART * np.abs(b[finite]).max():
            return False
    return True

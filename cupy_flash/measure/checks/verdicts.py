"""Runs a check in a worker process, which is replaced if it dies, and stores a verdict on each engine as evidence."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ...device import SIMULATED, Device
from ...engines import MODULES
from ...gpu import ahead
from ...plan import measurements, plan
from ...plan.refusals import engine_refusals
from ...problem.recorded_call import Json
from ..worker_process import Lost, Worker
from . import calls, micro_kernels
from .calls import Task, trials

PASSED, WRONG, LOST, NOT_RUN = "passed", "wrong", "lost", "not run"
INSTRUCTIONS = "instructions"  # the engine column of instructions that all engines use
SECONDS, SIMULATED_SECONDS = 20.0, 1200.0  # time limit of one run on a GPU, and on a simulator
LOSSES = 2  # worker processes that an engine may crash before its remaining cases are skipped

Report = Callable[[str], None]


class Row(NamedTuple):
    """The verdict on one case."""

    engine: str
    case: str
    verdict: str
    reason: str
    seconds: float
    trial: dict[str, Json] | None  # the record of its Trial, from which it can be repeated


class Verdicts(NamedTuple):
    """The result of a check; `print` shows it as a table."""

    device: Device
    rows: tuple[Row, ...]
    refused: dict[str, str]  # {engine that does not serve this card: reason}

    @property
    def engines(self) -> dict[str, str | None]:
        """{engine: its first case that has not passed, with the reason; None if all have}."""
        reasons: dict[str, str | None] = {}
        for row in self.rows:
            reasons.setdefault(row.engine, None)
            if row.verdict != PASSED and reasons[row.engine] is None:
                reasons[row.engine] = f"{row.case}: {row.verdict}, {row.reason}"
        return reasons

    @property
    def passed(self) -> bool:
        """Whether every case of every engine has passed; False if no engine serves the device."""
        return bool(self.rows) and not any(self.engines.values())

    def as_json(self) -> dict[str, Any]:
        """Return the result as values that JSON can hold."""
        rows = [row._asdict() for row in self.rows]
        return {"device": str(self.device), "card": self.device.card, "engines": self.engines, "rows": rows,
                "refused": self.refused, "passed": self.passed}  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{'engine':<13} {'cases':>5} {'passed':>6}  verdict on {self.device.card}, {self.device}"]
        for engine, reason in self.engines.items():
            verdicts = [row.verdict for row in self.rows if row.engine == engine]
            count = f"{len(verdicts):>5} {verdicts.count(PASSED):>6}"
            lines.append(f"{engine:<13} {count}  {'passed' if reason is None else f'FAILED: {reason}'}")
        lines += [f"{engine:<13} {'-':>5} {'-':>6}  {reason}" for engine, reason in self.refused.items()]
        return "\n".join(lines)


def check(
    *,
    backend: str = "cuda",
    engine: str | None = None,
    quick: bool = False,
    tensor_memory: bool = False,
    report: Report | None = None,
) -> Verdicts:
    """Compare every engine on this machine's GPU with the formula, and store the verdicts, which plans consult.

    Instructions are compared with the simulator, calls of every engine with the formula, also on side streams and in
    CUDA graphs. Everything runs in a worker process, so a kernel that crashes or hangs ends only that process. It is
    reported, and its engine is not used on this kind of card until the kernel texts change. A run that ends with an
    exception stores no verdict.

    Args:
        backend: "cuda", or "simulator:ARCH" for a simulator, which takes minutes.
        engine: check only this engine.
        quick: run one call per engine and no instructions, and store only the verdicts of failed engines.
        tensor_memory: kernels also check, at run time, that their accesses to tensor memory (sm_100a, sm_103a) are
            allocated, initialised and in the lanes of their warp; stores only the verdicts of failed engines.
        report: called with a line of text for each case.

    Returns:
        The verdicts; `passed` is whether all engines have passed, and `print` shows a table.

    Raises:
        RuntimeError: there is no GPU, the worker process did not start, or another process has killed it twice.
        ImportError: a dependency is missing, such as NVRTC, or NVRTC is too old for the GPU.
        MemoryError: the host or the GPU has too little free memory.
        OSError: the verdicts cannot be stored, or a file cannot be read or written.
        TypeError, ValueError: an unknown backend or engine.
    """
    work = calls.work_with_tensor_memory_checks if tensor_memory else calls.work
    return run_check(backend, engine, quick, report or (lambda line: None), work, only_failures=quick or tensor_memory)


def run_check(
    backend: str,
    engine: str | None,
    quick: bool,
    report: Report,
    work: Callable[..., Any],
    seconds: float | None = None,
    only_failures: bool | None = None,
) -> Verdicts:
    """Run `check` with a function for the worker process to call, and a time limit of one run in seconds.

    `only_failures`: store the verdicts of failed engines alone; None: if the run is quick.
    """
    only_failures = quick if only_failures is None else only_failures
    backend = valid_backend(backend)
    simulated = backend != "cuda"
    known = [name for name, module in MODULES.items() if "cuda" in module.BACKENDS]
    if engine is not None and engine not in known:
        raise ValueError(f"engine must be one of {', '.join(known)}, not {engine!r}")
    limit = seconds or (SIMULATED_SECONDS if simulated else SECONDS)
    with Worker(work) as worker:
        on = device_of(worker, backend)
        refused = {name: reason for name in known if (reason := _refusal(name, on))}
        measurements.require_storable(on)
        names = [name for name in known if name not in refused and engine in (None, name)]
        tasks = [task for name in names for task in _tasks(name, on, backend, quick, limit)]
        if not simulated and not quick:
            tasks = [*_micro_tasks(None, on, backend, limit), *tasks]
        rows = tuple(_run(worker, tasks, report))
    verdicts = Verdicts(on, rows, refused if engine is None else {k: v for k, v in refused.items() if k == engine})
    stored = {
        name: (wrong, [row._asdict() for row in rows if row.engine == name])
        for name, wrong in verdicts.engines.items()
        if name != INSTRUCTIONS and (wrong is not None or not only_failures)
    }
    for name, path in measurements.store_checks(on, stored).items():
        report(f"{name}: {'passed' if stored[name][0] is None else 'failed'}, stored in {path}")
    plan.forget()
    return verdicts


def valid_backend(backend: str) -> str:
    """Return the backend with its architecture; ValueError unless it is "cuda" or "simulator:ARCH"."""
    given: object = backend
    if not isinstance(given, str):
        raise TypeError(f'backend must be "cuda" or "simulator:ARCH", not {given!r}')
    if backend == "simulator":
        return f"simulator:{SIMULATED}"
    if backend != "cuda" and not backend.startswith("simulator:"):
        raise ValueError(f'backend must be "cuda" or "simulator:ARCH", not {backend!r}')
    return backend


def device_of(worker: Worker[Any], backend: str) -> Device:
    """Return the device of a backend, as the worker process finds it; RuntimeError if it finds none."""
    try:
        found: Device = worker(Task("device", backend), until=math.inf)
    except Lost as lost:
        hint = "; --backend simulator:sm_80 runs anywhere, slowly" if backend == "cuda" else ""
        raise RuntimeError(f"backend {backend} cannot run here: {lost.reason}{hint}") from None
    return found


def _refusal(engine: str, on: Device) -> str:
    """Return the reason why an engine serves no call on a device; "" if it serves some."""
    return "; ".join(engine_refusals(engine, ahead.example(engine), on))


def _tasks(engine: str, on: Device, backend: str, quick: bool, seconds: float) -> list[Task]:
    simulated = backend != "cuda"
    cases = trials(engine, on, simulated, quick)
    kind = "KV cache" if MODULES[engine].OPTIONS is None else "call"
    tasks = [Task(kind, backend, engine, trial, seconds=seconds) for trial in cases]
    if simulated or kind != "call":
        return tasks
    if not quick:
        tasks = [*_micro_tasks(engine, on, backend, seconds), *tasks]
    return [*tasks, *(Task(kind, backend, engine, cases[0], seconds=seconds) for kind in ("side stream", "CUDA graph"))]


def _micro_tasks(engine: str | None, on: Device, backend: str, seconds: float) -> list[Task]:
    """Return the tasks for the instructions that only this engine uses, or for None those that all use."""
    capability = int(on.arch.removeprefix("sm_").rstrip("a"))
    families: tuple[str | None, ...] = (None,) if engine is None else MODULES[engine].MICRO_KERNELS
    return [
        Task("micro-kernel", backend, engine or INSTRUCTIONS, number=number, seconds=seconds)
        for number, kernel in enumerate(micro_kernels.kernels())
        if kernel.family in families and kernel.runs_on(capability)
    ]


def _run(worker: Worker[str | None], tasks: list[Task], report: Report) -> Iterator[Row]:
    losses: dict[str, int] = {}
    for number, task in enumerate(tasks, 1):
        begin = time.monotonic()
        verdict, reason = PASSED, ""
        if losses.get(task.engine, 0) >= LOSSES:
            verdict, reason = NOT_RUN, f"{LOSSES} cases of this engine have cost the worker process"
        else:
            try:
                wrong = worker(task, until=math.inf)
                if wrong is not None:
                    verdict, reason = WRONG, wrong
            except Lost as lost:
                lost.raise_obstacle()
                losses[task.engine] = losses.get(task.engine, 0) + 1
                verdict, reason = LOST, str(lost)
        record = None if task.trial is None else task.trial.record
        row = Row(task.engine, task.name, verdict, reason, round(time.monotonic() - begin, 3), record)
        # Passed instructions get no line: there are hundreds.
        if task.kind != "micro-kernel" or verdict != PASSED:
            why = reason and f", {reason}"
            report(f"{number}/{len(tasks)} {row.engine}: {row.case}: {verdict}{why}, {row.seconds:.1f} s")
        yield row

"""The commands of python -m bench that only developers of the kernels use."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from types import ModuleType
from typing import Any

from cupy_flash.measure.worker_process import ended_by_signal

from .. import gpu
from ..arguments import add_out, positive
from ..report import count, progress, show
from ..results import ROOT, describe, write
from . import (
    backward_events,
    bounds,
    conversions,
    costs,
    events,
    latent,
    marks,
    packed,
    peers,
    predict,
    roles,
    selected,
    static,
    static_mods,
    static_tables,
    sweep,
    sweep_plot,
    tables,
)


def run(arguments: list[str]) -> int:
    """Run the command that the arguments begin with and return its exit status."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options, arguments)
    return status


def _static(options: argparse.Namespace, arguments: list[str]) -> int:
    archs = static.EVERY_ARCH if options.all else static.ARCHS
    libraries = [None, *options.nvrtc]
    problems = options.problems or list(static.SCARCE if options.all else static.PROBLEMS)
    mods_counted = [] if options.problems else list(static_mods.MODS)
    path = options.out / "static.json"
    stored = static.Result([], [], [])
    if options.check or (options.update and path.is_file()):
        stored = static.Result.of(json.loads(path.read_text(encoding="utf-8"))["static"])
    if options.check:
        return _report(stored.stale(problems, archs, mods_counted), "stale row", path)
    # Store the file names of the compilers without their folders; each record has the compiler's release anyway.
    command = [Path(argument).name if argument in options.nvrtc else argument for argument in arguments]
    description = describe(command, options.jobs)
    result = replace(stored)

    def save(**rows: Any) -> None:
        """Write rows as soon as they are computed, so that --update continues an interrupted run."""
        write(description | {"static": replace(result, **rows).record()}, path)

    with progress("compile", len(libraries) * len(static.tasks(problems, archs))) as step:
        result.kernels = static.compile_all(
            problems, archs, libraries, options.jobs, step, stored.kernels, lambda rows: save(kernels=rows)
        )
    with progress("simulate", len(static.counted(problems))) as step:
        result.steps = static.count_steps(problems, step, stored.steps, lambda rows: save(steps=rows))
    with progress("mods", len(static_mods.cases(mods_counted))) as step:
        result.mods = static_mods.count(mods_counted, step, stored.mods, lambda rows: save(mods=rows))
    save()
    for table in static_tables.tables(result.record()):
        show(table)
    complaints = static.complaints(result.kernels, result.steps) + static_mods.complaints(result.mods)
    print(f"\n{len(result.kernels)} kernels.")
    return _report(complaints + result.stale(problems, archs, mods_counted), "complaint", path)


def _report(reasons: list[str], noun: str, path: Path) -> int:
    """Print the reasons why a check fails; return the exit status: 1 if there are any, else 0."""
    for reason in reasons:
        print(reason)
    print(f"{count(len(reasons), noun)}. Full result: {path}")
    return 1 if reasons else 0


def _predict(options: argparse.Namespace, arguments: list[str]) -> int:
    regimes = [regime for regime in marks.MARKS if regime.dtype in predict.DTYPES]
    path = options.out / "predict.json"
    if options.check:
        stored = json.loads(path.read_text(encoding="utf-8"))
        of_blackwell = events.stale(stored["tcgen05"]) + backward_events.stale(stored["tcgen05_backward"])
        return _report(predict.stale(stored["predict"], regimes) + of_blackwell, "stale row", path)
    kernels = len(regimes) + len(roles.ARCHS) * len(events.DIMS) + 1 + len(backward_events.CASES)
    with progress("compile", kernels) as step:
        predictions = [each._asdict() for each in predict.predict(regimes, step)]
        forward = [each._asdict() for each in events.predict(step)]
        backward = [each._asdict() for each in backward_events.predict(step)]
    rows = {"predict": predictions, "tcgen05": forward, "tcgen05_backward": backward}
    write(describe(arguments, 1) | rows, path)
    show(predict.table(predictions))
    show(events.table(forward))
    show(backward_events.table(backward))
    return 0


def _counts(name: str, module: ModuleType, options: argparse.Namespace, arguments: list[str]) -> int:
    """Count the cases of a module in the simulator, store and show the rows."""
    with progress("simulate", len(module.CASES)) as step:
        counts = []
        for case in module.CASES:
            step(f"{case[0]}, {case.heads} heads")  # the engine or the architecture
            counts.append(module.record(module.count(case)))
    write(describe(arguments, 1) | {name: counts}, options.out / f"{name}.json")
    show(module.table(counts))
    return 0


def _selected(options: argparse.Namespace, arguments: list[str]) -> int:
    return _counts("selected", selected, options, arguments)


def _packed(_: argparse.Namespace, __: list[str]) -> int:
    show(packed.table())
    return 0


def _latent(options: argparse.Namespace, arguments: list[str]) -> int:
    return _counts("latent", latent, options, arguments)


def _conversions(options: argparse.Namespace, arguments: list[str]) -> int:
    counts, predictions = conversions.records(), conversions.predictions()
    rows = {"conversions": counts, "predicted": predictions}
    write(describe(arguments, 1) | rows, options.out / "conversions.json")
    show(conversions.table(counts))
    show(conversions.table_of_times(predictions))
    return 0


def _sass(options: argparse.Namespace, _: list[str]) -> int:
    cubins = peers.theirs(options.folder)
    if not cubins:
        print(f"{options.folder} has no file *.cubin", file=sys.stderr)
        return 1
    show(peers.table(peers.ours([each for each in marks.MARKS if each.seqlen == 16384]) | cubins))
    return 0


def _costs(options: argparse.Namespace, _: list[str]) -> int:
    for table in costs.tables(json.loads(options.sweep.read_text(encoding="utf-8"))):
        show(table)
    return 0


def _bounds(options: argparse.Namespace, arguments: list[str]) -> int:
    """Profile the regimes of MARKS, in its order; the forward and backward sweeps alternate."""
    cases_by_sweep = []
    for path in filter(Path.is_file, options.sweeps):
        cases = {case["regime"]: case for case in json.loads(path.read_text(encoding="utf-8"))["cases"]}
        cases_by_sweep.append([cases[regime.name] for regime in marks.MARKS if regime.name in cases])
    interleaved = [case for cases in zip_longest(*cases_by_sweep) for case in cases if case]
    result = describe(arguments, 1)
    with ended_by_signal():
        result["bounds"] = bounds.run(interleaved, options.seconds)
    write(result, options.out / "bounds.json")
    show(bounds.table(result["bounds"]))
    return 0 if any(record["kernels"] for record in result["bounds"]) else 1


def time_tiles(options: argparse.Namespace, arguments: list[str]) -> int:
    """forward or backward --sweep: time every candidate tile and every other implementation on the GPU."""
    regimes = sweep.regimes(
        options.command == "backward",
        options.dtype,
        [options.head_dim] if options.head_dim else None,
        options.seqlens,
        options.causal,
    )
    out = options.out / f"sweep-{options.command}{f'-{options.dtype}' if options.dtype else ''}.json"
    status = gpu.run(regimes, sweep.measure_tiles, options.seconds, out, ["python -m bench", *arguments])
    if out.is_file():
        result = json.loads(out.read_text(encoding="utf-8"))
        for table in (*sweep.tables(result["cases"]), marks.table(result)):
            show(table)
        if sweep_plot.plot(result, out.with_suffix(".png")):
            print(f"plot: {out.with_suffix('.png')}")
        print(f"\nAll tiles and samples: {out}")
    return status


def _tables(options: argparse.Namespace, _: list[str]) -> int:
    page, results = options.page, options.results
    text = page.read_text(encoding="utf-8")
    missing = tables.without_block(text, results)
    for name in missing:
        stem = name.removesuffix(".json")
        print(
            f"{page.name} has no table from {name}: add the two marker lines "
            f"<!-- bench:{stem} --> and <!-- /bench:{stem} --> (see tables.py)",
            file=sys.stderr,
        )
    generated = tables.regenerate(text, results)
    if generated != text and options.check:
        print(f"{page.name} is out of date: run python -m bench tables", file=sys.stderr)
        return 1
    if generated != text:
        page.write_text(generated, encoding="utf-8")
    return 1 if missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_static_options(commands.add_parser("static"))
    prediction = commands.add_parser("predict")
    prediction.set_defaults(run=_predict)
    prediction.add_argument(
        "--check", action="store_true", help="predict nothing; exit status 1 names the rows whose kernels have changed"
    )
    add_out(prediction)
    of_lists = commands.add_parser("selected")
    of_lists.set_defaults(run=_selected)
    add_out(of_lists)
    of_latents = commands.add_parser("latent")
    of_latents.set_defaults(run=_latent)
    add_out(of_latents)
    of_codes = commands.add_parser("conversions")
    of_codes.set_defaults(run=_conversions)
    add_out(of_codes)
    commands.add_parser("packed").set_defaults(run=_packed)
    machine_code = commands.add_parser("sass")
    machine_code.set_defaults(run=_sass)
    machine_code.add_argument("folder", type=Path, help="folder of *.cubin files of other implementations")
    cost_models = commands.add_parser("costs")
    cost_models.set_defaults(run=_costs)
    cost_models.add_argument("sweep", type=Path, metavar="SWEEP.json")
    profile = commands.add_parser("bounds")
    profile.set_defaults(run=_bounds)
    profile.add_argument("sweeps", type=Path, nargs="+", metavar="SWEEP.json")
    profile.add_argument(
        "--seconds", type=float, default=400, help="time budget; no profile starts that would exceed it"
    )
    add_out(profile)
    generate = commands.add_parser("tables")
    generate.set_defaults(run=_tables)
    generate.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if the page is out of date"
    )
    generate.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    generate.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    return parser


def _add_static_options(gate: argparse.ArgumentParser) -> None:
    gate.set_defaults(run=_static)
    gate.add_argument(
        "--all", action="store_true", help=f"those with the most registers, for {', '.join(static.EVERY_ARCH)}"
    )
    rows = gate.add_mutually_exclusive_group()
    rows.add_argument(
        "--update", action="store_true", help="keep the rows of an earlier result whose kernels have not changed"
    )
    rows.add_argument(
        "--check", action="store_true", help="compile nothing; exit status 1 names the rows whose kernels have changed"
    )
    gate.add_argument(
        "--nvrtc", action="append", default=[], metavar="PATH", help="additional libnvrtc; may be repeated"
    )
    gate.add_argument("--problems", action="append", choices=list(static.PROBLEMS), help="may be repeated")
    gate.add_argument("--jobs", type=positive, default=2, help="compiler processes")
    add_out(gate)

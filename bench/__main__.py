"""python -m bench: measure accuracy, time and peak memory of cupy_flash and of every installed peer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cupy_flash.device import blas_threads
from cupy_flash.measure.worker_process import ended_by_signal

from . import (
    bounds,
    compare,
    costs,
    decode,
    decode_gpu,
    first,
    gpu,
    marks,
    mods,
    overhead,
    predict,
    ring,
    static,
    static_mods,
    sweep,
)
from .model import ITEMSIZE, Case
from .peers import limit_threads
from .plots import plot, plot_sweep
from .report import count, left_out, progress, provenance, show, tables
from .results import ROOT, describe, write
from .run import memory_cases, time_cases
from .tables import regenerate, without_block
from .timing import measure_ceilings

SEQLENS = {
    "forward": (512, 1024, 2048, 4096),
    "backward": (512, 1024, 2048, 4096),
    "memory": (512, 1024, 2048, 4096, 8192, 16384),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` defaults to sys.argv[1:]."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    # The default command is "all".
    has_command = arguments[:1] and (not arguments[0].startswith("-") or arguments[0] in ("-h", "--help"))
    options = parser.parse_args(arguments if has_command else ["all", *arguments])
    if options.command == "static":
        return _static(options, arguments)
    if options.command == "overhead":
        return _overhead(options.out, arguments)
    if options.command == "decode":
        return _decode(options, arguments)
    if options.command == "mods":
        return _mods(options, arguments)
    if options.command == "first":
        return _first(options.out, arguments)
    if options.command == "predict":
        return _predict(options, arguments)
    if options.command == "compare":
        return _compare(options)
    if options.command == "costs":
        for table in costs.tables(json.loads(options.sweep.read_text(encoding="utf-8"))):
            show(table)
        return 0
    if options.command == "bounds":
        return _bounds(options, arguments)
    if options.command == "tables":
        return _tables(options.page, options.results, options.check)
    if getattr(options, "sweep", False):
        return _sweep(options, arguments)
    options.head_dim, options.dtype = options.head_dim or 64, options.dtype or "float32"
    if options.command == "ring":
        return _ring(options, arguments)
    if getattr(options, "gpu", False):
        return _on_gpu(options, arguments)
    options.kv_heads = options.kv_heads or options.heads
    if options.heads % options.kv_heads:
        parser.error(f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}")
    return _measure(options, arguments)


def _measure(options: argparse.Namespace, arguments: list[str]) -> int:
    sections = list(SEQLENS) if options.command == "all" else [options.command]
    result = describe(arguments, options.threads)
    device, version = result["device"], result["versions"]["cupy_flash"]
    print(f"cupy_flash {version} runs on the CPU: {device['cpu']}, {count(options.threads, 'thread')}.")
    if device["gpu"] is not None:
        print(f"The GPU, {device['gpu']}, is not used by this command: run python -m bench forward --gpu.")
    path = options.out / f"{options.command}.json"
    with limit_threads(options.threads):
        ceilings = measure_ceilings(options.dtype)
        result["ceilings"] = asdict(ceilings)
        for section in sections:
            cases = _cases(options, section)
            if section == "memory":
                with progress(section, 3 * len(cases)) as step:
                    result[section] = memory_cases(cases, options.threads, step)
            else:
                with progress(section, 1 + len(cases)) as step:
                    result[section] = time_cases(cases, section == "backward", options.repeats, ceilings, step)
            write(result, path)
            _show(section, result, options.out / f"{section}.png")
    print(f"\nAll samples: {path}")
    return 0


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
    # Store file names of the compilers without their folders; every record has the compiler's release.
    command = [Path(argument).name if argument in options.nvrtc else argument for argument in arguments]
    description = describe(command, options.jobs)
    result = replace(stored)

    def save(**rows: Any) -> None:
        """Write rows as soon as they are made: a run that was interrupted is continued by --update."""
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
    for table in static.tables(result.record()):
        show(table)
    complaints = static.complaints(result.kernels, result.steps) + static_mods.complaints(result.mods)
    print(f"\n{len(result.kernels)} kernels.")
    return _report(complaints + result.stale(problems, archs, mods_counted), "complaint", path)


def _report(reasons: list[str], noun: str, path: Path) -> int:
    """Print why a result is not good, and return the exit status."""
    for reason in reasons:
        print(reason)
    print(f"{count(len(reasons), noun)}. Full result: {path}")
    return 1 if reasons else 0


def _overhead(out: Path, arguments: list[str]) -> int:
    result = describe(arguments, 1) | {"overhead": overhead.measure(overhead.here())}
    write(result, out / "overhead.json")
    for table in overhead.tables(result["overhead"]):
        show(table)
    return 0


def _decode(options: argparse.Namespace, arguments: list[str]) -> int:
    module, name = (decode_gpu, "decode_gpu") if options.gpu else (decode, "decode")
    result = describe(arguments, 1) | {name: module.measure()}
    write(result, options.out / f"{name}.json")
    show(module.table(result[name]))
    for row in result[name] if options.gpu else ():
        for peer, reason in row["left_out"].items():
            print(f"{row['regime']}: left out {peer}: {reason}")
    return 0


def _mods(options: argparse.Namespace, arguments: list[str]) -> int:
    result = describe(arguments, 1)
    with limit_threads(1):
        result["mods"] = mods.measure("cuda" if options.gpu else "cpu")
    write(result, options.out / "mods.json")
    show(mods.table(result["mods"]))
    return 0


def _first(out: Path, arguments: list[str]) -> int:
    result = describe(arguments, 1)
    result["first"] = first.measure(result["device"]["gpu"] is not None)
    write(result, out / "first.json")
    show(first.table(result["first"]))
    return 0


def _predict(options: argparse.Namespace, arguments: list[str]) -> int:
    regimes = [regime for regime in marks.MARKS if regime.dtype in predict.DTYPES]
    path = options.out / "predict.json"
    if options.check:
        stored = json.loads(path.read_text(encoding="utf-8"))["predict"]
        return _report(predict.stale(stored, regimes), "stale row", path)
    with progress("compile", len(regimes)) as step:
        predictions = [each._asdict() for each in predict.predict(regimes, step)]
    write(describe(arguments, 1) | {"predict": predictions}, path)
    show(predict.table(predictions))
    return 0


def _compare(options: argparse.Namespace) -> int:
    new = json.loads(options.new.read_text(encoding="utf-8"))
    old = json.loads(options.against.read_text(encoding="utf-8")) if options.against else compare.before(options.new)
    print(f"old: `{old['command']}`, {old['date']}\nnew: `{new['command']}`, {new['date']}")
    table, regressions = compare.compare(old, new, options.slower)
    show(table)
    for line in regressions:
        print(line)
    print(f"\n{len(table.rows)} pairs, {len(regressions)} of ours slower by more than {options.slower:.0%}")
    return 1 if regressions else 0


def _bounds(options: argparse.Namespace, arguments: list[str]) -> int:
    """Profile the regimes with a mark, in the order of MARKS, alternating between the sweeps."""
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


def _on_gpu(options: argparse.Namespace, arguments: list[str]) -> int:
    """Time the tile that the plan chooses (mma for 16-bit dtypes, simt otherwise) and every peer on the GPU."""
    regimes = [
        gpu.Regime(options.dtype, options.head_dim, seqlen, causal, options.command == "backward")
        for causal in ((False, True) if options.causal is None else (options.causal,))
        for seqlen in options.seqlens or SEQLENS[options.command]
    ]
    out = options.out / f"gpu-{options.command}.json"
    return gpu.run(regimes, gpu.measure_peers, options.seconds, out, ["python -m bench", *arguments])


def _sweep(options: argparse.Namespace, arguments: list[str]) -> int:
    """Time every candidate tile and every peer on the GPU."""
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
        if plot_sweep(result, out.with_suffix(".png")):
            print(f"plot: {out.with_suffix('.png')}")
        print(f"\nAll tiles and samples: {out}")
    return status


def _ring(options: argparse.Namespace, arguments: list[str]) -> int:
    causal = options.causal is not False
    shape = Case(
        options.batch, options.heads, options.kv_heads or options.heads, options.head_dim, 0, options.dtype, causal
    )
    cases = [replace(shape, seqlen=seqlen) for seqlen in options.seqlens or ring.SEQLENS]
    for case in cases:
        if uneven := [ranks for ranks in options.ranks if case.seqlen % (2 * ranks)]:
            raise SystemExit(
                f"--seqlens {case.seqlen} is not a multiple of {2 * uneven[0]}: zigzag sharding gives each of "
                f"{uneven[0]} ranks two chunks"
            )
    with progress("ring", len(cases) * len(options.ranks)) as step:
        section = ring.ring_cases(cases, options.ranks, min(options.repeats, ring.REPEATS), options.threads, step)
    result = describe(arguments, options.threads) | {"ring": section}
    path = options.out / "ring.json"
    write(result, path)
    print(ring.provenance(result))
    for table in (ring.time_table(section), ring.memory_table(section), ring.plan_table()):
        show(table)
    print(f"\nAll samples: {path}")
    return 0


def _show(section: str, result: dict[str, Any], plot_path: Path) -> None:
    print(f"\n{provenance(section, result)}")
    for table in tables(section, result):
        show(table)
    for reason in left_out(section, result):
        print(f"not measured: {reason}")
    print(f"plot: {plot_path}" if plot(section, result, plot_path) else "plot: matplotlib is not installed")


def _cases(options: argparse.Namespace, section: str) -> list[Case]:
    shape = Case(options.batch, options.heads, options.kv_heads, options.head_dim, 0, options.dtype, False)
    causal_values = (False, True) if options.causal is None and section != "memory" else (bool(options.causal),)
    return [
        replace(shape, seqlen=seqlen, causal=causal)
        for causal in causal_values
        for seqlen in options.seqlens or SEQLENS[section]
    ]


def _tables(page: Path, results: Path, check: bool) -> int:
    text = page.read_text(encoding="utf-8")
    missing = without_block(text, results)
    for name in missing:
        stem = name.removesuffix(".json")
        print(
            f"{page.name} has no table from {name}: add the two marker lines "
            f"<!-- bench:{stem} --> and <!-- /bench:{stem} --> (see bench/tables.py)",
            file=sys.stderr,
        )
    generated = regenerate(text, results)
    if generated != text and check:
        print(f"{page.name} is out of date: run python -m bench tables", file=sys.stderr)
        return 1
    if generated != text:
        page.write_text(generated, encoding="utf-8")
    return 1 if missing else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sizes = argparse.ArgumentParser(add_help=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sizes.add_argument("--batch", type=_positive, default=1)
    sizes.add_argument("--heads", type=_positive, default=8)
    sizes.add_argument("--kv-heads", type=_positive, help="default: --heads")
    sizes.add_argument("--head-dim", type=_positive, help="default: 64; --sweep: all")
    sizes.add_argument(
        "--seqlens", type=_lengths, metavar="S,S,...", help="default: 512 to 4096; memory and --sweep: to 16384"
    )
    sizes.add_argument("--dtype", choices=list(ITEMSIZE), help="default: float32; --sweep: bfloat16")
    sizes.add_argument("--causal", action=argparse.BooleanOptionalAction, help="default: both; memory: --no-causal")
    sizes.add_argument("--repeats", type=_positive, default=15, help="samples per peer; slow peers take fewer")
    sizes.add_argument("--threads", type=_positive, default=blas_threads(), help="default: the BLAS default")
    sizes.add_argument("--out", type=Path, default=Path("bench/out"), help="output folder for the JSON and the plots")
    forward = commands.add_parser("forward", parents=[sizes], help="accuracy and time of the forward")
    backward = commands.add_parser("backward", parents=[sizes], help="accuracy and time of forward + backward")
    for timed in (forward, backward):
        gpu_mode = timed.add_mutually_exclusive_group()
        gpu_mode.add_argument(
            "--gpu",
            action="store_true",
            help="time ours and every peer on the GPU: 16384 tokens, hidden size 2048; backward alone",
        )
        gpu_mode.add_argument("--sweep", action="store_true", help="the same for every tile of every engine")
        timed.add_argument(
            "--seconds", type=float, default=440, help="GPU time budget; no regime starts that would exceed it"
        )
    commands.add_parser("memory", parents=[sizes], help="peak memory over the sequence length")
    commands.add_parser("all", parents=[sizes], help="forward, backward and memory (default)")
    ranks = commands.add_parser(
        "ring", parents=[sizes], help="ring attention: peak memory and time per rank; estimate for 2^20 tokens"
    )
    ranks.add_argument(
        "--ranks", type=_lengths, metavar="N,N,...", default=list(ring.RANKS), help="numbers of processes"
    )
    gate = commands.add_parser(
        "static",
        help="registers, spills and compiler warnings of every kernel; exit status 1 for spills, warnings, stale rows",
    )
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
    gate.add_argument("--jobs", type=_positive, default=2, help="compiler processes")
    gate.add_argument("--out", type=Path, default=Path("bench/out"), help="output folder for the JSON")
    host_time = commands.add_parser("overhead", help="host time of a call before the kernel launch")
    host_time.add_argument("--out", type=Path, default=Path("bench/out"), help="output folder for the JSON")
    step = commands.add_parser(
        "decode", help="one query on a KV cache: on the CPU beside torch's SDPA, on a GPU beside reading the cache"
    )
    step.add_argument("--gpu", action="store_true", help="on this machine's GPU, with CuPy")
    step.add_argument("--out", type=Path, default=Path("bench/out"), help="output folder for the JSON")
    functions = commands.add_parser(
        "mods", help="score_mods and mask_mods beside the built-in options, on a GPU beside FlexAttention"
    )
    functions.add_argument("--gpu", action="store_true", help="on this machine's GPU, with torch tensors")
    functions.add_argument("--out", type=Path, default=Path("bench/out"), help="output folder for the JSON")
    first_call = commands.add_parser(
        "first", help="time of the first call of a process, with a cold and a warm kernel cache"
    )
    first_call.add_argument("--out", type=Path, default=Path("bench/out"), help="output folder for the JSON")
    prediction = commands.add_parser("predict", help="predict the Hopper engine's speed from its SASS, without a GPU")
    prediction.add_argument(
        "--check", action="store_true", help="predict nothing; exit status 1 names the rows whose kernels have changed"
    )
    prediction.add_argument("--out", type=Path, default=Path("bench/out"), help="output folder for the JSON")
    comparison = commands.add_parser(
        "compare", help="compare a run with an earlier one; exit status 1 if ours is slower"
    )
    comparison.add_argument("new", type=Path, metavar="NEW.json")
    comparison.add_argument(
        "--against",
        type=Path,
        metavar="OLD.json",
        help="default: the file of that name in bench/results, or its committed version",
    )
    comparison.add_argument(
        "--slower", type=float, default=compare.SLOWER, help="tolerated loss of speed, as a fraction"
    )
    cost_models = commands.add_parser("costs", help="compare the cost models with a sweep and fit their constants")
    cost_models.add_argument("sweep", type=Path, metavar="SWEEP.json")
    profile = commands.add_parser(
        "bounds", help="find the bottleneck of the fastest tiles of sweeps with Nsight Compute"
    )
    profile.add_argument("sweeps", type=Path, nargs="+", metavar="SWEEP.json")
    profile.add_argument(
        "--seconds", type=float, default=400, help="time budget; no profile starts that would exceed it"
    )
    profile.add_argument("--out", type=Path, default=Path("bench/out"), help="output folder for the JSON")
    generate = commands.add_parser("tables", help="regenerate the tables of docs/benchmarks.md from bench/results")
    generate.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if the page is out of date"
    )
    generate.add_argument("--page", type=Path, default=ROOT / "docs" / "benchmarks.md")
    generate.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _lengths(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())

"""python -m bench: exactness, time and peak memory of cupy_flash beside every peer present."""

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

from . import bounds, compare, costs, first, gpu, marks, overhead, ring, static, sweep
from .isolated import ended_by_signal
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
    """Runs one command and returns its exit status; `argv` defaults to the arguments of the process."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    # Without a command everything is measured.
    named = arguments[:1] and (not arguments[0].startswith("-") or arguments[0] in ("-h", "--help"))
    asked = parser.parse_args(arguments if named else ["all", *arguments])
    if asked.command == "static":
        return _static(asked, arguments)
    if asked.command == "overhead":
        return _overhead(asked.out, arguments)
    if asked.command == "first":
        return _first(asked.out, arguments)
    if asked.command == "compare":
        return _compare(asked)
    if asked.command == "costs":
        for table in costs.tables(json.loads(asked.sweep.read_text(encoding="utf-8"))):
            show(table)
        return 0
    if asked.command == "bounds":
        return _bounds(asked, arguments)
    if asked.command == "tables":
        return _tables(asked.page, asked.results, asked.check)
    if getattr(asked, "sweep", False):
        return _sweep(asked, arguments)
    asked.head_dim, asked.dtype = asked.head_dim or 64, asked.dtype or "float32"
    if asked.command == "ring":
        return _ring(asked, arguments)
    if getattr(asked, "gpu", False):
        return _on_gpu(asked, arguments)
    asked.kv_heads = asked.kv_heads or asked.heads
    if asked.heads % asked.kv_heads:
        parser.error(f"--heads {asked.heads} is not a multiple of --kv-heads {asked.kv_heads}")
    return _measure(asked, arguments)


def _measure(asked: argparse.Namespace, arguments: list[str]) -> int:
    sections = list(SEQLENS) if asked.command == "all" else [asked.command]
    result = describe(arguments, asked.threads)
    device, version = result["device"], result["versions"]["cupy_flash"]
    print(f"cupy_flash {version} computes on the CPU alone: {device['cpu']}, {count(asked.threads, 'thread')}.")
    if device["gpu"] is not None:
        print(f"The GPU, {device['gpu']}, is not used here: python -m bench forward --gpu measures it.")
    path = asked.out / f"{asked.command}.json"
    with limit_threads(asked.threads):
        ceilings = measure_ceilings(asked.dtype)
        result["ceilings"] = asdict(ceilings)
        for section in sections:
            cases = _cases(asked, section)
            if section == "memory":
                with progress(section, 3 * len(cases)) as step:
                    result[section] = memory_cases(cases, asked.threads, step)
            else:
                with progress(section, 1 + len(cases)) as step:
                    result[section] = time_cases(cases, section == "backward", asked.repeats, ceilings, step)
            write(result, path)
            _show(section, result, asked.out / f"{section}.png")
    print(f"\nEvery sample: {path}")
    return 0


def _static(asked: argparse.Namespace, arguments: list[str]) -> int:
    archs = static.EVERY_ARCH if asked.all else static.ARCHS
    libraries = [None, *asked.nvrtc]
    problems = asked.problems or list(static.SCARCE if asked.all else static.PROBLEMS)
    with progress("compile", len(libraries) * len(archs) * len(problems)) as step:
        compiled = static.compile_all(problems, archs, libraries, asked.jobs, step)
    with progress("simulate", len(problems)) as step:
        steps = [each for arch in static.STEP_ARCHS for each in static.count_steps(problems, arch, step)]
    # Where a compiler lies on this machine is of no interest elsewhere; its release is in every record.
    given = [Path(word).name if word in asked.nvrtc else word for word in arguments]
    result = describe(given, asked.jobs) | {"static": static.record(compiled, steps)}
    path = asked.out / "static.json"
    write(result, path)
    for table in static.tables(result["static"]):
        show(table)
    complaints = static.complaints(compiled, steps)
    for complaint in complaints:
        print(complaint)
    print(f"\n{len(compiled)} kernels compiled, {count(len(complaints), 'complaint')}. All of it: {path}")
    return 1 if complaints else 0


def _overhead(out: Path, arguments: list[str]) -> int:
    result = describe(arguments, 1) | {"overhead": overhead.measure(overhead.here())}
    write(result, out / "overhead.json")
    for table in overhead.tables(result["overhead"]):
        show(table)
    return 0


def _first(out: Path, arguments: list[str]) -> int:
    result = describe(arguments, 1)
    result["first"] = first.measure(result["device"]["gpu"] is not None)
    write(result, out / "first.json")
    show(first.table(result["first"]))
    return 0


def _compare(asked: argparse.Namespace) -> int:
    new = json.loads(asked.new.read_text(encoding="utf-8"))
    old = json.loads(asked.against.read_text(encoding="utf-8")) if asked.against else compare.before(asked.new)
    print(f"old: `{old['command']}`, {old['date']}\nnew: `{new['command']}`, {new['date']}")
    table, worse = compare.compare(old, new, asked.slower)
    show(table)
    for line in worse:
        print(line)
    print(f"\n{len(table.rows)} pairs, {len(worse)} of ours slower by more than {asked.slower:.0%}")
    return 1 if worse else 0


def _bounds(asked: argparse.Namespace, arguments: list[str]) -> int:
    """Of the regimes with a mark, the most important of each sweep first."""
    of_sweeps = []
    for path in filter(Path.is_file, asked.sweeps):
        cases = {case["regime"]: case for case in json.loads(path.read_text(encoding="utf-8"))["cases"]}
        of_sweeps.append([cases[regime.name] for regime in marks.MARKS if regime.name in cases])
    in_turn = [case for cases in zip_longest(*of_sweeps) for case in cases if case]
    result = describe(arguments, 1)
    with ended_by_signal():
        result["bounds"] = bounds.run(in_turn, asked.seconds)
    write(result, asked.out / "bounds.json")
    show(bounds.table(result["bounds"]))
    return 0 if any(record["kernels"] for record in result["bounds"]) else 1


def _on_gpu(asked: argparse.Namespace, arguments: list[str]) -> int:
    """Ours through the plan, whose engine is mma for 16-bit numbers and simt for others, beside every peer there."""
    regimes = [
        gpu.Regime(asked.dtype, asked.head_dim, seqlen, causal, asked.command == "backward")
        for causal in ((False, True) if asked.causal is None else (asked.causal,))
        for seqlen in asked.seqlens or SEQLENS[asked.command]
    ]
    out = asked.out / f"gpu-{asked.command}.json"
    return gpu.run(regimes, gpu.measure_peers, asked.seconds, out, ["python -m bench", *arguments])


def _sweep(asked: argparse.Namespace, arguments: list[str]) -> int:
    """Every tile that may be the fastest, beside every peer there."""
    regimes = sweep.regimes(
        asked.command == "backward",
        asked.dtype,
        [asked.head_dim] if asked.head_dim else None,
        asked.seqlens,
        asked.causal,
    )
    out = asked.out / f"sweep-{asked.command}{f'-{asked.dtype}' if asked.dtype else ''}.json"
    status = gpu.run(regimes, sweep.measure_tiles, asked.seconds, out, ["python -m bench", *arguments])
    if out.is_file():
        result = json.loads(out.read_text(encoding="utf-8"))
        for table in (*sweep.tables(result["cases"]), marks.table(result)):
            show(table)
        if plot_sweep(result, out.with_suffix(".png")):
            print(f"plot: {out.with_suffix('.png')}")
        print(f"\nEvery tile and sample: {out}")
    return status


def _ring(asked: argparse.Namespace, arguments: list[str]) -> int:
    causal = asked.causal is not False
    shape = Case(asked.batch, asked.heads, asked.kv_heads or asked.heads, asked.head_dim, 0, asked.dtype, causal)
    cases = [replace(shape, seqlen=seqlen) for seqlen in asked.seqlens or ring.SEQLENS]
    for case in cases:
        if uneven := [ranks for ranks in asked.ranks if case.seqlen % (2 * ranks)]:
            raise SystemExit(f"--seqlens {case.seqlen} cannot be cut into two pieces for each of {uneven[0]} ranks")
    with progress("ring", len(cases) * len(asked.ranks)) as step:
        section = ring.ring_cases(cases, asked.ranks, min(asked.repeats, ring.REPEATS), asked.threads, step)
    result = describe(arguments, asked.threads) | {"ring": section}
    path = asked.out / "ring.json"
    write(result, path)
    print(ring.provenance(result))
    for table in (ring.time_table(section), ring.memory_table(section), ring.plan_table()):
        show(table)
    print(f"\nEvery sample: {path}")
    return 0


def _show(section: str, result: dict[str, Any], picture: Path) -> None:
    print(f"\n{provenance(section, result)}")
    for table in tables(section, result):
        show(table)
    for reason in left_out(section, result):
        print(f"not measured: {reason}")
    print(f"plot: {picture}" if plot(section, result, picture) else "plot: matplotlib is not installed")


def _cases(asked: argparse.Namespace, section: str) -> list[Case]:
    shape = Case(asked.batch, asked.heads, asked.kv_heads, asked.head_dim, 0, asked.dtype, False)
    maskings = (False, True) if asked.causal is None and section != "memory" else (bool(asked.causal),)
    return [
        replace(shape, seqlen=seqlen, causal=causal)
        for causal in maskings
        for seqlen in asked.seqlens or SEQLENS[section]
    ]


def _tables(page: Path, results: Path, check: bool) -> int:
    text = page.read_text(encoding="utf-8")
    absent = without_block(text, results)
    for name in absent:
        stem = name.removesuffix(".json")
        print(
            f"{page.name} shows nothing of {name}: give it a block, as in "
            f"<!-- bench:{stem} --> <!-- /bench:{stem} --> on two lines (bench/tables.py)",
            file=sys.stderr,
        )
    generated = regenerate(text, results)
    if generated != text and check:
        print(f"{page.name} differs from the results: run python -m bench tables", file=sys.stderr)
        return 1
    if generated != text:
        page.write_text(generated, encoding="utf-8")
    return 1 if absent else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    sizes = argparse.ArgumentParser(add_help=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    sizes.add_argument("--batch", type=_positive, default=1)
    sizes.add_argument("--heads", type=_positive, default=8)
    sizes.add_argument("--kv-heads", type=_positive, help="default: as many as --heads")
    sizes.add_argument("--head-dim", type=_positive, help="default: 64, a sweep has them all")
    sizes.add_argument(
        "--seqlens", type=_lengths, metavar="S,S,...", help="default: 512 to 4096, memory and sweep to 16384"
    )
    sizes.add_argument("--dtype", choices=list(ITEMSIZE), help="default: float32, a sweep's bfloat16")
    sizes.add_argument("--causal", action=argparse.BooleanOptionalAction, help="default: both, memory without")
    sizes.add_argument("--repeats", type=_positive, default=15, help="samples per peer, fewer where they take long")
    sizes.add_argument("--threads", type=_positive, default=blas_threads(), help="default: what NumPy's BLAS would use")
    sizes.add_argument("--out", type=Path, default=Path("bench/out"), help="folder of the JSON and the plots")
    forward = commands.add_parser("forward", parents=[sizes], help="exactness and time of the forward")
    backward = commands.add_parser("backward", parents=[sizes], help="exactness and time of forward and backward")
    for timed in (forward, backward):
        where = timed.add_mutually_exclusive_group()
        where.add_argument(
            "--gpu",
            action="store_true",
            help="on the GPU, 16384 tokens of width 2048, beside its peers; backward alone",
        )
        where.add_argument("--sweep", action="store_true", help="there, every tile of every engine beside its peers")
        timed.add_argument("--seconds", type=float, default=440, help="on the GPU: begin no size that would end later")
    commands.add_parser("memory", parents=[sizes], help="peak memory as the sequence grows")
    commands.add_parser("all", parents=[sizes], help="all of these (default)")
    ranks = commands.add_parser("ring", parents=[sizes], help="peak memory and time per rank, and a million tokens")
    ranks.add_argument("--ranks", type=_lengths, metavar="N,N,...", default=list(ring.RANKS), help="processes")
    gate = commands.add_parser("static", help="registers, spills and warnings of every kernel; exit status 1 for any")
    gate.add_argument("--all", action="store_true", help=f"for {', '.join(static.EVERY_ARCH)}")
    gate.add_argument("--nvrtc", action="append", default=[], metavar="PATH", help="one more libnvrtc; may be repeated")
    gate.add_argument("--problems", action="append", choices=list(static.PROBLEMS), help="may be repeated")
    gate.add_argument("--jobs", type=_positive, default=2, help="processes that compile")
    gate.add_argument("--out", type=Path, default=Path("bench/out"), help="folder of the JSON")
    host = commands.add_parser("overhead", help="host time of a call before its launch")
    host.add_argument("--out", type=Path, default=Path("bench/out"), help="folder of the JSON")
    begin = commands.add_parser("first", help="the first call of a process, cold and warm")
    begin.add_argument("--out", type=Path, default=Path("bench/out"), help="folder of the JSON")
    beside = commands.add_parser("compare", help="a run beside the one before; exit status 1 where ours is slower")
    beside.add_argument("new", type=Path, metavar="NEW.json")
    beside.add_argument(
        "--against", type=Path, metavar="OLD.json", help="default: what bench/results has, or last had, by that name"
    )
    beside.add_argument("--slower", type=float, default=compare.SLOWER, help="share of the speed that may be lost")
    written = commands.add_parser("costs", help="written costs beside a sweep, and the constants that fit best")
    written.add_argument("sweep", type=Path, metavar="SWEEP.json")
    bound = commands.add_parser("bounds", help="what bounds the fastest tiles of sweeps, by Nsight Compute")
    bound.add_argument("sweeps", type=Path, nargs="+", metavar="SWEEP.json")
    bound.add_argument("--seconds", type=float, default=400, help="begin nothing that would end later")
    bound.add_argument("--out", type=Path, default=Path("bench/out"), help="folder of the JSON")
    generate = commands.add_parser("tables", help="write the tables of docs/benchmarks.md from the stored results")
    generate.add_argument("--check", action="store_true", help="write nothing; exit status 1 when they differ")
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

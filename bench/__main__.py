"""python -m bench: measure accuracy, time and peak memory of cupy_flash and of all other installed implementations."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cupy_flash.device import blas_threads

from . import compare, decode, decode_gpu, first, gpu, mods, overhead, ring
from .arguments import add_out, lengths, positive
from .implementations import limit_threads
from .model import ITEMSIZE, Case
from .plots import plot
from .report import count, left_out, progress, provenance, show, tables
from .results import describe, write
from .run import memory_cases, time_cases
from .timing import measure_ceilings

SEQLENS = {
    "forward": (512, 1024, 2048, 4096),
    "backward": (512, 1024, 2048, 4096),
    "memory": (512, 1024, 2048, 4096, 8192),
}
# The commands of kernel_development/ and their help texts. That folder is imported only when one of them runs.
KERNEL_DEVELOPMENT = {
    "static": "registers, spills and compiler warnings of every kernel; exit status 1 for spills, warnings, stale rows",
    "predict": "predict the speed of the Hopper and Blackwell engines from their SASS, without a GPU",
    "latent": "count the bytes that a decode of values inside keys reads, and predict its speed",
    "conversions": "count the instructions that convert codes of quantised caches, and predict their decodes",
    "selected": "count the bytes that kernels move for lists of selected keys, and the instructions of the look-up",
    "packed": "model the order of blocks in packed batches, and how evenly they end",
    "sass": "compare the machine code of other implementations' kernels, a folder of cubins, with ours",
    "costs": "compare the cost models with a sweep and fit their constants",
    "bounds": "find the bottleneck of the fastest tiles of sweeps with Nsight Compute",
    "tables": "regenerate the tables of docs/benchmarks.md from bench/results",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` defaults to sys.argv[1:]."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in KERNEL_DEVELOPMENT:
        from .kernel_development import commands

        return commands.run(arguments)
    # The default command is "all".
    has_command = arguments[:1] and (not arguments[0].startswith("-") or arguments[0] in ("-h", "--help"))
    options = _parser().parse_args(arguments if has_command else ["all", *arguments])
    status: int = options.run(options, arguments)
    return status


def _time(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run forward or backward as the flags say: on the CPU, on the GPU, or with every tile on the GPU."""
    if options.sweep:
        from .kernel_development import commands

        return commands.time_tiles(options, arguments)
    return _on_gpu(options, arguments) if options.gpu else _measure(options, arguments)


def _measure(options: argparse.Namespace, arguments: list[str]) -> int:
    shape = _shape(options)
    if shape.heads % shape.kv_heads:
        options.error(f"--heads {shape.heads} is not a multiple of --kv-heads {shape.kv_heads}")
    sections = list(SEQLENS) if options.command == "all" else [options.command]
    result = describe(arguments, options.threads)
    device, version = result["device"], result["versions"]["cupy_flash"]
    print(f"cupy_flash {version} runs on the CPU: {device['cpu']}, {count(options.threads, 'thread')}.")
    if device["gpu"] is not None:
        print(f"The GPU, {device['gpu']}, is not used by this command: run python -m bench forward --gpu.")
    path = options.out / f"{options.command}.json"
    with limit_threads(options.threads):
        ceilings = measure_ceilings(shape.dtype)
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
            _show(section, result)
    print(f"\nAll samples: {path}")
    plots = [options.out / f"{section}.png" for section in sections]
    drawn = [str(file) for section, file in zip(sections, plots, strict=True) if plot(section, result, file)]
    print(f"Plot{'s' * (len(drawn) != 1)}: {', '.join(drawn) or 'none, as matplotlib is not installed'}")
    return 0


def _on_gpu(options: argparse.Namespace, arguments: list[str]) -> int:
    """Time our default tile (of mma for 16-bit dtypes, else of simt) and all other implementations on the GPU."""
    shape = _shape(options)
    regimes = [
        gpu.Regime(shape.dtype, shape.head_dim, seqlen, causal, options.command == "backward")
        for causal in ((False, True) if options.causal is None else (options.causal,))
        for seqlen in options.seqlens or SEQLENS[options.command]
    ]
    out = options.out / f"gpu-{options.command}.json"
    return gpu.run(regimes, gpu.measure_others, options.seconds, out, ["python -m bench", *arguments])


def _overhead(options: argparse.Namespace, arguments: list[str]) -> int:
    result = describe(arguments, 1) | {"overhead": overhead.measure(overhead.here())}
    write(result, options.out / "overhead.json")
    for table in overhead.tables(result["overhead"]):
        show(table)
    return 0


def _decode(options: argparse.Namespace, arguments: list[str]) -> int:
    module, name = (decode_gpu, "decode_gpu") if options.gpu else (decode, "decode")
    result = describe(arguments, 1) | {name: module.measure()}
    write(result, options.out / f"{name}.json")
    show(module.table(result[name]))
    for row in result[name] if options.gpu else ():
        for name, reason in row["left_out"].items():
            print(f"{row['regime']}: left out {name}: {reason}")
    return 0


def _mods(options: argparse.Namespace, arguments: list[str]) -> int:
    result = describe(arguments, 1)
    with limit_threads(1):
        result["mods"] = mods.measure("cuda" if options.gpu else "cpu")
    write(result, options.out / "mods.json")
    show(mods.table(result["mods"]))
    return 0


def _first(options: argparse.Namespace, arguments: list[str]) -> int:
    result = describe(arguments, 1)
    result["first"] = first.measure(result["device"]["gpu"] is not None)
    write(result, options.out / "first.json")
    show(first.table(result["first"]))
    return 0


def _compare(options: argparse.Namespace, _: list[str]) -> int:
    new = json.loads(options.new.read_text(encoding="utf-8"))
    old = json.loads(options.against.read_text(encoding="utf-8")) if options.against else compare.before(options.new)
    print(f"old: `{old['command']}`, {old['date']}\nnew: `{new['command']}`, {new['date']}")
    table, regressions = compare.compare(old, new, options.slower)
    show(table)
    for line in regressions:
        print(line)
    print(f"\n{len(table.rows)} pairs, {len(regressions)} of ours slower by more than {options.slower:.0%}")
    return 1 if regressions else 0


def _ring(options: argparse.Namespace, arguments: list[str]) -> int:
    shape = replace(_shape(options), causal=options.causal is not False)
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


def _show(section: str, result: dict[str, Any]) -> None:
    print(f"\n{provenance(section, result)}")
    for table in tables(section, result):
        show(table)
    for reason in left_out(section, result):
        print(f"not measured: {reason}")


def _shape(options: argparse.Namespace) -> Case:
    """Return the sizes of a case, given or default; its sequence length is 0 until `_cases` sets it."""
    kv_heads, head_dim = options.kv_heads or options.heads, options.head_dim or 64
    return Case(options.batch, options.heads, kv_heads, head_dim, 0, options.dtype or "float32", False)


def _cases(options: argparse.Namespace, section: str) -> list[Case]:
    causal_values = (False, True) if options.causal is None and section != "memory" else (bool(options.causal),)
    return [
        replace(_shape(options), seqlen=seqlen, causal=causal)
        for causal in causal_values
        for seqlen in options.seqlens or SEQLENS[section]
    ]


def _parser() -> argparse.ArgumentParser:
    """Return the parser of the commands; it lists the commands of kernel_development/, which parses their options."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace, list[str]], int], summary: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=summary)
        command.set_defaults(run=run, error=command.error)
        return command

    for name, summary in (
        ("forward", "accuracy and time of the forward"),
        ("backward", "accuracy and time of forward + backward"),
    ):
        timed = add(name, _time, summary)
        _add_sizes(timed)
        _add_gpu_modes(timed)
    _add_sizes(add("memory", _measure, "peak memory over the sequence length"))
    _add_sizes(add("all", _measure, "forward, backward and memory (default)"))
    ranks = add("ring", _ring, "ring attention: peak memory and time per rank; estimate for 2^20 tokens")
    _add_sizes(ranks)
    ranks.add_argument(
        "--ranks", type=lengths, metavar="N,N,...", default=list(ring.RANKS), help="numbers of processes"
    )
    add_out(add("overhead", _overhead, "host time of a call before the kernel launch"))
    step = add(
        "decode", _decode, "one query on a KV cache: on the CPU beside torch's SDPA, on a GPU beside reading the cache"
    )
    step.add_argument("--gpu", action="store_true", help="on this machine's GPU, with CuPy")
    add_out(step)
    functions = add(
        "mods", _mods, "score_mods and mask_mods beside the built-in options, on a GPU beside FlexAttention"
    )
    functions.add_argument("--gpu", action="store_true", help="on this machine's GPU, with torch tensors")
    add_out(functions)
    add_out(add("first", _first, "time of the first call of a process, with a cold and a warm kernel cache"))
    _add_comparison(add("compare", _compare, "compare a run with an earlier one; exit status 1 if ours is slower"))
    for name, summary in KERNEL_DEVELOPMENT.items():
        commands.add_parser(name, help=f"for developers of the kernels: {summary}")
    return parser


def _add_sizes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--batch", type=positive, default=1)
    command.add_argument("--heads", type=positive, default=8)
    command.add_argument("--kv-heads", type=positive, help="default: --heads")
    command.add_argument("--head-dim", type=positive, help="default: 64; --sweep: all")
    command.add_argument(
        "--seqlens", type=lengths, metavar="S,S,...", help="default: 512 to 4096; memory: to 8192; --sweep: to 16384"
    )
    command.add_argument("--dtype", choices=list(ITEMSIZE), help="default: float32; --sweep: bfloat16")
    command.add_argument("--causal", action=argparse.BooleanOptionalAction, help="default: both; memory: --no-causal")
    command.add_argument("--repeats", type=positive, default=15, help="samples; slow implementations take fewer")
    command.add_argument("--threads", type=positive, default=blas_threads(), help="default: the BLAS default")
    add_out(command, "the JSON and the plots")


def _add_gpu_modes(timed: argparse.ArgumentParser) -> None:
    mode = timed.add_mutually_exclusive_group()
    mode.add_argument(
        "--gpu",
        action="store_true",
        help="time ours and every other implementation on the GPU: 16384 tokens, hidden size 2048; backward alone",
    )
    mode.add_argument("--sweep", action="store_true", help="the same for every tile of every engine")
    timed.add_argument(
        "--seconds", type=float, default=440, help="GPU time budget; no regime starts that would exceed it"
    )


def _add_comparison(command: argparse.ArgumentParser) -> None:
    command.add_argument("new", type=Path, metavar="NEW.json")
    command.add_argument(
        "--against",
        type=Path,
        metavar="OLD.json",
        help="default: the file of that name in bench/results, or its committed version",
    )
    command.add_argument("--slower", type=float, default=compare.SLOWER, help="tolerated loss of speed, as a fraction")


if __name__ == "__main__":
    sys.exit(main())

"""Command line: python -m cupy_flash info | compile | memory | cache."""

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np

from . import __version__, ahead, cache, device, environment, memory, nvrtc, source
from .backends.kernels import compile_launch
from .features import FEATURES, NUMBER, Feature
from .problem import DTYPES, FP8

# Versions are read from package metadata, without an import.
LIBRARIES = ("ml_dtypes", "threadpoolctl", "torch", "jax", "cupy")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` defaults to the arguments of the process."""
    parser = argparse.ArgumentParser(prog="python -m cupy_flash", description="Exact attention for Python arrays.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("info", help="what is installed and which engines serve this machine").set_defaults(run=info)
    add_compile(commands)
    add_memory(commands)
    actions = commands.add_parser("cache", help="the folder of compiled kernels").add_subparsers(
        required=True, metavar="ACTION"
    )
    actions.add_parser("size", help="show its path and size").set_defaults(run=cache_size)
    actions.add_parser("clear", help="remove the compiled kernels, and nothing else").set_defaults(run=cache_clear)
    arguments = vars(parser.parse_args(argv))
    status: int = arguments.pop("run")(**arguments)
    return status


def add_compile(commands: Any) -> None:
    """Add the command compile, whose options are the arguments of cupy_flash.compile."""
    command = commands.add_parser("compile", help="fill the cache with the kernels of later calls; needs no GPU")
    command.set_defaults(run=compile_kernels)
    command.add_argument("--arch", choices=list(device.GPUS), help="default: that of this machine's GPU")
    command.add_argument("--dtype", choices=(*DTYPES, FP8), default="bfloat16", help="default: bfloat16")
    command.add_argument("--head-dim", type=int, required=True, metavar="D")
    command.add_argument("--head-dim-v", type=int, metavar="DV", help="default: D")
    command.add_argument("--no-backward", dest="backward", action="store_false", help="forward only")
    command.add_argument("--packed", action="store_true", help="for attention_varlen")
    command.add_argument(
        "--causal", nargs="?", const=True, default=False, choices=(True, "top_left"), metavar="top_left"
    )
    command.add_argument("--window", nargs=2, type=int, metavar=("LEFT", "RIGHT"), help="-1: unbounded")
    command.add_argument("--return-lse", action="store_true")
    for feature in FEATURES:
        if feature.constant:  # the others change no kernel
            add_feature(command, feature)


def add_feature(command: argparse.ArgumentParser, feature: Feature) -> None:
    """An option of attention: a number and an array count by presence, an array of several dtypes by its dtype."""
    flag = f"--{feature.name.replace('_', '-')}"
    if feature.kind == NUMBER:
        text = f"with {feature.name}, of any value"
        command.add_argument(flag, action="store_const", const=feature.example, default=feature.default, help=text)
    elif feature.element:
        command.add_argument(flag, nargs="?", const=True, choices=feature.dtypes, metavar="DTYPE")
    else:
        command.add_argument(flag, action="store_true")


def compile_kernels(arch: str | None, **arguments: Any) -> int:
    """Compile the kernels and print a line for each; errors go to stderr, with exit status 1."""
    try:
        on = ahead.device_for(arch)
        launches = ahead.launches(on, **arguments)
    except (RuntimeError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for number, launch in enumerate(launches, 1):
        begin = time.perf_counter()
        try:
            registers = compile_launch(launch, on.arch).resources[launch.function].registers
        except (ImportError, OSError, RuntimeError) as error:  # no NVRTC, no kernels_cu, or a compile error
            print(error, file=sys.stderr)
            return 1
        tile = f", tile {launch.tile[0]} x {launch.tile[1]}" if launch.tile else ""
        seconds = time.perf_counter() - begin
        print(f"{number}/{len(launches)} {launch.kernel}{tile}: {registers} registers, {seconds:.2f} s", flush=True)
    return cache_size()


def add_memory(commands: Any) -> None:
    """Add the command memory, whose options are the fields of cupy_flash.memory.Training."""
    command = commands.add_parser("memory", help="how much memory training takes, with standard and flash attention")
    command.set_defaults(run=estimate_memory)
    command.add_argument(
        "--model", required=True, help=f"{', '.join(memory.PRESETS)}, or the path of a transformers config.json"
    )
    command.add_argument("--batch", type=int, default=1, help="default: 1")
    command.add_argument("--seq", type=int, metavar="S", help="tokens of a sequence; default: the model's context")
    command.add_argument(
        "--checkpoint",
        choices=list(memory.KEPT),
        default="none",
        help="what the backward recomputes; default: none",
    )
    command.add_argument("--precision", choices=list(memory.ITEMSIZE), default="mixed", help="default: mixed")
    command.add_argument("--fsdp", type=int, default=1, metavar="GPUS", help="GPUs that shard parameters and optimizer")
    command.add_argument("--tensor", type=int, default=1, metavar="GPUS", help="GPUs of tensor parallelism")
    command.add_argument("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True)
    command.add_argument("--ring", type=int, default=1, metavar="GPUS", help="GPUs of ring attention")
    command.add_argument("--gb", type=float, metavar="N", help="also print what fits into N GB (10^9 bytes)")
    command.add_argument("--plot", type=Path, metavar="FILE", help="also plot to a PNG or SVG; needs matplotlib")


def estimate_memory(model: str, seq: int | None, gb: float | None, plot: Path | None, **arguments: Any) -> int:
    """Print the memory of one GPU by part, and what fits; errors go to stderr, with exit status 1."""
    limit = None if gb is None else gb * memory.GB
    try:
        sizes = memory.load(model)
        training = memory.Training(seqlen=sizes.context if seq is None else seq, **arguments)
        title = f"{model}, {sizes.parameters / 1e9:.3g}e9 parameters: {describe(training)}"
        rows = estimate_rows(sizes, training, limit)
        if plot is not None:
            memory.plot(sizes, training, plot, limit, title)
    except (ImportError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{title}, checkpoint {training.checkpoint}")
    for label, *cells in rows:
        print(f"{label:<42}", *(f"{cell:>10}" for cell in cells))
    return 0


def estimate_rows(
    sizes: memory.Transformer, training: memory.Training, limit: float | None
) -> list[tuple[str | int, ...]]:
    """Rows of a table with a column per attention; `limit` in bytes adds the largest batch and sequence that fit."""
    # Standard attention cannot run on a ring: it needs all scores on one GPU.
    attentions = memory.ATTENTIONS if training.ring == 1 else ("flash",)
    columns = [replace(training, attention=attention) for attention in attentions]
    parts = [memory.estimate(sizes, column) for column in columns]
    rows: list[tuple[str | int, ...]] = [("GB on one GPU", *attentions)]
    for part, label in (memory.PARTS | {"total": "total"}).items():
        rows.append((label, *(f"{getattr(column, part) / memory.GB:.2f}" for column in parts)))
    for letter in ("alpha", "beta"):
        values = [getattr(memory.coefficients(sizes, column), letter) for column in columns]
        rows.append((f"{letter} of a block", *(f"{value:.4g}" for value in values)))
    if limit is None:
        return rows
    for checkpoint in memory.KEPT:
        choices = [replace(column, checkpoint=checkpoint) for column in columns]
        batches = [memory.largest_batch(sizes, choice, limit) for choice in choices]
        lengths = [memory.longest_sequence(sizes, choice, limit) for choice in choices]
        rows.append((f"fits into {limit / memory.GB:g} GB, checkpoint {checkpoint}", *attentions))
        rows.append((f"largest batch of {training.seqlen} tokens", *batches))
        rows.append((f"longest sequence in a batch of {training.batch}", *lengths))
    return rows


def describe(training: memory.Training) -> str:
    """Batch, length, precision and parallelism of a training, in one line."""
    shares = [f"{name} {getattr(training, name)}" for name in ("fsdp", "tensor", "ring") if getattr(training, name) > 1]
    if training.tensor > 1 and not training.sequence_parallel:
        shares.append("no sequence parallelism")
    return ", ".join([f"b = {training.batch}", f"s = {training.seqlen}", training.precision, *shares])


def info() -> int:
    """Print the environment, as bug reports need it."""
    providers = packages_distributions()
    rows = {
        "cupy_flash": __version__,
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "NumPy": np.__version__,
        "BLAS": blas(),
        **{name: installed(providers.get(name, [])) for name in LIBRARIES},
        "import cupy": import_cupy(),
        "kernels_cu": kernels(),
        "NVRTC": compiler(),
        "cache": kernel_cache(),
        "CUPY_FLASH_BACKEND": environment.backend() or "not set",
        "CUPY_FLASH_CACHE_DIR": environment.cache_dir() or "not set",
        "engine cpu": "serves this machine: arrays in host memory",
        "engine simt": gpu_engine(),
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
    return 0


def blas() -> str:
    """The BLAS libraries that NumPy has loaded and their threads, as threadpoolctl sees them."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError as error:
        return f"unknown: {error}"
    libraries = [library for library in threadpool_info() if library["user_api"] == "blas"]
    if not libraries:
        return "none that threadpoolctl knows"
    return ", ".join(
        f"{library['internal_api']} {library['version']}, {library['num_threads']} threads" for library in libraries
    )


def installed(distributions: Sequence[str]) -> str:
    """Names and versions of the distributions that provide a library (CuPy has several)."""
    return ", ".join(f"{name} {version(name)}" for name in sorted(set(distributions))) or "not installed"


def import_cupy() -> str:
    """Whether `import cupy` works; it creates a cache folder, and may fail with any exception if it cannot."""
    try:
        import cupy

        return f"works, CUDA device usable: {'yes' if cupy.cuda.is_available() else 'no'}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"


def kernels() -> str:
    """Path of the CUDA sources and number of kernels."""
    try:
        folder = source.kernel_folder()
    except FileNotFoundError as error:
        return str(error)
    return f"{folder}, {len(list(folder.rglob('*.cu')))} kernels"


def compiler() -> str:
    """NVRTC's version and architectures, or why it is not available."""
    try:
        return f"{'.'.join(map(str, nvrtc.version()))}, for sm_{', '.join(map(str, nvrtc.architectures()))}"
    except ImportError as error:
        return str(error)


def gpu_engine() -> str:
    """The GPU that the engine simt can use, or why there is none."""
    try:
        return f"serves this machine: {ahead.device_for(None)}"
    except RuntimeError as error:
        return f'no GPU that CuPy can use ({error.__cause__}); backend="simulator" runs it, slowly, anywhere'


def kernel_cache() -> str:
    """Path and size of the kernel cache, or why it is not used."""
    try:
        folder = cache.location()
        if folder.exists():
            cache.check_safe(folder)
        count, size = cache.size(folder)
    except OSError as error:
        return f"not used: {error}"
    return f"{folder}, {count} entries, {size / 2**20:.1f} MiB"


def cache_size() -> int:
    """Print the path and size of the kernel cache."""
    print(kernel_cache())
    return 0


def cache_clear() -> int:
    """Remove all compiled kernels from the cache folder; running processes recompile what they still need."""
    try:
        cache.clear(cache.location())
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    print(kernel_cache())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

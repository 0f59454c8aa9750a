"""python -m cupy_flash compile: compile kernels into the cache before they are needed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..engines.launch import Launch
from ..gpu import ahead
from ..gpu.run_plan import compile_launch
from . import kernel_cache
from .problem_arguments import add_problem, size

if TYPE_CHECKING:
    from . import Commands


def add(commands: Commands) -> None:
    """Add the command compile, whose arguments are those of cupy_flash.compile."""
    command = commands.add_parser(
        "compile",
        help="fill the cache with the kernels of later calls; needs no GPU",
        description="Fill the cache with the kernels of later calls. With --arch no GPU is needed. Batch and lengths "
        "stay free: every tile that a plan may choose is compiled.",
    )
    add_problem(command)
    command.add_argument("--jobs", type=size, metavar="N", help="kernels to compile at once; default: one per core")
    command.set_defaults(run=run)


def run(arch: str | None, jobs: int | None, **arguments: Any) -> int:
    """Compile the kernels in parallel, and print a line when each is done."""
    on = ahead.device_for(arch)
    launches = ahead.launches(on, **arguments)
    # NVRTC compiles in several threads at once, and ctypes releases the GIL.
    pool = ThreadPoolExecutor(jobs or os.cpu_count())
    with progress(len(launches)) as report:
        try:
            tasks = [pool.submit(_compile, launch, on.arch) for launch in launches]
            for number, task in enumerate(as_completed(tasks), 1):
                report(f"{number}/{len(launches)} {task.result()}")
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, do not start the remaining kernels
    return kernel_cache.print_size()


def _compile(launch: Launch, target: str) -> str:
    """Compile one kernel and return a line with its tile, registers and compile time."""
    begin = time.perf_counter()
    registers = compile_launch(launch, target).resources[launch.function].registers
    tile = f", tile {launch.tile[0]} x {launch.tile[1]}" if launch.tile else ""
    return f"{launch.kernel}{tile}: {registers} registers, {time.perf_counter() - begin:.2f} s"


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """Yield a function that prints a line per kernel; on a terminal with rich, above a progress bar."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _print
        return
    if not sys.stdout.isatty():
        yield _print
        return
    columns = (TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, transient=True) as bar:
        task = bar.add_task("", total=total)

        def report(line: str) -> None:
            bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)

        yield report


def _print(line: str) -> None:
    print(line, flush=True)

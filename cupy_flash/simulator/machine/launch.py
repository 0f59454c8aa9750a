"""launch(): lay out a kernel's parameters and variables, and run its grid in sets of resident blocks."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from numbers import Integral
from typing import get_args

import numpy as np

from ...device import GPUS
from .. import named_checks
from ..asynchrony.barriers import Barriers
from ..asynchrony.bulk import BulkCopies
from ..asynchrony.clusters import ClusterBarrier
from ..asynchrony.copies import Copies, Order
from ..asynchrony.exits import Exits
from ..asynchrony.mbarriers import Mbarriers
from ..asynchrony.registers import REGISTERS_PER_SM, Registers
from ..asynchrony.tcgen05 import Tcgen05Queue
from ..asynchrony.tensor_memory import TensorMemory
from ..asynchrony.wgmma import WgmmaQueue
from ..counters import Counters
from ..errors import LaunchRefused, SimulationError, Unsupported
from ..instructions.access import access_bytes
from ..memory.checks import Checks, tracked_unit
from ..memory.grid_order import GridOrder
from ..memory.store import SHARED_START, Memory
from .context import Context
from .parameters import entry_point
from .parser import parse
from .program import Program
from .ptx import Function, Module, Variable
from .scheduler import MOST_BASIC_BLOCKS, Scheduler

# Lanes that are resident at once: enough to amortise NumPy's call overhead, few enough to fit a CPU cache.
RESIDENT_LANES = 1 << 13
_MAX_THREADS = 1024  # per block
_MAX_BLOCK = (1024, 1024, 64)
_MAX_GRID = ((1 << 31) - 1, 65535, 65535)


def launch(
    ptx: str | Module,
    kernel: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    parameters: bytes,
    *,
    memory: Memory,
    dynamic_shared: int = 0,
    unchecked: Collection[str] = (),
    order: Order = "late",
    seed: int = 0,
    resident_lanes: int = RESIDENT_LANES,
    most_basic_blocks: int = MOST_BASIC_BLOCKS,
) -> Counters:
    """Run a kernel over its whole grid, in place on the arrays of `memory`; return the counters.

    `parameters` is the parameter buffer as the driver takes it (see `pack`). `order` is when asynchronous instructions
    take effect: at issue ("early"), at their wait ("late"), or at random times ("random", which also shuffles the start
    order of blocks, the warp schedule, the order of atomics and the elected lane, and lets mbarrier waits time out;
    `seed` makes it reproducible). `resident_lanes` of the grid run at a time, in whole clusters; a run of more than
    `most_basic_blocks` counts as a deadlock. `unchecked` names the checks (named_checks.CHECKS) that are not made.
    Raises a subclass of SimulationError for what a GPU rejects, and for what the named checks find; ValueError for an
    unknown name of a check or order; TypeError for a grid or block that has not three sizes.
    """
    skipped = named_checks.names(unchecked)
    _check_arguments(grid, block, order)
    module = ptx if isinstance(ptx, Module) else parse(ptx)
    function = _function(module, kernel, parameters)
    program = _program(module, kernel)
    if ptx not in memory.variables:
        memory.variables[ptx] = _variable_addresses(module, memory)
    variables = memory.variables[ptx]
    counters = Counters(function)
    shared, static_bytes = _shared_layout(function, module)
    _check_limits(module, function, math.prod(block), static_bytes + dynamic_shared)
    _check_sizes(kernel, grid, block, dynamic_shared)
    blocks = grid[0] * grid[1] * grid[2]
    warps = -(-block[0] * block[1] * block[2] // 32)
    cluster = _cluster(function, grid)
    resident = max(1, min(blocks, resident_lanes // (32 * warps)) // cluster) * cluster
    unit = tracked_unit(function.instructions, access_bytes)
    starts = np.arange(blocks)
    if order == "random":  # CUDA does not define the order in which blocks start
        starts = np.random.default_rng([seed, blocks]).permutation(starts.reshape(-1, cluster)).reshape(-1)
    checked = skipped != named_checks.CHECKS.keys()
    order_of_grid = GridOrder(program, blocks, warps) if checked and program.synchronises else None
    for first in range(0, blocks, resident):
        ids = starts[first : first + resident]
        symbols = {**variables, **shared, **function.parameter_layout()[0]}
        context = Context(
            program, ids, grid, block, parameters, symbols, static_bytes + dynamic_shared, memory, counters
        )
        context.shared_symbols = shared
        context.specials["dynamic_smem_size"] = np.uint32(dynamic_shared)
        context.specials["total_smem_size"] = np.uint32(static_bytes + dynamic_shared)
        context.unchecked = skipped
        if checked:
            Checks(context, unit, order_of_grid)
        if order == "random":
            context.random = np.random.default_rng([seed, first])
            context.first_elected = int(np.random.default_rng(seed).integers(32))
        _add_asynchronous_units(context, order)
        scheduler = Scheduler(context, most_basic_blocks)
        scheduler.run()
        # Instructions, units and context refer to each other. Breaking these cycles frees their hundreds of megabytes
        # now instead of at the next garbage collection.
        scheduler.forget_instructions()
        context.forget_units()
    return counters


def _function(module: Module, kernel: str, parameters: bytes) -> Function:
    """Return the entry point of a kernel; raises SimulationError unless `parameters` has the size that it takes."""
    function = entry_point(module, kernel)
    _, size = function.parameter_layout()
    if len(parameters) != size:
        raise SimulationError(f"{kernel} takes {size} bytes of parameters, {len(parameters)} were given")
    return function


def _cluster(function: Function, grid: tuple[int, int, int]) -> int:
    """Return the number of blocks of a cluster, which lie along x and fill the grid."""
    cluster = function.cluster[0]
    if function.cluster[1:] != (1, 1) or grid[0] % cluster:
        raise SimulationError(
            f"clusters of {function.cluster} blocks do not fill a grid of {grid}, or do not extend along x only"
        )
    return cluster


def _add_asynchronous_units(context: Context, order: Order) -> None:
    """Register each unit with the context, after the units that it uses."""
    Barriers(context)
    ClusterBarrier(context)
    Exits(context)
    Mbarriers(context)
    Registers(context)
    Copies(context, order)
    BulkCopies(context, order)
    WgmmaQueue(context, order)
    TensorMemory(context)
    Tcgen05Queue(context, order)


@functools.lru_cache(maxsize=64)
def _program(module: Module, name: str) -> Program:
    return Program(module.kernels[name])


def _check_arguments(grid: object, block: object, order: object) -> None:
    """Raise ValueError for an unknown order, TypeError for a grid or block that has not three sizes."""
    if order not in get_args(Order):
        raise ValueError(f"order must be one of {', '.join(get_args(Order))}, not {order!r}")
    for name, sizes in (("grid", grid), ("block", block)):
        if not isinstance(sizes, tuple) or len(sizes) != 3 or not all(isinstance(size, Integral) for size in sizes):
            raise TypeError(f"{name} must be a tuple of three sizes (x, y, z), not {sizes!r}")


def _check_sizes(kernel: str, grid: tuple[int, ...], block: tuple[int, ...], dynamic_shared: int) -> None:
    """Raise LaunchRefused for a size that is out of range on every GPU, as is an empty grid or block."""
    for name, sizes, most in (("grid", grid, _MAX_GRID), ("block", block, _MAX_BLOCK)):
        if not all(1 <= size <= limit for size, limit in zip(sizes, most, strict=True)):
            raise LaunchRefused(f"the {name} of {kernel} is {sizes}: each size is at least 1, and at most {most}")
    if dynamic_shared < 0:
        raise LaunchRefused(f"the dynamic shared memory of {kernel} is {dynamic_shared} bytes")


def _check_limits(module: Module, function: Function, threads: int, shared_bytes: int) -> None:
    """Raise LaunchRefused if a block exceeds the target's limits of threads, registers or shared memory."""
    # The targets sm_120a (architecture-specific) and sm_120f (family-specific) have the limits of sm_120.
    gpu = module.target if module.target in GPUS else module.target.rstrip("af")
    if gpu not in GPUS:
        raise Unsupported(f"the limits of target {module.target!r} are not known, only those of {', '.join(GPUS)}")
    shared_kib, _ = GPUS[gpu]
    reasons = [
        f"{need} {resource} ({bound})"
        for need, resource, limit, bound in (
            (threads, "threads", _MAX_THREADS, f"a block has at most {_MAX_THREADS}"),
            (threads, "threads", function.max_threads or threads, f".maxntid is {function.max_threads}"),
            (threads * function.max_registers, "registers", REGISTERS_PER_SM, f"an SM has {REGISTERS_PER_SM}"),
            (shared_bytes, "bytes of shared memory", shared_kib << 10, f"{module.target} has {shared_kib << 10}"),
        )
        if need > limit
    ]
    if reasons:
        raise LaunchRefused(f"a block of {function.name} needs {'; '.join(reasons)}")


def _variable_addresses(module: Module, memory: Memory) -> dict[str, int]:
    """Allocate the module's .global and .const variables; return their addresses."""
    return {
        variable.name: _allocate(variable, memory, f"variable {variable.name}")
        for variable in module.variables.values()
        if variable.space in ("global", "const")
    }


def _allocate(variable: Variable, memory: Memory, name: str) -> int:
    data = np.frombuffer((variable.data or bytes(variable.size)).ljust(variable.size, b"\0"), np.uint8).copy()
    return memory.add(data, name, writable=variable.space == "global")


def _shared_layout(function: Function, module: Module) -> tuple[dict[str, int], int]:
    """Return (address of each shared variable, static bytes); dynamic memory starts after the static variables."""
    static = [v for v in (*function.variables.values(), *module.variables.values()) if v.space == "shared"]
    addresses, end = {}, 0
    for variable in sorted(static, key=lambda v: v.size == 0):
        end = -(-end // variable.align) * variable.align
        addresses[variable.name] = SHARED_START + end
        end += variable.size
    return addresses, end

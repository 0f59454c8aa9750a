"""Launch a kernel: its parameters, its variables, its grid cut into blocks that run side by side."""

from __future__ import annotations

import functools
import math

import numpy as np

from ...device import GPUS
from .access import access_bytes
from .bulk import BulkCopies
from .checks import Checks, tracked_unit
from .clusters import ClusterBarrier
from .copies import Copies, Order
from .counters import Counters
from .errors import LaunchRefused, SimulationError
from .exits import Exits
from .grid_order import GridOrder
from .lanes import Context
from .mbarriers import Mbarriers
from .memory import SHARED_START, Memory
from .parser import parse
from .program import Program
from .ptx import Function, Module, Variable
from .registers import OF_A_PROCESSOR, Registers
from .scheduler import Scheduler
from .wgmma import Products

# Lanes that run side by side: enough to pay for NumPy's calls, few enough for a processor's cache.
_RESIDENT_LANES = 1 << 13
_MOST_THREADS = 1024  # of a block


def launch(
    ptx: str | Module,
    kernel: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    parameters: bytes,
    *,
    memory: Memory,
    dynamic_shared: int = 0,
    checks: bool = True,
    order: Order = "late",
    seed: int = 0,
) -> Counters:
    """Run a kernel over its whole grid, in place on the arrays of `memory`; return what it did.

    `parameters` is the parameter block as the driver takes it. `order`: asynchronous instructions take effect at once,
    at their wait, or at random times; `random` also shuffles in which order blocks start, whose turn it is, the order
    of atomics and who is elected, lets waits for mbarriers time out, and `seed` repeats it.
    Raises SimulationError, by its subclass, for whatever a GPU would not stand, or would let pass and get wrong.
    """
    module = parse(ptx) if isinstance(ptx, str) else ptx
    if kernel not in module.kernels:
        raise SimulationError(f"no kernel {kernel!r} in the PTX, only {sorted(module.kernels)}")
    function = module.kernels[kernel]
    _, size = function.parameter_layout()
    if len(parameters) != size:
        raise SimulationError(f"{kernel} takes {size} bytes of parameters, {len(parameters)} were given")
    program = _program(module, kernel)
    variables = _memory_with_globals(module, memory)
    counters = Counters(function)
    shared, static_bytes = _shared_layout(function, module)
    _check_limits(module, function, math.prod(block), static_bytes + dynamic_shared)
    blocks = grid[0] * grid[1] * grid[2]
    warps = -(-block[0] * block[1] * block[2] // 32)
    cluster = function.cluster[0]
    if function.cluster[1:] != (1, 1) or grid[0] % cluster:
        raise SimulationError(f"clusters of {function.cluster} blocks do not fill a grid of {grid}, or not along x")
    resident = max(1, min(blocks, _RESIDENT_LANES // (32 * warps)) // cluster) * cluster
    unit = tracked_unit(function.instructions, access_bytes)
    starts = np.arange(blocks)
    if order == "random":  # CUDA promises no order
        starts = np.random.default_rng([seed, blocks]).permutation(starts.reshape(-1, cluster)).reshape(-1)
    order_of_grid = GridOrder(program, blocks, warps) if checks and program.synchronises else None
    for first in range(0, blocks, resident):
        ids = starts[first : first + resident]
        symbols = {**variables, **shared, **function.parameter_layout()[0]}
        context = Context(
            program, ids, grid, block, parameters, symbols, static_bytes + dynamic_shared, memory, counters
        )
        context.shared_symbols = shared
        context.specials["dynamic_smem_size"] = np.uint32(dynamic_shared)
        context.specials["total_smem_size"] = np.uint32(static_bytes + dynamic_shared)
        if checks:
            context.checks = Checks(context, unit, order_of_grid)
        if order == "random":
            context.random = np.random.default_rng([seed, first])
            context.elected = int(np.random.default_rng(seed).integers(32))
        context.copies = Copies(context, order)
        context.mbarriers = Mbarriers(context)
        context.cluster_barrier = ClusterBarrier(context)
        context.registers = Registers(context)
        context.exits = Exits(context)
        context.bulk = BulkCopies(context, order)
        context.products = Products(context, order)
        Scheduler(context).run()
    return counters


@functools.lru_cache(maxsize=64)
def _program(module: Module, name: str) -> Program:
    return Program(module.kernels[name])


def _check_limits(module: Module, function: Function, threads: int, shared_bytes: int) -> None:
    """Raise LaunchRefused for more threads, registers or shared memory than the target's blocks have."""
    shared_kib, _ = GPUS[module.target]
    reasons = [
        f"{asked} {what}, of which {there_are}"
        for asked, what, most, there_are in (
            (threads, "threads", _MOST_THREADS, f"a block has {_MOST_THREADS}"),
            (threads, "threads", function.max_threads or threads, f".maxntid allows {function.max_threads}"),
            (threads * function.max_registers, "registers", OF_A_PROCESSOR, f"a processor has {OF_A_PROCESSOR}"),
            (shared_bytes, "bytes of shared memory", shared_kib << 10, f"{module.target} has {shared_kib << 10}"),
        )
        if asked > most
    ]
    if reasons:
        raise LaunchRefused(f"a block of {function.name} asks for {'; '.join(reasons)}")


def _memory_with_globals(module: Module, memory: Memory) -> dict[str, int]:
    """Addresses of the module's .global and .const variables, allocated at their first use in this memory."""
    found = {}
    for variable in module.variables.values():
        if variable.space in ("global", "const"):
            name = f"variable {variable.name}"
            known = [a for a in memory.allocations if a.name == name]
            found[variable.name] = known[0].start if known else _allocate(variable, memory, name)
    return found


def _allocate(variable: Variable, memory: Memory, name: str) -> int:
    data = np.frombuffer((variable.data or bytes(variable.size)).ljust(variable.size, b"\0"), np.uint8).copy()
    return memory.add(data, name, writable=variable.space == "global")


def _shared_layout(function: Function, module: Module) -> tuple[dict[str, int], int]:
    """(address of each shared variable, bytes of the static ones): dynamic shared memory starts behind the static."""
    static = [v for v in (*function.variables.values(), *module.variables.values()) if v.space == "shared"]
    found, end = {}, 0
    for variable in sorted(static, key=lambda v: v.size == 0):
        end = -(-end // variable.align) * variable.align
        found[variable.name] = SHARED_START + end
        end += variable.size
    return found, end

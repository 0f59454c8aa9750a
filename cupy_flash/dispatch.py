"""Dispatch of all computations to the backends cpu, cuda and simulator.

These are forward, backward, JVP, double backward, merge, append and block classes.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from . import device, environment
from .arrays import Array
from .cpu import partials
from .device import Device
from .engines import MODULES
from .engines.launch import Launch
from .plan.plan import Plan, last_of_bucket, plan
from .problem.records import JVP, Gradients, Operands, Problem, SecondGradients, Statistics, UnsupportedError

if TYPE_CHECKING:
    from types import ModuleType

    from .explanation import Tiles
    from .mods.tiles import TileCounts
    from .problem.indexer import Indexer, IndexerOperands
    from .problem.weights import Asked, WeightsGradients

# Appended to the error if CuPy is missing.
EXTRA = '; install the extra of your CUDA version: python -m pip install "cupy-flash[cuda13]" (or cuda12)'


def device_of(problem: Problem | Indexer) -> Device:
    """Return the device of the requested backend, by default the device of the problem's arrays.

    Raises UnsupportedError for a GPU that CuPy cannot use.
    """
    backend, _, arch = (problem.backend or problem.device).partition(":")
    if backend == "simulator":
        return device.named(arch or device.SIMULATED)
    if backend == "cpu" or problem.device == "cpu":  # `plan` refuses a backend that does not match the arrays
        return device.cpu()
    return _gpu(problem.device)


def _gpu(name: str) -> Device:
    """Return the GPU with the name "cuda:<index>"; UnsupportedError if CuPy cannot use it."""
    try:
        return device.gpu(int(name.partition(":")[2]))
    except (ImportError, OSError, RuntimeError) as error:  # no CuPy; no folder for its cache; no driver or no such GPU
        raise UnsupportedError(
            f"the arrays are on {name}, and arrays never change device; CuPy, which launches the kernels, "
            f"cannot use it: {error}{EXTRA if isinstance(error, ImportError) else ''}"
        ) from error


def plan_for(problem: Problem, since: Device | None = None) -> Plan:
    """Return the plan of a problem on its device; `since` is the device of the call that it continues, if any.

    A backward continues its forward without torch's operators if torch was imported only after it.
    """
    on = device_of(problem)
    if since is not None and since.torch_flash:
        on = on._replace(torch_flash=since.torch_flash)
    return plan(problem, on)


def forward(problem: Problem, operands: Operands) -> tuple[Array, ...]:
    """Plan and run a forward problem; returns (out, lse), followed by the statistics of the problem."""
    if _RECORD is not None:
        _record(problem, operands, _RECORD)
    return run_forward(_fitted(plan_for(problem), operands), operands)


def backward(problem: Problem, operands: Operands, since: Device | None = None) -> Gradients[Array]:
    """Plan and run a backward problem; returns the gradients as Arrays, None where not requested.

    `since` is the device of the forward as it was then, see `plan_for`.
    """
    if _RECORD is not None:
        _record(problem, operands, _RECORD)
    return run_backward(_fitted(plan_for(problem, since), operands), operands)


_RECORD = environment.record_file()  # read once, so that calls of a process that records nothing skip the check
_recorded: set[Problem] = set()


def is_recording() -> bool:
    """Return whether calls are recorded."""
    return _RECORD is not None


def _record(problem: Problem, operands: Operands, file: str) -> None:
    """Append a call to the file of CUPY_FLASH_RECORD, unless this process has recorded a call of the same bucket.

    If the file cannot be written, it warns and stops recording, and the call itself continues.
    """
    global _RECORD
    from .problem.recorded_call import append_line, recorded_line

    bucket = last_of_bucket(problem)
    if bucket not in _recorded:
        _recorded.add(bucket)
        try:
            _RECORD = os.path.abspath(file)  # absolute, so that a later chdir has no effect
            append_line(recorded_line(problem, operands), _RECORD)
        except OSError as error:
            _RECORD = None
            warnings.warn(
                f"CUPY_FLASH_RECORD={file} cannot be written, so this process records no calls: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


def jvp(problem: Problem, operands: Operands) -> tuple[Array, Array, Array, Array]:
    """Plan and run a JVP; returns (out, lse, tout, tlse)."""
    if _RECORD is not None:
        _record(problem, operands, _RECORD)
    chosen = _fitted(plan_for(problem), operands)
    results: tuple[Array, Array, Array, Array] = _derivatives(chosen).jvp(chosen, operands)
    return results


def double_backward(problem: Problem, operands: Operands) -> SecondGradients[Array]:
    """Plan and run a double backward; returns the gradients as Arrays, None where not requested.

    The JVP in the direction of the cotangents comes first: its tout is ddout, its tlse ddlse.
    """
    if _RECORD is not None:
        _record(problem, operands, _RECORD)
    _, _, tout, tlse = jvp(along_cotangents(problem), operands)
    chosen, operands = _fitted(plan_for(problem), operands), operands._replace(tout=tout, tlse=tlse)
    gradients: Gradients[Array] = _derivatives(chosen).double_backward(chosen, operands)
    return SecondGradients(*gradients, ddout=tout, ddlse=tlse)


def weights(problem: Problem, operands: Operands, asked: Asked) -> tuple[Array, ...]:
    """Plan and run a call that returns probabilities; returns its results."""
    chosen = _fitted(plan_for(problem), operands)
    if chosen.device.backend in LAUNCHERS:
        launched: tuple[Array, ...] = launcher(chosen.device.backend).weights(chosen, operands, asked)
        return launched
    results: tuple[Array, ...] = _weights(chosen).forward(chosen, operands, asked)
    return results


def weights_backward(problem: Problem, operands: Operands, asked: Asked) -> WeightsGradients:
    """Plan and run the backward of a call that returns probabilities; returns the gradients as Arrays."""
    chosen = _fitted(plan_for(problem), operands)
    if chosen.device.backend in LAUNCHERS:
        launched: WeightsGradients = launcher(chosen.device.backend).weights_backward(chosen, operands, asked)
        return launched
    gradients: WeightsGradients = _weights(chosen).backward(chosen, operands, asked)
    return gradients


def select_keys(indexer: Indexer, operands: IndexerOperands) -> Array:
    """Return the lists of keys that an indexer chooses."""
    (lists,) = _of_indexer("select", indexer, operands)
    return lists


def selection_loss(indexer: Indexer, operands: IndexerOperands) -> Array:
    """Return the loss of an indexer."""
    (loss,) = _of_indexer("loss", indexer, operands)
    return loss


def selection_loss_gradients(indexer: Indexer, operands: IndexerOperands) -> tuple[Array, Array, Array, Array]:
    """Return the loss of an indexer and its gradients by q, weights and k."""
    loss, dq, dweights, dk = _of_indexer("gradients", indexer, operands)
    return loss, dq, dweights, dk


def _of_indexer(function: str, indexer: Indexer, operands: IndexerOperands) -> tuple[Array, ...]:
    """Return the results of a function of the indexer, which its modules for CPUs and for GPUs both have."""
    if indexer.backend.startswith("cpu"):
        results = getattr(_imported(INDEXER), function)(indexer, operands)
    else:
        on = device_of(indexer)
        results = launcher(on.backend).indexer(function, indexer, operands, on)
    return tuple(results) if function == "gradients" else (results,)


def load_indexer(function: str, indexer: Indexer, operands: IndexerOperands) -> None:
    """Compile and load the kernels of a function of the indexer on the current GPU."""
    from .engines.indexer import requested  # imported by the first call of an indexer

    on = device_of(indexer)
    load(requested(function, indexer, operands, on)[0], on)


def along_cotangents(problem: Problem) -> Problem:
    """Return the JVP with which a double backward begins, in the direction of its cotangents."""
    captured_gradient = (False,) * len(problem.captured_gradient)
    return problem._replace(backward=False, derivative=JVP, bias_gradient=False, captured_gradient=captured_gradient)


def _fitted(chosen: Plan, operands: Operands) -> Plan:
    """Return the plan; on the CPU its tile suits the pairs that the mask_mod, with its captured arrays, leaves."""
    if not chosen.problem.mask_mod or _code(chosen) != ATTENTION:
        return chosen
    from .cpu import attention as cpu

    return cpu.fitted(chosen, operands)


def tile_counts(problem: Problem, operands: Operands) -> tuple[Plan, TileCounts | None]:
    """Return the plan as it runs, and how many of its tiles are empty, full and cut under the mask_mod.

    The counts are None if lengths or captured arrays are on a GPU, or if there are too many tiles to count.
    """
    from .cpu import attention as cpu

    chosen = _fitted(plan_for(problem), operands)
    arrays = (*operands.captured, operands.q_lengths, operands.kv_lengths)
    on_host = all(array is None or array.device == "cpu" for array in arrays)
    return chosen, cpu.tile_counts(chosen, operands) if on_host else None


def tiles(problem: Problem, operands: Operands) -> Tiles:
    """Return the classes of the tiles of the first sequence and head; lengths and captured arrays are copied to it."""
    from .cpu import attention as cpu

    chosen = _fitted(plan_for(problem), operands)
    classes = cpu.tile_classes(chosen, operands)
    return classes, problem.q_len, problem.kv_len, chosen.block_q, chosen.block_kv


def run_forward(chosen: Plan, operands: Operands) -> tuple[Array, ...]:
    """Run a forward with a given plan; returns (out, lse), followed by the statistics of the problem."""
    results: tuple[Array, ...] = _module(chosen).forward(chosen, operands)
    return results


def run_backward(chosen: Plan, operands: Operands) -> Gradients[Array]:
    """Run a backward with a given plan; returns the gradients."""
    gradients: Gradients[Array] = _module(chosen).backward(chosen, operands)
    return gradients


def merge(
    parts: tuple[Array, Array, Array, Array],
    layout: str,
    statistics: tuple[Statistics[Array], Statistics[Array]],
    key_offset_b: int,
) -> tuple[Array, ...]:
    """Merge parts = (out_a, lse_a, out_b, lse_b) into (out, lse), on their device; the parts' statistics follow."""
    if parts[0].device == "cpu":
        return (
            *partials.merge(parts, layout),
            *partials.merge_statistics((parts[1], parts[3]), statistics, key_offset_b),
        )
    card = _gpu(parts[0].device)
    from .gpu import cuda

    return cuda.merge(parts, layout, card.arch, statistics, key_offset_b)


def block_classes(problem: Problem, operands: Operands, block: int) -> Array:
    """Return the exact classes of a mask_mod's blocks, uint8 (B, query blocks, H, key blocks), computed on a GPU."""
    card = _gpu(problem.device)
    from .gpu import cuda

    return cuda.block_classes(problem, operands, block, card.arch)


def load(launches: Iterable[Launch], on: Device) -> None:
    """Compile and load the kernels of these launches on the current GPU."""
    from .gpu import cuda

    for launch in launches:
        cuda.load(launch, on.arch)


def append(problem: Problem, operands: Operands) -> None:
    """Append rows of k and v to a KV cache."""
    chosen = plan_for(problem)
    _module(chosen).append(chosen, operands)


def explain(chosen: Plan, operands: Operands) -> str:
    """Return the text of a plan; if the CPU engine computes in torch, with torch's tiles and a line that says so."""
    if _code(chosen) == FLASH:
        return f"{chosen.explain()}{_imported(FLASH).lines(chosen.problem)}"
    if _code(chosen) != ATTENTION:
        return chosen.explain()
    products = _imported(".cpu.blas").products_of(chosen.problem, operands)
    return f"{products.planned(chosen).explain()}{products.line}"


SELECTED = ".cpu.selected"  # the module of the CPU engine for calls with `selected`
SELECTED_WEIGHTS = ".cpu.selected_weights"
INDEXER = ".cpu.indexer"
ATTENTION = ".cpu.attention"  # the CPU engine that chooses its tile, and NumPy or torch, at the call
FLASH = ".cpu.aten"  # the module on the CPU that computes some calls again, by their contents
REPEATED = (FLASH, ".cpu.decode")  # the modules on the CPU that repeat kept calls
# {backend that runs kernels: the module that launches them}; on the CPU each engine has its own module.
LAUNCHERS = {"cuda": ".gpu.cuda", "simulator": ".simulator.run"}


def launcher(backend: str) -> ModuleType:
    """Return the module that launches the kernels of a backend."""
    return _imported(LAUNCHERS[backend])


def repeater(chosen: Plan) -> ModuleType:
    """Return the module that repeats kept calls of a plan: of launches, or on the CPU the engine's."""
    return _module(chosen)


def repeated_on_cpu(chosen: Plan, operands: Operands) -> Any:
    """Return what `repeater` needs of a call on the CPU, or None if later calls may need more."""
    return _module(chosen).kept(chosen, operands) if _code(chosen) in REPEATED else None


SELECTED_DERIVATIVES = ".cpu.selected_derivatives"
# {backend: module of JVP and double backward}
DERIVATIVES = {"cpu": ".cpu.derivatives", **LAUNCHERS}


def _derivatives(chosen: Plan) -> ModuleType:
    """Return the backend's module of derivatives, imported by the first call that needs it."""
    backend = chosen.device.backend
    lists = chosen.problem.selected is not None and backend not in LAUNCHERS
    return _imported(SELECTED_DERIVATIVES if lists else DERIVATIVES[backend])


def _weights(chosen: Plan) -> ModuleType:
    """Return the module in which an engine computes attention weights."""
    if chosen.problem.selected is not None:
        return _imported(SELECTED_WEIGHTS)
    return _imported(f".{MODULES[chosen.engine].WEIGHTS}")


def _module(chosen: Plan) -> ModuleType:
    """Return the module that runs a plan, imported lazily: its dependencies may be slow to import or not installed."""
    return _imported(_code(chosen))


def _code(chosen: Plan) -> str:
    """Return the name of the module that runs a plan."""
    backend = chosen.device.backend
    if backend in LAUNCHERS:
        return LAUNCHERS[backend]
    code = f".{MODULES[chosen.engine].KERNELS}"
    return SELECTED if code == ATTENTION and chosen.problem.selected is not None else code


@cache
def _imported(name: str) -> ModuleType:
    """Return a module, cached because `import_module` takes microseconds even if the module has been imported."""
    return importlib.import_module(name, __package__)

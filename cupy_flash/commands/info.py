"""python -m cupy_flash info: print what is installed, and which engines serve this machine."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version
from typing import TYPE_CHECKING

import numpy as np

from .. import __version__, device, environment
from ..device import SIMULATED, Device
from ..engines import MODULES
from ..explanation import wrapped
from ..gpu import ahead
from ..jit import nvrtc, source
from ..plan import measurements
from ..plan.refusals import engine_refusals, unproved
from . import kernel_cache

if TYPE_CHECKING:
    from . import Commands

# Their versions come from package metadata, so that none of them is imported.
LIBRARIES = ("ml_dtypes", "threadpoolctl", "torch", "jax", "cupy")


def add(commands: Commands) -> None:
    """Add the command info."""
    text = "what is installed and which engines serve this machine"
    commands.add_parser("info", help=text).set_defaults(run=run)


def run() -> int:
    """Print the environment for a bug report; return 0."""
    providers = packages_distributions()
    rows = {
        "cupy_flash": __version__,
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "NumPy": np.__version__,
        "BLAS": device.blas(),
        **{name: installed(providers.get(name, [])) for name in LIBRARIES},
        "import cupy": import_cupy(),
        "GPU": gpu(),
        "kernels_cu": kernels(),
        "NVRTC": compiler(),
        "cache": kernel_cache.describe(),
        "evidence": "; ".join(measurements.summary()) or f"none: {measurements.CHECK_COMMAND}",
        "CUPY_FLASH_BACKEND": environment.backend() or "not set",
        "CUPY_FLASH_CACHE_DIR": environment.cache_dir() or "not set",
        "CUPY_FLASH_EVIDENCE_DIR": environment.evidence_dir() or "not set",
        "CUPY_FLASH_RECORD": environment.record_file() or "not set",
        **{f"engine {name}": text for name, text in engines().items()},
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        print(wrapped(f"{name:<{width}}  {value}", width + 2))
    return 0


def installed(distributions: Sequence[str]) -> str:
    """Return the names and versions of the distributions that provide a library (CuPy has several)."""
    return ", ".join(f"{name} {version(name)}" for name in sorted(set(distributions))) or "not installed"


def import_cupy() -> str:
    """Return a line on whether `import cupy` works; it may raise anything if CuPy cannot create its cache folder."""
    try:
        import cupy

        return f"works, CUDA device usable: {'yes' if cupy.cuda.is_available() else 'no'}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"


def kernels() -> str:
    """Return the path of the CUDA sources and the number of kernels."""
    try:
        folder = source.kernel_folder()
    except FileNotFoundError as error:
        return str(error)
    return f"{folder}, {len(list(folder.rglob('*.cu')))} kernels"


def compiler() -> str:
    """Return NVRTC's version and architectures, or the reason why it is not available."""
    try:
        return f"{'.'.join(map(str, nvrtc.version()))}, for sm_{', '.join(map(str, nvrtc.architectures()))}"
    except ImportError as error:
        return str(error)


def gpu() -> str:
    """Return the GPU of this machine, or why CuPy can use none."""
    try:
        return str(ahead.device_for(None))
    except RuntimeError as error:
        return f"none that CuPy can use: {error.__cause__}"


def engines() -> dict[str, str]:
    """Return {engine: a line that says that it serves this machine, or why not, and which backend can run it}."""
    try:
        card = ahead.device_for(None)
    except RuntimeError:  # `gpu` has the reason
        card = None
    texts = {}
    for name, engine in MODULES.items():
        if "cuda" not in engine.BACKENDS:
            texts[name] = "serves this machine: arrays in host memory"
        elif card is None:
            texts[name] = f"no GPU; {simulated(name)} runs it, slowly, anywhere"
        else:
            reasons = refusals(name, card)
            texts[name] = f"not chosen on {card}: {'; '.join(reasons)}" if reasons else f"serves this machine: {card}"
    return texts


def simulated(engine: str) -> str:
    """Return the arguments with which a call runs an engine in the simulator."""
    arch = next(arch for arch in (SIMULATED, *device.GPUS) if not refusals(engine, device.named(arch), engine))
    backend = f'backend="{"simulator" if arch == SIMULATED else f"simulator:{arch}"}"'
    return f'{backend}, engine="{engine}"' if refusals(engine, device.named(arch)) else backend


def refusals(engine: str, on: Device, requested: str | None = None) -> list[str]:
    """Return the reasons why an engine would not serve a simple problem, with engine=`requested`, on a device."""
    problem = ahead.example(engine, requested)
    return [*engine_refusals(engine, problem, on), *unproved(engine, problem, on)]

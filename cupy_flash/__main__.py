"""python -m cupy_flash: the command line."""

import argparse
import platform
from collections.abc import Sequence
from importlib.metadata import packages_distributions, version

import numpy as np

from . import __version__, environment, source

# Looked up in the metadata of what is installed, never imported.
LIBRARIES = ("ml_dtypes", "threadpoolctl", "torch", "jax", "cupy")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status; `argv` defaults to the arguments of the process."""
    parser = argparse.ArgumentParser(prog="python -m cupy_flash", description="Exact attention for Python arrays.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("info", help="what is installed and which engines serve this machine").set_defaults(run=info)
    return parser.parse_args(argv).run()


def info() -> int:
    """Prints what a report of a problem should hold."""
    providers = packages_distributions()
    rows = {
        "cupy_flash": __version__,
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "NumPy": np.__version__,
        "BLAS": blas(),
        **{name: installed(providers.get(name, [])) for name in LIBRARIES},
        "import cupy": import_cupy(),
        "kernels_cu": kernels(),
        "CUPY_FLASH_BACKEND": environment.backend() or "not set",
        "engine cpu": "serves this machine: arrays in host memory",
        "engines on CUDA": "none: CUDA engines are not part of this version; arrays on a GPU raise UnsupportedError",
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
    return ", ".join(f"{it['internal_api']} {it['version']}, {it['num_threads']} threads" for it in libraries)


def installed(distributions: Sequence[str]) -> str:
    """The distributions that provide a library and their versions; cupy alone comes under several names."""
    return ", ".join(f"{name} {version(name)}" for name in sorted(set(distributions))) or "not installed"


def import_cupy() -> str:
    """Whether `import cupy` works here: it makes a cache folder, and where it cannot it fails with any exception."""
    try:
        import cupy

        return f"works, CUDA device usable: {'yes' if cupy.cuda.is_available() else 'no'}"
    except Exception as error:
        return f"fails: {type(error).__name__}: {error}"


def kernels() -> str:
    """Where the CUDA source is, and how much of it there is."""
    try:
        folder = source.kernel_folder()
    except FileNotFoundError as error:
        return str(error)
    return f"{folder}, {len(list(folder.rglob('*.cu')))} kernels"


if __name__ == "__main__":
    raise SystemExit(main())

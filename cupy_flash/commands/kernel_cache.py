"""python -m cupy_flash cache: the folder of compiled kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..jit import kernel_cache

if TYPE_CHECKING:
    from . import Commands


def add(commands: Commands) -> None:
    """Add the command cache with its actions."""
    actions = commands.add_parser("cache", help="the folder of compiled kernels").add_subparsers(
        required=True, metavar="ACTION"
    )
    actions.add_parser("size", help="show its path and size").set_defaults(run=print_size)
    actions.add_parser("clear", help="remove the compiled kernels, and nothing else").set_defaults(run=clear)


def describe() -> str:
    """Return the path and size of the kernel cache, or the reason why it is not used."""
    try:
        folder = kernel_cache.location()
        if folder.exists():
            kernel_cache.check_safe(folder)
        count, size = kernel_cache.size(folder)
    except OSError as error:
        return f"not used: {error}"
    return f"{folder}, {count} entries, {size / 2**20:.1f} MiB"


def print_size() -> int:
    """Print the path and size of the kernel cache."""
    print(describe())
    return 0


def clear() -> int:
    """Remove all compiled kernels from the cache folder; running processes recompile what they still need."""
    kernel_cache.clear(kernel_cache.location())
    print(describe())
    return 0

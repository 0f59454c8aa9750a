"""Makes cupy_flash compile PTX, under the header of a cubin, wherever it asks for a cubin."""

from __future__ import annotations

from cupy_flash.jit import kernel_cache, nvrtc
from cupy_flash.jit.nvrtc import Compiled

from .modules import cubin


def install() -> None:
    """Replace nvrtc.compile and nvrtc.flags for sm targets.

    The PTX is compiled like the simulator's, and shares its cache. The flags of a cubin must include the flags of its
    PTX, because those differ between the tiers (conftest.faster): code from other passes rounds differently, so it
    needs another cache entry.
    """
    compile_real, flags_real = nvrtc.compile, nvrtc.flags

    def compile(text: str, name: str, target: str) -> Compiled:
        if not target.startswith("sm_"):
            return compile_real(text, name, target)
        ptx = kernel_cache.compiled(text, name, _ptx(target))
        return Compiled(name, target, cubin(target, ptx.code), ptx.log)

    def flags(target: str) -> tuple[str, ...]:
        if not target.startswith("sm_"):
            return flags_real(target)
        return (*flags_real(target), "for a GPU in NumPy", *nvrtc.flags(_ptx(target)))

    nvrtc.compile, nvrtc.flags = compile, flags


def _ptx(target: str) -> str:
    """Return the PTX target of an architecture."""
    return target.replace("sm_", "compute_")

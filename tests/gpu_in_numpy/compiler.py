"""Makes cupy_flash compile PTX, with the header of a cubin here, wherever it asks for a cubin."""

from __future__ import annotations

from cupy_flash import cache, nvrtc
from cupy_flash.nvrtc import Compiled

from .modules import cubin


def install() -> None:
    """Replace nvrtc.compile and nvrtc.flags for sm targets; the flags give such code cache entries of its own. The PTX
    is that of the simulator, with which it shares the cache."""
    compile_real, flags_real = nvrtc.compile, nvrtc.flags

    def compile(text: str, name: str, target: str) -> Compiled:
        if not target.startswith("sm_"):
            return compile_real(text, name, target)
        ptx = cache.compiled(text, name, target.replace("sm_", "compute_"))
        return Compiled(name, target, cubin(target, ptx.code), ptx.log)

    def flags(target: str) -> tuple[str, ...]:
        mark = ("for a GPU in NumPy",) if target.startswith("sm_") else ()
        return (*flags_real(target), *mark)

    nvrtc.compile, nvrtc.flags = compile, flags

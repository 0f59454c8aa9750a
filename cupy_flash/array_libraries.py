"""What array libraries need beyond DLPack: how each imports an output.

Only an array of such a library leads here, so that the caller has imported the library.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arrays import Exported


def importer(library: str, x: Any) -> Callable[[Exported], Any] | None:
    """Return the function that makes an array of the library of `x`, on its device; None if the library has none."""
    if library in IMPORTERS:
        return IMPORTERS[library]
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else None
    return functools.partial(_array_api, x) if hasattr(namespace, "from_dlpack") else None


def _array_api(x: Any, output: Exported) -> Any:
    """Import by the array API, which has devices that DLPack does not know."""
    result = x.__array_namespace__().from_dlpack(output)
    return result if result.device == x.device else result.to_device(x.device)


def _mlx(output: Exported) -> Any:
    import mlx.core as mx

    # mx.from_dlpack makes float64 float32; mx.array does not take bf16.
    return mx.array(output, dtype=mx.float64) if output.dtype == "float64" else mx.from_dlpack(output)


def _warp(output: Exported) -> Any:
    import warp

    return warp.from_dlpack(output)


IMPORTERS = {"mlx": _mlx, "warp": _warp}

"""What only a GPU can run. Where CuPy finds none, nothing here is collected."""

from __future__ import annotations


def _has_gpu() -> bool:
    try:
        import cupy
    except Exception:  # CuPy's import fails with any exception, for example where it cannot make its cache folder
        return False
    return bool(cupy.cuda.is_available())


collect_ignore_glob = [] if _has_gpu() else ["test_*.py"]

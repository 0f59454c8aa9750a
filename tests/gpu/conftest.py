"""What only a GPU can run. Where CuPy finds none, nothing here is collected."""

from __future__ import annotations

from on_gpu import has_gpu

collect_ignore_glob = [] if has_gpu() else ["test_*.py"]

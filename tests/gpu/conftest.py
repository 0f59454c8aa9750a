"""Fixtures of tests that need a GPU, or one made of NumPy (tests/gpu_in_numpy). Without either nothing is collected
here.
"""

from __future__ import annotations

from collections.abc import Iterator

import on_gpu
import pytest

collect_ignore_glob = [] if on_gpu.has_gpu() else ["test_*.py"]
if not on_gpu.torch_has_gpu():
    collect_ignore_glob += ["test_gpu_torch.py", "test_gpu_adapters.py", "test_gpu_fp8.py", "test_gpu_memory.py"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    yield
    on_gpu.leave_a_lost_gpu()

"""Tests that need a GPU. Without one nothing here is collected."""

from __future__ import annotations

from collections.abc import Iterator

import on_gpu
import pytest

collect_ignore_glob = [] if on_gpu.has_gpu() else ["test_*.py"]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    yield
    on_gpu.leave_a_lost_gpu()

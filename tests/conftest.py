"""Shared by all tests: hypothesis without randomness or deadlines, the backends that one body runs on, poison."""

import hypothesis
import numpy as np
import on_gpu
import pytest

from cupy_flash import cache
from cupy_flash.engines import mma, simt
from cupy_flash.plan import plan

hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("deterministic")


# On the simulator most tests plan with these tiles alone: short sequences make several, and their kernels compile
# fastest. test_kernels.py and test_mma.py take the others, and those that a plan chooses.
SMALL_TILE = simt.Tile(block_q=8, block_kv=16, threads=64)
SMALL_FRAGMENTS = mma.Tile(rows=32, step=16, threads=64, column_warps=1, stages=2)


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory):
    """Kernels are compiled once per session, into a folder of its own: none from another time is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPY_FLASH_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        cache.compiled.cache_clear()
        yield


@pytest.fixture(params=["cpu", "simulator", *(["cuda"] if on_gpu.has_gpu() else [])])
def backend(request):
    """The backend that a behaviour test asks for, by name. Where its rows differ by backend, so does the test's list:
    cases.by_backend."""
    if request.param == "simulator":
        request.getfixturevalue("small_tile")
    if request.param == "cuda":
        on_gpu.route(request.getfixturevalue("monkeypatch"))
    return request.param


@pytest.fixture
def small_tile(monkeypatch):
    """Every plan for a GPU takes SMALL_TILE or SMALL_FRAGMENTS."""
    monkeypatch.setattr("cupy_flash.engines.simt.tiles", lambda problem, device: [SMALL_TILE])

    def small_fragments(kernel, problem, device, *, add_dq=False):
        stages = 1 if kernel == "backward_bias" else SMALL_FRAGMENTS.stages
        return [SMALL_FRAGMENTS._replace(stages=stages, q_in_registers=kernel == "forward", add_dq=add_dq)]

    monkeypatch.setattr("cupy_flash.engines.mma.legal_tiles", small_fragments)
    plan.cache_clear()
    yield
    plan.cache_clear()


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Outputs and workspaces come as NaN (raw bytes as 255: NaN in any float), so that what is not written shows."""
    empty = np.empty

    def poisoned(*args, **kwargs):
        array = empty(*args, **kwargs)
        if array.dtype == np.uint8:
            array.fill(255)
        elif array.dtype.kind in "fcV":  # ml_dtypes' are of kind V
            array.fill(np.nan)
        return array

    monkeypatch.setattr(np, "empty", poisoned)

"""Shared by all tests: hypothesis without randomness or time limits, the backends that one body runs on, poison."""

import gc
import os
import shutil
from dataclasses import dataclass, field

import hypothesis
import numpy as np
import on_gpu
import pytest
from tiles import SMALL_FRAGMENTS, SMALL_TILE, every_kernel_in

from cupy_flash import backends, cache
from cupy_flash.backends.simulator import launch
from cupy_flash.backends.simulator.counters import Counters
from cupy_flash.plan import plan
from cupy_flash.source import kernel_folder

hypothesis.settings.register_profile(
    "deterministic",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("deterministic")

# A kernel that is parsed and built makes some 100,000 objects, most of which stay: to look for cycles among all of them
# as often as Python does by default took a tenth of the processor's time.
gc.set_threshold(10_000)


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory, request):
    """Kernels are compiled once per session, into a folder that its processes share: none from another time is used.
    Where KERNELS names a folder, sessions share that one."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if hasattr(request.config, "workerinput") else folder) / "kernels"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPY_FLASH_CACHE_DIR", os.environ.get("KERNELS") or str(folder))
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
    yield request.param
    if request.param == "cuda":
        on_gpu.leave_a_lost_gpu()


@pytest.fixture
def small_tile(monkeypatch):
    """Every plan for a GPU takes SMALL_TILE or SMALL_FRAGMENTS."""
    monkeypatch.setattr("cupy_flash.engines.simt.tiles", lambda problem, device: [SMALL_TILE])
    monkeypatch.setattr("cupy_flash.engines.mma.legal_tiles", every_kernel_in(SMALL_FRAGMENTS))
    plan.cache_clear()
    yield
    plan.cache_clear()


@pytest.fixture
def hopper(monkeypatch):
    """What is simulated is Hopper."""
    monkeypatch.setattr(backends, "SIMULATED", "sm_90a")


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


@dataclass
class Watch:
    """What every launch of the simulator is done with, and its counters by kernel."""

    options: dict = field(default_factory=dict)
    counters: dict[str, Counters] = field(default_factory=dict)

    def launch(self, ptx, kernel, *arguments, **options):
        self.counters[kernel] = launch(ptx, kernel, *arguments, **options, **self.options)
        return self.counters[kernel]


@pytest.fixture
def watch(monkeypatch):
    watch = Watch()
    monkeypatch.setattr("cupy_flash.backends.simulator.run.launch", watch.launch)
    return watch


@pytest.fixture
def changed_kernels(monkeypatch, tmp_path):
    """Replaces a text in a copy of the kernels."""

    def change(file, old, new):
        folder = tmp_path / "kernels_cu"
        shutil.copytree(kernel_folder(), folder)
        text = (folder / file).read_text()
        assert text.count(old) == 1, old
        (folder / file).write_text(text.replace(old, new))
        monkeypatch.setattr("cupy_flash.source.kernel_folder", lambda: folder)

    return change

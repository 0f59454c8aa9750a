"""Options, fixtures and hypothesis settings of all tests: tiers, processes, backends, and outputs filled with NaN."""

import atexit
import functools
import gc
import importlib.util
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass, field

import array_libraries
import hypothesis
import needs_triton
import numpy as np
import on_gpu
import pytest

from cupy_flash import dispatch
from cupy_flash.commands import info
from cupy_flash.jit import nvrtc
from cupy_flash.jit.kernel_cache import compiled
from cupy_flash.simulator.counters import Counters
from cupy_flash.simulator.run import start

# Import torch before any test, because its import changes the engine that computes NumPy arrays on the CPU. The
# environment of tests/array_libraries that has TensorFlow lacks it.
torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None

# CuPy creates its cache as soon as it is imported, and cannot be imported if the home is read-only.
if not os.access(os.path.expanduser("~"), os.W_OK) and "CUPY_CACHE_DIR" not in os.environ:
    os.environ["CUPY_CACHE_DIR"] = tempfile.mkdtemp(prefix="cupy-")
    atexit.register(shutil.rmtree, os.environ["CUPY_CACHE_DIR"], ignore_errors=True)

# Four devices for the tests of sharded arrays; jax reads this when it first looks for devices.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"

for tier, examples in (("default", 64), ("exhaustive", 200)):
    hypothesis.settings.register_profile(
        tier,
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=examples,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )

# Parsing and building a kernel creates about 100,000 objects. They are in no cycle once its launch has ended, so that
# the garbage collector has little to find; with a threshold of 10,000 it took a tenth of the CPU time of the tests.
gc.set_threshold(100_000)


def pytest_addoption(parser):
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="also run the tests marked exhaustive: the same checks on more architectures, dtypes, tiles and orders",
    )


def pytest_configure(config):
    # Load the profile before any test module is imported, so that settings() there inherit from it.
    hypothesis.settings.load_profile("exhaustive" if config.option.exhaustive else "default")
    # A run under nohup or in the background of a script inherits SIGINT as ignored, and so would its subprocesses.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header():
    """Name torch's instruction set, for which the engine aten is or is not chosen, and the tests that are left out."""
    reason = needs_triton.reason_to_leave_out()
    left_out = [f"left out: tests/other_kernels ({reason})"] if reason else []
    name = "not installed" if torch is None else f"{torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    return [f"torch: {name}", *left_out]


def pytest_terminal_summary(terminalreporter):
    """Name the array libraries without which tests/array_libraries ran."""
    if array_libraries.MISSING:
        names = ", ".join(array_libraries.MISSING)
        terminalreporter.write_line(f"tests/array_libraries ran without {names} (extra array-libraries)")


@pytest.hookimpl(tryfirst=True)  # must run before pytest-xdist reads its options
def pytest_cmdline_main(config):
    """Run one process per core by default, because compiling and simulating kernels is CPU-bound.

    On a GPU run one process, because some tests measure its memory and streams. worksteal keeps neighbouring tests,
    which share compiled kernels, in one process.
    """
    is_worker = hasattr(config, "workerinput")
    if is_worker or not config.pluginmanager.has_plugin("xdist") or on_gpu.has_gpu():
        return
    if config.option.numprocesses is None and config.option.dist == "no" and not config.option.usepdb:
        config.option.numprocesses = "auto"
        config.option.dist = "worksteal"


def pytest_collection_modifyitems(config, items):
    """Put the longest tests first, and deselect those marked exhaustive unless --exhaustive is given.

    A test of minutes that begins last would leave the other processes idle. pytest's summary counts the deselected.
    """
    items.sort(key=lambda item: item.path.name != "test_gpu_in_numpy.py")
    if config.option.exhaustive:
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_collection_finish():
    """Leave the modules of torch, JAX and the tests, millions of objects, out of the garbage collector's searches."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory, request):
    """Create a kernel cache that all processes of a session share; set KERNELS to share the folder between sessions.

    PTX for the simulator is compiled with fewer optimization passes, in half the time, unless --exhaustive is given.
    Cubins are always compiled with the flags of a user's call.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if hasattr(request.config, "workerinput") else folder) / "kernels"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPY_FLASH_CACHE_DIR", os.environ.get("KERNELS") or str(folder))
        if not request.config.option.exhaustive:
            patch.setattr(nvrtc, "flags", faster(nvrtc.flags))
        compiled.cache_clear()
        yield


@pytest.fixture(scope="session", autouse=True)
def installed_packages():
    """Read the metadata of all installed packages once: it takes half a second, and no test installs into its own
    environment.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(info, "packages_distributions", functools.cache(info.packages_distributions))
        yield


def faster(flags):
    @functools.wraps(flags)
    def with_fewer_passes(target):
        # With fewer passes, PTX for sm_90a copies accumulators between wgmma.fence and wgmma, which the simulator
        # reports.
        is_cheaper = target.startswith("compute_") and target != "compute_90a"
        return (*flags(target), *(["--Ofast-compile=mid"] if is_cheaper else []))

    return with_fewer_passes


@pytest.fixture
def flags_of_users(monkeypatch):
    """Compile PTX with the flags of a user's call, which the fixture kernel_cache has replaced."""
    monkeypatch.setattr(nvrtc, "flags", getattr(nvrtc.flags, "__wrapped__", nvrtc.flags))
    compiled.cache_clear()
    yield
    compiled.cache_clear()


@pytest.fixture(params=["cpu", "simulator", *(["cuda"] if on_gpu.has_gpu() else [])])
def backend(request):
    """The name of a backend, for behaviour tests; tests with a table of rows per backend use cases.by_backend
    instead.
    """
    if request.param == "cuda":
        on_gpu.route(request.getfixturevalue("monkeypatch"))
    yield request.param
    if request.param == "cuda":
        on_gpu.leave_a_lost_gpu()


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Fill outputs and workspaces with NaN, so that an element which is never written is found.

    Raw workspaces are filled with bytes of 255, which are NaN in every floating-point dtype.
    """
    empty = np.empty

    def poisoned(*args, **kwargs):
        array = empty(*args, **kwargs)
        if array.dtype == np.uint8:
            array.fill(255)
        elif array.dtype.kind in "fcV":  # dtypes of ml_dtypes have kind V
            array.fill(np.nan)
        return array

    monkeypatch.setattr(np, "empty", poisoned)


@dataclass
class Watch:
    """Start launches on the simulator with `options`, and keep the counters of each kernel."""

    options: dict = field(default_factory=dict)
    counters: dict[str, Counters] = field(default_factory=dict)

    def start(self, work):
        launch_counters = start(work, **self.options)
        for launch, counters in zip(work.launches, launch_counters, strict=True):
            self.counters[launch.function] = counters


@pytest.fixture
def watch():
    return Watch()


@pytest.fixture
def steps(monkeypatch):
    """Return a list to which each run of a backend adds "forward" or "backward"."""
    seen = []

    def recorded(name, function):
        def record(*arguments):
            seen.append(name)
            return function(*arguments)

        return record

    for name in ("forward", "backward"):
        monkeypatch.setattr(dispatch, name, recorded(name, getattr(dispatch, name)))
    return seen

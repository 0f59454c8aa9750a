"""The tests as other shells and machines run them: ignored signals, hanging tests, another arithmetic."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).relative_to(ROOT)


def run_of_pytest(*arguments, shell=(), **variables):
    """Return a run of pytest in one process unless `arguments` have -n, in an environment with some other variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")} | variables
    environment["KERNELS"] = os.environ["CUPY_FLASH_CACHE_DIR"]
    command = [*shell, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_ctrl_c_reaches_a_test_and_its_processes():
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    program = "import signal; signal.raise_signal(signal.SIGINT)"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == -signal.SIGINT and "KeyboardInterrupt" in ran.stderr


def test_cupy_can_be_imported_if_it_is_installed():
    """CuPy creates its cache when it is imported; with a read-only home that fails unless conftest.py sets
    CUPY_CACHE_DIR.
    """
    assert importlib.util.find_spec("cupy") is None or importlib.import_module("cupy").__name__ == "cupy"


def test_a_run_in_the_background_without_a_home(tmp_path):
    """The shell ignores SIGHUP, as nohup does, and SIGINT, as a script does for its background jobs."""
    (tmp_path / "file").touch()
    tests = (
        f"{HERE}::{test_ctrl_c_reaches_a_test_and_its_processes.__name__}",
        f"{HERE}::{test_cupy_can_be_imported_if_it_is_installed.__name__}",
        f"{HERE.parent}/test_isolated.py::test_a_run_that_is_ended_ends_its_worker[{signal.SIGHUP:d}]",
    )
    shell = ("sh", "-c", 'trap "" HUP INT; umask 077; exec "$@"', "sh")
    ran = run_of_pytest(*tests, "--timeout=60", shell=shell, HOME=str(tmp_path / "file" / "home"), LC_ALL="C")
    assert ran.stdout.splitlines()[-1].startswith("3 passed"), ran.stdout + ran.stderr


HANGING = """
import ctypes, threading
def wait(event):
    event.wait()
def test_in_python():
    threading.Thread(target=wait, args=(threading.Event(),), daemon=True).start()
    threading.Event().wait()
def test_in_c():  # with Python's global lock
    threading.Thread(target=wait, args=(threading.Event(),), daemon=True).start()
    lock, library = ctypes.create_string_buffer(256), ctypes.PyDLL(None)
    library.pthread_mutex_lock(lock), library.pthread_mutex_lock(lock)
"""


def test_a_hanging_test_fails_with_the_stacks_of_all_threads(tmp_path):
    path = tmp_path / "test_hanging.py"
    path.write_text(HANGING)
    limits = ("-o", "timeout=3", "-o", "faulthandler_timeout=6")
    ran = run_of_pytest(path, "-c", ROOT / "setup.cfg", "--rootdir", ROOT, "-n", "2", *limits)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED and "2 failed" in ran.stdout, ran.stdout + ran.stderr
    assert "Timeout (>3.0s)" in ran.stdout and "crashed while running" in ran.stdout
    in_python, in_c = ran.stdout, ran.stderr
    assert all("in wait\n" in stacks for stacks in (in_python, in_c)) and "in test_in_c\n" in in_c


NUMERIC = (
    "tests/cpu/test_torch_products.py::test_results", "tests/behaviour/test_backward.py::test_every_option",
    "tests/behaviour/test_backward.py::test_all_pairs_of_options", "tests/mods/test_mod_attention.py",
    "tests/mods/test_mod_kernels.py::test_every_mod", "tests/adapters/test_torch_vit.py",
    "tests/adapters/test_torch_drop_in.py::test_sdpa_equals_torch",
)  # fmt: skip


@pytest.mark.exhaustive
def test_numeric_tests_pass_with_another_arithmetic():
    """Without AVX, FMA and threads, BLAS, NumPy and torch sum in other orders and round more often."""
    features = np._core._multiarray_umath
    names = [name for name in features.__cpu_dispatch__ if features.__cpu_features__[name]]
    ran = run_of_pytest(
        *NUMERIC, "-k", "not simulator", NPY_DISABLE_CPU_FEATURES=" ".join(names), OPENBLAS_CORETYPE="Prescott",
        ATEN_CPU_CAPABILITY="default", MKL_ENABLE_INSTRUCTIONS="SSE4_2", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1",
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr

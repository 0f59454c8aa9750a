"""Results from a separate process (measure/worker_process.py), and every way in which the process can be lost."""

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from patience import FOREVER, give_workers_time, hang
from processes import processes

from cupy_flash.measure.worker_process import OUT_OF_GPU_MEMORY, START, Lost, OutOfTime, Worker, one_line
from cupy_flash.problem.records import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]


class GpuError(RuntimeError):
    """CuPy's errors of the runtime and of the driver have a status."""

    status = OUT_OF_GPU_MEMORY


ERRORS = {
    "fails": RuntimeError("CUDA error: an illegal memory access was encountered\nand much else"),
    "fills the GPU": GpuError("out of memory"),
}


def work(how, announce):
    """Announce two steps, then return the process id or fail in the way that `how` names."""
    if how == "leaves early":
        os._exit(3)
    announce("a first step", FOREVER)
    announce("the step", 0 if how == "hangs" else FOREVER)
    if how in ("hangs", "waits"):
        hang()
    if how == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "leaves":
        os._exit(3)
    if how in ERRORS:
        raise ERRORS[how]
    if how == "is interrupted":
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.raise_signal(signal.SIGINT)
    if how == "ends by an interrupt":
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    if isinstance(how, Path) and how.exists():
        number = int(how.read_text())
        how.unlink()
        os.kill(os.getpid(), number)
    if how == "begins another":
        return subprocess.Popen([sys.executable, "-c", "import patience; patience.hang()"]).pid
    if how == "begins a pool":
        pools.append(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
        return pools[0].submit(os.getpid).result()
    return os.getpid()


pools = []


@pytest.fixture(autouse=True)
def workers_have_time(monkeypatch):
    give_workers_time(monkeypatch)


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # a killed process is a zombie until its parent waits for it
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    "how, reason, obstacle",
    [
        ("hangs", "timed out after 0 s", type(None)),
        ("crashes", "process exited with status -11", type(None)),
        ("leaves", "process exited with status 3", type(None)),
        ("fails", "RuntimeError: CUDA error: an illegal memory access was encountered", type(None)),
        ("fills the GPU", "GpuError: out of memory", MemoryError),
    ],
)
def test_a_lost_call_is_reported_and_the_next_is_served(how, reason, obstacle):
    """A loss has an obstacle, which a check raises, only if the work is not the reason of the loss."""
    with Worker(work) as worker:
        first = worker("goes well", until=math.inf)
        assert worker("goes well", until=math.inf) == first != os.getpid()
        with pytest.raises(Lost) as lost:
            worker(how, until=math.inf)
        assert (lost.value.step, lost.value.reason) == ("the step", reason)
        assert type(lost.value.obstacle) is obstacle
        assert not is_alive(first)
        second = worker("goes well", until=math.inf)
        assert second != first
    assert not is_alive(second)


def test_a_worker_that_is_killed_is_tried_once_more(tmp_path):
    """The kernel of the operating system kills a process when memory is short, which says nothing about the work."""
    with Worker(work) as worker:
        first = worker("goes well", until=math.inf)
        for number in (signal.SIGKILL, signal.SIGTERM):
            (tmp_path / "signal").write_text(str(int(number)))
            second = worker(tmp_path / "signal", until=math.inf)
            assert second != first
            first = second


@pytest.mark.parametrize("how", ["is interrupted", "ends by an interrupt"])
def test_an_interrupt_of_the_worker_interrupts_the_run(how):
    with Worker(work) as worker, pytest.raises(KeyboardInterrupt):
        worker(how, until=math.inf)


def test_a_process_that_ends_before_the_first_step_has_not_judged_it():
    with Worker(work) as worker, pytest.raises(Lost, match="process exited with status 3") as lost:
        worker("leaves early", until=math.inf)
    assert (lost.value.step, type(lost.value.obstacle)) == (START, RuntimeError)


def test_a_process_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")
    with Worker(work) as worker, pytest.raises(FileNotFoundError, match="/no/python"):
        worker("goes well", until=math.inf)


def test_out_of_time_ends_the_worker():
    with Worker(work) as worker:
        worker("goes well", until=math.inf)
        with pytest.raises(OutOfTime):
            worker("waits", until=time.monotonic())


@pytest.mark.parametrize("how", ["begins another", "begins a pool"])
def test_processes_that_a_worker_starts_end_with_it(how):
    with Worker(work) as worker:
        other = worker(how, until=math.inf)
        assert is_alive(other)
    while is_alive(other):
        time.sleep(0.05)


RUN = """
import math
import signal
import pytest
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and so does what runs under nohup
from cupy_flash.measure.worker_process import Worker, ended_by_signal
from patience import give_workers_time
from test_isolated import work
with pytest.MonkeyPatch.context() as patch, ended_by_signal(), Worker(work) as worker:
    give_workers_time(patch)
    print(worker("goes well", until=math.inf), flush=True)
    worker("waits", until=math.inf)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_run_that_is_ended_ends_its_worker(number):
    """`timeout` signals only the run, not its worker; after SIGKILL the run cannot end the worker itself."""
    folders = (ROOT, ROOT / "tests" / "helpers", Path(__file__).parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    with processes([sys.executable, "-c", RUN], env=environment, stdout=subprocess.PIPE, text=True) as (run,):
        pid = int(run.stdout.readline())
        run.send_signal(number)
        assert run.wait() == (-number if number == signal.SIGKILL else 128 + number)
        while number == signal.SIGKILL and is_alive(pid):
            time.sleep(0.05)
        assert not is_alive(pid)


def test_every_reason_of_an_error_is_kept():
    error = UnsupportedError("no engine serves this:\n  simt: one reason\n  mma: another")
    assert one_line(error) == "UnsupportedError: no engine serves this: simt: one reason; mma: another"
    assert one_line(RuntimeError("first\nsecond")) == "RuntimeError: first"

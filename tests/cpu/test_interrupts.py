"""Exceptions at any moment, such as Ctrl-C, and forks: a call restores all process-wide state."""

import itertools
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from cases import Case, posed

from cupy_flash.cpu import attention as cpu
from cupy_flash.cpu import thread_pool
from cupy_flash.device import blas_controller
from cupy_flash.problem.records import Saved

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60  # seconds until a test fails; a passing test never waits that long


@pytest.fixture(autouse=True)
def two_blas_threads():
    """Set BLAS to two threads, so that a limit of one is visible on any machine and is not left behind."""
    libraries = blas_controller().lib_controllers
    assert libraries, "threadpoolctl knows NumPy's BLAS here"
    before = [library.num_threads for library in libraries]
    for library in libraries:
        library.set_num_threads(2)
    yield
    for library, threads in zip(libraries, before, strict=True):
        library.set_num_threads(threads)


def blas_limits():
    return {library.num_threads for library in blas_controller().lib_controllers}


class AsynchronousError(BaseException):
    """An asynchronous exception, such as PyThreadState_SetAsyncExc raises."""


def strike(error, moment, call):
    """Call a function and raise an exception at its event number `moment`; return False if it has fewer events.

    Python checks for signals and asynchronous exceptions when a function starts and when a C function returns; at the
    same points it calls a profiler.
    """
    moments = itertools.count()

    def profiler(frame, event, argument):
        if event in ("call", "c_return") and next(moments) == moment:
            raise error

    try:
        sys.setprofile(profiler)
        call()
    except error:
        return True
    finally:
        sys.setprofile(None)
    return next(moments) > moment


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, AsynchronousError])
def test_an_exception_at_any_moment_leaves_nothing_behind(error, threads):
    limit, errors = thread_pool._single_threaded_blas, np.geterr()
    for moment in itertools.count():
        limits_of_tasks = set()
        tasks = [partial(lambda limits: limits.update(blas_limits()), limits_of_tasks)] * 2
        lasted = strike(error, moment, partial(thread_pool.run_tasks, threads, tasks))
        assert blas_limits() == {2}, moment
        assert np.geterr() == errors, moment
        assert not limit._users, moment
        free = threading.Thread(target=lambda: limit._lock.acquire(timeout=PATIENCE) and limit._lock.release())
        free.start()
        free.join(PATIENCE)
        assert not free.is_alive(), moment
        if not lasted:
            break
    assert moment > 50
    assert limits_of_tasks == {1}


def test_the_next_call_repairs_a_limit_that_was_left_behind(monkeypatch):
    def cut_short(user):
        raise AsynchronousError

    with monkeypatch.context() as patch, pytest.raises(AsynchronousError):
        patch.setattr(thread_pool._single_threaded_blas, "leave", cut_short)
        thread_pool.run_tasks(1, [lambda: None])
    assert blas_limits() == {1}
    thread_pool.run_tasks(1, [lambda: None])
    assert blas_limits() == {2}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_interrupt_is_answered_within_a_tile(monkeypatch, backward):
    """Both threads compute when the caller's thread is interrupted; the other thread starts no further tile."""
    case, small = Case(batch=1, heads=2, q_len=64, kv_len=64, dlse=False), dict(threads=2, block_q=16, block_kv=16)
    plan, operands = posed(case, **small)
    out, lse = (array.numpy() for array in cpu.forward(plan, operands))
    if backward:
        plan, operands = posed(case, Saved(case.call().dout, out, lse), **small)
    run = cpu.backward if backward else cpu.forward
    poll, polls = thread_pool.Stop.poll, itertools.count()
    monkeypatch.setattr(thread_pool.Stop, "poll", lambda stop: (next(polls), poll(stop)))
    run(plan, operands)
    assert next(polls) >= 2 * (64 // 16) ** 2  # at least one poll per tile of both heads

    caller, helping, stopped = threading.get_ident(), threading.Event(), []

    def interrupt(stop):
        if threading.get_ident() == caller:
            assert helping.wait(PATIENCE)
            raise KeyboardInterrupt
        helping.set()
        deadline = time.monotonic() + PATIENCE
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.001)
        stopped.append(stop.requested)
        poll(stop)

    monkeypatch.setattr(thread_pool.Stop, "poll", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(plan, operands)
    assert stopped == [True]
    assert blas_limits() == {2}


def test_an_error_in_one_thread_stops_the_other():
    stop, began = thread_pool.Stop(), threading.Event()

    def fail():
        assert began.wait(PATIENCE)
        raise MemoryError("no more")

    def last_long():
        began.set()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            stop.poll()
            time.sleep(0.001)
        raise AssertionError("it was never told to stop")

    for tasks in ((fail, last_long), (last_long, fail)):
        with pytest.raises(MemoryError, match="no more"):
            thread_pool.run_tasks(2, list(tasks), stop)
        assert blas_limits() == {2}
        stop.requested = False
        began.clear()


# This program runs in a separate process without other threads; an alarm ends a child that hangs.
FORK = """
import os, signal, threading, time
import numpy as np
import cupy_flash
from cupy_flash.cpu import attention as cpu, thread_pool
from cupy_flash.gpu import cuda
from cupy_flash.device import blas_controller

libraries = blas_controller().lib_controllers
for library in libraries:
    library.set_num_threads(2)
blas_limits = lambda: {library.num_threads for library in libraries}
q, k, v = np.random.default_rng(0).normal(size=(3, 1, 40, 2, 8)).astype(np.float32)
expected = cupy_flash.attention(q, k, v)

def child_computes_the_same():
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        cuda._loading.acquire()
        well = blas_limits() == {2}
        well = well and np.array_equal(cupy_flash.attention(q, k, v), expected) and blas_limits() == {2}
        os._exit(0 if well else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

inside, leave = threading.Event(), threading.Event()
def hold():
    with cuda._loading:  # as a thread has it that compiles a kernel
        inside.set()
        leave.wait()
thread = threading.Thread(target=thread_pool.run_tasks, args=(1, [hold]))
thread.start()
inside.wait()
assert blas_limits() == {1}
print("in a task:", child_computes_the_same())
assert blas_limits() == {1}
leave.set()
thread.join()
assert blas_limits() == {2}

forking, another_lock, set_limits = threading.Event(), threading.Lock(), thread_pool._single_threaded_blas._set
def set_slowly(threads):
    with another_lock:  # as threadpoolctl has one
        if threading.current_thread() is setting:
            inside.set()
            forking.wait()
            time.sleep(0.2)  # long after a fork that does not wait
        set_limits(threads)
thread_pool._single_threaded_blas._set = set_slowly
inside.clear()
setting = threading.Thread(target=thread_pool.run_tasks, args=(1, [lambda: None]))
setting.start()
inside.wait()
os.register_at_fork(before=forking.set)
print("holding the lock:", child_computes_the_same())
setting.join()
assert blas_limits() == {2}
"""


def test_a_fork_while_another_thread_is_in_a_call():
    result = subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "in a task: 0\nholding the lock: 0\n"


def test_no_lock_without_a_hook_for_forks():
    """A lock that another thread holds stays locked in a forked child, unless a hook replaces it.

    Before Python 3.12 a cached_property holds one lock for all instances while it computes.
    """
    for path in (ROOT / "cupy_flash").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "cached_property" not in text, path
        assert not re.search(r"\bR?Lock\(\)", text) or "register_at_fork" in text, path

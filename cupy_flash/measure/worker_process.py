"""A worker process that announces each step, so that a run survives crashes and hangs in it.

A faulting kernel leaves a sticky CUDA error that makes the GPU unusable for its whole process, and a kernel that
deadlocks never returns. The worker is a new interpreter and not a process of multiprocessing, which would run the
caller's script again.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
Announce = Callable[[str, float], None]  # (name of the step that begins, its timeout in seconds)
START, START_SECONDS = "the start of the worker process", 60.0
WATCH_SECONDS = 1.0  # interval at which a worker checks that its parent is alive
ENDING_SECONDS = 30.0  # limit for a killed process to end: the driver may take long to clean up
# Errors that say nothing about the work of a step: a missing dependency, a full disk or no permission, no memory.
OBSTACLES = (ImportError, OSError, MemoryError)
OUT_OF_GPU_MEMORY = 2  # cudaErrorMemoryAllocation and CUDA_ERROR_OUT_OF_MEMORY, the `status` of CuPy's errors
KILLERS = tuple(signal.Signals[name] for name in ("SIGKILL", "SIGTERM", "SIGHUP") if hasattr(signal, name))


class Lost(Exception):
    """The worker process was lost during `step`, for `reason`.

    `obstacle` is an error if the loss says nothing about the work of the step: something else has prevented it.
    """

    def __init__(self, step: str, reason: str, obstacle: type[Exception] | None = None) -> None:
        super().__init__(f"{step}: {reason}")
        self.step, self.reason = step, reason
        self.obstacle = None if obstacle is None else obstacle(str(self))

    def raise_obstacle(self) -> None:
        """Raise the obstacle, if there is one."""
        if self.obstacle is not None:
            raise self.obstacle from None


class _Killed(Exception):
    """Another process has ended the worker process, as the kernel does when memory is short."""


class OutOfTime(Exception):
    """The time budget of the whole run ended before the result arrived."""


class Worker(Generic[T]):
    """Calls `work(*arguments, announce)` in a worker process; after a loss the next call starts a new one.

    `work` and the arguments are pickled, so `work` is a function of a module, or a partial of one.
    """

    def __init__(self, work: Callable[..., T]) -> None:
        self.work = work
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Any = None  # a Connection as long as the process exists

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self, *arguments: object, until: float) -> T:
        """Return the result of `work` in the worker process, tried once more if another process kills it.

        Raises Lost if `work` raises, its process exits or a step times out, OutOfTime at `until`, a time of
        time.monotonic(), KeyboardInterrupt if the process is interrupted, and OSError if none can be started.
        """
        try:
            return self._try(arguments, until)
        except _Killed:
            return self._try(arguments, until, again=True)

    def _try(self, arguments: tuple[object, ...], until: float, again: bool = False) -> T:
        step, seconds, is_announced = "before the first step", START_SECONDS, False
        try:
            if self.process is None:
                step = START
                self._begin()
            self.pipe.send(arguments)
            while True:
                if not self.pipe.poll(max(min(seconds, until - time.monotonic()), 0)):
                    self.end()
                    if time.monotonic() >= until:
                        raise OutOfTime
                    raise Lost(step, f"timed out after {seconds:.0f} s", None if is_announced else RuntimeError)
                kind, payload = self.pipe.recv()
                if kind == "done":
                    return payload
                if kind == "interrupted":
                    self.end()
                    raise KeyboardInterrupt
                if kind == "failed":
                    self.end()
                    raise Lost(step, *payload)
                (step, seconds), is_announced = payload, True
        except (EOFError, OSError):
            if self.process is None:
                raise
            code = self._status()
            self.end()
        if code == -signal.SIGINT:
            raise KeyboardInterrupt
        if code is not None and -code in KILLERS:
            if not again:
                raise _Killed
            raise Lost(step, f"process was killed twice, now by {signal.Signals(-code).name}", RuntimeError)
        raise Lost(step, f"process exited with status {code}", None if is_announced else RuntimeError)

    def end(self) -> None:
        """Kill the process and its children, and wait for it."""
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._status()
        self.pipe.close()
        self.process = self.pipe = None

    def _status(self) -> int | None:
        """Return the exit status of the process, or None if it has not ended in time."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(ENDING_SECONDS)
        return self.process.returncode

    def _begin(self) -> None:
        if not hasattr(os, "killpg"):
            raise RuntimeError("a worker process that can be replaced needs the process groups of POSIX systems")
        self.pipe, worker_pipe = Pipe()
        file = worker_pipe.fileno()
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve({file}, {os.getpid()})"
        # A new session is also a process group, which `end` kills as a whole.
        self.process = subprocess.Popen([sys.executable, "-c", program], pass_fds=(file,), start_new_session=True)
        worker_pipe.close()  # so that recv raises EOFError when the worker exits
        self.pipe.send(self.work)


def serve(file: int, parent: int) -> None:
    """Answer requests in the worker process until the pipe is closed or the parent has ended."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pipe = Connection(file)
    work: Callable[..., object] = pipe.recv()
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = "done", work(*arguments, lambda step, seconds: pipe.send(("step", (step, seconds))))
        except KeyboardInterrupt:  # the caller kills this process, because a normal exit could wait for threads
            answer = "interrupted", None
        except Exception as error:  # the caller raises it as Lost and ends this process
            answer = "failed", (one_line(error), _obstacle(error))
        pipe.send(answer)


def _end_with(parent: int) -> None:
    """Kill the worker's process group once its parent has ended, because a kernel that hangs never returns."""
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _obstacle(error: Exception) -> type[Exception] | None:
    """Return the type in OBSTACLES to which an error belongs, or None if the work itself failed."""
    if getattr(error, "status", None) == OUT_OF_GPU_MEMORY:
        return MemoryError
    return next((kind for kind in OBSTACLES if isinstance(error, kind)), None)


def one_line(error: Exception) -> str:
    """Return an exception's type and its message in one line.

    The message has every reason of an error about arguments or a dependency, and the first line of other errors such as
    a compiler's.
    """
    lines = [line.strip().removeprefix("- ") for line in f"{type(error).__name__}: {error}".splitlines()]
    return (
        " ".join((lines[0], "; ".join(filter(None, lines[1:])))).strip()
        if isinstance(error, (TypeError, ValueError, ImportError))
        else lines[0][:300]
    )


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that workers, which have their own process groups, end too."""

    def raise_exit(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    numbers = [signal.Signals[name] for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    changed = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # as by nohup
    for number in changed:
        signal.signal(number, raise_exit)
    try:
        yield
    finally:
        for number, handler in changed.items():
            signal.signal(number, handler)

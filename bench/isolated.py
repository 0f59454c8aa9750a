"""Work in a process of its own, which says what it begins: whatever crashes or hangs there, the run goes on.

A kernel that faults takes the GPU from its whole process, and one that waits for ever never comes back.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

Announce = Callable[[str, float], None]  # the step that begins, and the seconds that it may take
START, START_SECONDS = "the start of its process", 60.0
ENDING_SECONDS = 30.0  # a process that was killed may first have to be freed by the driver


class Lost(Exception):
    """The process is gone, and its answer with it: during which step, and why."""

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"{step}: {reason}")
        self.step, self.reason = step, reason


class OutOfTime(Exception):
    """The time of the whole run was over before the answer came."""


class Worker:
    """Calls `work(*arguments, announce)` in one process after the other: a new one begins where the last was lost."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work
        self.process: Any = None
        self.pipe: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __call__(self, *arguments: Any, until: float) -> Any:
        """What `work` gives; Lost where it fails, ends its process or overstays a step, OutOfTime at `until`, a time
        of time.monotonic()."""
        step, seconds = "its first step", START_SECONDS
        try:
            if self.process is None:
                self._begin()
                step = START
            self.pipe.send(arguments)
            while True:
                if not self.pipe.poll(max(min(seconds, until - time.monotonic()), 0)):
                    self.end()
                    if time.monotonic() >= until:
                        raise OutOfTime
                    raise Lost(step, f"did not come back within {seconds:.0f} s")
                kind, told = self.pipe.recv()
                if kind == "done":
                    return told
                if kind == "failed":
                    self.end()
                    raise Lost(step, told)
                step, seconds = told
        except (EOFError, OSError):
            self.process.join(ENDING_SECONDS)
            code = self.process.exitcode
            self.end()
            raise Lost(step, f"ended its process, exit status {code}") from None

    def end(self) -> None:
        """The process, and those that it has begun, are no more."""
        if self.process is None:
            return
        for kill in (lambda: os.killpg(self.process.pid, signal.SIGKILL), self.process.kill):
            with suppress(ProcessLookupError):
                kill()
        self.process.join(ENDING_SECONDS)
        self.pipe.close()
        self.process = self.pipe = None

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(self.work, theirs))
        self.process.start()
        theirs.close()  # so that its end is heard of


def _serve(work: Callable[..., Any], pipe: Connection) -> None:
    """Answers until nobody asks any more."""
    os.setpgrp()  # what it begins ends with it
    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = "done", work(*arguments, lambda step, seconds: pipe.send(("step", (step, seconds))))
        except Exception as error:  # whatever it is: whoever asked is told, and ends this process
            answer = "failed", one_line(error)
        pipe.send(answer)


def one_line(error: Exception) -> str:
    """An exception in the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


@contextmanager
def ended_by_signal() -> Iterator[None]:
    """SIGTERM leaves by SystemExit, so that workers, which are in process groups of their own, end too."""

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

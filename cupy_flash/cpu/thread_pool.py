"""Threads of the CPU engines: tasks on several threads with single-threaded BLAS, safe under interrupts."""

from __future__ import annotations

import contextvars
import os
import threading
from _thread import start_new_thread
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from weakref import WeakSet, ref

import numpy as np

from ..device import blas_controller

# Runs a function on a number of threads of a pool, among them the caller's.
Region = Callable[[int, Callable[[], None]], None]


class Stopped(Exception):
    """Raised to end a task early, because another task of the call has failed or the caller was interrupted."""


class Stop:
    """A flag that makes all threads of one call end at their next tile."""

    requested = False

    def poll(self) -> None:
        """Raise Stopped if the call must end."""
        if self.requested:
            raise Stopped


def run_tasks(
    threads: int, tasks: list[Callable[[], None]], stop: Stop | None = None, region: Region | None = None
) -> None:
    """Run the tasks on up to `threads` threads with single-threaded BLAS; re-raise the first exception of any task.

    `region(threads, function)` runs a function on each thread of a pool, which includes the caller's; without it, this
    starts threads.

    An exception in the caller's thread, such as KeyboardInterrupt, is re-raised after the other threads have ended:
    within one tile if the tasks poll `stop`.
    """
    stop = Stop() if stop is None else stop
    queue = iter(tasks)  # shared: a free thread runs the next task
    errors: list[BaseException] = []

    def work() -> None:
        # Infinities are regular values here: a masked score, the lse of an empty row.
        with np.errstate(all="ignore"):
            for task in queue:
                stop.poll()
                task()

    def help_out() -> None:
        try:
            work()
        except Stopped:
            pass
        except BaseException as error:
            stop.requested = True
            errors.append(error)

    def work_together() -> None:
        helpers = _Helpers()
        try:
            for _ in range(min(threads, len(tasks)) - 1):
                helpers.start(help_out)
            # NumPy's error state belongs to the context: `work` runs in a copy of it, so that the caller's is unchanged
            # even if an interrupt cuts off the exit of `errstate`.
            contextvars.copy_context().run(work)
            helpers.wait()
        except BaseException as error:
            stop.requested = True
            helpers.wait()
            if not isinstance(error, Stopped):
                raise
        if errors:
            raise errors.pop(0)

    def work_in_region(region: Region) -> None:
        caller, completed = threading.get_ident(), False

        def share() -> None:
            nonlocal completed
            is_caller = threading.get_ident() == caller
            if is_caller or threads > 1:
                contextvars.copy_context().run(help_out)
            if is_caller:
                completed = True

        # In a region of one thread, operations of torch would use all threads of its pool.
        region(max(2, min(threads, len(tasks))), share)
        if not completed:  # ctypes drops an exception that is raised outside of `help_out`
            raise KeyboardInterrupt
        if errors:
            raise errors.pop(0)

    user = _User()
    try:
        try:
            _single_threaded_blas.enter(user)
            if region is None:
                work_together()
            else:
                work_in_region(region)
        finally:
            _single_threaded_blas.leave(user)
    finally:
        # Repeated, because Ctrl-C may have cut off the first `leave`; calling it twice is harmless.
        _single_threaded_blas.leave(user)


class OrderedSum:
    """A sum to which threads add arrays at any time; it adds them in a fixed order, so that the bits never differ.

    Its lock belongs to the threads of one call, which a forked child does not have.
    """

    def __init__(self, count: int) -> None:
        self.count, self.added = count, 0
        self.waiting: dict[int, np.ndarray] = {}
        self.total: np.ndarray | None = None
        self.lock = threading.Lock()

    def add(self, place: int, array: np.ndarray) -> np.ndarray | None:
        """Add the array that comes at `place` in the order; return the total if that completes it."""
        with self.lock:
            self.waiting[place] = array
            while self.added in self.waiting:
                array = self.waiting.pop(self.added)
                if self.total is None:
                    self.total = array
                else:
                    self.total += array
                self.added += 1
            return self.total if self.added == self.count else None


class _Helpers:
    """Starts threads and joins them, safely under asynchronous exceptions in the caller or in the threads.

    threading.Thread is not safe: an exception inside Thread.start can leave the new thread blocked on a lock of the
    caller, and one at the start of a thread skips its clean-up code. Instead, `wait` watches a weak reference to each
    thread's function, which the interpreter drops when the thread has ended.
    """

    def __init__(self) -> None:
        self._functions: list[ref[partial[None]]] = []
        self._ended: SimpleQueue[object] = SimpleQueue()

    def start(self, function: Callable[[], None]) -> None:
        target = partial(function)
        reference = ref(target, self._ended.put)
        start_new_thread(target, ())
        del target
        self._functions.append(reference)

    def wait(self) -> None:
        """Join all threads, except one whose `start` was interrupted."""
        for function in self._functions:
            while function() is not None:
                self._ended.get()


class _User:
    """Identity of one call that needs single-threaded BLAS."""


class _BlasLimit:
    """Process-wide limit of BLAS to one thread: the first user sets it, the last one restores the previous limits.

    An asynchronous exception may cut off `enter` and `leave` at any point. So `leave` is valid after any part of
    `enter`, and idempotent. Users are weakly referenced: one whose `leave` never completed counts until it is
    collected, and the next user then restores the limits.
    """

    def __init__(self) -> None:
        self._users: WeakSet[_User] = WeakSet()
        self._before: list[int] | None = None  # thread limits to restore, per library; None: nothing was changed
        self._lock = threading.RLock()  # reentrant: a signal handler may call attention
        if hasattr(os, "register_at_fork"):
            # Hold the lock across a fork: a child forked while another thread holds it would deadlock.
            os.register_at_fork(
                before=lambda: self._lock.acquire(),
                after_in_parent=lambda: self._lock.release(),
                after_in_child=self._reset,
            )

    def enter(self, user: _User) -> None:
        with self._lock:
            first = not self._users
            self._users.add(user)
            if first:
                limits = [library.num_threads for library in blas_controller().lib_controllers]
                # If all limits are 1 already, nothing has to be set. An interrupted call may have left them at 1: then
                # `_before` still has the limits to restore.
                if limits != [1] * len(limits):
                    self._before = limits
                    self._set([1] * len(limits))

    def leave(self, user: _User) -> None:
        with self._lock:
            self._users.discard(user)
            if not self._users and self._before is not None:
                self._set(self._before)
                self._before = None

    def _set(self, threads: list[int]) -> None:
        for library, number in zip(blas_controller().lib_controllers, threads, strict=True):
            # threadpoolctl >= 3.8 silently ignores every thread but the first that set OpenBLAS's limit; here the last
            # thread to leave restores it, whichever set it.
            disown = getattr(library, "clear_controlling_thread", lambda force: None)
            disown(force=True)
            library.set_num_threads(number)
            disown(force=True)

    def _reset(self) -> None:
        """Drop the users and the lock, as a forked child lacks the parent's other threads, and restore the limits."""
        self._lock = threading.RLock()
        self._users = WeakSet()
        self.leave(_User())


_single_threaded_blas = _BlasLimit()

"""Ends XLA's calls of the FFI handler before the interpreter finalizes, while XLA's threads may still run programs.

jax does not wait for its programs at exit. CPython ends a thread that asks for the GIL of an interpreter that finalizes
(from 3.14 on it blocks the thread), so the locks that this thread holds stay locked. The interpreter also deletes XLA's
client, which joins XLA's threads and would wait for ever.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import time
from weakref import WeakSet

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_PROCESS = os.getpid()  # a forked child has none of XLA's threads


class Call:
    """A running call of the handler. `_running` refers to it weakly, so that no exception can leave an entry there."""


_running: WeakSet[Call] = WeakSet()
_expected = _exiting = False


def expect_programs() -> None:
    """Make exit wait for running programs from now on; called once XLA's CPU client exists and has the handler."""
    global _expected
    _expected = True


def begin() -> Call:
    """Return the record of a call, which the caller keeps until it returns; RuntimeError during exit."""
    call = Call()
    _running.add(call)
    if _exiting:
        raise RuntimeError("the Python interpreter is exiting: compiled programs cannot call attention any more")
    return call


@atexit.register
def _finish() -> None:
    """Wait for programs in flight, then for running calls, and refuse calls from then on.

    There is no wait for a program that another thread has dispatched to one device, if it has not called the handler
    yet: that call is refused, or CPython ends its thread. A reference to the client is therefore leaked: a client that
    is never deleted joins no threads.
    """
    global _exiting
    if not _expected or os.getpid() != _PROCESS:
        return
    devices = jax.local_devices(backend="cpu")
    try:
        _await_programs(devices)
    finally:
        _exiting = True
        while _running:
            time.sleep(1e-3)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(devices[0].client))


def _await_programs(devices: list[jax.Device]) -> None:
    """Wait for all programs on several devices, and for those that this thread has dispatched to one device.

    XLA runs either kind in the order of dispatch, so it is enough to wait for one more program of each.
    """
    for group in (devices[:1], devices):
        mesh = Mesh(np.array(group), "device")
        with jax.set_mesh(mesh):  # in place of a mesh that the caller has set
            x = jax.device_put(np.zeros(len(group), np.float32), NamedSharding(mesh, PartitionSpec("device")))
            jax.block_until_ready(jax.lax.neg(x))

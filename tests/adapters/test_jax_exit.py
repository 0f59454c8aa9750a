"""A process exits with programs in flight that call attention: on 1, 2 and 8 devices, with and without their results."""

import os
import subprocess
import sys

import pytest
from tiers import in_tiers

# A call of the handler waits until the main thread has ended, so that it is in flight at exit on any machine: before it
# is recorded as running, or for the thread while it runs.
SCRIPT = """
import atexit, sys, threading, time
devices, way, ending = int(sys.argv[1]), *sys.argv[2:]
ended = []

@atexit.register  # before jax and cupy_flash, whose functions run first
def report():
    print(len(ended), "ended", flush=True)
    if ending == "thread":
        jax.block_until_ready(call())

import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from cupy_flash.adapters.jax import attention, handler

mesh = jax.make_mesh((1 if way == "one" else devices,), ("batch",))
q = jax.device_put(jnp.ones((8, 16, 2, 4)), NamedSharding(mesh, PartitionSpec("batch")))
w = jax.device_put(jnp.ones((500, 500)), NamedSharding(mesh, PartitionSpec()))  # XLA runs cheaper programs at once
lengths = jnp.full(8, 99 if ending == "error" else 16, jnp.int32)
held_back = "handle" if ending == "thread" else "_served"
function = getattr(handler, held_back)

def in_flight(*arguments):
    threading.main_thread().join()
    time.sleep(0.2)  # an interpreter that does not wait finalizes now
    result = function(*arguments)
    ended.append(None)
    return result

def program(q, w):
    return attention(q + (w @ w @ w).max(), q, q, kv_lengths=lengths)

def call():
    return attention(q, q, q) if way == "eager" else jax.jit(program)(q, w)

setattr(handler, held_back, in_flight)
if ending == "thread":
    thread = threading.Thread(target=lambda: [call(), call()] and None)
    thread.start()
    thread.join()
else:
    out = call()
if ending == "dropped":
    del out
if ending == "raises":
    raise SystemExit(3)
"""

# name: (devices, way, ending, exit status, calls of the handler)
EXITS = {
    "1-jit-dropped": (1, "jit", "dropped", 0, 1),
    "2-jit-raises": (2, "jit", "raises", 3, 2),
    "8-eager-held": (8, "eager", "held", 0, 8),
    "1-jit-held": (1, "jit", "held", 0, 1),
    "2-one-dropped": (2, "one", "dropped", 0, 1),
    "2-eager-dropped": (2, "eager", "dropped", 0, 2),
    "2-jit-error": (2, "jit", "error", 0, 2),
    "8-jit-dropped": (8, "jit", "dropped", 0, 8),
}


def exits(devices, way, ending):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    arguments = [sys.executable, "-c", SCRIPT, str(devices), way, ending]
    return subprocess.run(arguments, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, timeout=1200)


@pytest.mark.parametrize("case", in_tiers(EXITS, ("1-jit-dropped", "2-jit-raises", "8-eager-held")))
def test_a_process_exits_after_the_programs_in_flight(case):
    devices, way, ending, status, calls = case
    process = exits(devices, way, ending)
    assert (process.returncode, process.stdout, process.stderr) == (status, f"{calls} ended\n", "")


def test_a_process_exits_though_a_thread_has_dropped_its_results():
    """XLA orders the programs of one thread on one device, so that no other thread can wait for them."""
    process = exits(1, "jit", "thread")
    assert (process.returncode, process.stdout) == (0, "1 ended\n"), process.stderr
    assert "the Python interpreter is exiting" in process.stderr  # the call in `report`

"""A process can exit while programs that call attention run on 1, 2 or 8 devices, whether it holds results or not."""

import os
import subprocess
import sys

import pytest
from tiers import in_tiers

SCRIPT = """
import atexit, sys, threading
devices, way, ending = int(sys.argv[1]), *sys.argv[2:]

@atexit.register  # before jax and cupy_flash, whose functions run first
def report():
    print(len(at_exit.ended), "ended", flush=True)
    if ending == "held":
        at_exit.release()
        jax.block_until_ready(call())

import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from cupy_flash.adapters.jax import attention
import at_exit

mesh = jax.make_mesh((1 if way == "one" else devices,), ("batch",))
q = jax.device_put(jnp.ones((8, 16, 2, 4)), NamedSharding(mesh, PartitionSpec("batch")))
w = jax.device_put(jnp.ones((500, 500)), NamedSharding(mesh, PartitionSpec()))  # XLA runs cheaper programs at once
lengths = jnp.full(8, 99 if ending == "error" else 16, jnp.int32)

def program(q, w):
    return attention(q + (w @ w @ w).max(), q, q, kv_lengths=lengths)

def call():
    return attention(q, q, q) if way == "eager" else jax.jit(program)(q, w)

def dispatch():
    call(), call()

if ending == "thread":
    at_exit.hold_programs_of_a_thread()
    thread = threading.Thread(target=dispatch)
    thread.start()
    thread.join()
else:
    at_exit.hold_programs()
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
    "1-jit-thread": (1, "jit", "thread", 0, 1),  # the second call starts too late to be counted
    "1-jit-held": (1, "jit", "held", 0, 1),
    "2-one-dropped": (2, "one", "dropped", 0, 1),
    "2-eager-dropped": (2, "eager", "dropped", 0, 2),
    "2-jit-error": (2, "jit", "error", 0, 2),
    "8-jit-dropped": (8, "jit", "dropped", 0, 8),
}


def exits(devices, way, ending):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    arguments = [sys.executable, "-c", SCRIPT, str(devices), way, ending]
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=1200)


@pytest.mark.parametrize("case", in_tiers(EXITS, ("1-jit-dropped", "2-jit-raises", "8-eager-held", "1-jit-thread")))
def test_a_process_exits_after_the_programs_in_flight(case):
    devices, way, ending, status, calls = case
    process = exits(devices, way, ending)
    assert (process.returncode, process.stdout) == (status, f"{calls} ended\n"), process.stderr
    # atexit runs functions in reverse order, so `report`, registered before cupy_flash's function, calls attention
    # after it.
    assert ("the Python interpreter is exiting" in process.stderr) == (ending == "held"), process.stderr

"""Ordering bugs planted in cupy_flash give wrong results in some legal order of execution.

Without a bug every body is right in all orders. With one, it is wrong in some order, mostly one of the first five.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cupy
import gpu_in_numpy
import pytest
from engines import assert_right, assign, inputs

import cupy_flash
from cupy_flash import arrays
from cupy_flash.gpu import cuda, run_plan

machine = gpu_in_numpy.machine()
SEEDS = range(5)


class Interface:
    """A CUDA array that names the stream on which it is ready."""

    def __init__(self, array: cupy.ndarray, stream: Any) -> None:
        self.owner, self.__cuda_array_interface__ = array, array.__cuda_array_interface__ | {"stream": stream.ptr}


def new_stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def late_inputs() -> tuple[list[Any], list[Any]]:
    """Return (values, arrays of zeros of the same shapes), ready on the host."""
    values = inputs("cupy", "simt")
    late = [cupy.zeros_like(x) for x in values]
    cupy.cuda.Device().synchronize()
    return values, late


def step(q: Any, k: Any, v: Any, dout: Any) -> list[Any]:
    out, vjp = cupy_flash.attention_vjp(q, k, v, causal=True, engine="simt")
    return [out, *vjp(dout)[:3]]


# Bodies of the tests. Each gives right results if cupy_flash keeps every dependency.


def on_one_stream() -> list[Any]:
    """Return the results of a step whose inputs are written, and whose results are read, on the stream of the call."""
    values, late = late_inputs()
    with new_stream():
        assign(late, values)
        return [cupy.asnumpy(x) for x in step(*late)]


def from_another_stream() -> list[Any]:
    """Return the results of a step whose inputs are written on a stream named by their __cuda_array_interface__."""
    values, late = late_inputs()
    producer, consumer = new_stream(), new_stream()
    with producer:
        assign(late, values)
    with consumer:
        return [cupy.asnumpy(x) for x in step(*(Interface(x, producer) for x in late))]


def after_a_blocking_stream() -> list[Any]:
    """Return the results of a step on the legacy default stream, which waits for the blocking stream of the inputs."""
    values, late = late_inputs()
    producer = cupy.cuda.Stream()
    with producer:
        assign(late, values)
    return [cupy.asnumpy(x) for x in step(*late)]


BODIES = {body.__name__: body for body in (on_one_stream, from_another_stream, after_a_blocking_stream)}


def is_right(body: Callable[[], list[Any]], seed: int) -> bool:
    machine.reset(seed)
    try:
        assert_right([cupy.asarray(x) for x in body()], "simt")
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("body", BODIES)
def test_without_a_bug_every_order_is_right(body: str) -> None:
    assert all(is_right(BODIES[body], seed) for seed in SEEDS)


# Each function plants one bug with pytest's monkeypatch.


def no_wait_for_an_inputs_stream(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda, "_wait", lambda stream, others: None)


def kernels_on_another_stream(patch: pytest.MonkeyPatch) -> None:
    other = new_stream()
    patch.setattr(cuda, "stream_of", lambda like: other.ptr)


def workspaces_freed_before_the_kernels(patch: pytest.MonkeyPatch) -> None:
    """Run kernels on another stream, for which the caller's stream waits only after the call has freed workspaces."""
    other, run = new_stream(), {name: getattr(cuda, name) for name in ("forward", "backward")}
    patch.setattr(cuda, "stream_of", lambda like: other.ptr)

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            current = cupy.cuda.get_current_stream()
            other.wait_event(current.record())
            results = run[name](*arguments)
            current.wait_event(other.record())
            return results

        return call

    for name in run:
        patch.setattr(cuda, name, wrapped(name))


def outputs_from_another_streams_pool(patch: pytest.MonkeyPatch) -> None:
    other, empty = new_stream(), run_plan.empty

    def allocate(*arguments: Any) -> Any:
        with other:
            return empty(*arguments)

    patch.setattr(run_plan, "empty", allocate)


def legacy_default_stream_taken_for_per_thread(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cuda, "stream_of", lambda like: arrays.stream_of(like) or 2)


def wait_for_the_wrong_stream(patch: pytest.MonkeyPatch) -> None:
    """Record the event on the consumer's stream instead of the producer's."""
    wait = cuda._wait
    patch.setattr(cuda, "_wait", lambda stream, others: wait(SimpleNamespace(ptr=stream.ptr), {stream.ptr}))


BUGS = {
    no_wait_for_an_inputs_stream: from_another_stream,
    wait_for_the_wrong_stream: from_another_stream,
    kernels_on_another_stream: on_one_stream,
    workspaces_freed_before_the_kernels: on_one_stream,
    outputs_from_another_streams_pool: on_one_stream,
    legacy_default_stream_taken_for_per_thread: after_a_blocking_stream,
}


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        bug(patch)
        assert not all(is_right(BUGS[bug], seed) for seed in range(40))  # all() stops at the first wrong order
    machine.reset(0)


def test_one_wait_for_each_stream_on_which_an_input_is_ready() -> None:
    values, _ = late_inputs()
    producer, consumer = new_stream(), new_stream()
    with consumer:
        given = [Interface(x, stream) for x, stream in zip(values, (producer, producer, consumer), strict=False)]
        machine.streams.executed.clear()
        cupy_flash.attention(*given, causal=True, engine="simt")
        consumer.synchronize()
    waits = [stream for stream, name in machine.streams.executed if name == "wait"]
    assert waits == [consumer.ptr]

"""Streams: a call waits for its inputs and consumers wait for its results; memory is not reused too early."""

from __future__ import annotations

from typing import Any

import cupy
import numpy as np
import pytest
from engines import (
    assert_right,
    assign,
    bits,
    case,
    differ,
    inputs,
    keep_busy,
    new_stream,
    on_both_frameworks,
    on_every_engine,
    on_gpu,
    on_stream,
    step,
    synchronise,
)
from on_gpu import in_numpy
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash.measure.checks.references import references

pytestmark = pytest.mark.orders


@on_both_frameworks
@on_every_engine
def test_a_producer_and_a_consumer_on_other_streams(engine: str, framework: str) -> None:
    """Results are right although the inputs are zeros before and after the producer's step.

    The consumer's stream compares them after an event of the producer's.
    """
    values = inputs(framework, engine)
    expected = step(values, engine, deterministic=True)
    assert_right(expected, engine)
    late = inputs(framework, engine)
    wrong = on_gpu(framework, np.zeros((), np.int64))
    producer, consumer = new_stream(), new_stream()
    for array in late:
        bits(array)[...] = 0
    synchronise()
    for _ in range(2 if in_numpy() else 200):
        with on_stream(producer):
            keep_busy(0.2)
            assign(late, values)
            results = step(late, engine, deterministic=True)
            for array in late:
                bits(array)[...] = 0
        consumer.wait_event(producer.record())
        with on_stream(consumer):
            wrong += differ(results, expected)
        producer.wait_event(consumer.record())
    synchronise()
    assert int(wrong) == 0


@on_both_frameworks
@on_every_engine
def test_two_streams_never_have_the_same_memory(engine: str, framework: str) -> None:
    """Work of both streams is queued: memory that the host has freed may still be written by a kernel that waits."""
    streams, values = (new_stream(), new_stream()), [inputs(framework, engine, seed) for seed in (0, 1)]
    expected = [step(arrays, engine, deterministic=True) for arrays in values]
    wrong = [on_gpu(framework, np.zeros((), np.int64)) for _ in streams]
    synchronise()
    for _ in range(2 if in_numpy() else 50):
        for index, stream in enumerate(streams):
            with on_stream(stream):
                keep_busy(0.2)
                wrong[index] += differ(step(values[index], engine, deterministic=True), expected[index])
    synchronise()
    assert list(map(int, wrong)) == [0, 0]


class Interface:
    """A CUDA array that names the stream on which it is ready."""

    def __init__(self, array: cupy.ndarray, stream: Any) -> None:
        self.owner, self.__cuda_array_interface__ = array, array.__cuda_array_interface__ | {"stream": stream.ptr}


class Exporter:
    """A CUDA array with DLPack only, whose __dlpack__ makes the consumer's stream wait for its own."""

    def __init__(self, array: cupy.ndarray, stream: Any) -> None:
        self.array, self.stream = array, stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **words: Any) -> Any:
        with self.stream:
            return self.array.__dlpack__(**words)


@pytest.mark.parametrize("library", [Interface, Exporter])
def test_an_input_is_awaited_on_the_stream_of_its_library(library: type) -> None:
    call = case("simt").call()
    values = [cupy.asarray(x) for x in call[:3]]
    late = [cupy.zeros_like(x) for x in values]
    cupy_flash.attention(*values, causal=True)
    producer, consumer = new_stream(), new_stream()
    synchronise()
    with on_stream(producer):
        keep_busy(50)
        assign(late, values)
    with on_stream(consumer):
        out = cupy_flash.attention(*(library(x, producer) for x in late), causal=True)
        actual = cupy.asnumpy(out)
    exact, low = references(call._replace(options=dict(causal=True)), np.float32, gradients=False)
    assert_matches_reference(actual, exact[0], low[0], np.dtype(np.float32), "out")

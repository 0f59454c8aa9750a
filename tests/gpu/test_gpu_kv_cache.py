"""KV caches on the GPU, appended to in place; a graph that serves lengths which grow after its capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import cupy
import numpy as np
import pytest
from cache_cases import CacheCall, CacheCase, check
from engines import FRAMEWORKS, HALF, new_stream, on_both_frameworks, on_gpu, on_host

import cupy_flash
from bench import decode_gpu, decode_libraries
from cupy_flash.dispatch import plan_for, run_forward
from cupy_flash.plan.plan import Plan, forms
from cupy_flash.problem.build import pose_with_cache
from cupy_flash.problem.records import CacheOptions, Operands

CASE = CacheCase(
    lengths=(5, 130, 0), page=16, capacity=144, appended=2, q_len=3, rotary=(8, False), window=(100, None), alibi="h",
    sink=True, dtype=HALF,
)  # fmt: skip


def moved(call: CacheCall, framework: str) -> CacheCall:
    """Return the call with all arrays copied to the GPU."""
    return call.map(lambda x: on_gpu(framework, x))


def attend(call: CacheCall) -> tuple[Any, Any]:
    return cupy_flash.attention_with_kv_cache(*call[:3], **call.options, return_lse=True)


def in_every_form(call: CacheCall) -> list[Callable[[CacheCall], tuple[Any, Any]]]:
    """Return functions like `attend`, one for each form of the decode that only a tune chooses; some GPUs have none."""

    def posed(call: CacheCall) -> tuple[Plan, Operands]:
        problem, operands = pose_with_cache(*call[:3], CacheOptions(**call.options))
        return plan_for(problem), operands

    def attend_in_form(call: CacheCall, form: str) -> tuple[Any, Any]:
        chosen, operands = posed(call)
        out, lse = run_forward(forms(chosen)[form], operands)
        return out.result(), lse.result()

    return [partial(attend_in_form, form=form) for form in forms(posed(call)[0])]


@on_both_frameworks
@pytest.mark.parametrize("split_size", [None, 64])
def test_the_formula(framework: str, split_size: int | None) -> None:
    case = replace(CASE, split_size=split_size)
    call = moved(case.call(), framework)
    out, lse = attend(call)
    check(case, tuple(map(on_host, (out, lse, *call[1:3]))))


@pytest.mark.parametrize("dtype", [HALF, "float32"])
def test_a_chunk_of_a_prompt(dtype: str) -> None:
    """Many queries on pages, which the forward kernels of mma and simt serve."""
    case = replace(CASE, lengths=(50, 130, 0), q_len=150, appended=150, capacity=288, dtype=dtype)
    call = moved(case.call(), "cupy")
    out, lse = attend(call)
    check(case, tuple(map(on_host, (out, lse, *call[1:3]))))


@on_both_frameworks
@pytest.mark.parametrize("rows", [3, 100])
def test_mods(framework: str, rows: int) -> None:
    """A decode and a chunk of a prompt, with captured arrays on the GPU, of which one has a table of extremes."""
    rng = np.random.default_rng(2)
    table, documents = rng.normal(size=(4, 256)).astype(np.float32), np.sort(rng.integers(0, 3, 256).astype(np.int32))

    def mods(table: Any, documents: Any) -> dict[str, Any]:
        return dict(
            score_mod=lambda score, b, h, q_idx, kv_idx: score + table[h, kv_idx] - 0.01 * (q_idx - kv_idx),
            mask_mod=lambda b, h, q_idx, kv_idx: (documents[q_idx] == documents[kv_idx]) | (kv_idx < 2),
        )

    case = CacheCase(lengths=(5, 130, 0), page=16, capacity=256, appended=rows, q_len=rows, dtype=HALF)
    host = case.call()
    call = moved(host, framework)
    out, lse = attend(call._replace(options=call.options | mods(*(on_gpu(framework, x) for x in (table, documents)))))
    expected = host._replace(options=host.options | mods(table, documents))
    check(case, tuple(map(on_host, (out, lse, *call[1:3]))), call=expected)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_append_alone(framework: str) -> None:
    """append_to_kv_cache writes the bits that attention_with_kv_cache writes."""
    case = replace(CASE, window=None, alibi=None, sink=False)
    whole, ours = moved(case.call(), framework), moved(case.call(), framework)
    attend(whole)
    names = ("k", "v", "cache_seqlens", "block_table", "rotary_cos", "rotary_sin", "rotary_interleaved")
    options = {name: ours.options[name] for name in names}
    k, v = options.pop("k"), options.pop("v")
    cupy_flash.append_to_kv_cache(k, v, *ours[1:3], **options)
    for a, b in zip(ours[1:3], whole[1:3], strict=True):
        assert on_host(a).tobytes() == on_host(b).tobytes()


def test_a_graph_serves_lengths_that_grow() -> None:
    """The graph is captured with one key per sequence and replayed with full caches, so the host cannot read
    lengths.
    """
    case = CacheCase(lengths=(300, 290), capacity=300, q_len=1, dtype=HALF)
    call = moved(case.call(), "cupy")
    lengths = call.options["cache_seqlens"]
    for attend_in_form in (attend, *in_every_form(call)):
        lengths[...] = 1
        attend_in_form(call)  # this call loads the kernels, because a capture cannot
        with new_stream() as stream:
            stream.begin_capture()
            out, lse = attend_in_form(call)
            graph = stream.end_capture()
            lengths[...] = cupy.asarray(case.lengths, np.int32)
            graph.launch(stream)
            stream.synchronize()
        check(case, tuple(map(on_host, (out, lse, *call[1:3]))))


def test_the_implementations_of_the_bench_compute_the_same() -> None:
    """Pages may be in any order, because all sequences of the bench hold the same values."""
    small = decode_gpu.Regime(1, 4, 2, 64, 0.8, 0.9, dim=16)
    ways = decode_gpu.calls(small, decode_gpu.inputs(small))
    ways.pop(decode_gpu.READ)()
    expected = ways[decode_gpu.CONTIGUOUS]().get()
    for name in set(ways) - {"pages of 1", "pages of 16"}:
        np.testing.assert_allclose(ways[name]().get(), expected, atol=2e-3)
    names = {decode_gpu.READ, *ways}
    (row,) = decode_gpu.measure((small,), samples=1)
    others = set(row["seconds"]) - names
    assert names <= set(row["seconds"]) and others <= set(decode_libraries.LIBRARIES)
    assert not others & set(row["left_out"])

"""Runs short forwards and backwards for compute-sanitizer: python -m sanitize [ENGINE].

ENGINE is simt, mma, wgmma, fp8, tcgen05, selected (keys), indexer, cache, derivatives or rows (statistics of rows, and
attention weights); for the last four the call chooses the engine. Without ENGINE all of them run, each in its own
process, and the results are compared with the formula.

The driver allocates each array, because the tool does not detect out-of-bounds accesses inside a memory pool.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import derivatives
import fp8_cases
import indexer_cases
import ml_dtypes
import numpy as np
import on_gpu
import row_statistics
import selected_cases
import shared_prefixes
import weights_cases
from cache_cases import CacheCall, CacheCase, references
from cache_cases import check as check_cache
from cases import Call, Case, Result, check, compare, run
from mods import arrays_of, mods_of
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import Statistics, device, dispatch
from cupy_flash.engines import tcgen05
from cupy_flash.plan.plan import Plan, candidates, forms, plan
from cupy_flash.problem.build import pose, pose_with_cache
from cupy_flash.problem.records import CacheOptions, Operands, Options, Saved

DTYPES = {"simt": "float32", "mma": "bfloat16", "wgmma": "bfloat16", "tcgen05": "bfloat16"}
# Each case has a few tiles, the last one partial. Together they cover every option, every kernel, and both orders of
# the additions to dQ.
LONG = dict(q_len=150, kv_len=170, batch=1, heads=2, kv_heads=1, head_dim=64, head_dim_v=64)
CASES = {
    "causal-sink": Case(**LONG, causal=True, sink=True),
    "window-softcap-dropout": Case(**LONG, window=(60, 20), softcap=2.0, dropout=0.3, layout="bhsd"),
    "bias-mask-alibi": Case(**LONG, bias="1hqk", mask="b1qk", alibi="h"),
    "lengths": Case(**LONG | dict(batch=2), q_lengths=(150, 37), kv_lengths=(70, 170)),
    "packed": Case(**LONG | dict(batch=3), packed=True, causal=True, q_lengths=(70, 0, 150), kv_lengths=(80, 9, 170)),
    "wide": Case(**LONG | dict(q_len=70, kv_len=90, head_dim=192, head_dim_v=128)),
}
# Properties of wgmma tiles that a plan chooses only for larger problems, or never.
OTHER_TILES = ("persistent", "takes_turns", "paired", "dq_in_bulk")
FULL = Case(**LONG | dict(q_len=256))
# The gradient of the table is summed in no fixed order.
MODS = Case(**LONG, score_mod="relative", mask_mod="document")
VALUES_INSIDE_KEYS = dict(page=16, heads=16, kv_heads=1, head_dim=576, head_dim_v=512, dtype="float16", shared=True)
CACHES = {
    "cache": CacheCase(
        lengths=(5, 330, 0), capacity=400, appended=2, q_len=3, rotary=(8, False), alibi="h", sink=True, dtype="float16"
    ),
    "cache of pages": CacheCase(
        lengths=(5, 330, 0),
        capacity=400,
        page=16,
        appended=1,
        q_len=2,
        window=(100, None),
        split_size=64,
        dtype="float16",
    ),
    "cache of values inside keys": CacheCase(
        **VALUES_INSIDE_KEYS, lengths=(5, 330, 0), capacity=400, appended=2, q_len=2
    ),
    "prompt of values inside keys": CacheCase(
        **VALUES_INSIDE_KEYS, lengths=(100, 170, 150), capacity=256, appended=80, q_len=80
    ),
}
PREFIXES = ([150, 9], [5, 0, 17], 2, [0, 1, 0])  # lengths of prefixes and of own keys, queries, groups
DIRECTION = Case(**LONG, causal=True, softcap=2.0, bias="1hqk", sink=True, dropout=0.3)
DERIVATIVES = {
    "derivatives": DIRECTION,
    "derivatives of mods": MODS,
    "derivatives on tensor cores": replace(
        DIRECTION, dtype="bfloat16", q_len=1200, kv_len=1200
    ),  # shorter cases go to simt
}
# Statistics of rows with their gradients, and attention weights.
ROWS = {
    "rows": CASES["causal-sink"],
    "rows on tensor cores": replace(CASES["bias-mask-alibi"], dtype="bfloat16"),
}
SELECTED = ("rows-sink", "dropout-mask")
FP8 = ("sink-causal-more-queries", "all", "packed-causal", "narrow")


def engines() -> list[str]:
    """Return the engines that this GPU supports."""
    return [
        "simt",
        "mma",
        "selected",
        "indexer",
        "cache",
        "derivatives",
        "rows",
        *(["wgmma", "fp8"] if device.gpu(0).arch == "sm_90a" else []),
        *(["tcgen05"] if device.gpu(0).arch in (tcgen05.ARCHES or ()) else []),
    ]


TileOf = Callable[[Plan], Any]


def calls(engine: str) -> Iterator[tuple[str, Case, dict, TileOf | None]]:
    """Yield (name, case, further options, tile to use instead of the planned one)."""
    for name, case in CASES.items():
        if engine == "tcgen05":
            case = replace(case, head_dim=min(case.head_dim, tcgen05.LARGEST_OF_BACKWARD))
        for deterministic in (False, True):
            order = "deterministic" if deterministic else "in any order"
            yield f"{name}, {order}", replace(case, dtype=DTYPES[engine]), dict(deterministic=deterministic), None
    if engine != "wgmma":
        yield "mods", replace(MODS, dtype=DTYPES[engine]), {}, None
    if engine == "wgmma":  # blocks draw tiles from a counter only if tiles have unequal costs
        yield "drawn tiles", replace(CASES["causal-sink"], dtype=DTYPES[engine]), {}, best_having("persistent")
    for having in OTHER_TILES if engine == "wgmma" else ():
        yield having, replace(FULL, dtype=DTYPES[engine]), {}, best_having(having)


def best_having(name: str) -> TileOf:
    """Return a function that returns a plan's cheapest tile with a given property, or None if no tile has it."""

    def tile(chosen: Plan) -> Any:
        return next(tile for tile, _ in candidates(chosen, chosen.engine) if getattr(tile, name, True))

    return tile


def run_in(call: Call, tile: TileOf) -> Result:
    """Return results of a call on CuPy copies of its arrays, in the given tile."""
    import cupy

    q, k, v, dout, dlse = map(cupy.asarray, (call.q, call.k, call.v, call.dout, call.dlse))

    def planned(saved: Saved | None = None) -> tuple[Plan, Operands]:
        problem, operands = pose("case", (q, k, v), Options(**call.options), None, saved)
        best = dispatch.plan_for(problem)
        return plan(problem, best.device, tile(best)), operands

    out, lse = (array.result() for array in dispatch.run_forward(*planned()))
    gradients = dispatch.run_backward(*planned(Saved(dout, out, lse, dlse)))[:3]
    return Result(*map(cupy.asnumpy, (out, lse, *(array.result() for array in gradients))), None, None)


def sanitize(engine: str, *, checked: bool) -> None:
    import cupy

    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # torch reads this variable at its first allocation
    cupy.cuda.set_allocator(None)
    if engine == "fp8":
        return _fp8(checked)
    if engine == "cache":
        return _caches(checked)
    for name in on_gpu.FUNCTIONS:
        setattr(cupy_flash, name, on_gpu.moving(getattr(cupy_flash, name)))
    if engine == "derivatives":
        return _derivatives(checked)
    if engine == "rows":
        return _rows(checked)
    if engine == "selected":
        return _selected(checked)
    if engine == "indexer":
        return _indexer(checked)
    for name, case, words, tile in calls(engine):
        call = _with_mods(case)
        call.options.update(engine=engine, **words)
        result = run(case, "cuda", call) if tile is None else run_in(call, tile)
        if checked:
            check(case, result)
        print(f"{engine}: {name}", flush=True)
    if engine == "simt":  # the kernel of block masks belongs to no engine, so it runs once, with simt
        _block_mask(checked)


def _block_mask(checked: bool) -> None:
    """Compute the classes of blocks on the GPU, and compare them with those of the host."""
    import cupy

    numbers = np.arange(LONG["q_len"]) * 5 // LONG["q_len"]

    def arrays(xp: Any) -> list[Any]:
        segments = xp.asarray(numbers)
        mask_mod = cupy_flash.block_mask(
            lambda b, h, q_idx, kv_idx: segments[q_idx] == segments[kv_idx],
            q_len=LONG["q_len"], kv_len=LONG["q_len"], block=16,
        )  # fmt: skip
        return list(cupy_flash.Mod(mask_mod=mask_mod).arrays)

    computed = arrays(cupy)
    if checked:
        for x, expected in zip(computed, arrays(np), strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(x), expected)
    print("block_mask", flush=True)


def _with_mods(case: Case) -> Call:
    """Return the call of a case with mods that read CuPy arrays."""
    import cupy

    call = case.call()
    captured = {name: cupy.asarray(array) for name, array in arrays_of(case).items()}
    call.options.update(mods_of(case, cupy, captured))
    return call


def _derivatives(checked: bool) -> None:
    for name, case in DERIVATIVES.items():
        result = derivatives.run(case, "cuda", call=_with_mods(case))
        if checked:
            derivatives.check(case, result)
        print(f"derivatives: {name}", flush=True)


def _rows(checked: bool) -> None:
    for name, case in ROWS.items():
        call, n = case.call(), 3
        arrays, options = (call.q, call.k, call.v), call.options
        asked = dict(return_lse=True, statistics=Statistics._fields)
        out, lse, found = cupy_flash.attention(*arrays, **asked, **options)
        dmax, dentropy = row_statistics.drawn(lse)
        given = dict(dlse=call.dlse, statistics=found, dmax=dmax, dentropy=dentropy)
        gradients = cupy_flash.attention_backward(call.dout, *arrays, out, lse, **given, **options)
        twice = cupy_flash.merge(out, lse, out, lse, layout=case.layout, statistics_a=found, statistics_b=found)
        weights = cupy_flash.attention_weights(call.q, call.k, lse, **options)
        values, keys = cupy_flash.top_weights(call.q, call.k, lse, n, **options)
        importance, vjp = cupy_flash.key_importance_vjp(
            call.q, call.k, lse, row_weights=np.ones(case.q_len, np.float32), **options
        )
        of_importance = vjp(np.ones_like(importance))
        if checked:
            row_statistics.assert_are_of_the_scores(case, call, found)
            row_statistics.assert_are_the_gradients(case, call, gradients, dmax, dentropy)
            np.testing.assert_array_equal(twice[2].argmax, found.argmax)
            P, low = weights_cases.dense(case, call)
            assert_matches_reference(weights, P, low, weights.dtype, name)
            np.testing.assert_array_equal(values, np.take_along_axis(weights, np.maximum(keys, 0), -1) * (keys >= 0))
            exact, approximate = (x.astype(float).sum(axis=-2) for x in (P, low))
            assert_matches_reference(importance, exact, approximate, case.accumulation, name)
            low = low.astype(float).sum(axis=(0, 1, 3))
            assert_matches_reference(of_importance.drow_weights, P.sum(axis=(0, 1, 3)), low, np.dtype(np.float32), name)
        print(f"rows: {name}", flush=True)


def selected_calls() -> Iterator[tuple[str, Case, Call, dict]]:
    """Yield (name, case, call, further options) of lists of keys, with gradients added in any and in one order."""
    for engine in ("simt", "mma"):
        for name in SELECTED:
            for deterministic in (False, True):
                case, call = selected_cases.call_of(name, dtype=DTYPES[engine])
                order = "deterministic" if deterministic else "in any order"
                yield f"{engine}, {name}, {order}", case, call, dict(engine=engine, deterministic=deterministic)


def _selected(checked: bool) -> None:
    for name, case, call, words in selected_calls():
        call.options.update(words)
        result = run(case, "cuda", call)
        if checked:
            check(case, result, call=call)
        print(f"selected: {name}", flush=True)
    for name in SELECTED:
        case, call = selected_cases.call_of(name)
        result = derivatives.run(case, "cuda", call=call)
        if checked:
            derivatives.check(case, result, call=call)
        print(f"selected: derivatives, {name}", flush=True)


def indexer_calls() -> Iterator[tuple[str, tuple[Any, ...], dict, Any]]:
    """Yield (dtype, arrays, options, lists) of the choice of keys, where the lists are None of their loss."""
    for dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        arrays, lists, options = indexer_cases.in_pages(12, dtype)
        yield dtype.name, tuple(arrays), options, lists
        few, options = indexer_cases.whole_numbers(0, 3, 150), indexer_cases.CHOICES["causal"]  # parts of the keys
        yield dtype.name, tuple(x.astype(dtype) for x in few), options, indexer_cases.sorted_choice(*few, **options)
        yield dtype.name, indexer_cases.normal(dtype=dtype), {}, None


def _indexer(checked: bool) -> None:
    for name, arrays, options, lists in indexer_calls():
        if lists is None:
            found = cupy_flash.selection_loss_vjp(*arrays)
            if checked:
                indexer_cases.assert_loss_and_gradients(found, arrays)
        else:
            chosen = cupy_flash.select_keys(*arrays, **options)
            if checked:
                np.testing.assert_array_equal(chosen, lists)
        print(f"indexer: {'loss' if lists is None else 'choice'} in {name}", flush=True)


def _caches(checked: bool) -> None:
    import cupy

    for name, case in CACHES.items():
        call = case.call().map(cupy.asarray)
        results = cupy_flash.attention_with_kv_cache(*call[:3], **call.options, return_lse=True)
        on_host = tuple(x.get() for x in (*results, *call[1:3]))
        if checked:
            check_cache(case, on_host)
        print(f"cache: {name}", flush=True)
        for form, chosen, operands in forms_of(case, call):
            out, lse = (array.result().get() for array in dispatch.run_forward(chosen, operands))
            if checked:
                check_cache(case, (out, lse, *on_host[2:]))
            print(f"cache: {name}, {form}", flush=True)
    shared, unshared = shared_prefixes.calls(*PREFIXES, dtype="float16")
    call = shared.map(cupy.asarray)
    results = cupy_flash.attention_with_kv_cache(*call[:3], **call.options, return_lse=True)
    if checked:
        exact, low = references(unshared, np.dtype(np.float16))
        for of, actual, expected, approximate in zip(("float16", "float32"), results, exact, low, strict=False):
            assert_matches_reference(actual.get(), expected, approximate, np.dtype(of), "shared prefixes")
    print("cache: shared prefixes", flush=True)


def forms_of(case: CacheCase, call: CacheCall, **options: Any) -> Iterator[tuple[str, Plan, Operands]]:
    """Yield the forms that only a tune chooses for a call that keeps its caches: each appends the same rows again."""
    problem, operands = pose_with_cache(*call[:3], CacheOptions(**call.options | options))
    for form, chosen in forms(dispatch.plan_for(problem)).items():
        yield form, chosen, operands


def _fp8(checked: bool) -> None:
    import fp8_on_gpu

    for name in FP8:
        case = Case(**fp8_cases.LONG | fp8_cases.OPTIONS[name])
        call = fp8_cases.quantised(case)
        result = fp8_on_gpu.forward(call)
        if checked:
            compare(case, result, *fp8_cases.references(call), only=("out", "lse"))
        print(f"fp8: {name}", flush=True)


def main(arguments: Sequence[str]) -> int:
    if arguments:
        sanitize(arguments[0], checked="checked" in arguments)
        return 0
    command = (sys.executable, "-m", "sanitize")
    started = [subprocess.Popen([*command, engine, "checked"]) for engine in engines()]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""KV caches as torch tensors: the formula, appends in place, no gradients, torch.compile without a copy of a cache."""

import contextlib

import numpy as np
import pytest
import torch
from cache_cases import CacheCase, references
from tolerance import assert_matches_reference
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad

import cupy_flash


def as_tensor(x):
    if not isinstance(x, np.ndarray):
        return x
    if x.dtype.name in ("bfloat16", "float8_e4m3fn"):
        return torch.from_numpy(x.view(f"u{x.dtype.itemsize}").copy()).view(getattr(torch, x.dtype.name))
    return torch.from_numpy(x.copy())


def tensors_of(call):
    return [as_tensor(x) for x in call[:3]], {name: as_tensor(x) for name, x in call.options.items()}


@pytest.mark.parametrize(
    "case",
    [
        CacheCase(appended=2, q_len=2, rotary=(8, True)),
        CacheCase(page=8, appended=1, dtype="bfloat16", alibi="h", sink=True),
        CacheCase(dtype="bfloat16", cache_dtype="float8_e4m3fn", appended=1, descales=True),
        CacheCase(packed=(3, 1), appended=0, page=4),
        CacheCase(lengths=(7, 7), one_length=True, layout="bhsd", mask="11qs", split_size=64),
    ],
    ids=["rotary", "paged-bfloat16", "fp8", "packed", "bhsd-mask"],
)
def test_the_formula(case):
    call = case.call()
    arrays, options = tensors_of(call)
    out, lse = cupy_flash.attention_with_kv_cache(*arrays, **options, return_lse=True)
    exact, low = references(call, call.q.dtype)
    assert out.dtype == arrays[0].dtype and lse.dtype == torch.float32
    assert_matches_reference(out.float(), exact[0], low[0], call.q.dtype, "out")
    assert_matches_reference(lse, exact[1], low[1], np.float32, "lse")
    for tensor, expected, approximate in zip(arrays[1:], exact[2:], low[2:], strict=True):
        assert_matches_reference(tensor.float(), expected, approximate, expected.dtype, "cache")


def step(**changes):
    """Return (q and the caches, options) of a call that appends."""
    arrays, options = tensors_of(CacheCase(appended=1, **changes).call())
    return arrays, options


def test_out_is_the_callers_tensor():
    (q, *caches), options = step()
    out = torch.full_like(q, torch.nan)
    assert cupy_flash.attention_with_kv_cache(q, *caches, **options, out=out) is out
    assert not out.isnan().any()


def test_a_cache_records_no_gradients():
    """Inputs that require grad are refused, because gradients through a cache would be lost silently."""
    (q, *caches), options = step()
    for name in ("q", "k"):
        x = q if name == "q" else options["k"]
        x.requires_grad_()
        with pytest.raises(ValueError, match=f"{name} require grad, .* call it under torch.no_grad"):
            cupy_flash.attention_with_kv_cache(q, *caches, **options)
        with torch.no_grad():
            assert not cupy_flash.attention_with_kv_cache(q, *caches, **options).requires_grad
        x.requires_grad_(False)
    options["k"].requires_grad_()
    rest = {name: options[name] for name in ("k", "v", "cache_seqlens")}
    with pytest.raises(ValueError, match="append_to_kv_cache(.|\n)*k require grad"):
        cupy_flash.append_to_kv_cache(rest["k"], rest["v"], *caches, cache_seqlens=rest["cache_seqlens"])


def test_an_append_counts_as_a_change_in_place():
    """An append changes the version of a cache, so that autograd refuses a backward through its old contents."""
    (q, *caches), options = step()
    versions = [cache._version for cache in caches]
    cupy_flash.attention_with_kv_cache(q, *caches, cache_seqlens=options["cache_seqlens"])
    assert [cache._version for cache in caches] == versions
    cupy_flash.attention_with_kv_cache(q, *caches, **options)
    assert all(cache._version > version for cache, version in zip(caches, versions, strict=True))


def test_append():
    arrays, options = step(page=8)
    expected, _ = step(page=8)
    cupy_flash.attention_with_kv_cache(*expected, **options)
    rest = {name: options[name] for name in ("cache_seqlens", "block_table")}
    assert cupy_flash.append_to_kv_cache(options["k"], options["v"], *arrays[1:], **rest) is None
    for cache, same in zip(arrays[1:], expected[1:], strict=True):
        torch.testing.assert_close(cache, same, rtol=0, atol=0, equal_nan=True)


def test_compiled_without_a_copy_of_a_cache():
    """The call is traced to one graph, which serves other lengths too and neither clones nor copies a cache."""
    graphs = []

    def compiler(graph, _):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=aot_autograd(inference_compiler=compiler, fw_compiler=compiler))
    def decode(q, k_cache, v_cache, options):
        out = cupy_flash.attention_with_kv_cache(q * 1, k_cache, v_cache, **options)
        return out + 1

    arrays, options = step()
    expected, _ = step()
    for _ in range(2):
        out = decode(*arrays, options)
        eager = cupy_flash.attention_with_kv_cache(*expected, **options) + 1
        torch.testing.assert_close(out, eager, rtol=0, atol=0)
        for cache, same in zip(arrays[1:], expected[1:], strict=True):
            torch.testing.assert_close(cache, same, rtol=0, atol=0, equal_nan=True)
        options["cache_seqlens"] = options["cache_seqlens"] + 1
    assert len(graphs) == 1
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("auto_functionalized" in name for name in names) == 1
    assert not any("clone" in name or "copy" in name for name in names)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # raised by Inductor
def test_inductor_writes_to_the_caches():
    """Inductor turns the functional form into writes in place: its program copies no cache."""
    (q, *caches), options = step()

    @torch.compile(fullgraph=True, backend="inductor")
    def decode(q, k_cache, v_cache, options):
        return cupy_flash.attention_with_kv_cache(q, k_cache, v_cache, **options)

    with torch.no_grad():
        _, programs = run_and_get_code(decode, q, *caches, options)
    call = programs[0].partition("def call")[2].partition("def get_args")[0]
    assert "attention_with_kv_cache" in call and "clone" not in call and "copy_(" not in call
    for cache, rows in zip(caches, (options["k"], options["v"]), strict=True):
        for b, length in enumerate(options["cache_seqlens"].tolist()):
            torch.testing.assert_close(cache[b, length], rows[b, 0], rtol=0, atol=0)


def test_opcheck():
    """The schema with its mutations, the autograd registration and the fake kernel agree with the operator."""
    (q, *caches), options = step(rotary=(8, True))
    from cupy_flash.adapters.torch import kv_cache

    given = {"q": q, "k_cache": caches[0], "v_cache": caches[1]}
    given_options = kv_cache.CacheOptions(**options)
    arguments = kv_cache._arguments(kv_cache.ATTEND, {**given, **kv_cache._tensors(given_options)}, given_options, ())
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(kv_cache.attention_with_kv_cache, arguments, test_utils=tests)
    torch.library.opcheck(kv_cache.append_then_attend_kv_cache, (*arguments, True), test_utils=tests)


def test_a_profiler_sees_the_operator_and_both_ways_write_the_caches():
    """An unobserved call bypasses the operator, with the same results and the same versions of the written tensors."""
    results, versions = [], []
    for observe in (contextlib.nullcontext, torch.profiler.profile):
        (q, *caches), options = step()
        before = [cache._version for cache in caches]
        with observe() as profile:
            out = cupy_flash.attention_with_kv_cache(q, *caches, **options)
        results.append((out, *caches))
        versions.append([cache._version > version for cache, version in zip(caches, before, strict=True)])
    assert any(event.key == "cupy_flash::attention_with_kv_cache" for event in profile.key_averages())
    assert versions == [[True, True]] * 2
    for direct, observed in zip(*results, strict=True):
        torch.testing.assert_close(direct, observed, rtol=0, atol=0, equal_nan=True)


def test_a_lazily_negated_tensor_cannot_be_written():
    """The values of such a tensor are its memory times -1, so a kernel would write to a copy, which is lost."""
    (q, *caches), options = step()
    for n, name in enumerate(("k_cache", "v_cache")):
        negated = [cache._neg_view() if n == at else cache for at, cache in enumerate(caches)]
        with pytest.raises(ValueError, match=f"{name} is read-only"):
            cupy_flash.attention_with_kv_cache(q, *negated, **options)
    with pytest.raises(ValueError, match="out is read-only"):
        cupy_flash.attention_with_kv_cache(q, *caches, **options, out=torch.zeros_like(q)._neg_view())
    reads = {name: x for name, x in options.items() if name not in ("k", "v")}
    expected = cupy_flash.attention_with_kv_cache(q, -caches[0], caches[1], **reads)
    negated = cupy_flash.attention_with_kv_cache(q, caches[0]._neg_view(), caches[1], **reads)
    torch.testing.assert_close(negated, expected)
    with torch.profiler.profile(), pytest.raises(ValueError, match="k_cache is lazily negated"):
        cupy_flash.attention_with_kv_cache(q, caches[0]._neg_view(), caches[1], **reads)
    with pytest.raises(ValueError, match="v_cache is read-only"):
        cupy_flash.append_to_kv_cache(
            q, q.clone(), torch.zeros_like(q), torch.zeros_like(q)._neg_view(), cache_seqlens=0
        )


def test_a_zero_tensor_is_allocated_by_the_dispatcher():
    (q, *caches), options = step()
    before = [cache.clone() for cache in caches]
    expected = cupy_flash.attention_with_kv_cache(torch.zeros_like(q), *caches, **options)
    torch.testing.assert_close(
        cupy_flash.attention_with_kv_cache(torch._efficientzerotensor(q.shape), *before, **options), expected
    )


def test_all_reasons_at_once():
    (q, *caches), options = step()
    options |= {"cache_seqlens": options["cache_seqlens"].long(), "causal": "top_left", "v": None}
    with pytest.raises(TypeError) as error:
        cupy_flash.attention_with_kv_cache(q, *caches, **options)
    for text in (
        "cache_seqlens must be int32, not int64",
        "to(torch.int32)",
        "causal must be True or False",
        "k and v",
    ):
        assert text in str(error.value)


def test_tensors_on_meta_are_refused_beside_others():
    """Meta tensors would run the fake kernels, which return memory that is never written."""
    q, cache, lengths = torch.ones(2, 1, 2, 4), torch.ones(2, 8, 2, 4), torch.tensor([5, 5], dtype=torch.int32)
    for arguments in ((q, cache.to("meta"), cache.to("meta")), (q.to("meta"), cache, cache)):
        with pytest.raises(ValueError, match="attention_with_kv_cache: all arrays must be on one device, not q on"):
            cupy_flash.attention_with_kv_cache(*arguments, cache_seqlens=lengths)
    with pytest.raises(ValueError, match="append_to_kv_cache: all arrays must be on one device, not k on meta"):
        cupy_flash.append_to_kv_cache(q.to("meta"), q, cache, cache, cache_seqlens=lengths)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # raised by torch's forward mode
def test_tangents_are_refused():
    q, cache = torch.ones(1, 1, 2, 4), torch.ones(1, 8, 2, 4)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="q: a KV cache has no forward-mode derivative"):
        cupy_flash.attention_with_kv_cache(forward_ad.make_dual(q, q), cache, cache, cache_seqlens=5)

"""Values inside keys: attention(q, k, None, head_dim_v=...), in which v is the first head_dim_v numbers of k."""

from dataclasses import replace

import derivatives
import numpy as np
import pytest
from cache_cases import CacheCase, assert_append_writes_the_bits_of_the_cpu
from cache_cases import check as check_on_cache
from cache_cases import run_kernels as run_on_cache
from cases import Case, Result, check, planned, run, run_kernels
from tiers import exhaustive

import cupy_flash
from cupy_flash import device, reference
from cupy_flash.gpu import ahead

pytestmark = pytest.mark.usefixtures("poisoned_memory")

PADDED = Case(11, 13, 2, 4, 1, 24, causal=True, scale=0.3, kv_lengths=(13, 9), shared=True)
PACKED = replace(PADDED, packed=True, q_lengths=(11, 5))
CACHED = CacheCase(head_dim=24, kv_heads=1, q_len=3, appended=3, page=16, capacity=48, shared=True)


@pytest.mark.parametrize("case", [PACKED, replace(PADDED, head_dim_v=24, layout="bhsd", kv_heads=2)])
def test_the_gradient_of_a_key_has_that_of_its_value(case):
    """References add the two in their precision, and round their sum once."""
    check(case)


def test_every_backend_adds_the_gradient_of_the_value(backend):
    check(PADDED, backend=backend)


def test_tensor_cores_add_the_gradient_of_the_value():
    case = replace(PADDED, dtype="float16")
    assert planned(case, engine="mma")[0].engine == "mma"
    check(case, run_kernels(case, engine="mma"))


def test_gradients_are_rounded_once():
    """The sum has a smaller error than one of dK and dV that have been rounded to bfloat16."""
    case = replace(PADDED, dtype="bfloat16", kv_lengths=None)
    call = case.call()
    views = call._replace(v=call.k[..., : case.head_dim_v], options=call.options | {"head_dim_v": None})
    one, two = run(case, call=call), run(case, call=views)
    exact = reference.attention_backward(call.dout, *call[:3], dlse=call.dlse, **call.options, dtype="float64").dk
    summed = two.dk.copy()
    summed[..., : case.head_dim_v] += two.dv
    once, twice = (np.abs(x.astype(np.float64) - exact).mean() for x in (one.dk, summed))
    assert once < 0.95 * twice


def test_derivatives(backend):
    """The tangent of a value is that of its key."""
    derivatives.check(PADDED, backend=backend, moving=("tq", "tk"))


def test_the_results_are_those_of_a_view():
    call = PADDED.call()
    view = call._replace(v=call.k[..., : PADDED.head_dim_v], options=call.options | {"head_dim_v": None})
    one, two = run(PADDED, call=call), run(PADDED, call=view)
    assert one.dv is None and one.out.tobytes() == two.out.tobytes() and one.dq.tobytes() == two.dq.tobytes()


def test_an_engine_of_a_forward_alone_reads_a_view():
    case = replace(PADDED, dtype="float16", head_dim=64, head_dim_v=64, kv_lengths=None, batch=1)
    plan, _ = planned(case, arch="sm_90a", engine="wgmma")
    assert plan.problem.shared_kv and plan.engine == "wgmma"
    call = case.call()
    with pytest.raises(cupy_flash.UnsupportedError, match="wgmma: it computes no gradient of values inside keys"):
        cupy_flash.attention_backward(
            call.dout, call.q, call.k, None, call.dout, call.dlse, backend="simulator:sm_90a", engine="wgmma",
            head_dim_v=64,
        )  # fmt: skip


@exhaustive
@pytest.mark.parametrize(("engine", "dtype"), [("simt", "float32"), ("mma", "float16")])
def test_the_sizes_of_multi_head_latent_attention(engine, dtype):
    case = Case(5, 37, 1, 2, 1, 576, 512, dtype=dtype, shared=True)
    only = ("out", "lse") if engine == "simt" else ("out", "lse", "dq", "dk")
    call = case.call()
    out, lse = cupy_flash.attention(*call[:3], return_lse=True, backend="simulator", engine=engine, **call.options)
    dq = dk = None
    if engine == "mma":
        gradients = cupy_flash.attention_backward(
            call.dout, *call[:3], out, lse, dlse=call.dlse, backend="simulator", engine=engine, **call.options
        )
        dq, dk = gradients[:2]
    check(case, Result(out, lse, dq, dk, None, None, None), only=only)


@pytest.mark.parametrize("case", [CACHED, replace(CACHED, page=None, rotary=(8, True))])
def test_a_cache_of_keys_alone(case, backend):
    """Appended rows are written once, rotated, and the value of a key is what is stored."""
    check_on_cache(case, backend=backend)


def test_decode_of_keys_alone():
    case = replace(CACHED, dtype="float16", q_len=1, appended=1)
    call = case.call()
    check_on_cache(case, run_on_cache(call), call=call)


def test_appends_write_the_bits_of_the_keys(monkeypatch):
    case = replace(CACHED, rotary=(8, True))
    call = case.call()
    options = {x: call.options[x] for x in ("cache_seqlens", "block_table", "rotary_cos", "rotary_sin")}
    assert_append_writes_the_bits_of_the_cpu(call, options, monkeypatch)
    plain = CACHED.call()
    cache = plain.k_cache
    cupy_flash.append_to_kv_cache(
        plain.options["k"], None, cache, None, **{x: options[x] for x in options if "rot" not in x}
    )
    for b, length in enumerate(CACHED.lengths):
        for i, row in enumerate(plain.options["k"][b]):
            page = options["block_table"][b, (length + i) // 16]
            assert cache[page, (length + i) % 16].tobytes() == row.tobytes()


K = np.zeros((1, 5, 1, 8), np.float32)


@pytest.mark.parametrize(
    ("kind", "v", "size", "text"),
    [
        (TypeError, None, None, "without v, head_dim_v must say how many numbers of a key are its value"),
        (TypeError, None, 2.5, "head_dim_v must be None or a whole number, not 2.5"),
        (ValueError, None, 0, r"head_dim_v must be in \[1, 8\], the numbers of a key, not 0"),
        (ValueError, None, 9, r"head_dim_v must be in \[1, 8\], the numbers of a key, not 9"),
        (ValueError, None, True, r"head_dim_v must be in \[1, 8\], the numbers of a key, not True"),
        (ValueError, K, 4, "head_dim_v is for v=None"),
    ],
)
def test_head_dim_v_is_given_if_v_is_none(kind, v, size, text):
    for call in (
        lambda: cupy_flash.attention(K, K, v, head_dim_v=size),
        lambda: cupy_flash.attention_with_kv_cache(K, K, v, head_dim_v=size),
    ):
        with pytest.raises(kind, match=text):
            call()


def test_a_refused_call_changes_no_cache():
    cache = np.ones((1, 8, 1, 8), np.float32)
    before = cache.tobytes()
    given = dict(cache_seqlens=2, k=K[:, :1])
    for options in (given, given | dict(head_dim_v=4, v=K[:, :1, :, :4]), given | dict(head_dim_v=9)):
        with pytest.raises((TypeError, ValueError)):
            cupy_flash.attention_with_kv_cache(K, cache, None, **options)
    with pytest.raises(ValueError, match="v must be None, as v_cache is"):
        cupy_flash.append_to_kv_cache(K, K, cache, None, cache_seqlens=0)
    with pytest.raises(ValueError, match="v is None, and v_cache is not"):
        cupy_flash.append_to_kv_cache(K, None, cache, cache.copy(), cache_seqlens=0)
    with pytest.raises(ValueError, match="tv must be None, as v is"):
        cupy_flash.attention_jvp(K, K, None, K, K, K[..., :4], head_dim_v=4)
    assert cache.tobytes() == before


@pytest.mark.parametrize("size", [None, 9, 2.5])
def test_a_wrong_head_dim_v_is_the_only_reason(size):
    """The rows to append lack no v, which is inside them."""
    cache, slots = np.ones((1, 8, 1, 8), np.float32), np.zeros(5, np.int64)
    with pytest.raises((TypeError, ValueError), match="a requirement is not met\n  - .*head_dim_v must"):
        cupy_flash.attention_with_kv_cache(
            K, cache, None, k=K, slots=slots, cache_seqlens=np.array([5], np.int32), head_dim_v=size
        )


def test_explain_says_that_values_are_inside_keys():
    assert "D 8, Dv 4; full, shared_kv" in cupy_flash.explain(K, K, None, head_dim_v=4)


def test_kernels_are_compiled_ahead():
    launches = ahead.launches(
        device.named("sm_80", "cuda"), dtype="float16", head_dim=64, head_dim_v=32, shared_kv=True, engine="mma"
    )
    constants = {launch.kernel: dict(launch.constants) for launch in launches}
    assert constants["mma/backward_kv"]["SHARED_KV"] and not constants["mma/forward"]["SHARED_KV"]
    with pytest.raises(TypeError, match="shared_kv must be True or False"):
        cupy_flash.compile(dtype="float16", head_dim=64, shared_kv=None, arch="sm_80")

"""KV caches as jax arrays: appends to donated buffers, reads under jit, and a decode loop in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import exhaustive, in_tiers

import cupy_flash
from cupy_flash.adapters.jax import append_to_kv_cache, attention, attention_with_kv_cache
from cupy_flash.adapters.jax.kv_cache import CACHES, CacheCall

B, S, H, HK, D, CAPACITY = 2, 3, 4, 2, 8, 16
LENGTHS = np.array([5, 2], np.int32)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def contiguous():
    return [normal(n, B, CAPACITY, HK, D) for n in (3, 4)]


OPTIONS = {
    "lengths": dict(cache_seqlens=LENGTHS),
    "rotary": dict(cache_seqlens=LENGTHS, rotary_cos=normal(5, 32, 4), rotary_sin=normal(6, 32, 4)),
    "paged": dict(cache_seqlens=LENGTHS, block_table=np.array([[3, 1], [0, 2]], np.int32)),
}


def caches_of(case):
    return [normal(n, 4, 8, HK, D) for n in (3, 4)] if case == "paged" else contiguous()


def to_jax(arrays):
    return jax.tree.map(jnp.asarray, arrays)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", OPTIONS)
def test_appends_and_attention_equal_numpy(case, transform):
    options, caches = OPTIONS[case], caches_of(case)
    k, v, q = normal(0, B, S, HK, D), normal(1, B, S, HK, D), normal(2, B, S, H, D)
    arrays = to_jax(dict(k=k, v=v, k_cache=caches[0], v_cache=caches[1], **options))
    actual = transform(lambda arrays: append_to_kv_cache(**arrays))(arrays)
    cupy_flash.append_to_kv_cache(k, v, *caches, **options)
    for one, other in zip(actual, caches, strict=True):
        np.testing.assert_array_equal(one, other)
    longer = options | {"cache_seqlens": LENGTHS + S}
    expected = cupy_flash.attention_with_kv_cache(q, *caches, return_lse=True, **longer)
    read = transform(functools.partial(attention_with_kv_cache, return_lse=True))
    for one, other in zip(read(jnp.asarray(q), *actual, **to_jax(longer)), expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_slots_are_int32():
    k, v = normal(0, 3, HK, D), normal(1, 3, HK, D)
    slots = np.array([17, -1, 4])
    actual = append_to_kv_cache(*to_jax([k, v, *contiguous()]), slots=jnp.asarray(slots, jnp.int32))
    expected = contiguous()
    cupy_flash.append_to_kv_cache(k, v, *expected, slots=slots)
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_donated_caches_are_written_in_place(jitted, monkeypatch):
    handed, run = [], CacheCall.run

    def record(call, operands, results):
        handed.append([operands[name].pointer for name in CACHES] + [x.pointer for x in results])
        return run(call, operands, results)

    monkeypatch.setattr(CacheCall, "run", record)
    append = jax.jit(append_to_kv_cache, donate_argnums=(2, 3)) if jitted else append_to_kv_cache
    k, v, *caches = to_jax([normal(0, B, S, HK, D), normal(1, B, S, HK, D), *contiguous()])
    caches = [cache + 0 for cache in caches]
    pointers = [cache.unsafe_buffer_pointer() for cache in caches]
    results = append(k, v, *caches, cache_seqlens=jnp.asarray(LENGTHS))
    assert [cache.unsafe_buffer_pointer() for cache in results] == pointers
    assert all(cache.is_deleted() for cache in caches)
    assert handed == [[*pointers, *pointers]]  # the handler got the arrays that were passed: XLA copied nothing


def test_a_cache_that_is_used_again_is_copied():
    k, v, *caches = to_jax([normal(0, B, S, HK, D), normal(1, B, S, HK, D), *contiguous()])
    before = [np.array(cache) for cache in caches]
    (k_cache, _), first = jax.jit(lambda k, v, a, b: (append_to_kv_cache(k, v, a, b, cache_seqlens=4), a.sum()))(
        k, v, *caches
    )
    for cache, old in zip(caches, before, strict=True):
        np.testing.assert_array_equal(cache, old)
    np.testing.assert_allclose(first, before[0].sum(), rtol=1e-5)
    np.testing.assert_array_equal(k_cache[:, 4 : 4 + S], k)


def test_a_decode_loop_in_one_program_equals_causal_attention():
    q, k, v = (jnp.asarray(normal(n, B, CAPACITY, heads, D)) for n, heads in ((0, H), (1, HK), (2, HK)))

    @jax.jit
    def decode(q, k, v):
        def token(caches, x):
            position, *rows = x
            q, k, v = (row[:, None] for row in rows)
            caches = append_to_kv_cache(k, v, *caches, cache_seqlens=position)
            return caches, attention_with_kv_cache(q, *caches, cache_seqlens=position + 1)[:, 0]

        empty = (jnp.zeros_like(k), jnp.zeros_like(v))
        moved = (jnp.moveaxis(x, 1, 0) for x in (q, k, v))
        _, out = jax.lax.scan(token, empty, (jnp.arange(CAPACITY), *moved))
        return jnp.moveaxis(out, 0, 1)

    np.testing.assert_allclose(decode(q, k, v), attention(q, k, v, causal=True), rtol=2e-5, atol=2e-6)


def decode(q, k, v, k_cache, v_cache, lengths, **options):
    """Return out, lse and the caches of an append followed by attention."""
    caches = append_to_kv_cache(k, v, k_cache, v_cache, cache_seqlens=lengths, **options)
    return (*attention_with_kv_cache(q, *caches, cache_seqlens=lengths + S, return_lse=True, **options), *caches)


def read(q, k_cache, v_cache, lengths):
    return attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=lengths)


def read_pages(q, k_cache, v_cache, table):
    return attention_with_kv_cache(q, k_cache, v_cache, cache_seqlens=jnp.asarray(LENGTHS), block_table=table)


def rows_of(count=()):
    return [jnp.asarray(normal(n, *count, B, S, heads, D)) for n, heads in ((0, H), (1, HK), (2, HK))]


def per_instance(arrays, axes):
    """Return the given arrays with three instances stacked along their vmap axis; arrays without an axis are shared."""
    varied = [jnp.stack([x, 2 * x, x[::-1]]) if x.dtype == jnp.float32 else jnp.stack([x, x[::-1], x]) for x in arrays]
    return [x if axis is None else many for x, many, axis in zip(arrays, varied, axes, strict=True)]


# (function, its arrays, the axes of vmap, number of calls of the handler)
CONTIGUOUS, PAGES = to_jax(contiguous()), to_jax(caches_of("paged"))
DECODED = [*rows_of(), *CONTIGUOUS, jnp.asarray(LENGTHS)]
TABLE = jnp.asarray(OPTIONS["paged"]["block_table"])
VMAPS = {
    "all": (decode, DECODED, (0,) * 6, 2),
    "caches-shared": (decode, DECODED, (None, 0, 0, None, None, None), 2),
    "one-sequence": (decode, [x[:1] for x in DECODED], (0, 0, 0, None, None, None), 2),
    "read": (read, [DECODED[0], *DECODED[3:]], (0, None, None, 0), 1),
    "pages-shared": (read_pages, [DECODED[0], *PAGES, TABLE], (0, None, None, 0), 1),
    "pages": (read_pages, [DECODED[0], *PAGES, TABLE], (0, 0, 0, None), 3),
}


@pytest.mark.parametrize("case", in_tiers({name: name for name in VMAPS}, ("all",)))
def test_vmap_is_one_call(case, monkeypatch):
    function, arrays, axes, count = VMAPS[case]
    given = per_instance(arrays, axes)
    expected = [function(*(x + 0 if a is None else x[n] for x, a in zip(given, axes, strict=True))) for n in range(3)]
    steps, run = [], CacheCall.run
    monkeypatch.setattr(CacheCall, "run", lambda call, *arrays: steps.append(call.step) or run(call, *arrays))
    actual = jax.block_until_ready(jax.jit(jax.vmap(function, axes))(*given))
    assert len(steps) == count
    jax.tree.map(np.testing.assert_array_equal, actual, jax.tree.map(lambda *x: jnp.stack(x), *expected))


@pytest.mark.parametrize(
    "transform", [lambda f: f, functools.partial(jax.jit, donate_argnums=(3, 4))], ids=["eager", "jit"]
)
@pytest.mark.parametrize("kind", [exhaustive(AxisType.Auto), exhaustive(AxisType.Explicit)], ids=str)
def test_caches_stay_sharded(kind, transform):
    """Caches are sharded by sequence and key/value head; each device appends to its shard and reads it."""
    expected = decode(*(x + 0 for x in DECODED))
    spec = PartitionSpec("data", None, "model")
    with jax.set_mesh(mesh := jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)):
        sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in DECODED[:5]]
        actual = transform(decode)(*sharded, DECODED[5])
        assert sharded[3].is_deleted()
    for one, other in zip(actual, expected, strict=True):
        rows = spec if one.ndim == 4 else PartitionSpec("data", "model")
        assert one.sharding.is_equivalent_to(NamedSharding(mesh, rows), one.ndim)
        np.testing.assert_array_equal(one, other)


@pytest.mark.exhaustive
def test_sharded_sequences_share_the_pages():
    """Each device holds its heads of all pages, because any sequence may use any page."""
    arrays = [*rows_of(), *PAGES, jnp.asarray(LENGTHS)]
    call = functools.partial(decode, block_table=TABLE)
    expected = call(*(x + 0 for x in arrays))
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows, pages = PartitionSpec("data", None, "model"), PartitionSpec(None, None, "model")
    placed = [NamedSharding(mesh, spec) for spec in (rows, rows, rows, pages, pages)]
    actual = jax.jit(call)(*map(jax.device_put, arrays[:5], placed), arrays[5])
    for one, other, sharding in zip((actual[0], *actual[2:]), (expected[0], *expected[2:]), placed[2:], strict=True):
        assert one.sharding.is_equivalent_to(sharding, 4)
        np.testing.assert_array_equal(one, other)


def test_a_cache_has_no_gradient():
    with pytest.raises(NotImplementedError, match="attention_with_kv_cache: there is no derivative of this order"):
        jax.grad(lambda q: attention_with_kv_cache(q, *CONTIGUOUS).sum())(DECODED[0])


Q, EMPTY = jnp.zeros((B, S, H, D)), [jnp.zeros((B, CAPACITY, HK, D))] * 2
ROWS = [jnp.zeros((B, S, HK, D))] * 2
WRONG = {
    "in-place": (lambda: attention_with_kv_cache(Q, *EMPTY, k=Q, v=Q), TypeError, "k, v would be written in place"),
    "option": (lambda: append_to_kv_cache(*ROWS, *EMPTY, window=(1, 1)), TypeError, "unknown option window"),
    "shape": (lambda: attention_with_kv_cache(Q[..., :3], *EMPTY), ValueError, "one head dimension, not 3, 8"),
    "heads": (lambda: append_to_kv_cache(Q, Q, *EMPTY), ValueError, "k and v must agree"),
}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("case", WRONG)
def test_refused(case, transform):
    call, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        transform(call)()


def test_lengths_beyond_the_capacity_are_an_error():
    call = jax.jit(lambda n: attention_with_kv_cache(Q, *EMPTY, cache_seqlens=n))
    with pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError), match=r"cache_seqlens\[0\] is 17, and the capacity is"
    ):
        jax.block_until_ready(call(CAPACITY + 1))

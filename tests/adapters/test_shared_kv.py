"""Values inside keys in torch and jax: None is the gradient of v, and that of k is the whole one."""

import numpy as np
import pytest
import torch

import cupy_flash
from cupy_flash import UnsupportedError

# torch's forward mode uses torch.jit.script, which torch itself has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
RNG = np.random.default_rng(0)
Q, K = RNG.normal(size=(2, 5, 4, 12)), RNG.normal(size=(2, 9, 1, 12))
OPTIONS = dict(causal=True, head_dim_v=8)


def of_view(attention):
    """Return the same function with v as a view of k, whose gradients autograd adds."""
    return lambda q, k: attention(q, k, k[..., :8], causal=True)


def test_torch():
    from cupy_flash.adapters.torch import attention

    q, k = (torch.tensor(x, requires_grad=True) for x in (Q, K))
    out, view = attention(q, k, None, **OPTIONS), of_view(attention)(q, k)
    grads = [torch.autograd.grad((x**2).sum(), (q, k)) for x in (out, view)]
    for one, two in zip((out, *grads[0]), (view, *grads[1]), strict=True):
        np.testing.assert_array_equal(one.detach(), two.detach())
    small = [x[:1, :2, :2].detach().requires_grad_() for x in (q, k)]
    assert torch.autograd.gradgradcheck(lambda q, k: attention(q, k, None, head_dim_v=8), small)
    assert (
        cupy_flash.attention_backward(
            out.detach(), q, k, None, out.detach(), torch.zeros(2, 4, 5).double(), **OPTIONS
        ).dv
        is None
    )


def test_torch_compiles_and_transforms():
    from cupy_flash.adapters.torch import attention

    q, k = torch.tensor(Q), torch.tensor(K, requires_grad=True)
    compiled = torch.compile(lambda k: attention(q, k, None, **OPTIONS), fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(k).sum(), k)
    (expected,) = torch.autograd.grad(of_view(attention)(q, k).sum(), k)
    np.testing.assert_array_equal(gradient, expected)
    one, two = (
        torch.func.jvp(lambda k, f=f: f(q, k), (k.detach(),), (k.detach() + 1,))[1]
        for f in (lambda q, k: attention(q, k, None, **OPTIONS), of_view(attention))
    )
    np.testing.assert_array_equal(one, two)


def test_torch_caches():
    q, k, cache = torch.tensor(Q), torch.tensor(K), torch.zeros(2, 16, 1, 12, dtype=torch.float64)
    cupy_flash.append_to_kv_cache(k[:, :4], None, cache, None, cache_seqlens=0)
    out = cupy_flash.attention_with_kv_cache(q, cache, None, k=k[:, 4:], cache_seqlens=4, head_dim_v=8)
    assert torch.equal(cache[:, :9], k) and cache._version == 2
    np.testing.assert_allclose(out, cupy_flash.attention(q, k, None, **OPTIONS), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("function", ["ring_attention", "ulysses_attention"])
def test_several_ranks_refuse_it_by_name(function, tmp_path):
    import torch.distributed as dist

    from cupy_flash import distributed

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="head_dim_v is not served over several ranks"):
            getattr(distributed, function)(torch.tensor(Q), torch.tensor(K), None, head_dim_v=8)
    finally:
        dist.destroy_process_group()


def test_jax():
    import jax

    from cupy_flash.adapters import jax as adapter

    q, k = (jax.numpy.asarray(x, "float32") for x in (Q, K))
    losses = [lambda q, k: (adapter.attention(q, k, None, **OPTIONS) ** 2).sum()]
    losses.append(lambda q, k: (of_view(adapter.attention)(q, k) ** 2).sum())
    for transform in (lambda f: jax.grad(f, (0, 1)), lambda f: jax.jit(jax.grad(f, (0, 1)))):
        one, two = (transform(f)(q, k) for f in losses)
        np.testing.assert_array_equal(one[0], two[0])
        np.testing.assert_allclose(one[1], two[1], rtol=1e-5, atol=1e-6)  # the view adds rounded gradients
    one, two = (jax.jvp(jax.grad(f, 1), (q, k), (q, k))[1] for f in losses)
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)
    cache, values = adapter.append_to_kv_cache(k, None, jax.numpy.zeros((2, 16, 1, 12)), None, cache_seqlens=0)
    assert values is None and (cache[:, :9] == k).all()
    out = adapter.attention_with_kv_cache(q, cache, None, cache_seqlens=9, head_dim_v=8)
    np.testing.assert_allclose(out, adapter.attention(q, k, None, **OPTIONS), rtol=1e-5, atol=1e-6)


def test_tapes_refuse_it_by_name():
    from cupy_flash.adapters.tape_call import TapeCall

    with pytest.raises(UnsupportedError, match=r"head_dim_v; give v=k\[..., :head_dim_v\]"):
        TapeCall("attention", {"head_dim_v": 8}, lambda x: False)


def test_a_kept_plan_has_head_dim_v_in_its_key():
    """Calls that differ in head_dim_v alone have other results; a backward from a kept plan gives k its gradient."""
    from cupy_flash import keyed_plan

    keyed_plan.forget()
    q, k = (torch.tensor(x[:1], dtype=torch.float32, requires_grad=True) for x in (Q, K))
    on = dict(backend="simulator", engine="simt")
    for size in (8, 4, 8, 4):
        out = cupy_flash.attention(q, k, None, head_dim_v=size, **on)
        grads = torch.autograd.grad(out.sum(), (q, k))
        view = cupy_flash.attention(q, k, k[..., :size], **on)
        of_view = torch.autograd.grad(view.sum(), (q, k))
        assert out.shape[-1] == size and torch.equal(out, view) and torch.equal(grads[0], of_view[0])
        np.testing.assert_allclose(grads[1], of_view[1], rtol=1e-5, atol=1e-6)
    served = [entry.served for entry in keyed_plan._entries.values() if entry is not None]
    assert len(served) == 4 and sum(served) == 4
    with torch.no_grad():
        cache = torch.zeros(1, 16, 1, 12)
        for step in (0, 1, 2):
            rows = k[:, 3 * step : 3 * step + 3]
            out = cupy_flash.attention_with_kv_cache(
                q[:, :3], cache, None, k=rows, cache_seqlens=3 * step, head_dim_v=8, **on
            )
            expected = cupy_flash.attention(q[:, :3], k[:, : 3 * step + 3], None, causal=True, head_dim_v=8)
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    keyed_plan.forget()


def test_a_kept_plan_has_in_its_key_which_arrays_are_given():
    """A call that is refused is refused after one with the same arrays in all places, and after one without v."""
    from cupy_flash import keyed_plan

    keyed_plan.forget()
    for k in (K, torch.tensor(K)):
        cupy_flash.attention(k, k, k)
        cupy_flash.attention(k, k, None, head_dim_v=12)
        with pytest.raises(TypeError, match="without v, head_dim_v must say"):
            cupy_flash.attention(k, k, None)
        with pytest.raises(ValueError, match="head_dim_v is for v=None"):
            cupy_flash.attention(k, k, k, head_dim_v=12)
    q, cache = torch.zeros(1, 1, 1, 16), torch.zeros(1, 8, 1, 16)
    row, on = torch.ones(1, 1, 1, 16), dict(cache_seqlens=2, head_dim_v=16, backend="simulator")
    cupy_flash.attention_with_kv_cache(q, cache, None, k=row, **on)
    with pytest.raises(ValueError, match="v must be None, as v_cache is"):
        cupy_flash.attention_with_kv_cache(q, cache, None, k=row, v=row, **on)
    keyed_plan.forget()

"""Checks that attention on DTensors returns the results of one process, without communication (see test_ring.py)."""

import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

import cupy_flash
from cupy_flash import dispatch
from cupy_flash.adapters.torch import scaled_dot_product_attention, sdpa

WHOLE = Replicate()
SUM = Partial()
ARRAYS = {
    "bias": (2, 4, 5, 6), "bias-of-heads": (4, 5, 6), "bias-of-sequences": (2, 1, 5, 6), "bias-of-all": (5, 6),
    "sink": (4,), "alibi_slopes": (4,), "alibi_slopes-of-all": (2, 4),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A call whose q, k and v are sharded along `dims` (by axis of the mesh; None: replicated), and its placements."""

    dims: tuple[int | None, ...]
    out: tuple
    lse: tuple
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    kv_dims: tuple[int | None, ...] | None = None  # of k and v; None: those of q
    dk: tuple | None = None  # placements of dk and dv; None: those of out
    array: str = ""  # a key of ARRAYS; replicated
    gradient: tuple = ()  # placements of its gradient
    packed: bool = False
    options: dict = field(default_factory=dict)

    def tensors(self):
        """Return (q, k, v) and the tensors among the options, whole."""
        rng = np.random.default_rng(0)
        shapes = [(self.batch, 5, self.heads, 8), *((self.batch, 6, self.kv_heads, 8) for _ in range(2))]
        arrays = [torch.from_numpy(rng.normal(size=shape)) for shape in shapes]
        if self.packed:
            arrays = [x.flatten(0, 1) for x in arrays]
        if self.options.get("layout") == "bhsd":
            arrays = [x.transpose(1, 2).contiguous() for x in arrays]
        options = {}
        if self.array:
            name = self.array.partition("-")[0]
            x = torch.from_numpy(rng.normal(size=ARRAYS[self.array]))
            options[name] = x.abs().float() if name == "alibi_slopes" else x
        if "lengths" in self.options:
            options |= dict(q_lengths=torch.tensor([3, 5]).int(), kv_lengths=torch.tensor([6, 2]).int())
            options["mask"] = torch.from_numpy(rng.uniform(size=(2, 1, 5, 6)) > 0.2)
        if self.packed:
            options |= dict(cu_seqlens_q=torch.tensor([0, 3, 10]).int(), cu_seqlens_k=torch.tensor([0, 7, 12]).int())
        return arrays, options

    def run(self, arrays, options):
        """Return (out, lse, *gradients) of a call, for cotangents that are the same for whole and sharded tensors."""
        tensors = [*arrays, *options.values()]
        leaves = [x.requires_grad_() for x in tensors if x.dtype == torch.float64]
        named = {name: x for name, x in self.options.items() if name != "lengths"}
        if self.packed:
            bounds = [options[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
            out, lse = cupy_flash.attention_varlen(*arrays, *bounds, 7, 7, return_lse=True, **named)
        else:
            out, lse = cupy_flash.attention(*arrays, return_lse=True, **named, **options)
        # With sin every element has a different cotangent, without communication.
        return out, lse, *torch.autograd.grad((out * out.sin()).sum() + lse.sin().sum(), leaves)


def placements(dims):
    return tuple(WHOLE if dim is None else Shard(dim) for dim in dims)


def compare(case, mesh):
    expected = case.run(*case.tensors())
    arrays, options = case.tensors()
    of_kv = case.dims if case.kv_dims is None else case.kv_dims
    arrays = [distribute_tensor(x, mesh, placements(d)) for x, d in zip(arrays, (case.dims, of_kv, of_kv), strict=True)]
    options = {name: distribute_tensor(x, mesh, [WHOLE] * mesh.ndim) for name, x in options.items()}
    with CommDebugMode() as communication, warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of tensors, such as a seed, that are no DTensors
        results = case.run(arrays, options)
    assert communication.get_total_counts() == 0
    given = [x.placements for x in results]
    dk = case.out if case.dk is None else case.dk
    assert given == [case.out, case.lse, case.out, dk, dk, *([case.gradient] if case.gradient else [])]
    for whole, x in zip(expected, results, strict=True):
        torch.testing.assert_close(x.full_tensor(), whole, rtol=0, atol=1e-12)


BATCH, HEADS = (dict(dims=(0,), out=(Shard(0),), lse=(Shard(0),)), dict(dims=(2,), out=(Shard(2),), lse=(Shard(1),)))
CASES = {
    "replicated": Case((None,), (WHOLE,), (WHOLE,), options=dict(causal=True, dropout=0.3, seed=5)),
    "batch": Case(**BATCH, options=dict(causal=True, window=(3, 0), scale=0.3, softcap=2.0)),
    "batch-of-unequal-shards": Case(**BATCH, batch=3),
    "heads": Case(**HEADS, options=dict(causal="top_left")),
    "heads-of-q": Case(**HEADS, kv_dims=(None,)),
    "one-kv-head": Case(**HEADS, kv_heads=1, kv_dims=(None,), dk=(SUM,)),
    "bhsd": Case((1,), (Shard(1),), (Shard(1),), options=dict(layout="bhsd")),
    "packed": Case((1,), (Shard(1),), (Shard(0),), packed=True),
    "batch-bias": Case(**BATCH, array="bias", gradient=(Shard(0),)),
    "batch-bias-of-heads": Case(**BATCH, array="bias-of-heads", gradient=(SUM,)),
    "batch-bias-of-sequences": Case(**BATCH, array="bias-of-sequences", gradient=(Shard(0),)),
    "batch-bias-of-all": Case(**BATCH, array="bias-of-all", gradient=(SUM,)),
    "batch-sink": Case(**BATCH, array="sink", gradient=(SUM,)),
    "batch-alibi": Case(**BATCH, array="alibi_slopes"),
    "batch-alibi-of-all": Case(**BATCH, array="alibi_slopes-of-all"),
    "batch-lengths-mask": Case(**BATCH, options=dict(lengths=True)),
    "heads-bias": Case(**HEADS, array="bias", gradient=(Shard(1),)),
    "heads-bias-of-heads": Case(**HEADS, array="bias-of-heads", gradient=(Shard(0),)),
    "heads-bias-of-sequences": Case(**HEADS, array="bias-of-sequences", gradient=(SUM,)),
    "heads-bias-of-all": Case(**HEADS, array="bias-of-all", gradient=(SUM,)),
    "heads-sink": Case(**HEADS, array="sink", gradient=(Shard(0),)),
    "heads-alibi": Case(**HEADS, array="alibi_slopes"),
    "heads-alibi-of-all": Case(**HEADS, array="alibi_slopes-of-all"),
    "heads-lengths-mask": Case(**HEADS, options=dict(lengths=True)),
}


def on_2(case, world):
    compare(case, init_device_mesh("cpu", (2,)))


def sharded(mesh, dim, shape=(2, 6, 4, 8)):
    return distribute_tensor(torch.ones(shape), mesh, [WHOLE if dim is None else Shard(dim)])


def refused_dtensors(world):
    """Every rank raises the reason: placements are facts that all ranks know, so none of them waits for another."""
    mesh = init_device_mesh("cpu", (2,))
    whole, sequence, batch, heads = (sharded(mesh, dim) for dim in (None, 1, 0, 2))
    odd = [sharded(mesh, 2, (2, 6, n, 8)) for n in (6, 3, 3)]
    bounds = distribute_tensor(torch.tensor([0, 6, 12]).int(), mesh, [WHOLE])
    leaf = sharded(mesh, 0).requires_grad_()

    def second_derivative():
        (gradient,) = torch.autograd.grad(cupy_flash.attention(leaf, leaf, leaf).sum(), leaf, create_graph=True)
        return torch.autograd.grad(gradient.sum(), leaf)

    attention, refused = cupy_flash.attention, cupy_flash.UnsupportedError
    for call, error, text in (
        (lambda: attention(sequence, whole, whole), refused, "q is .*call cupy_flash.distributed.ring_attention"),
        (lambda: attention(batch, batch, sequence), refused, "v is .*ring_attention"),
        (lambda: cupy_flash.attention_varlen(*[sequence.flatten(0, 1)] * 3, bounds, bounds, 6, 6), refused,
         "attention_varlen: q is .*ring_attention"),
        (lambda: attention(*odd), refused, r"the mesh \(2,\) divides .*: q \(2, 6, 6, 8\), k \(2, 6, 3, 8\)"),
        (lambda: attention(batch, batch, batch, dropout=0.5, seed=1), refused, "the dropout mask of a shard depends"),
        (lambda: attention(whole, whole, whole, dropout=0.5), ValueError, "dropout of DTensors needs a seed"),
        (lambda: attention(batch, batch, batch, score_mod=lambda s, b, h, q, kv: s + b), refused, "without score_mod"),
        (lambda: cupy_flash.attention_with_kv_cache(batch, batch, batch, cache_seqlens=3), refused, "call to_local"),
        (second_derivative, refused, "attention_double_backward.*attention and its gradient alone"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"(?s){text}"):
            call()


def sums_with_dropout(world):
    """Partial sums are reduced before the call and not scattered: dropout masks depend on the position in the whole."""
    mesh = init_device_mesh("cpu", (2,))
    case = CASES["replicated"]
    arrays, options = case.tensors()
    parts = [DTensor.from_local(x / 2, mesh, [SUM]) for x in arrays]
    for whole, x in zip(case.run(arrays, options), case.run(parts, options), strict=True):
        assert x.placements == (WHOLE,)
        torch.testing.assert_close(x.full_tensor(), whole, rtol=0, atol=1e-12)


def sdpa_of_dtensors(world):
    """The drop-in for torch's SDPA transposes DTensors before and after the call, in eager mode and under
    torch.compile.
    """
    mesh = init_device_mesh("cpu", (2,))
    q, k, v = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for heads in (4, 2, 2))
    for x in (q, k, v):
        distributed.broadcast(x, 0)
    compiled = torch.compile(scaled_dot_product_attention, backend="aot_eager", fullgraph=True)
    for dim, function in ((0, scaled_dot_product_attention), (1, compiled)):
        results = []
        for tensors in ((q, k, v), [distribute_tensor(x, mesh, [Shard(dim)]) for x in (q, k, v)]):
            leaves = [x.detach().requires_grad_() for x in tensors]
            out = (scaled_dot_product_attention if tensors[0] is q else function)(*leaves, enable_gqa=True)
            results.append((out, *torch.autograd.grad((out * out.sin()).sum(), leaves)))
        for whole, x in zip(*results, strict=True):
            assert isinstance(x, DTensor) and x.placements == (Shard(dim),)
            torch.testing.assert_close(x.full_tensor(), whole, rtol=0, atol=1e-12)


def ring_of_torch(world):
    """torch's context_parallel runs its ring over the operators of an active cupy_flash.

    On a GPU F.scaled_dot_product_attention calls this operator. On a CPU it calls another, which torch's ring does not
    know, so the operator is called here. The ring merges parts in float32.
    """
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 4, 64, 16)
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*whole, is_causal=True)
    expected = (out, *torch.autograd.grad(out, whole, dout.double()))
    activate_flash_attention_impl("cupy_flash")
    steps = []
    with pytest.MonkeyPatch.context() as patch:
        for step in ("forward", "backward"):
            run = getattr(dispatch, step)
            patch.setattr(dispatch, step, lambda *call, step=step, run=run: steps.append(step) or run(*call))
        with context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            shards = [DTensor.from_local(x, mesh, [Shard(2)]) for x in leaves]
            out, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*shards, 0.0, True)
            gradients = torch.autograd.grad(out, leaves, DTensor.from_local(dout, mesh, [Shard(2)]))
            parts = [out.detach().to_local(), *gradients]
            results = context_parallel_unshard(mesh, parts, [2] * 4)
            with pytest.raises(
                NotImplementedError, match="flash_attention_for_cpu.* does not have a sharding strategy"
            ):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
            with sdpa(), pytest.raises(ValueError, match="the ranks of a sharded sequence must exchange keys"):
                F.scaled_dot_product_attention(q, k, v, is_causal=True)
    restore_flash_attention_impl()
    assert steps == ["forward"] * 2 + ["backward"] * 2
    for x, y in zip(results, expected, strict=True):
        torch.testing.assert_close(x, y.detach().float(), rtol=1e-5, atol=1e-5)


def a_mesh_of_two_axes(world):
    """Ranks share the sequences along one axis of the mesh, and the heads along the other."""
    mesh = init_device_mesh("cpu", (2, 2))
    both = (Shard(0), Shard(2))
    sizes = dict(dims=(0, 2), out=both, lse=(Shard(0), Shard(1)))
    compare(Case(**sizes, array="sink", gradient=(SUM, Shard(0))), mesh)
    compare(Case(**sizes, array="bias-of-sequences", gradient=(Shard(0), SUM)), mesh)
    compare(Case(**sizes, kv_heads=1, kv_dims=(0, None), dk=(Shard(0), SUM)), mesh)

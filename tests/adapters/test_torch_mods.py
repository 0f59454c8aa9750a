"""Mods on torch tensors: autograd, opcheck, checkpoint, torch.compile with a Mod and with plain functions, export."""

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import cupy_flash
from cupy_flash.adapters.torch import op

BATCH, HEADS, LENGTH, DIM = 2, 4, 12, 8


def inputs(dtype=torch.float64, length=LENGTH):
    generator = torch.Generator().manual_seed(0)
    shape = (BATCH, length, HEADS, DIM)
    return [torch.randn(shape, dtype=dtype, generator=generator).requires_grad_() for _ in range(3)]


class Bias(torch.nn.Module):
    """A score_mod with a learned bias of the distance and a learned temperature."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = torch.nn.Parameter(torch.randn(HEADS, 9, dtype=dtype, generator=generator))
        self.temperature = torch.nn.Parameter(torch.tensor(0.7, dtype=dtype))
        self.register_buffer("scale", torch.linspace(0.5, 1, HEADS, dtype=dtype))

    def forward(self, score, b, h, q_idx, kv_idx):
        near = torch.clamp(q_idx - kv_idx, -4, 4) + 4
        return torch.tanh(score * self.temperature) * self.scale[h] + self.table[h, near]


def document(ids):
    return and_masks(lambda b, h, q, kv: ids[b, q] == ids[b, kv], lambda b, h, q, kv: q >= kv)


IDS = torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) // 5


def dense(q, k, v, score_mod, mask_mod):
    """Return the formula on all scores."""
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    i, j = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    scores = score_mod(torch.einsum("bihd,bjhd->bhij", q, k) / DIM**0.5, b, h, i, j)
    scores = scores.masked_fill(~mask_mod(b, h, i, j), -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)


def gradients(out, sources):
    return torch.autograd.grad(out.square().sum(), sources)


def assert_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_results_and_gradients_equal_autograd_on_all_scores():
    q, k, v = inputs()
    bias, mask = Bias(), document(IDS)
    sources = (q, k, v, bias.table, bias.temperature)
    out = cupy_flash.attention(q, k, v, score_mod=bias, mask_mod=mask)
    expected = dense(q, k, v, bias, mask)
    torch.testing.assert_close(out, expected)
    assert_equal(gradients(out, sources), gradients(expected, sources))


def test_gradcheck():
    q, k, v = (x[:1, :5, :2].detach().requires_grad_() for x in inputs())
    table = torch.randn(2, 9, dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, table):
        mod = lambda s, b, h, i, j: s * table[h, i - j + 4] + torch.sin(table[h, j])  # noqa: E731
        return cupy_flash.attention(q, k, v, score_mod=mod, return_lse=True)

    assert torch.autograd.gradcheck(attend, (q, k, v, table))


def test_gradients_are_computed_only_if_required():
    q, k, v = (x.detach() for x in inputs())
    bias = Bias().requires_grad_(False)
    assert not cupy_flash.attention(q, k, v, score_mod=bias).requires_grad
    bias.table.requires_grad_()
    cupy_flash.attention(q, k, v, score_mod=bias).sum().backward()
    assert bias.table.grad is not None and bias.temperature.grad is None


def test_arrays_read_only_by_a_mask_have_no_gradient():
    q, k, v = inputs()
    bias, threshold = Bias(), torch.zeros(HEADS, dtype=torch.float64, requires_grad=True)
    out = cupy_flash.attention(q, k, v, score_mod=bias, mask_mod=lambda b, h, i, j: (i >= j) & (threshold[h] < 1))
    out.sum().backward()
    assert threshold.grad is None and bias.table.grad is not None


def test_the_backward_saves_the_captured_tensors_only():
    q, k, v = inputs(torch.float32)
    bias = Bias(torch.float32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = cupy_flash.attention(q, k, v, score_mod=bias)
    others = [x for x in saved if not any(x is y or x.data_ptr() == y.data_ptr() for y in (q, k, v, out))]
    captured = {x.data_ptr() for x in (bias.table, bias.temperature, bias.scale)}
    assert {x.data_ptr() for x in others} - captured == {others[-1].data_ptr()}  # the only other tensor is lse
    assert others[-1].shape == (BATCH, HEADS, LENGTH)


def test_packed_sequences_and_checkpoint():
    q, k, v = (x.flatten(0, 1).detach().requires_grad_() for x in inputs())
    bounds = torch.tensor([0, 7, 2 * LENGTH], dtype=torch.int32)
    bias = Bias()

    def attend(q, k, v):
        mask = lambda b, h, i, j: (i - j < 4) & (b >= 0)  # noqa: E731
        return cupy_flash.attention_varlen(q, k, v, bounds, bounds, 17, 17, score_mod=bias, mask_mod=mask)

    sources = (q, k, v, *bias.parameters())
    plain, again = attend(q, k, v), checkpoint(attend, q, k, v, use_reentrant=False)
    assert_equal(gradients(again, sources), gradients(plain, sources))


def functions_of(table):
    """Return a Mod with a learned bias and a mask."""
    return cupy_flash.Mod(lambda s, b, h, i, j: s + table[h, i - j + LENGTH - 1], document(IDS))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_mod_is_an_argument_of_checkpoint(use_reentrant):
    """A Mod is a single object to torch: autograd reaches its tensors through the operator, not as a pytree."""
    q, k, v = inputs()
    table = torch.randn(HEADS, 2 * LENGTH - 1, dtype=torch.float64, requires_grad=True)
    attend = lambda q, mod: cupy_flash.attention(q, k, v, score_mod=mod)  # noqa: E731
    mod = functions_of(table)
    for out in (attend(q, mod), checkpoint(attend, q, mod, use_reentrant=use_reentrant)):
        q.grad, table.grad = None, None
        out.square().sum().backward()
        again = (q.grad, table.grad)
        assert_equal(again, gradients(attend(q, mod), (q, table)))


# torch's forward mode uses torch.jit.script
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_mod_is_an_argument_of_transforms():
    """torch.func transforms calls with a Mod; a Mod that is made inside the function has gradients and tangents."""
    q, k, v = (x.detach() for x in inputs())
    table = torch.randn(HEADS, 2 * LENGTH - 1, dtype=torch.float64)

    def loss(q, mod):
        return cupy_flash.attention(q, k, v, score_mod=mod).square().sum()

    def loss_of_table(table):
        return loss(q, functions_of(table))

    mod = functions_of(table)
    leaves = q.clone().requires_grad_(), table.clone().requires_grad_()
    expected = torch.autograd.grad(loss(leaves[0], functions_of(leaves[1])), leaves)
    assert_equal((torch.func.grad(loss)(q, mod), torch.func.grad(loss_of_table)(table)), expected)
    _, tangent = torch.func.jvp(loss_of_table, (table,), (table,))
    torch.testing.assert_close(tangent, (expected[1] * table).sum())
    batched = torch.func.vmap(loss, in_dims=(0, None))(torch.stack([q, 2 * q]), mod)
    torch.testing.assert_close(batched, torch.stack([loss(q, mod), loss(2 * q, mod)]))
    tables = torch.stack([table, -table])
    torch.testing.assert_close(torch.func.vmap(loss_of_table)(tables), torch.stack([*map(loss_of_table, tables)]))


def test_opcheck():
    q, k, v = inputs(torch.float32)
    bias, threshold = Bias(torch.float32), torch.zeros(HEADS, requires_grad=True)
    mod = cupy_flash.Mod(bias, lambda b, h, i, j: (i >= j) & (threshold[h] < 1))
    call = op.arguments_of((q, k, v), cupy_flash.problem.records.Options(), None, False)
    arguments = (*call, list(mod.arrays), mod.encoded)
    torch.library.opcheck(op.modified_attention_forward, arguments)
    out, lse = (x.detach() for x in op.modified_attention_forward(*arguments))
    wanted = [x.requires_grad for x in mod.arrays]
    arguments = (*arguments, torch.ones_like(out), out, lse, None, False, wanted)
    torch.library.opcheck(op.modified_attention_backward, tree_map_only(torch.Tensor, torch.Tensor.detach, arguments))


def test_a_mod_compiles_into_one_graph():
    q, k, v = inputs()
    bias, mask = Bias(), document(IDS)
    mod = cupy_flash.Mod(bias, mask)
    sources = (q, k, v, bias.table, bias.temperature)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k, v, mod):
        return cupy_flash.attention(q * 2, k, v, score_mod=mod) + 1

    out, expected = step(q, k, v, mod), dense(q * 2, k, v, bias, mask) + 1
    torch.testing.assert_close(out, expected)
    assert_equal(gradients(out, sources), gradients(expected, sources))
    bias.table.data.zero_()
    torch.testing.assert_close(step(q, k, v, mod), dense(q * 2, k, v, bias, mask) + 1)


# raised by Dynamo after a graph break
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_plain_functions_break_the_graph_once_with_a_hint():
    q, k, v = (x.detach() for x in inputs())
    bias, mask = Bias(), document(IDS)

    def step(q, k, v):
        return cupy_flash.attention(q * 2, k, v, score_mod=bias, mask_mod=mask) + 1

    graphs = []
    backend = lambda graph, example: graphs.append(graph) or graph.forward  # noqa: E731
    out = torch.compile(step, backend=backend)(q, k, v)
    torch.testing.assert_close(out, dense(q * 2, k, v, bias, mask) + 1)
    assert len(graphs) == 2  # a graph that computes q * 2, and one that adds 1 to the result
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"pass a cupy_flash\.Mod"):
        torch.compile(step, backend="eager", fullgraph=True)(q, k, v)


def test_export_keeps_a_mod():
    q, k, v = (x.detach() for x in inputs())

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mod = cupy_flash.Mod(mask_mod=document(IDS))

        def forward(self, q, k, v):
            return cupy_flash.attention(q, k, v, mask_mod=self.mod)

    layer = Layer()
    exported = torch.export.export(layer, (q, k, v))
    assert "modified_attention_forward" in exported.graph_module.code
    torch.testing.assert_close(exported.module()(q, k, v), layer(q, k, v))


def test_flops_equal_those_of_attention():
    q, k, v = inputs(torch.float32)
    counts = []
    for mods in ({}, dict(score_mod=Bias(torch.float32))):
        with FlopCounterMode(display=False) as counter:
            cupy_flash.attention(q, k, v, **mods).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_errors_equal_those_of_numpy_arrays():
    q, k, v = inputs()
    with pytest.raises(TypeError, match=r"(?s)softmax.*k and v must have one length"):
        cupy_flash.attention(q, k, v[:, 1:], score_mod=lambda s, b, h, i, j: torch.softmax(s, -1))
    table = np.ones(LENGTH)
    with pytest.raises(TypeError, match="all arrays must be of one type, not numpy and torch"):
        cupy_flash.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j])
    short = torch.ones(3)
    with pytest.raises(ValueError, match="indexed by kv_idx in dimension 0, and there are 12 keys"):
        cupy_flash.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + short[j])


def test_the_encoded_mod_is_read_back():
    from cupy_flash.mods.trace import decoded

    ids = IDS
    width, scale, far = 5, 0.1, 2**40

    def mod(s, b, h, q, kv):
        return s * scale + (ids[b, q] * far + kv - width).float() * 1e-12

    made = cupy_flash.Mod(mod)
    again = decoded(made.encoded, made.arrays)
    assert (again.text, again.numbers, again.arrays) == (made.text, made.numbers, made.arrays)
    assert [type(x) for x in again.numbers] == [type(x) for x in made.numbers]

"""Drop-in functions have the exact signatures of the functions that they replace, and the results of torch's."""

import inspect
from itertools import permutations, product

import pytest
import torch
import torch.nn.functional as F
from tolerance import assert_matches_reference
from torch._dynamo.backends.debugging import aot_eager
from torch.nested import nested_tensor_from_jagged
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch_orders import furthest, in_several_orders

import cupy_flash
from cupy_flash.adapters import torch as adapter


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(function):
    """Return (name, default, is_positional) of every parameter; default is `empty` if there is none."""
    return [
        (parameter.name, parameter.default, parameter.kind is parameter.POSITIONAL_OR_KEYWORD)
        for parameter in inspect.signature(function).parameters.values()
    ]


def test_signature_of_torch():
    schema = torch.ops.aten.scaled_dot_product_attention.default._schema
    expected = [
        (x.name, x.default_value if x.has_default_value() else inspect.Parameter.empty, not x.kwarg_only)
        for x in schema.arguments
    ]
    assert parameters(adapter.scaled_dot_product_attention) == expected


# flash-attn 2.8, flash_attn/flash_attn_interface.py
FLASH_ATTN = {
    "flash_attn_func": (
        "(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False)"
    ),
    "flash_attn_varlen_func": (
        # vLLM passes the first arguments by name and omits cu_seqlens_k, so all parameters after it need defaults.
        "(q, k, v, cu_seqlens_q, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, dropout_p=0.0, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
        "deterministic=False, return_attn_probs=False, block_table=None, *, seqused_k=None, out=None, "
        "return_softmax_lse=False, q_descale=None, k_descale=None, v_descale=None, num_splits=0, s_aux=None, "
        "scheduler_metadata=None, fa_version=None)"
    ),
    "flash_attn_qkvpacked_func": (
        "(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
        "deterministic=False, return_attn_probs=False)"
    ),
    "flash_attn_kvpacked_func": (
        "(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "alibi_slopes=None, deterministic=False, return_attn_probs=False)"
    ),
    "flash_attn_varlen_kvpacked_func": (
        "(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
        "return_attn_probs=False)"
    ),
    "flash_attn_varlen_qkvpacked_func": (
        "(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False)"
    ),
}


@pytest.mark.parametrize("name", FLASH_ATTN)
def test_signatures_of_flash_attn(name):
    signature = inspect.signature(getattr(adapter, name))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == FLASH_ATTN[name]


L, S, E, EV = 5, 7, 8, 6
SDPA = {
    "plain": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)], {}),
    "causal": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)], dict(is_causal=True)),
    "causal-more-queries-than-keys": ([(2, 4, S, E), (2, 4, L, E), (2, 4, L, EV)], dict(is_causal=True)),
    "scale": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)], dict(scale=0.7)),
    "gqa": ([(2, 4, L, E), (2, 2, S, E), (2, 2, S, EV)], dict(enable_gqa=True)),
    "gqa-one-head": ([(2, 4, L, E), (2, 1, S, E), (2, 1, S, EV)], dict(enable_gqa=True, is_causal=True)),
    "gqa-without-batch": ([(4, L, E), (2, S, E), (2, S, EV)], dict(enable_gqa=True)),
    "boolean-mask": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)], dict(attn_mask=normal(2, 1, L, S) > -0.5)),
    "row-that-sees-nothing": (
        [(2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)],
        dict(attn_mask=torch.arange(L)[:, None].expand(L, S) > 0),
    ),
    "float-mask": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)], dict(attn_mask=normal(4, L, S))),
    "float-mask-of-keys": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)], dict(attn_mask=normal(2, 1, 1, S))),
    "two-dimensions": ([(L, E), (S, E), (S, EV)], {}),
    "three-dimensions": ([(3, L, E), (3, S, E), (3, S, EV)], dict(attn_mask=normal(L, S))),
    "five-dimensions": ([(3, 2, 4, L, E), (3, 2, 4, S, E), (3, 2, 4, S, EV)], dict(is_causal=True)),
    "five-dimensions-mask": ([(3, 2, 4, L, E), (3, 2, 4, S, E), (3, 2, 4, S, EV)], dict(attn_mask=normal(2, 1, L, S))),
    "five-dimensions-mask-of-five": ([(3, 2, 4, L, E)] + 2 * [(3, 2, 4, S, E)], dict(attn_mask=normal(3, 1, 4, 1, S))),
    "broadcast-batch": ([(2, 4, L, E), (1, 4, S, E), (4, S, EV)], {}),
    "broadcast-heads": ([(2, 4, L, E), (2, 1, S, E), (2, 1, S, EV)], {}),
    "broadcast-queries": ([(4, L, E), (3, 2, 4, S, E), (2, 4, S, EV)], dict(is_causal=True)),
    "no-queries": ([(2, 4, 0, E), (2, 4, S, E), (2, 4, S, EV)], {}),
    "boolean-mask-causal": (
        [(2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)],
        dict(attn_mask=normal(2, 1, L, S) > -0.5, is_causal=True),
    ),
    "float-mask-causal": (
        [(2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)],
        dict(attn_mask=normal(4, L, S), is_causal=True),
    ),
    "gqa-more-heads-of-keys": ([(2, 8, L, E), (2, 4, S, E), (2, 2, S, EV)], dict(enable_gqa=True)),
    "gqa-more-heads-of-values": ([(6, L, E), (2, S, E), (3, S, EV)], dict(enable_gqa=True, is_causal=True)),
    "dropout-of-one": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, EV)], dict(dropout_p=1.0, attn_mask=normal(4, L, S))),
    "no-head-dimension": ([(2, 4, L, 0), (2, 4, S, 0), (2, 4, S, EV)], dict(is_causal=True)),
    "no-value-dimension": ([(2, 4, L, E), (2, 4, S, E), (2, 4, S, 0)], {}),
    "no-heads": ([(2, 0, L, E), (2, 0, S, E), (2, 0, S, EV)], dict(enable_gqa=True)),
    "no-heads-of-keys": ([(2, 4, L, E), (2, 0, S, E), (2, 0, S, EV)], dict(enable_gqa=True)),
}


def sdpa_of_torch(query, key, value, attn_mask=None, is_causal=False, **options):
    """Return the result of torch's function. It refuses attn_mask with is_causal, so they are merged into one mask."""
    if attn_mask is not None and is_causal:
        hidden = torch.ones(attn_mask.shape[-2:], dtype=torch.bool).triu(1)
        value_of_hidden = False if attn_mask.dtype == torch.bool else -torch.inf
        attn_mask, is_causal = attn_mask.masked_fill(hidden, value_of_hidden), False
    return F.scaled_dot_product_attention(query, key, value, attn_mask, is_causal=is_causal, **options)


def results(function, shapes, options, dtype):
    """Return out and the gradients of query, key, value and a floating-point mask."""
    tensors = [normal(*shape, seed=number).to(dtype).requires_grad_() for number, shape in enumerate(shapes)]
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype).requires_grad_()
        options = options | dict(attn_mask=mask)
        tensors.append(mask)
    out = function(*tensors[:3], **options)
    return [out.detach(), *torch.autograd.grad(out, tensors, normal(*out.shape, seed=9).to(dtype))]


@pytest.mark.parametrize("case", SDPA)
def test_sdpa_equals_torch(case):
    shapes, options = SDPA[case]
    actual = results(adapter.scaled_dot_product_attention, shapes, options, torch.float32)
    with torch.nn.attention.sdpa_kernel(
        torch.nn.attention.SDPBackend.MATH
    ):  # the formula, which has gradients for every mask
        exact = results(sdpa_of_torch, shapes, options, torch.float64)
        runs = list(in_several_orders(lambda: results(sdpa_of_torch, shapes, options, torch.float32), orders=8))
    independent = map(furthest, exact, *runs)
    for name, *three in zip(("out", "dq", "dk", "dv", "dmask"), actual, exact, independent, strict=False):
        assert three[0].shape == three[1].shape
        assert_matches_reference(*three, "float32", name)
    assert len(actual) == len(exact)


@pytest.mark.parametrize("dim", [EV, E], ids=["value-of-another-dim", "value-of-the-same-dim"])
@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_sdpa_result_is_laid_out_as_query(order, dim):
    """The result has the order of dimensions in memory that query has, as torch's result has."""
    q, k, v = normal(2, 4, L, E), normal(2, 4, S, E, seed=1), normal(2, 4, S, dim, seed=2)
    expected = adapter.scaled_dot_product_attention(q, k, v)
    inverse = [*map(order.index, range(3)), 3]
    dense = q.permute(*order, 3).contiguous()
    sliced = torch.cat([dense, dense], dim=3)[..., E:]
    for laid_out in (dense, sliced):
        with adapter.sdpa():
            out = F.scaled_dot_product_attention(laid_out.permute(inverse), k, v)
        assert torch.equal(out, expected)
        assert out.permute(*order, 3).is_contiguous()


def test_sdpa_result_can_be_viewed_as_tokens():
    q = normal(2, L, 4 * E).view(2, L, 4, E).transpose(1, 2).requires_grad_()
    out = adapter.scaled_dot_product_attention(q, q, q).transpose(1, 2).view(2, L, -1)
    out.sum().backward()
    assert out.is_contiguous() and q.grad.shape == q.shape


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_sdpa_result_is_laid_out_as_an_expanded_query(order):
    """Strides equal torch's on the CPU, for any repeated dimensions of query in any order in memory."""
    k, inverse = normal(2, 4, S, E), [*map(order.index, range(3)), 3]
    for repeated in product([False, True], repeat=3):
        sizes = [1 if repeated[dim] else (2, 4, L)[dim] for dim in order]
        q = normal(*sizes, E).permute(inverse).expand(2, 4, L, E)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            expected = F.scaled_dot_product_attention(q, k, k)
        with adapter.sdpa():
            out = F.scaled_dot_product_attention(q, k, k)
        assert out.stride() == expected.stride(), repeated


def test_sdpa_result_of_a_broadcast_query_is_contiguous():
    """For a broadcast query torch computes the result by a matmul, which returns a contiguous tensor."""
    q, k = normal(1, L, 4, E).transpose(1, 2), normal(2, 4, S, E)
    assert F.scaled_dot_product_attention(q, k, k).is_contiguous()
    assert adapter.scaled_dot_product_attention(q, k, k).is_contiguous()


def test_sdpa_of_learned_queries_compiles():
    k = normal(2, 4, S, E)

    def function(queries):
        q = queries.view(1, -1, 4, E).expand(2, -1, -1, -1).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k).transpose(1, 2).view(2, queries.shape[0], -1)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="eager")
    queries = normal(L, 4 * E).requires_grad_()
    with adapter.sdpa():
        results = [attend(queries) for attend in (compiled, function)]
    gradients = [torch.autograd.grad(out.square().sum(), queries)[0] for out in results]
    assert torch.equal(*results) and torch.equal(*gradients)
    torch.compiler.reset()


def test_sdpa_result_of_other_ranks_is_laid_out_as_query():
    q = normal(L, 4, E).transpose(0, 1)
    assert adapter.scaled_dot_product_attention(q, q, q).transpose(0, 1).is_contiguous()
    q = normal(3, 2, 4, L, E)
    assert adapter.scaled_dot_product_attention(q, q, q).is_contiguous()
    q = normal(1, 4, L, E).expand(3, -1, -1, -1)
    assert adapter.scaled_dot_product_attention(q, q, q).is_contiguous()


def test_sdpa_of_any_length_compiles_to_one_graph_per_layout():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(adapter.scaled_dot_product_attention, fullgraph=True, dynamic=True, backend=backend)
    for length in (5, 7, 9):
        q = normal(2, length, 4, E).transpose(1, 2)
        out = compiled(q, q, q)
        assert torch.equal(out, adapter.scaled_dot_product_attention(q, q, q))
        assert out.transpose(1, 2).is_contiguous()
    assert len(graphs) == 1
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_sdpa_takes_the_causal_biases_of_torch(bias):
    q, k = normal(1, 2, L, E), normal(1, 2, S, E, seed=1)
    mask = bias(L, S)
    actual = adapter.scaled_dot_product_attention(q, k, k, mask)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), k.double(), mask)
    runs = in_several_orders(lambda: F.scaled_dot_product_attention(q, k, k, mask))
    assert_matches_reference(actual, exact, furthest(exact, *runs), "float32", "out")
    for x, y in ((q, k), (k, q)):  # with is_causal a query sees the keys that both diagonals allow
        seen = torch.ones(x.shape[-2], y.shape[-2], dtype=torch.bool)
        both = seen.tril() & seen.tril(0 if bias is causal_upper_left else y.shape[-2] - x.shape[-2])
        actual = adapter.scaled_dot_product_attention(x, y, y, bias(*both.shape), is_causal=True)
        torch.testing.assert_close(actual, adapter.scaled_dot_product_attention(x, y, y, both))
    with pytest.raises(ValueError, match="causal for 7 queries and 7 keys, and there are 5 and 7"):
        adapter.scaled_dot_product_attention(q, k, k, bias(S, S))
    with pytest.raises(TypeError, match="contents of their own"):  # the contents of a CausalBias are uninitialised
        adapter.attention(q, k, k, layout="bhsd", bias=bias(L, S))


def test_sdpa_applies_dropout_in_every_mode():
    q, k, v = normal(2, 4, L, E), normal(2, 4, S, E, seed=1), normal(2, 4, S, EV, seed=2)
    torch.manual_seed(0)
    out = adapter.scaled_dot_product_attention(q, k, v, None, 0.5)
    torch.manual_seed(0)
    assert torch.equal(out, adapter.attention(q, k, v, layout="bhsd", dropout=0.5))
    assert not torch.equal(out, adapter.scaled_dot_product_attention(q, k, v))


X = torch.zeros(2, 4, L, E)


@pytest.mark.parametrize(
    "arguments, options, error, message",
    [
        pytest.param((X, X[:, :2], X[:, :2]), {}, ValueError, "enable_gqa=True", id="heads-without-gqa"),
        pytest.param((X, X[:, :3], X[:, :3]), dict(enable_gqa=True), ValueError, "the 3 heads of k", id="gqa-heads"),
        pytest.param((X, X[:1].expand(3, -1, -1, -1), X), {}, ValueError, "do not broadcast", id="batch"),
        pytest.param((X, X, X, torch.zeros(3, L, L)), {}, ValueError, "must broadcast", id="mask-shape"),
        pytest.param((*[X[None]] * 3, torch.zeros(5, 2, 4, L, L)), {}, ValueError, "do not broadcast", id="mask-batch"),
        pytest.param((X, X, X, torch.zeros(L, L).int()), {}, TypeError, "bias must be floating", id="mask-dtype"),
        pytest.param((X, X, X, [True]), {}, TypeError, r"bias \(builtins.list\)", id="mask-list"),
        pytest.param((X, X, X.numpy()), {}, TypeError, "must be tensors", id="not-a-tensor"),
        pytest.param((X[0, 0, 0],) * 3, {}, TypeError, "at least 2 dimensions", id="vector"),
        pytest.param((X[0, 0],) * 3, dict(enable_gqa=True), TypeError, "at least 3 dimensions", id="gqa-without-heads"),
        pytest.param((X, X.double(), X), {}, TypeError, "one dtype", id="dtypes"),
        pytest.param((X, X, X), dict(dropout_p=1.5), ValueError, r"dropout must be in \[0, 1\)", id="dropout"),
        pytest.param((X, X[:, :3], X[:, :2]), dict(enable_gqa=True), ValueError, "multiple of the 3", id="gqa-of-both"),
        pytest.param(
            (X.to(torch.float8_e4m3fn),) * 3, {}, cupy_flash.UnsupportedError, "float8_e4m3fn", id="unsupported"
        ),
        pytest.param((X, X, X), dict(is_causal="yes"), TypeError, "must be True or False", id="causal-text"),
    ],
)  # fmt: skip
def test_sdpa_refuses(arguments, options, error, message):
    with pytest.raises(error, match=message) as caught:
        adapter.scaled_dot_product_attention(*arguments, **options)
    # Users of torch's function catch RuntimeError.
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, RuntimeError)


def is_ours(tensor):
    """Return whether the tensor's graph has a node of cupy_flash."""
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return any("cupy_flash" in node.name() for node in seen)


def test_sdpa_context_routes_the_function_of_torch():
    x = normal(2, 4, L, E).requires_grad_()

    def function():
        return F.scaled_dot_product_attention(x, x, x, None, 0.0, True, scale=0.5)

    with adapter.sdpa():
        inside = function()
        with adapter.sdpa():
            assert torch.equal(function(), inside)
    expected = adapter.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.5)
    assert is_ours(inside) and torch.equal(inside, expected)
    assert not is_ours(function())


def test_sdpa_context_serves_the_layers_of_torch():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = normal(2, L, 16).requires_grad_()
    with adapter.sdpa():
        inside = layer(x)
    assert is_ours(inside) and not is_ours(layer(x))
    with adapter.sdpa(), torch.device("cpu"):
        assert torch.equal(layer(x), inside)
    with torch.device("cpu"), adapter.sdpa():
        assert torch.equal(layer(x), inside)
    with adapter.sdpa():
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), inside)
    torch.compiler.reset()
    runs = list(in_several_orders(lambda: layer(x).detach()))
    exact = layer.double()(x.double()).detach()
    assert_matches_reference(inside.detach(), exact, furthest(exact, *runs), "float32", "layer")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_sdpa_context_leaves_the_fast_path_of_encoders():
    """torch does not use the fast path of encoders inside a mode, and `sdpa()` is a mode.

    Only the fast path sets padded rows to 0; otherwise they are outputs of the layers.
    """
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    x, padding = normal(2, L, 16), torch.arange(L) >= torch.tensor([[L], [3]])
    with torch.no_grad():
        with adapter.sdpa():
            actual = encoder(x, src_key_padding_mask=padding)
        fast = encoder(x, src_key_padding_mask=padding)
        with torch.overrides.BaseTorchFunctionMode():
            slow = list(in_several_orders(lambda: encoder(x, src_key_padding_mask=padding)))
            exact = encoder.double()(x.double(), src_key_padding_mask=padding)
    assert not fast[padding].any() and slow[0][padding].all()
    assert_matches_reference(actual, exact, furthest(exact, *slow), "float32", "encoder")


JAGGED = {
    "plain": ((4, 4, 4), {}),
    "causal": ((4, 4, 4), dict(is_causal=True, scale=0.7)),
    "gqa": ((4, 2, 2), dict(enable_gqa=True)),
    "dropout-of-one": ((4, 4, 4), dict(dropout_p=1.0)),
}
# offsets of queries and of keys; some sequences are empty
OFFSETS = torch.tensor([0, 3, 4, 4, 9]), torch.tensor([0, 1, 1, 4, 12])


def jagged(values, offsets):
    """Return a nested tensor (B, H, S, E) with ragged S, from values (T, H, E)."""
    return nested_tensor_from_jagged(values, offsets).transpose(1, 2)


@pytest.mark.parametrize("case", JAGGED)
def test_sdpa_context_serves_jagged_tensors(case):
    heads, options = JAGGED[case]
    bounds = OFFSETS[0], OFFSETS[1], OFFSETS[1]
    values = [
        normal(int(end[-1]), number, dim, seed=dim).requires_grad_()
        for end, number, dim in zip(bounds, heads, (E, E, EV), strict=True)
    ]
    q, k, v = map(jagged, values, bounds)
    for query in (q, q.contiguous()):
        with adapter.sdpa():
            out = F.scaled_dot_product_attention(query, k, v, **options)
        sequences = (jagged(x, end).unbind() for x, end in zip(values, bounds, strict=True))
        alone = [adapter.scaled_dot_product_attention(*each, **options) for each in zip(*sequences, strict=True)]
        assert out.shape[:3] == query.shape[:3] and out.shape[3] == EV
        assert all(map(torch.equal, out.unbind(), alone))
        gradients = torch.autograd.grad(out.values().square().sum(), values)
        expected = torch.autograd.grad(sum(x.square().sum() for x in alone), values)
        assert all(map(torch.equal, gradients, expected))


def test_sdpa_context_serves_a_ragged_batch():
    x = nested_tensor_from_jagged(normal(9, 4, L, E), OFFSETS[0])
    with adapter.sdpa():
        out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert torch.equal(out.values(), adapter.scaled_dot_product_attention(*[x.values()] * 3, is_causal=True))


def test_sdpa_context_compiles_jagged_tensors_once():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def function(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for offsets in ([0, 3, 4, 9], [0, 7, 8, 12]):
        x = jagged(normal(offsets[-1], 4, E), torch.tensor(offsets)).detach().requires_grad_()
        with adapter.sdpa():
            results = [attend(x) for attend in (compiled, function)]
        gradients = [torch.autograd.grad(out.values().square().sum(), x)[0] for out in results]
        assert torch.equal(*(out.values() for out in results)) and torch.equal(*(dx.values() for dx in gradients))
    assert len(graphs) == 1
    torch.compiler.reset()


QUERY = jagged(normal(9, 4, E), OFFSETS[0])


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        pytest.param((QUERY, X, X), TypeError, "all must be jagged", id="dense-keys"),
        pytest.param((X, QUERY, QUERY), TypeError, "all must be jagged", id="dense-query"),
        pytest.param(
            (nested_tensor_from_jagged(normal(9, E), OFFSETS[0]),) * 3,
            TypeError,
            r"must be \(B, H, S, E\)",
            id="three-dimensions",
        ),
        pytest.param((QUERY, QUERY, QUERY, X > 0), cupy_flash.UnsupportedError, "attn_mask is not", id="mask"),
        pytest.param((QUERY, *[jagged(normal(9, 2, E), OFFSETS[0])] * 2), ValueError, "need enable_gqa", id="heads"),
        pytest.param(
            (QUERY, QUERY, jagged(normal(9, 4, E), torch.tensor([0, 2, 4, 4, 9]))), ValueError, "lengths", id="lengths"
        ),
        pytest.param(
            (QUERY, *[jagged(normal(9, 4, E), OFFSETS[0][[0, 1, 4]])] * 2), ValueError, "one length", id="batch"
        ),
    ],
)
def test_sdpa_refuses_nested(arguments, error, message):
    with pytest.raises(error, match=message):
        adapter.scaled_dot_product_attention(*arguments)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_sdpa_refuses_nested_tensors_that_are_not_packed():
    strided = torch.nested.nested_tensor([normal(4, 3, E), normal(4, 2, E)])
    holes = torch.nested.narrow(normal(2, 6, 4, E), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged)
    for x in (strided, holes.transpose(1, 2)):
        with adapter.sdpa(), pytest.raises(TypeError, match="all must be jagged and without holes"):
            F.scaled_dot_product_attention(x, x, x)


def test_sdpa_context_never_falls_back():
    x = torch.zeros(2, 4, L, E, dtype=torch.complex64)
    with adapter.sdpa(), pytest.raises(TypeError, match="q, k and v must be"):
        F.scaled_dot_product_attention(x, x, x)


def test_sdpa_context_under_compile():
    def function(x):
        return F.scaled_dot_product_attention(x, x, x, is_causal=True) * 1

    def function_with_context(x):
        with adapter.sdpa():
            return function(x)

    x = normal(2, 4, L, E).requires_grad_()
    expected = adapter.scaled_dot_product_attention(x, x, x, is_causal=True)
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.graph))
        return graph.forward

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    compiled(x)
    with adapter.sdpa():
        assert torch.equal(compiled(x), expected)
    compiled(x)
    assert torch.equal(torch.compile(function_with_context, fullgraph=True, backend=backend)(x), expected)
    assert ["cupy_flash" in graph for graph in graphs] == [False, True, True]
    torch.compiler.reset()


Q, K, V = normal(2, L, 4, E), normal(2, S, 2, E, seed=1), normal(2, S, 2, E, seed=2)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.1])
BOUNDARIES = torch.tensor([0, 3, 3, 10], dtype=torch.int32), torch.tensor([0, 4, 6, 14], dtype=torch.int32)

# (positional arguments of flash-attn after the arrays, the same call of attention)
FLASH_ATTN_CALLS = {
    "plain": ((), {}),
    "scale": ((0.0, 0.3), dict(scale=0.3)),
    "causal": ((0.0, None, True), dict(causal=True)),
    "causal-word": ((0.0, None, "bottom_right"), dict(causal=True)),
    "window": ((0.0, None, False, (2, 1)), dict(window=(2, 1))),
    "window-of-tensors": ((0.0, None, False, (torch.tensor(2), torch.tensor(1))), dict(window=(2, 1))),
    "window-causal": ((0.0, None, True, (2, -1)), dict(window=(2, None), causal=True)),
    "softcap": ((0.0, None, False, (-1, -1), 1.5), dict(softcap=1.5)),
    "softcap-infinite": ((0.0, None, False, (-1, -1), float("inf")), {}),
    "alibi": ((0.0, None, True, (-1, -1), 0.0, SLOPES, True), dict(alibi_slopes=SLOPES, causal=True)),
    "dropout": ((0.4,), dict(dropout=0.4)),
}


@pytest.mark.parametrize("case", FLASH_ATTN_CALLS)
def test_flash_attn_calls(case):
    positional, options = FLASH_ATTN_CALLS[case]
    qkv, kv = normal(2, L, 3, 4, E), torch.stack((K, V), 2)
    packed = (Q.flatten(0, 1), K.flatten(0, 1), V.flatten(0, 1), *BOUNDARIES, 7, 8)
    packed_kv = (packed[0], kv.flatten(0, 1), *packed[3:])
    whole = (*qkv.flatten(0, 1).unbind(1), *[BOUNDARIES[0]] * 2, 7, 7)
    wide = [x.long() for x in BOUNDARIES]  # int64, which attention itself refuses
    for ours, arrays, function, same in (
        (adapter.flash_attn_func, (Q, K, V), adapter.attention, (Q, K, V)),
        (adapter.flash_attn_qkvpacked_func, (qkv,), adapter.attention, qkv.unbind(2)),
        (adapter.flash_attn_kvpacked_func, (Q, kv), adapter.attention, (Q, K, V)),
        (adapter.flash_attn_varlen_func, packed, adapter.attention_varlen, packed),
        (adapter.flash_attn_varlen_func, (*packed[:3], *wide, 7, 8), adapter.attention_varlen, packed),
        (adapter.flash_attn_varlen_kvpacked_func, packed_kv, adapter.attention_varlen, packed),
        (adapter.flash_attn_varlen_kvpacked_func, (*packed_kv[:2], *wide, 7, 8), adapter.attention_varlen, packed),
        (adapter.flash_attn_varlen_qkvpacked_func, (qkv.flatten(0, 1), wide[0], 7), adapter.attention_varlen, whole),
    ):
        torch.manual_seed(0)
        expected, expected_lse = function(*same, **options, return_lse=True)
        torch.manual_seed(0)
        assert torch.equal(ours(*arrays, *positional), expected)
        torch.manual_seed(0)
        out, softmax_lse, probabilities = ours(*arrays, *positional, return_attn_probs=True)
        assert torch.equal(out, expected) and torch.equal(softmax_lse, expected_lse) and probabilities is None


def test_flash_attn_gradient_of_packed_qkv():
    qkv = normal(2, L, 3, 4, E).requires_grad_()
    adapter.flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(2))
    adapter.attention(q, k, v, causal=True).sum().backward()
    assert torch.equal(qkv.grad, torch.stack([q.grad, k.grad, v.grad], dim=2))
    kv = torch.stack((k, v), 2).detach().requires_grad_()
    adapter.flash_attn_kvpacked_func(q.detach(), kv, causal=True).sum().backward()
    assert torch.equal(kv.grad, torch.stack([k.grad, v.grad], dim=2))


def test_flash_attn_refuses():
    packed = (Q.flatten(0, 1), K.flatten(0, 1), V.flatten(0, 1), *BOUNDARIES, 7, 8)
    with pytest.raises(cupy_flash.UnsupportedError, match="seqused_k, out: served with block_table alone"):
        adapter.flash_attn_varlen_func(*packed, seqused_k=torch.zeros(3, dtype=torch.int32), out=Q)
    with pytest.raises(ValueError, match=r"qkv must be \(B, S, 3, H, D\)"):
        adapter.flash_attn_qkvpacked_func(Q)
    with pytest.raises(ValueError, match=r"kv must be \(Tk, 2, Hk, D\), not \(10, 3, 2, 8\)"):
        adapter.flash_attn_varlen_kvpacked_func(packed[0], normal(10, 3, 2, 8), *packed[3:])
    # if only the lower 32 bits counted, it would end at 14
    with pytest.raises(ValueError, match="cu_seqlens_k ends at 2147483647, past"):
        adapter.flash_attn_varlen_func(*packed[:3], BOUNDARIES[0], torch.tensor([0, 4, 6, 2**32 + 14]), 7, 2**33)
    with pytest.raises(TypeError, match=r"int32, not int64: pass cu_seqlens_q.to\(torch.int32\)"):
        adapter.attention_varlen(*packed[:3], BOUNDARIES[0].long(), *packed[4:])
    with pytest.raises(TypeError, match="qkv must be a torch tensor"):
        adapter.flash_attn_qkvpacked_func(Q.numpy())
    with pytest.raises(TypeError, match="return_lse must be True or False"):
        adapter.flash_attn_func(Q, K, V, return_attn_probs="no")
    with pytest.raises(ValueError, match="softcap must be positive"):
        adapter.flash_attn_func(Q, K, V, softcap=-1.0)
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        adapter.flash_attn_varlen_func(*packed[:3], BOUNDARIES[0].long().to_sparse(), *packed[4:])


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(torch.zeros(2), id="two-elements"),
        pytest.param(torch.zeros(2).numpy(), id="numpy"),
        pytest.param(torch.zeros(2).to_sparse(), id="sparse"),
        pytest.param(torch.zeros(2).to_mkldnn(), id="mkldnn"),
        pytest.param(torch.zeros((), device="meta"), id="meta"),
    ],
)
def test_flash_attn_refuses_tensors_as_options(value):
    qkv = torch.stack((Q, Q, Q), 2)
    whole = [BOUNDARIES[0]] * 2
    for function, arrays in (
        (adapter.flash_attn_func, (Q, K, V)),
        (adapter.flash_attn_qkvpacked_func, (qkv,)),
        (adapter.flash_attn_kvpacked_func, (Q, qkv[:, :, 1:])),
        (adapter.flash_attn_varlen_func, (*qkv.flatten(0, 1).unbind(1), *whole, 7, 7)),
        (adapter.flash_attn_varlen_kvpacked_func, (Q.flatten(0, 1), qkv[:, :, 1:].flatten(0, 1), *whole, 7, 7)),
        (adapter.flash_attn_varlen_qkvpacked_func, (qkv.flatten(0, 1), whole[0], 7)),
    ):
        with pytest.raises(TypeError, match="softcap must be a number"):
            function(*arrays, softcap=value)
        with pytest.raises(TypeError, match="window must be None or"):
            function(*arrays, window_size=value)


def attend_with_sdpa(layer, x):
    """Return the output of a CausalSelfAttention layer, computed by torch's own functions."""
    heads, kv_heads, _ = layer.heads
    q, k, v = layer.qkv(x).unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2).split(layer.heads, dim=1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layer.proj(out.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("num_kv_heads", [None, 2, 1], ids=["mha", "gqa", "mqa"])
def test_causal_self_attention(num_kv_heads):
    torch.manual_seed(0)
    layer = adapter.CausalSelfAttention(32, 4, num_kv_heads=num_kv_heads)
    x = normal(2, L, 32)
    runs = list(in_several_orders(lambda: attend_with_sdpa(layer, x).detach()))
    out = layer(x).detach()
    exact = attend_with_sdpa(layer.double(), x.double()).detach()
    assert_matches_reference(out, exact, furthest(exact, *runs), "float32", "out")
    assert {name: tuple(parameter.shape) for name, parameter in layer.named_parameters()} == {
        "qkv.weight": (8 * (4 + 2 * (num_kv_heads or 4)), 32),
        "qkv.bias": (8 * (4 + 2 * (num_kv_heads or 4)),),
        "proj.weight": (32, 32),
        "proj.bias": (32,),
    }


def test_causal_self_attention_applies_dropout_in_training_only():
    layer = adapter.CausalSelfAttention(32, 4, dropout=0.5, bias=False, dtype=torch.float64)
    x = normal(2, L, 32).double()
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    assert [name for name, _ in layer.named_parameters()] == ["qkv.weight", "proj.weight"]


@pytest.mark.parametrize(
    "sizes, options, error, message",
    [
        pytest.param((30, 4), {}, ValueError, "30 must be a positive multiple of num_heads 4", id="embed-dim"),
        pytest.param((-32, 4), {}, ValueError, "embed_dim -32 must be a positive multiple", id="embed-dim-negative"),
        pytest.param((0, 4), {}, ValueError, "embed_dim 0 must be a positive multiple", id="no-embed-dim"),
        pytest.param((32, 0), {}, ValueError, "num_heads 0", id="no-heads"),
        pytest.param((32, 4), dict(num_kv_heads=3), ValueError, "must be a multiple of num_kv_heads 3", id="kv-heads"),
        pytest.param((32, 4), dict(num_kv_heads=0), ValueError, "num_kv_heads 0", id="no-kv-heads"),
        pytest.param(("a", 4), {}, TypeError, "embed_dim must be a whole number, not 'a'", id="embed-dim-text"),
        pytest.param((32, "4"), {}, TypeError, "num_heads must be a whole number, not '4'", id="heads-text"),
        pytest.param((32, 4), dict(num_kv_heads=2.0), TypeError, "num_kv_heads must be a whole", id="kv-heads-float"),
        pytest.param((32, 4), dict(dropout=2.0), ValueError, r"dropout must be in \[0, 1\), not 2.0", id="dropout"),
        pytest.param((32, 4), dict(dropout=1), ValueError, r"dropout must be in \[0, 1\), not 1", id="dropout-of-one"),
        pytest.param((32, 4), dict(dropout=torch.nan), ValueError, r"dropout must be in \[0, 1\)", id="dropout-nan"),
        pytest.param((32, 4), dict(dropout="0.1"), TypeError, "dropout must be a number, not '0.1'", id="dropout-text"),
    ],
)
def test_causal_self_attention_refuses(sizes, options, error, message):
    with pytest.raises(error, match=rf"^CausalSelfAttention: .*{message}"):
        adapter.CausalSelfAttention(*sizes, **options)

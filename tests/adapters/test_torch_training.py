"""The operators in training: compile, export, checkpoints, offloading, FSDP2."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import ranks
import torch
import torch.nn.functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import cupy_flash
from cupy_flash import dispatch
from cupy_flash.adapters import torch as adapter

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 4, 2, 8


def inputs(length=LENGTH):
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, length, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def value_and_gradients(function, *arrays):
    """Return results of `function` and the gradients of the first one; the generator starts from a fixed state."""
    torch.manual_seed(0)
    results = function(*arrays)
    results = results if isinstance(results, tuple) else (results,)
    gradients = torch.autograd.grad(results[0].square().sum(), arrays, allow_unused=True)
    return [x.detach() for x in results] + [x for x in gradients if x is not None]


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    assert all(map(torch.equal, actual, expected))


def plain(q, k, v):
    return adapter.attention(q, k, v, causal=True)


def everything(q, k, v):
    """Return a call with every kind of option, a seed that is drawn, and both results."""
    bias = k.sum(dim=(1, 3))[:, :, None, None].repeat(1, HEADS // KV_HEADS, 1, LENGTH)
    slopes = torch.full((HEADS,), 0.5)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(2)
    return cupy_flash.attention(
        q, k, v, window=(4, None), scale=0.3, softcap=3.0, alibi_slopes=slopes, bias=bias, mask=mask,
        sink=v[0, 0].sum() + slopes, dropout=0.2, return_lse=True,
    )  # fmt: skip


def packed(q, k, v):
    boundaries = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return cupy_flash.attention_varlen(q, k, v, boundaries, boundaries, 7, 7, causal=True, dropout=0.2, seed=3)


def drop_ins(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = adapter.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)
    return adapter.flash_attn_func(out, out, out, 0.1, causal=True, window_size=(3, 0))


@pytest.fixture(autouse=True)
def fresh_compiler():
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("function", [plain, everything, packed, drop_ins])
def test_compile(function):
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_equal(value_and_gradients(compiled, *inputs()), value_and_gradients(function, *inputs()))


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            # torch's import of its mkldnn module gives this warning
            marks=pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
        ),
    ],
)
def test_compile_with_one_tensor_for_all_three(backend):
    def function(x):
        return adapter.attention(x, x, x, causal=True, dropout=0.3, seed=1)

    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert_equal(value_and_gradients(compiled, inputs()[0]), value_and_gradients(function, inputs()[0]))


def test_compile_with_autocast():
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return plain(q, k, v).float()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_equal(value_and_gradients(compiled, *inputs()), value_and_gradients(function, *inputs()))


def test_compile_once_for_many_lengths_and_seeds():
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(
        lambda q, k, v, seed: adapter.attention(q, k, v, dropout=0.2, seed=seed),
        fullgraph=True,
        backend=backend,
        dynamic=True,
    )
    for length, seed in ((5, 2), (7, 2**63), (9, 2**40)):
        arrays = inputs(length)
        assert torch.equal(compiled(*arrays, seed), adapter.attention(*arrays, dropout=0.2, seed=seed))
    # Seeds from 2**63 on become negative int64 values and get a graph of their own; all smaller ones share one.
    assert len(frames) == 2


@pytest.mark.parametrize(
    "options, message",
    [
        pytest.param(dict(causal=3), "causal must be", id="causal"),
        pytest.param(dict(return_lse=1), "return_lse", id="return-lse"),
        pytest.param(dict(bias=[1.0]), "must be torch tensors", id="bias"),
        pytest.param(dict(caual=True), "unknown option 'caual'", id="unknown-option"),
        pytest.param(dict(dropout=1.5), "dropout must be in", id="dropout"),
        pytest.param(dict(layout="sbhd"), "layout must be", id="layout"),
        pytest.param(dict(engine="wgmma"), "no engine of this version serves", id="engine"),
    ],
)
def test_compile_refuses_invalid_calls(options, message):
    compiled = torch.compile(lambda *arrays: adapter.attention(*arrays, **options), fullgraph=True, backend="aot_eager")
    with pytest.raises((TypeError, ValueError, torch._dynamo.exc.Unsupported), match=message):
        compiled(*inputs())


def test_export_with_dynamic_shapes():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return adapter.attention(q, k, v, causal=True, dropout=0.2, seed=1, return_lse=True)

    sizes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("length", min=2, max=4096)}
    program = torch.export.export(Model(), tuple(x.detach() for x in inputs()), dynamic_shapes=(sizes, sizes, sizes))
    assert "cupy_flash.attention_forward" in str(program.graph)
    arrays = [x.detach()[:1] for x in inputs(11)]
    assert_equal(program.module()(*arrays), Model()(*arrays))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = adapter.CausalSelfAttention(HEADS * HEAD_DIM, HEADS, num_kv_heads=KV_HEADS, dropout=0.3)
        self.norm = torch.nn.LayerNorm(HEADS * HEAD_DIM)

    def forward(self, x):
        return x + self.attention(self.norm(x))


def gradients_of(run):
    """Return gradients of one step through two layers, each called by `run(layer, x)`, from a fixed generator state."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([Layer(), Layer()])
    x = torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, requires_grad=True)
    y = x
    for layer in layers:
        y = run(layer, y)
    y.square().sum().backward()
    return [x.grad, *(parameter.grad for parameter in layers.parameters())]


@pytest.fixture
def forwards(monkeypatch):
    """Return a list that gets an entry at each run of the forward."""
    runs = []
    original = dispatch.forward
    monkeypatch.setattr(dispatch, "forward", lambda *arguments: runs.append(None) or original(*arguments))
    return runs


def call(layer, x):
    return layer(x)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_with_dropout(reentrant, forwards):
    expected = gradients_of(call)
    assert len(forwards) == 2
    assert_equal(gradients_of(lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)), expected)
    assert len(forwards) == 2 + 4


class Encoder(torch.nn.Module):
    """Calls torch's attention in both ways, by a layer and by the function, with dropout."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(HEADS * HEAD_DIM, HEADS, 16, dropout=0.3, batch_first=True)

    def forward(self, x):
        q = self.layer(x).view(*x.shape[:2], HEADS, HEAD_DIM).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q, None, 0.3, True).transpose(1, 2).flatten(-2)


def encoded(run, backward):
    """Return gradients of one step of an Encoder, with `run(encoder, x)` inside `sdpa` and `backward(loss)` outside."""
    torch.manual_seed(0)
    encoder, x = Encoder(), torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, requires_grad=True)
    with adapter.sdpa():
        loss = run(encoder, x).square().sum()
    backward(loss)
    return [x.grad, *(parameter.grad for parameter in encoder.parameters())]


def in_another_thread(loss):
    with ThreadPoolExecutor(1) as threads:
        threads.submit(loss.backward).result()


@pytest.mark.parametrize("backward", [torch.Tensor.backward, in_another_thread], ids=["this-thread", "another-thread"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_inside_sdpa(reentrant, backward, forwards):
    """Layers that ran inside `sdpa` are recomputed inside it, although torch disables modes in the backward."""

    def run(encoder, x):
        def inner(x):
            return checkpoint(encoder, x, use_reentrant=False)

        return checkpoint(inner, x, use_reentrant=reentrant)

    expected = encoded(call, torch.Tensor.backward)
    assert len(forwards) == 2
    assert_equal(encoded(run, backward), expected)
    assert len(forwards) > 2 + 2
    assert not _get_current_function_mode_stack()


def test_checkpoint_before_sdpa_is_recomputed_by_torch(forwards):
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, requires_grad=True)
    loss = checkpoint(Encoder(), x, use_reentrant=False).sum()
    with adapter.sdpa():
        torch.autograd.backward(loss)
    assert not forwards


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_compiled_checkpoint_inside_sdpa(reentrant, forwards):
    def run(encoder, x):
        compiled = torch.compile(
            lambda x: checkpoint(encoder, x, use_reentrant=reentrant), fullgraph=True, backend="aot_eager"
        )
        return compiled(x)

    assert_equal(encoded(run, torch.Tensor.backward), encoded(call, torch.Tensor.backward))
    assert len(forwards) == 4 + 2


def test_selective_checkpoint_keeps_the_result_of_attention(forwards):
    def keep_attention(context, operator, *_, **__):
        keep = operator == torch.ops.cupy_flash.attention_forward.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    def run(layer, x):
        return checkpoint(
            layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(keep_attention)
        )

    actual = gradients_of(run)
    assert len(forwards) == 2
    assert_equal(actual, gradients_of(call))


def test_compiled_checkpoint_with_dropout():
    def layer(x):
        return adapter.attention(x, x, x, dropout=0.3, causal=True)

    def function(x):
        return checkpoint(layer, x, use_reentrant=False)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_equal(value_and_gradients(compiled, inputs()[0]), value_and_gradients(function, inputs()[0]))


def test_save_on_cpu():
    def run(layer, x):
        with torch.autograd.graph.save_on_cpu():
            return layer(x)

    assert_equal(gradients_of(run), gradients_of(call))


def test_graph_may_be_used_twice():
    q, k, v = inputs()
    loss = adapter.attention(q, k, v, dropout=0.3).sum()
    first, second = (torch.autograd.grad(loss, (q, k, v), retain_graph=True) for _ in range(2))
    assert_equal(first, second)


def test_in_place_change_of_an_input_is_noticed():
    q, k, v = inputs()
    k = k * 1
    out = adapter.attention(q, k, v)
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


WORLD = 2


def train_sharded(rank, rendezvous, failures):
    """Compare one step of an FSDP2 model, in which each rank has half of the batch, with the same step without
    sharding.
    """
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD, timeout=ranks.TIMEOUT)
    try:
        torch.manual_seed(0)
        model = torch.nn.ModuleList([Layer(), Layer()])
        batches = [torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM) for _ in range(WORLD)]

        def step(model, index):
            torch.manual_seed(index)
            y = batches[index].bfloat16()
            for layer in model:
                y = checkpoint(layer, y, use_reentrant=False)
            y.float().square().sum().backward()

        # Gradients are in bfloat16 and averaged over the ranks in float32.
        alone = [copy.deepcopy(model).bfloat16() for _ in range(WORLD)]
        for index, copied in enumerate(alone):
            step(copied, index)
        expected = [
            sum(parameter.grad.float() for parameter in parameters) / WORLD
            for parameters in zip(*(copied.parameters() for copied in alone), strict=True)
        ]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        step(model, rank)
        for (name, parameter), expected_gradient in zip(model.named_parameters(), expected, strict=True):
            if not torch.equal(parameter.grad.full_tensor(), expected_gradient):
                failures.put(f"rank {rank}: {name}")
    finally:
        distributed.destroy_process_group()


def test_fsdp2_with_checkpoint(tmp_path):
    context = torch.multiprocessing.get_context("spawn")
    failures = context.SimpleQueue()
    torch.multiprocessing.spawn(train_sharded, (f"file://{tmp_path / 'rendezvous'}", failures), nprocs=WORLD)
    assert failures.empty(), failures.get()

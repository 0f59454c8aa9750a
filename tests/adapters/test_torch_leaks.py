"""The bytes that a call saves for its backward, and the absence of tensors that outlive the backward."""

import pytest
import ranks
import torch
from leaks import Allocated, Kept, SavedTensors
from torch.utils.checkpoint import checkpoint

import cupy_flash
from cupy_flash.adapters import torch as adapter
from cupy_flash.adapters.torch import module
from cupy_flash.memory import find_retained

BATCH, LENGTH, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM_V, LAYERS = 2, 6, 4, 2, 8, 4, 3


def inputs():
    shapes = (
        (BATCH, LENGTH, HEADS, HEAD_DIM),
        (BATCH, LENGTH, KV_HEADS, HEAD_DIM),
        (BATCH, LENGTH, KV_HEADS, HEAD_DIM_V),
    )
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def nbytes(*tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


OUT = 4 * BATCH * LENGTH * HEADS * HEAD_DIM_V
LSE = 4 * BATCH * HEADS * LENGTH


@pytest.mark.parametrize(
    "options, extra",
    [
        pytest.param(lambda: {}, 0, id="plain"),
        pytest.param(lambda: dict(causal=True, window=(3, 0), scale=0.3, softcap=5.0), 0, id="words"),
        pytest.param(lambda: dict(dropout=0.2), 8, id="dropout"),
        pytest.param(lambda: dict(dropout=0.2, seed=3), 8, id="dropout-seed"),
        pytest.param(lambda: dict(seed=3), 0, id="seed-without-dropout"),
        pytest.param(lambda: dict(bias=torch.randn(1, HEADS, 1, LENGTH)), 0, id="bias"),
        pytest.param(lambda: dict(bias=torch.randn(LENGTH, LENGTH, requires_grad=True)), 0, id="bias-with-gradient"),
        pytest.param(
            lambda: dict(sink=torch.randn(HEADS, requires_grad=True), mask=torch.ones(LENGTH) > 0), 0, id="sink-mask"
        ),
        pytest.param(lambda: dict(alibi_slopes=torch.ones(HEADS)), 0, id="alibi"),
        pytest.param(lambda: dict(kv_lengths=torch.tensor([3, 6], dtype=torch.int32)), 0, id="lengths"),
    ],
)
def test_saved_bytes(options, extra):
    """q, k, v, the caller's tensor options, out, lse and the seed are saved, without copies; nothing else is."""
    arrays, options = inputs(), options()
    tensors = [x for x in options.values() if isinstance(x, torch.Tensor)]
    with SavedTensors() as saved:
        out, lse = adapter.attention(*arrays, **options, return_lse=True)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*arrays, *tensors, out, lse)}
    assert own <= set(saved.storages)
    assert saved.bytes == nbytes(*arrays, *tensors) + OUT + LSE + extra
    assert len(set(saved.storages) - own) == (extra > 0)
    assert (nbytes(out), nbytes(lse)) == (OUT, LSE)


def test_saved_bytes_of_packed_sequences():
    q, k, v = (x.detach().flatten(0, 1).requires_grad_() for x in inputs())
    boundaries = torch.tensor([0, 5, 12], dtype=torch.int32)
    with SavedTensors() as saved:
        adapter.attention_varlen(q, k, v, boundaries, boundaries, 7, 7)
    assert saved.bytes == nbytes(q, k, v, boundaries) + OUT + LSE


def test_nothing_is_saved_without_gradients():
    with SavedTensors() as saved, torch.no_grad():
        adapter.attention(*inputs())
    assert not saved.boxes


@pytest.mark.parametrize("function", ["attention", "attention_varlen"])
def test_the_node_keeps_no_tensors(function):
    q, k, v = inputs()
    options = dict(
        bias=torch.randn(LENGTH, LENGTH, requires_grad=True), sink=torch.randn(HEADS, requires_grad=True), dropout=0.1
    )
    with SavedTensors() as saved:
        if function == "attention":
            out = adapter.attention(q, k, v, **options)
        else:
            boundaries = torch.tensor([0, 5, 12], dtype=torch.int32)
            packed = (x.flatten(0, 1) for x in (q, k, v))
            out = adapter.attention_varlen(*packed, boundaries, boundaries, 7, 7, dropout=0.1)
        loss = out.sum()
    assert saved.alive > 0
    loss.backward()
    assert saved.alive == 0
    assert not find_retained(loss)


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = module.CausalSelfAttention(width, HEADS, num_kv_heads=KV_HEADS, dropout=0.1)
        self.norm = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def step(reentrant):
    """Return (model, x, loss, SavedTensors) of a step of a small transformer.

    Its blocks are checkpointed unless `reentrant` is None.
    """
    torch.manual_seed(0)
    model = torch.nn.ModuleList(Block(HEADS * HEAD_DIM) for _ in range(LAYERS))
    x = torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM, requires_grad=True)
    with SavedTensors() as saved:
        y = x
        for block in model:
            y = block(y) if reentrant is None else checkpoint(block, y, use_reentrant=reentrant)
        loss = y.square().mean()
    loss.backward()
    return model, x, loss, saved


def findings(reentrant):
    """Return (number saved, tensors retained by the graph, number held by Python) while the loss is alive.

    Parameters and gradients do not count. torch's reentrant checkpoint keeps the state of the generator, as bytes, on
    each of its nodes.
    """
    with Kept() as kept:
        model, x, loss, saved = step(reentrant)
        own = [x, loss, *model.parameters()]
        own += [tensor.grad for tensor in own if tensor.is_leaf]
        retained = [item for item in find_retained(loss) if item.path != "CheckpointFunctionBackward.fwd_cpu_state"]
        held = [tensor for tensor in kept.beyond(*own) if tensor.dtype != torch.uint8]
        return saved.alive, retained, len(held)


CHECKPOINTS = [
    pytest.param(None, id="no-checkpoint"),
    pytest.param(False, id="checkpoint"),
    pytest.param(True, id="reentrant-checkpoint"),
]


@pytest.mark.parametrize("reentrant", CHECKPOINTS)
def test_transformer_keeps_nothing(reentrant):
    assert findings(reentrant) == (0, [], 0)


class Holder:
    """Holds a tensor that save_for_backward has returned."""

    tensor = None


class LeakyAttention(torch.autograd.Function):
    """The leak of a public library: its backward stores the saved tensors in objects that ctx still holds."""

    @staticmethod
    def forward(ctx, *arrays):
        out, lse = cupy_flash.attention(*arrays, causal=True, return_lse=True)
        ctx.save_for_backward(*arrays, out, lse)
        ctx.shells = [Holder() for _ in range(5)]
        return out

    @staticmethod
    def backward(ctx, dout):
        for shell, tensor in zip(ctx.shells, ctx.saved_tensors, strict=True):
            shell.tensor = tensor
        gradients = cupy_flash.attention_backward(dout, *(shell.tensor for shell in ctx.shells), causal=True)
        return tuple(gradients[:3])


@pytest.mark.parametrize("reentrant", [None, False], ids=["no-checkpoint", "checkpoint"])
def test_detector_catches_a_planted_leak(reentrant, monkeypatch):
    monkeypatch.setattr(module, "attention", lambda q, k, v, **_: LeakyAttention.apply(q, k, v))
    _, retained, kept = findings(reentrant)
    assert sorted((item.module, item.path) for item in retained) == [
        (f"{layer}.attention.qkv", f"LeakyAttentionBackward.shells[{index}].tensor")
        for layer in range(LAYERS)
        for index in range(5)
    ]
    assert kept > 0


def test_detector_catches_a_tensor_kept_elsewhere(monkeypatch):
    kept = []
    monkeypatch.setattr(
        module, "attention", lambda q, k, v, **_: kept.append(cupy_flash.attention(q, k, v)) or kept[-1]
    )
    _, _, held = findings(None)
    assert held == LAYERS


def test_retained_tensors_are_described(monkeypatch):
    monkeypatch.setattr(module, "attention", lambda q, k, v, **_: LeakyAttention.apply(q, k, v))
    layer = module.CausalSelfAttention(HEADS * HEAD_DIM, HEADS)
    loss = layer(torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM)).sum()
    loss.backward()
    out = find_retained(loss)[3]
    assert out == ("qkv", "LeakyAttentionBackward.shells[3].tensor", (2, 6, 4, 8), torch.float32, 4 * 2 * 6 * 4 * 8)
    assert str(out) == "qkv: LeakyAttentionBackward.shells[3].tensor: 2 x 6 x 4 x 8 torch.float32, 1,536 bytes"


def test_retained_before_the_backward_is_what_autograd_saved():
    q, k, v = inputs()
    weights = torch.nn.Parameter(torch.randn(HEAD_DIM_V, HEAD_DIM_V))
    loss = (adapter.attention(q, k, v) @ weights).exp().sum()
    lse = "cupy_flash_attention_forwardBackward.saved_tensors"
    retained = find_retained(loss)
    assert {item.bytes for item in retained if item.path.startswith(lse)} == {OUT, LSE}  # q, k and v are leaves
    assert any(item.path == "ExpBackward0._saved_result" for item in retained)
    assert not any(item.shape == tuple(weights.shape) for item in retained)
    loss.backward(retain_graph=True)
    assert find_retained(loss) == retained
    loss.backward()
    assert not find_retained(loss)


class LeakyScale(torch.autograd.Function):
    """Leaks a tensor through a closure in a list in a dict."""

    @staticmethod
    def forward(ctx, x):
        scaled = 2 * x
        ctx.table = {"closure": [lambda: scaled]}
        return scaled.clone()

    @staticmethod
    def backward(ctx, dout):
        return 2 * dout


def test_retained_needs_no_module_and_no_graph():
    x = torch.randn(3, requires_grad=True)
    y = LeakyScale.apply(x)
    y.sum().backward()
    assert [(item.module, item.path, item.shape) for item in find_retained(y)] == [
        ("", "LeakyScaleBackward.table['closure'][0].scaled", (3,))
    ]
    assert find_retained(torch.zeros(2)) == []
    with pytest.raises(TypeError, match=r"loss must be a torch\.Tensor, not <class 'float'>"):
        find_retained(1.0)


WORLD, STEPS = 2, 4


def train_sharded():
    """Return (bytes allocated, tensors retained by the graph) after each step of a bfloat16 FSDP2 model.

    They are counted while the loss is alive.

    Every block is checkpointed.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    model = torch.nn.Sequential(*(Block(HEADS * HEAD_DIM) for _ in range(LAYERS)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(BATCH, LENGTH, HEADS * HEAD_DIM)
    allocated, retained = [], []
    with Allocated() as memory:
        for _ in range(STEPS):
            y = batch
            for block in model:
                y = checkpoint(block, y, use_reentrant=False)
            loss = y.float().square().mean()
            del y
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            allocated.append(memory.bytes)
            retained.append([(item.module, item.path) for item in find_retained(loss)])
    return allocated, retained


def one_process(rank, rendezvous, reports):
    """Train with cupy_flash, then with the leaky attention."""
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD, timeout=ranks.TIMEOUT)
    try:
        ours = train_sharded()
        module.attention = lambda q, k, v, **_: LeakyAttention.apply(q, k, v)
        reports.put((rank, ours, train_sharded()))
    finally:
        distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """Return (results with cupy_flash, results with the leaky attention) of each process."""
    context = torch.multiprocessing.get_context("spawn")
    reports = context.SimpleQueue()
    rendezvous = f"file://{tmp_path_factory.mktemp('sharded') / 'rendezvous'}"
    torch.multiprocessing.spawn(one_process, (rendezvous, reports), nprocs=WORLD)
    return [report for _, *report in sorted(reports.get() for _ in range(WORLD))]


def test_sharded_training_keeps_nothing(sharded):
    """A public report had leaks of 20 GB with fused attention, FSDP and checkpointed blocks; cupy_flash leaks no
    byte.
    """
    for (allocated, retained), _ in sharded:
        assert allocated == [allocated[0]] * STEPS
        assert retained == [[]] * STEPS


def test_detector_catches_the_leak_of_sharded_training(sharded):
    """The leaky attention keeps every layer's q, k, v, out and lse alive as long as the loss."""
    leak = LAYERS * (2 * BATCH * LENGTH * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + LSE)
    names = [
        (f"{layer}.attention.qkv", f"LeakyAttentionBackward.shells[{index}].tensor")
        for layer in range(LAYERS)
        for index in range(5)
    ]
    for (allocated, _), (leaky, retained) in sharded:
        assert leaky[0] - allocated[0] == leak
        assert [sorted(names_of_step) for names_of_step in retained] == [names] * STEPS

"""What a call saves for its backward, to the byte, and that nothing of it outlives the backward."""

import pytest
import torch
from leaks import Kept, SavedTensors, tensors_on_nodes
from torch.utils.checkpoint import checkpoint

import cupy_flash
from cupy_flash.adapters import torch as adapter
from cupy_flash.adapters.torch import module

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
    """q, k, v, the caller's own tensors among the options, out, lse, the seed: nothing else, and no copies."""
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
def test_nothing_hangs_on_the_node(function):
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
    assert not tensors_on_nodes(loss)


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
    """A step of a small transformer, every block checkpointed (None: none): (model, x, loss, what was saved)."""
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
    """Tensors beyond parameters and gradients while the loss is alive: (saved, paths on the graph, held by Python)."""
    with Kept() as kept:
        model, x, loss, saved = step(reentrant)
        own = [x, loss, *model.parameters()]
        own += [tensor.grad for tensor in own if tensor.is_leaf]
        on_nodes = tensors_on_nodes(loss)
        # torch's own reentrant checkpoint keeps the state of the generator, on every node of its kind.
        own += [tensor for path, tensor in on_nodes if path == "CheckpointFunctionBackward.fwd_cpu_state"]
        paths = [path for path, tensor in on_nodes if all(tensor is not mine for mine in own)]
        del on_nodes
        return saved.alive, paths, len(kept.beyond(*own))


CHECKPOINTS = [
    pytest.param(None, id="no-checkpoint"),
    pytest.param(False, id="checkpoint"),
    pytest.param(True, id="reentrant-checkpoint"),
]


@pytest.mark.parametrize("reentrant", CHECKPOINTS)
def test_transformer_keeps_nothing(reentrant):
    assert findings(reentrant) == (0, [], 0)


class Shell:
    """An object that had a tensor and lost it to save_for_backward."""

    tensor = None


class LeakyAttention(torch.autograd.Function):
    """The leak of a public library: the backward restores the saved tensors into objects that still hang on ctx."""

    @staticmethod
    def forward(ctx, *arrays):
        out, lse = cupy_flash.attention(*arrays, causal=True, return_lse=True)
        ctx.save_for_backward(*arrays, out, lse)
        ctx.shells = [Shell() for _ in range(5)]
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
    _, on_nodes, kept = findings(reentrant)
    assert len(on_nodes) == 5 * LAYERS
    assert set(on_nodes) == {f"LeakyAttentionBackward.shells[{index}].tensor" for index in range(5)}
    assert kept > 0


def test_detector_catches_a_tensor_kept_elsewhere(monkeypatch):
    kept = []
    monkeypatch.setattr(
        module, "attention", lambda q, k, v, **_: kept.append(cupy_flash.attention(q, k, v)) or kept[-1]
    )
    _, _, held = findings(None)
    assert held == LAYERS

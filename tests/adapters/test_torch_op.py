"""The torch operators: NumPy's results, torch's own checks of operators, and the same error messages."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._vmap_internals import _vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import cupy_flash
from cupy_flash import dispatch
from cupy_flash.adapters import torch as adapter

BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM_V = 2, 5, 7, 4, 2, 8, 6


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape)).to(dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def inputs(dtype=torch.float32, requires_grad=True, layout="bshd"):
    shapes = (
        (BATCH, Q_LEN, HEADS, HEAD_DIM),
        (BATCH, KV_LEN, KV_HEADS, HEAD_DIM),
        (BATCH, KV_LEN, KV_HEADS, HEAD_DIM_V),
    )
    arrays = [normal(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    if layout == "bhsd":
        arrays = [x.transpose(1, 2).contiguous() for x in arrays]
    return tuple(x.requires_grad_(requires_grad) for x in arrays)


def padded(options):
    """Return positional arguments and options of a call of `attention`."""
    return inputs(layout=options.get("layout", "bshd")), options


def packed(options):
    """Return a call of `attention_varlen` with rows after the last sequence.

    One of the four sequences has no queries, and one has no keys.
    """
    q, k, v = normal(8, HEADS, HEAD_DIM), normal(9, KV_HEADS, HEAD_DIM, seed=1), normal(9, KV_HEADS, HEAD_DIM_V, seed=2)
    arrays = tuple(x.requires_grad_() for x in (q, k, v))
    return (*arrays, ints(0, 3, 3, 5, 7), ints(0, 4, 6, 6, 8), 3, 4), options


def strided():
    """Return q with heads before the sequence, k as every second row, v with a broadcast head."""
    q = normal(BATCH, HEADS, Q_LEN, HEAD_DIM).transpose(1, 2)
    k = normal(BATCH, 2 * KV_LEN, KV_HEADS, HEAD_DIM + 3)[:, ::2, :, :HEAD_DIM]
    v = normal(BATCH, KV_LEN, 1, HEAD_DIM_V).expand(-1, -1, KV_HEADS, -1)
    return tuple(x.requires_grad_() for x in (q, k, v)), {}


def option_sets():
    bias = normal(1, HEADS, 1, KV_LEN).requires_grad_()
    sink = normal(HEADS).requires_grad_()
    return {
        "plain": padded({}),
        "causal": padded(dict(causal=True)),
        "causal-top-left": padded(dict(causal="top_left")),
        "window-scale-softcap": padded(dict(window=(2, None), scale=-0.7, softcap=0.9)),
        "alibi": padded(dict(alibi_slopes=normal(BATCH, HEADS).abs())),
        "bias-and-sink": padded(dict(bias=bias, sink=sink)),
        "bias-without-gradient": padded(dict(bias=bias.detach(), sink=sink.detach())),
        "mask": padded(dict(mask=normal(BATCH, 1, Q_LEN, KV_LEN) > 0)),
        "lengths": padded(dict(q_lengths=ints(3, 5), kv_lengths=ints(7, 0), causal=True)),
        "dropout": padded(dict(dropout=0.4, seed=7)),
        "dropout-of-a-large-seed": padded(dict(dropout=0.4, seed=2**64 - 5)),
        "dropout-of-a-seed-tensor": padded(dict(dropout=0.4, seed=torch.tensor([7]))),
        "bhsd": padded(dict(layout="bhsd", causal=True)),
        "strided": strided(),
        "packed": packed(dict(causal=True, dropout=0.2, seed=3, sink=sink)),
        "packed-bias": packed(dict(causal=True, bias=normal(4, HEADS, 3, 4, seed=3).requires_grad_())),
        "engine": padded(dict(backend="cpu", engine="cpu", deterministic=True)),
    }


SETS = option_sets()
WITH_OPCHECK = ("plain", "causal", "bias-and-sink", "bias-without-gradient", "dropout", "strided", "packed")


def attend(arguments, options, **more):
    function = cupy_flash.attention if len(arguments) == 3 else cupy_flash.attention_varlen
    return function(*arguments, **options, **more)


def as_numpy(value):
    return value.detach().numpy() if isinstance(value, torch.Tensor) else value


class Recorder(TorchDispatchMode):
    """Mode that records the calls of cupy_flash's operators as (operator, arguments)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "cupy_flash":
            self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("case", SETS)
def test_results_equal_numpy(case):
    arguments, options = SETS[case]
    out, lse = attend(arguments, options, return_lse=True)
    assert out.is_contiguous() and lse.is_contiguous()
    dout, dlse = normal(*out.shape, seed=5), normal(*lse.shape, seed=6)
    sources = [*arguments[:3], *(options[name] for name in ("bias", "sink") if name in options)]
    wanted = [x for x in sources if x.requires_grad]
    gradients = torch.autograd.grad((out, lse), wanted, (dout, dlse))

    their_arguments = [as_numpy(value) for value in arguments]
    their_options = {name: as_numpy(value) for name, value in options.items()}
    expected_out, expected_lse = attend(their_arguments, their_options, return_lse=True)
    backward = cupy_flash.attention_backward if len(arguments) == 3 else cupy_flash.attention_varlen_backward
    saved = (as_numpy(dout), *their_arguments[:3], expected_out, expected_lse, *their_arguments[3:])
    expected = [x for x in backward(*saved, dlse=as_numpy(dlse), **their_options) if x is not None]
    expected = [x for x, source in zip(expected, sources, strict=True) if source.requires_grad]
    np.testing.assert_array_equal(out.detach(), expected_out)
    np.testing.assert_array_equal(lse.detach(), expected_lse)
    for gradient, source, expected_gradient in zip(gradients, wanted, expected, strict=True):
        assert gradient.is_contiguous() and gradient.dtype == source.dtype
        np.testing.assert_array_equal(gradient, expected_gradient)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtypes(dtype):
    q, k, v = inputs(dtype)
    out, lse = adapter.attention(q, k, v, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert [x.dtype for x in torch.autograd.grad(out.sum(), (q, k, v))] == [dtype] * 3


@pytest.mark.parametrize("case", WITH_OPCHECK)
def test_opcheck(case):
    with Recorder() as recorder:
        out, lse = attend(*SETS[case], return_lse=True)
        (out.sum() + lse[lse.isfinite()].sum()).backward()
    (forward, forward_arguments), (backward, backward_arguments) = recorder.calls
    assert (forward.name(), backward.name()) == ("cupy_flash::attention_forward", "cupy_flash::attention_backward")
    torch.library.opcheck(forward, forward_arguments)
    # opcheck would differentiate the backward operator, which is not tested here, if an argument required a gradient.
    torch.library.opcheck(backward, tree_map_only(torch.Tensor, torch.Tensor.detach, backward_arguments))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(causal=True), id="causal"),
        pytest.param(dict(window=(1, 1), softcap=0.8, scale=1.3), id="window-softcap"),
        pytest.param(dict(dropout=0.4, seed=1, alibi_slopes=normal(2).abs()), id="dropout-alibi"),
    ],
)
def test_gradcheck(options):
    shapes = ((1, 3, 2, 3), (1, 4, 1, 3), (1, 4, 1, 2), (1, 2, 1, 4), (2,))
    tensors = [normal(*shape, seed=i, dtype=torch.float64).requires_grad_() for i, shape in enumerate(shapes)]

    def function(q, k, v, bias, sink):
        return adapter.attention(q, k, v, bias=bias, sink=sink, return_lse=True, **options)

    assert torch.autograd.gradcheck(function, tensors)


def test_gradcheck_of_packed_sequences():
    tensors = [
        normal(*shape, seed=i, dtype=torch.float64).requires_grad_() for i, shape in enumerate([(5, 2, 3), (6, 1, 3)])
    ]

    def function(q, k):
        # The sink makes every lse finite.
        sink = torch.zeros(2, dtype=torch.float64)
        boundaries = (ints(0, 2, 2, 5), ints(0, 2, 4, 6))
        return adapter.attention_varlen(q, k, k, *boundaries, 3, 2, causal=True, sink=sink, return_lse=True)

    assert torch.autograd.gradcheck(function, tensors)


def test_gradient_only_through_lse():
    q, k, v = inputs()
    out, lse = adapter.attention(q, k, v, return_lse=True)
    dlse = normal(*lse.shape)
    lse.backward(dlse)
    saved = [x.detach().numpy() for x in (torch.zeros_like(out), q, k, v, out, lse)]
    expected = cupy_flash.attention_backward(*saved, dlse=dlse.numpy())
    for x, expected_gradient in zip((q, k, v), expected[:3], strict=True):
        np.testing.assert_array_equal(x.grad, expected_gradient)
    assert q.grad.any() and k.grad.any() and not v.grad.any()


def test_gradient_of_stride_0():
    q, k, v = inputs()
    out = adapter.attention(q, k, v)
    expected = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    strides = []
    out.register_hook(lambda dout: strides.append(dout.stride()))
    out.sum().backward()
    assert strides == [(0, 0, 0, 0)]
    assert all(torch.equal(x.grad, expected_gradient) for x, expected_gradient in zip((q, k, v), expected, strict=True))


def test_seed_is_drawn_from_the_generator_of_torch():
    arrays = inputs()
    state = torch.get_rng_state()
    first, second = (adapter.attention(*arrays, dropout=0.5) for _ in range(2))
    assert not torch.equal(first, second)
    torch.set_rng_state(state)
    assert torch.equal(adapter.attention(*arrays, dropout=0.5), first)
    state = torch.get_rng_state()
    adapter.attention(*arrays, dropout=0.0)
    adapter.attention(*arrays, dropout=0.5, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_whole_numbers_may_be_tensors():
    arrays = inputs()
    window = (torch.tensor(2), torch.tensor(1))
    assert torch.equal(adapter.attention(*arrays, window=window), adapter.attention(*arrays, window=(2, 1)))
    packed_arrays, options = SETS["packed"]
    *leading, max_q, max_k = packed_arrays
    out = adapter.attention_varlen(*leading, torch.tensor(max_q), torch.tensor(max_k), **options)
    assert torch.equal(out, adapter.attention_varlen(*packed_arrays, **options))


def test_deterministic_algorithms_are_honoured():
    with Recorder() as recorder:
        adapter.attention(*inputs())
        torch.use_deterministic_algorithms(True)
        try:
            adapter.attention(*inputs())
        finally:
            torch.use_deterministic_algorithms(False)
    names = [argument.name for argument in recorder.calls[0][0]._schema.arguments]
    assert [arguments[names.index("deterministic")] for _, arguments in recorder.calls] == [False, True]


def test_autocast():
    q, k, v = inputs()
    bias, sink = normal(1, HEADS, Q_LEN, KV_LEN).requires_grad_(), normal(HEADS).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = adapter.attention(q, k, v, bias=bias, sink=sink)
        exact = adapter.attention(*inputs(torch.float64))
    expected = adapter.attention(*(x.bfloat16() for x in (q, k, v)), bias=bias, sink=sink)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    assert exact.dtype == torch.float64
    gradients = torch.autograd.grad(out.float().sum(), (q, k, v, bias, sink))
    expected_gradients = torch.autograd.grad(expected.float().sum(), (q, k, v, bias, sink))
    assert all(map(torch.equal, gradients, expected_gradients))
    assert {x.dtype for x in gradients} == {torch.float32}


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_flops_follow_the_convention_of_torch(layout):
    q, k, v = inputs(layout=layout)
    with FlopCounterMode(display=False) as counter:
        adapter.attention(q, k, v, causal=True, layout=layout).sum().backward()
    sdpa_arrays = [x.detach() if layout == "bhsd" else x.detach().transpose(1, 2) for x in (q, k, v)]
    sdpa_arrays[1:] = [x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in sdpa_arrays[1:]]
    aten = torch.ops.aten
    expected = {
        "attention_forward": flop_registry[aten._scaled_dot_product_flash_attention](*sdpa_arrays),
        "attention_backward": flop_registry[aten._scaled_dot_product_flash_attention_backward](
            sdpa_arrays[0].new_empty((BATCH, HEADS, Q_LEN, HEAD_DIM_V)), *sdpa_arrays
        ),
    }
    counts = counter.get_flop_counts()["Global"]
    assert {operator.__name__: count for operator, count in counts.items()} == expected


def test_flops_of_packed_sequences():
    arguments, options = SETS["packed"]
    with FlopCounterMode(display=False) as counter:
        attend(arguments, options)
    pairs = 3 * 4 + 0 * 2 + 2 * 0 + 2 * 2
    assert counter.get_total_flops() == 2 * HEADS * pairs * (HEAD_DIM + HEAD_DIM_V)


# Invalid arguments or options, which replace those of a valid call.
BAD_CALLS = {
    "causal": dict(causal=3),
    "window-of-three": dict(window=(1, 2, 3)),
    "window-that-is-a-number": dict(window=4),
    "window-of-halves": dict(window=(0.5, 1)),
    "window-negative": dict(window=(-2, 1)),
    "scale-that-is-text": dict(scale="x"),
    "scale-that-is-true": dict(scale=True),
    "scale-infinite": dict(scale=float("inf")),
    "softcap-negative": dict(softcap=-1.0),
    "dropout-of-one": dict(dropout=1.0),
    "dropout-negative": dict(dropout=-0.1),
    "dropout-without-number": dict(dropout=None),
    "seed-negative": dict(seed=-1, dropout=0.1),
    "seed-too-large": dict(seed=2**64, dropout=0.1),
    "seed-that-is-a-float": dict(seed=1.0, dropout=0.1),
    "seed-of-no-use": dict(seed="x"),
    "layout": dict(layout="sbhd"),
    "layout-that-is-a-number": dict(layout=3),
    "return-lse": dict(return_lse=1),
    "deterministic": dict(deterministic="yes"),
    "backend": dict(backend="gpu"),
    "backend-that-is-a-number": dict(backend=3),
    "engine": dict(engine="fast"),
    "bias-that-is-a-list": dict(bias=[1.0]),
    "k-that-is-a-list": dict(k=[1.0]),
    "k-missing": dict(k=None),
    "k-batch": dict(k=np.zeros((1, KV_LEN, KV_HEADS, HEAD_DIM), np.float32)),
    "k-dtype": dict(k=np.zeros((BATCH, KV_LEN, KV_HEADS, HEAD_DIM), np.float64)),
    "v-heads": dict(v=np.zeros((BATCH, KV_LEN, 3, HEAD_DIM_V), np.float32)),
    "q-rank": dict(q=np.zeros((Q_LEN, HEADS, HEAD_DIM), np.float32)),
    "bias-shape": dict(bias=np.zeros((3, 3), np.float32)),
    "mask-dtype": dict(mask=np.zeros((Q_LEN, KV_LEN), np.float32)),
    "sink-shape": dict(sink=np.zeros(1, np.float32)),
    "lengths": dict(kv_lengths=np.array([8, -1], np.int32)),
    "everything": dict(causal=3, scale="x", window=(1, 2, 3), layout=3, seed=-1, softcap=0, bias=np.zeros(3, np.int32)),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_call_gets_the_error_of_numpy(case):
    q, k, v = (x.detach().numpy() for x in inputs())
    call = dict(q=q, k=k, v=v) | BAD_CALLS[case]
    with pytest.raises((TypeError, ValueError)) as expected:
        cupy_flash.attention(**call)
    tensors = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in call.items()}
    with pytest.raises((TypeError, ValueError)) as error:
        adapter.attention(**tensors)
    assert error.type is expected.type
    assert str(error.value) == str(expected.value).replace("numpy on cpu", "torch on cpu")


@pytest.mark.parametrize(
    "replaced, message",
    [
        pytest.param(dict(k=np.zeros((2, 7, 2, 8), np.float32)), "one type, not numpy and torch", id="k-numpy"),
        pytest.param(dict(sink=np.zeros(HEADS, np.float32)), "one type, not numpy and torch", id="sink-numpy"),
        pytest.param(dict(seed=np.array([3]), dropout=0.1), "seed must be", id="seed-numpy"),
        pytest.param(dict(q=torch.zeros(BATCH, Q_LEN, HEADS, HEAD_DIM).to_sparse()), "not dense", id="sparse"),
        pytest.param(dict(caual=True), "unknown option 'caual'", id="unknown-option"),
    ],
)  # fmt: skip
def test_bad_calls_that_only_torch_can_make(replaced, message):
    q, k, v = inputs()
    with pytest.raises(TypeError, match=message):
        adapter.attention(**(dict(q=q, k=k, v=v) | replaced))


def test_bad_packed_call_gets_the_error_of_numpy():
    arguments, _ = SETS["packed"]
    q, k, v, cu_seqlens_q, _, max_q, max_k = arguments
    for boundaries in (cu_seqlens_q.long(), ints(0, 4, 6, 6, 99), None):
        call = (q, k, v, cu_seqlens_q, boundaries, max_q, max_k)
        with pytest.raises((TypeError, ValueError)) as expected:
            cupy_flash.attention_varlen(*map(as_numpy, call))
        with pytest.raises((TypeError, ValueError)) as error:
            adapter.attention_varlen(*call)
        in_torch = str(expected.value).replace("numpy on cpu", "torch on cpu")
        assert str(error.value) == in_torch.replace('.astype("int32")', ".to(torch.int32)")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["nested", "jagged"])
def test_nested_tensors_are_refused(layout):
    nested = torch.nested.nested_tensor(
        [torch.zeros(3, HEADS, HEAD_DIM), torch.zeros(2, HEADS, HEAD_DIM)], layout=layout
    )
    with pytest.raises(TypeError, match="attention: 3 requirements are not met"):
        adapter.attention(nested, nested, nested)


def test_unsupported_engine_is_never_replaced():
    with pytest.raises(cupy_flash.UnsupportedError, match="wgmma"):
        adapter.attention(*inputs(), engine="wgmma")


def test_meta_tensors_give_shapes():
    q, k, v = (x.detach().to("meta") for x in inputs())
    out, lse = adapter.attention(q, k, v, return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", (BATCH, Q_LEN, HEADS, HEAD_DIM_V), (BATCH, HEADS, Q_LEN))


@pytest.mark.parametrize(
    "name", ["q", "k", "v", "alibi_slopes", "bias", "mask", "sink", "q_lengths", "kv_lengths", "seed", "all but mask"]
)
def test_meta_beside_other_tensors_is_refused(name):
    """torch runs the fake kernel if any tensor is meta; on a CPU its result would be uninitialised memory."""
    q, k, v = inputs(requires_grad=False)
    call = dict(
        q=q, k=k, v=v, alibi_slopes=torch.ones(HEADS), bias=torch.zeros(Q_LEN, KV_LEN), mask=torch.ones(KV_LEN) > 0,
        sink=torch.zeros(HEADS), q_lengths=ints(3, 5), kv_lengths=ints(7, 0), seed=torch.tensor([7]), dropout=0.4,
    )  # fmt: skip
    moved = [name] if name in call else [other for other in call if other not in ("mask", "dropout")]
    call |= {other: call[other].to("meta") for other in moved}
    with pytest.raises(ValueError, match=f"one device, not .*{moved[0]} on meta") as error:
        adapter.attention(**call)
    assert str(error.value).count("on cpu") == 10 - len(moved)


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4], ids=["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"])
def test_meta_beside_other_packed_tensors_is_refused(position):
    arguments, options = packed({})
    moved = [x.to("meta") if at == position else x for at, x in enumerate(arguments)]
    with pytest.raises(ValueError, match="attention_varlen: all arrays must be on one device"):
        adapter.attention_varlen(*moved, **options)


def test_fake_tensors_must_be_on_one_device():
    q, k, v = inputs(requires_grad=False)
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in (q, k, v))
        elsewhere = torch.empty(k.shape, device="cuda")
        with pytest.raises(ValueError, match="q on cpu, k on cuda:0, v on cpu"):
            adapter.attention(q, elsewhere, v)
        out, lse = adapter.attention(q, k, v, return_lse=True)
        with Recorder() as recorder:
            adapter.attention(q, k, v)
        ((_, arguments),) = recorder.calls
        with pytest.raises(ValueError, match="dout on cuda:0, out on cpu"):
            torch.ops.cupy_flash.attention_backward(*arguments, elsewhere, out, lse, None, False)


class SeenFunctions(TorchFunctionMode):
    """Records the names of the functions that are called."""

    def __init__(self):
        self.names = []
        super().__init__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """Counts the operators of cupy_flash that reach a subclass."""

    operators = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.operators += "cupy_flash" in str(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("requires_grad", [False, True])
def test_modes_traces_profilers_and_subclasses_see_the_operator(requires_grad):
    q, k, v = inputs(requires_grad=requires_grad)
    out = adapter.attention(q, k, v, causal=True)
    with SeenFunctions() as functions:
        torch.testing.assert_close(adapter.attention(q, k, v, causal=True), out, rtol=0, atol=0)
    assert any("attention_forward" in name for name in functions.names)
    with Recorder() as recorder:
        torch.testing.assert_close(adapter.attention(q, k, v, causal=True), out, rtol=0, atol=0)
    assert any("attention_forward" in str(func) for func, _ in recorder.calls)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        adapter.attention(q, k, v, causal=True)
    assert any(event.key == "cupy_flash::attention_forward" for event in profile.key_averages())
    with pytest.warns(DeprecationWarning, match="torch.jit.trace"):
        trace = torch.jit.trace(lambda *x: adapter.attention(*x, causal=True), (q, k, v), check_trace=False)
    assert "cupy_flash::attention_forward" in str(trace.graph)
    wrapped = adapter.attention(q.as_subclass(Wrapped), k, v, causal=True)
    assert Wrapped.operators == 1 and isinstance(wrapped, Wrapped)
    Wrapped.operators = 0


def test_settings_of_torch_apply_to_calls_without_gradients(monkeypatch):
    """Such calls have no operator, but autocast, torch's generator and torch's flags apply to them too."""
    q, k, v = inputs(requires_grad=False)
    out = adapter.attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert adapter.attention(q, k, v).dtype == torch.bfloat16
    dropped = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        dropped.append(adapter.attention(q, k, v, dropout=0.5))
    assert torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[0], dropped[2])
    problems = []
    forward = dispatch.forward
    monkeypatch.setattr(
        dispatch, "forward", lambda problem, operands: (problems.append(problem), forward(problem, operands))[1]
    )
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(adapter.attention(q, k, v), out, rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(False)
    adapter.attention(q, k, v)
    assert [problem.deterministic for problem in problems] == [True, False]


def of_ended_transform(x):
    """Return a tensor that a transform of torch.func wrapped and that outlives it."""
    wrapped = []
    torch.func.jvp(lambda y: wrapped.append(y * 2) or y, (x,), (x,))
    return wrapped[0]


# torch's forward mode uses torch.jit.script
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "recorded"])
def test_tensors_without_memory_of_their_own_go_through_the_dispatcher(requires_grad):
    """The dispatcher unwraps such tensors or allocates their memory.

    Nothing else reveals them: their type is torch.Tensor, and no mode or transform is active.
    """
    q, k, v = inputs(requires_grad=False)
    k.requires_grad_(requires_grad)
    zero = torch._efficientzerotensor(q.shape)
    torch.testing.assert_close(adapter.attention(zero, k, v), adapter.attention(torch.zeros_like(q), k, v))
    ended = of_ended_transform(q)
    with pytest.raises(RuntimeError):
        ended.data_ptr()
    torch.testing.assert_close(adapter.attention(ended, k, v), adapter.attention(2 * q, k, v))
    outer = _vmap(lambda one: adapter.attention(one[None], k[:1], v[:1])[0])(q)
    each = [adapter.attention(one[None], k[:1], v[:1])[0] for one in q]
    torch.testing.assert_close(outer, torch.stack(each))


@pytest.mark.parametrize("value", [np.complex64(1), np.timedelta64(1)], ids=["complex", "timedelta"])
@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_scalars_of_numpy_that_are_no_numbers(name, value):
    """float() would accept these scalars, so their type is checked, with the registered operator and without it."""
    q, k, v = inputs(requires_grad=False)
    for x in (q, q.clone().requires_grad_()):
        with pytest.raises(TypeError, match=f"{name} must be a number"):
            adapter.attention(x, k, v, **{name: value})

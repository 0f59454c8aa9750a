"""The handler that XLA calls: its structs against jaxlib's header, and its GPU path on call frames built here."""

import ctypes
import re

import indexer_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import in_tiers
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash import dispatch
from cupy_flash.adapters.jax import attention, ffi_handler, ffi_structs, indexer, kv_cache, primitive, static_call
from cupy_flash.arrays import Array, contiguous_strides
from cupy_flash.problem.indexer import Rule
from cupy_flash.problem.records import Options

# ---------------------------------------------------------------------------------------------------------- the header

# ctypes types of C's type names; every pointer has 8 bytes.
TYPES = {
    "size_t": ctypes.c_size_t, "int": ctypes.c_int, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64,
    "XLA_FFI_Handler_Traits": ctypes.c_uint32, "XLA_FFI_TypeId": ctypes.c_int64,
}  # fmt: skip
ENUMS = ("XLA_FFI_Extension_Type", "XLA_FFI_DataType", "XLA_FFI_ExecutionStage", "XLA_FFI_Error_Code")


def members_of_header(name):
    """Return (name, size) of the members of a struct in the header; a nested struct has the size of ours."""
    body = re.search(rf"struct {name} \{{(.*?)\n\}}", ffi_structs.header(), re.DOTALL)[1]
    body = re.sub(r"_XLA_FFI_API_STRUCT_FIELD\((\w+)\)", r"\1* \1", re.sub(r"//[^\n]*", "", body))
    ours = {struct.NAME: ctypes.sizeof(struct) for struct in ffi_structs.STRUCTS}
    sizes = ours | {c: ctypes.sizeof(python) for c, python in TYPES.items()} | dict.fromkeys(ENUMS, 4)
    members = []
    for declaration in filter(None, map(str.strip, body.split(";"))):
        text, member = re.fullmatch(r"(.*?[\s*])(\w+)", declaration, re.DOTALL).groups()
        text = text.replace("const", "").replace("struct", "").strip()
        members.append((member, 8 if "*" in text else sizes[text]))
    return members


@pytest.mark.parametrize("struct", ffi_structs.STRUCTS, ids=lambda struct: struct.NAME)
def test_structs_equal_the_header(struct):
    expected = members_of_header(struct.NAME)
    actual = [(name, ctypes.sizeof(kind)) for name, kind in struct._fields_]
    assert actual == expected[: len(actual)]
    unread = {"CallFrame": {"future"}, "Metadata": {"state_type_id"}}.get(struct.__name__, set())
    assert {name for name, _ in expected[len(actual) :]} == unread


def test_constants_equal_the_header():
    enumerated = {name: int(value) for name, value in re.findall(r"(XLA_FFI_\w+) = (\d+)", ffi_structs.header())}
    for code, dtype in ffi_structs.DATA_TYPES.items():
        name = {"bool": "PRED", "float8_e5m2": "F8E5M2", "float8_e4m3fn": "F8E4M3FN", "bfloat16": "BF16"}.get(dtype)
        name = name or f"{'S' if dtype.startswith('int') else dtype[0].upper()}{np.dtype(dtype).itemsize * 8}"
        assert enumerated[f"XLA_FFI_DataType_{name}"] == code
    for name in ("INITIALIZE", "EXECUTE"):
        assert enumerated[f"XLA_FFI_ExecutionStage_{name}"] == getattr(ffi_structs, name)
    for name in ("INVALID_ARGUMENT", "UNIMPLEMENTED", "INTERNAL"):
        assert enumerated[f"XLA_FFI_Error_Code_{name}"] == getattr(ffi_structs, name)
    assert enumerated["XLA_FFI_Extension_Metadata"] == ffi_structs.METADATA
    assert ffi_structs.unserved() is None


Q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 17, 4, 8)), jnp.float32)


def test_another_major_version_falls_back_to_pure_callback(monkeypatch):
    text = re.sub(r"(#define XLA_FFI_API_MAJOR) \d+", r"\1 1", ffi_structs.header())
    monkeypatch.setattr(ffi_structs, "header", lambda: text)
    ffi_structs.unserved.cache_clear()
    try:
        reason = "jaxlib has major version 1 of XLA's FFI, and this package speaks 0"
        assert reason in cupy_flash.explain(Q, Q, Q)
        differentiate = jax.grad(lambda q: (attention(q, q, q, causal=True) ** 2).sum())
        step = jax.jit(lambda q: differentiate(q) * 1)
        with pytest.warns(RuntimeWarning, match=f"falls back to jax.pure_callback: {reason}"):
            text = step.lower(Q).as_text()
        assert "xla_ffi_python_cpu_callback" in text and ffi_handler.TARGET + '"' not in text
        np.testing.assert_array_equal(step(Q), differentiate(Q))
    finally:
        ffi_structs.unserved.cache_clear()


def test_jit_is_one_call_of_the_handler_and_copies_nothing(monkeypatch):
    seen = []
    run = static_call.Call.run

    def record(call, operands, buffers):
        results = run(call, operands, buffers)
        seen.append({name: x.pointer for name, x in (operands | results).items()})
        return results

    monkeypatch.setattr(static_call.Call, "run", record)
    step = jax.jit(attention)
    q, k = (jnp.asarray(Q * factor) for factor in (1, 2))
    out = step(q, k, k)
    expected = {"q": q, "k": k, "v": k, "out": out}
    assert [{name: pointers[name] for name in expected} for pointers in seen] == [
        {name: x.unsafe_buffer_pointer() for name, x in expected.items()}
    ]
    assert "callback" not in step.lower(q, k, k).as_text()


def test_explain_names_the_interface():
    assert "jit        XLA's FFI, major version 0" in cupy_flash.explain(Q, Q, Q)
    assert "XLA" not in cupy_flash.explain(*[np.asarray(Q)] * 3)


def test_no_exception_crosses_into_xla(monkeypatch):
    def fail(call, operands, buffers):
        raise SystemExit("no")

    monkeypatch.setattr(static_call.Call, "run", fail)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="INTERNAL: SystemExit: no"):
        jax.jit(attention)(Q, Q, Q).block_until_ready()


# ---------------------------------------------------------------------------------------- frames as on a GPU


class Xla:
    """Stands for XLA: builds a call frame with buffers in host memory, and provides the functions of XLA's
    interface.
    """

    def __init__(self, ordinal=0):
        self.errors, self.keep, self.ordinal = [], [], ordinal
        self.api = ffi_structs.Api(api_version=ffi_structs.Version(major_version=0, minor_version=3))
        for name in ("Error_Create", "Stream_Get", "DeviceOrdinal_Get"):
            function = ffi_structs.Function(getattr(self, name))
            self.keep.append(function)
            setattr(self.api, f"XLA_FFI_{name}", ctypes.cast(function, ctypes.c_void_p).value)

    def Error_Create(self, address):
        argument = ffi_structs.ErrorCreateArgs.from_address(address)
        self.errors.append((argument.errc, argument.message.decode()))
        return 1

    def Stream_Get(self, address):
        ffi_structs.StreamGetArgs.from_address(address).stream = 7

    def DeviceOrdinal_Get(self, address):
        ffi_structs.DeviceOrdinalGetArgs.from_address(address).device_ordinal = self.ordinal

    def call(self, operands, results, attributes, stage=ffi_structs.EXECUTE, platform="cuda"):
        """Call the handler; return (code, message) of its error, or None."""
        call = ffi_structs.CallFrame(api=ctypes.pointer(self.api), stage=stage)
        call.args = ffi_structs.Args(size=len(operands), args=self.buffers(operands))
        call.rets = ffi_structs.Rets(size=len(results), rets=self.buffers(results))
        names, values = (self.array(map(self.span, texts)) for texts in (attributes, attributes.values()))
        call.attrs = ffi_structs.Attrs(size=len(attributes), attrs=values)
        call.attrs.names = ctypes.cast(names, ctypes.POINTER(ctypes.POINTER(ffi_structs.ByteSpan)))
        error = ffi_handler.HANDLERS[platform](ctypes.addressof(call))
        return self.errors.pop() if error else None

    def array(self, structs):
        """Return an array of the addresses of structs, which this object keeps alive."""
        structs = list(structs)
        array = (ctypes.c_void_p * len(structs))(*map(ctypes.addressof, structs))
        self.keep += [*structs, array]
        return array

    def buffers(self, arrays):
        codes = {name: code for code, name in ffi_structs.DATA_TYPES.items()}
        buffers = []
        for x in arrays:
            dims = (ctypes.c_int64 * x.ndim)(*x.shape)
            buffers.append(ffi_structs.Buffer(dtype=codes[x.dtype.name], data=x.ctypes.data, rank=x.ndim, dims=dims))
        return ctypes.cast(self.array(buffers), ctypes.POINTER(ctypes.c_void_p))

    def span(self, text):
        bytes_ = ctypes.create_string_buffer(text.encode())
        self.keep.append(bytes_)
        return ffi_structs.ByteSpan(ptr=ctypes.addressof(bytes_), len=len(text.encode()))


def static(**options):
    settings = Options(**options)
    given = {name: getattr(settings, name, None) for name in static_call.Static._fields}
    return static_call.Static(**given | {"function": "attention"})


def run_frame(call, operands, ordinal=0):
    """Return the results of a call through the handler of the platform "cuda", whose buffers start as NaN or -1."""
    recorder = primitive.Recorder("cpu")
    described = {
        name: Array(x.ctypes.data, x.shape, contiguous_strides(x.shape), x.dtype, "cpu", "xla", recorder)
        for name, x in operands.items()
    }
    written, outputs = primitive.allocations(call, recorder, described)
    buffers = [np.full(shape, -1 if dtype.kind in "iu" else np.nan, dtype) for shape, dtype in written]
    for operand, place in call.aliases.items():
        buffers[outputs[place]] = operands[call.names[operand]]
    attributes = {"call": call.text, "outputs": " ".join(map(str, outputs))}
    xla = Xla(ordinal)
    for stage in (0, 1, ffi_structs.INITIALIZE, ffi_structs.EXECUTE):
        error = xla.call([operands[name] for name in call.names], buffers, attributes, stage)
        assert error is None, error
    return {name: buffers[index] for name, index in zip(call.result_names, outputs, strict=True)}


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float16)


SIMULATED = {
    "causal": dict(causal=True),
    "sink-lengths": dict(sink=normal(4, 2), kv_lengths=np.array([9], np.int32)),
    "dropout": dict(dropout=0.3, seed=np.array([5, 6], np.uint32)),
}


@pytest.mark.parametrize("options", in_tiers(SIMULATED, ("causal",)))
def test_handler_runs_a_hopper_plan_from_a_frame(options):
    operands = {"q": normal(1, 1, 40, 2, 64), "k": normal(2, 1, 40, 1, 64), "v": normal(3, 1, 40, 1, 64)}
    arrays = {name: x for name, x in options.items() if isinstance(x, np.ndarray)}
    numbers = {name: x for name, x in options.items() if name not in arrays}
    settings = static(**numbers, backend="simulator:sm_90a")
    operands |= arrays
    forward = run_frame(static_call.Call("forward", settings, tuple(operands)), operands)
    saved = {"dout": normal(7, *forward["out"].shape), **forward, "dlse": np.zeros_like(forward["lse"])}
    operands |= saved
    backward = run_frame(static_call.Call("backward", settings, tuple(operands)), operands)
    if "seed" in options:
        options = options | {"seed": 5 + (6 << 32)}
    direct = options | {"backend": "simulator:sm_90a"}
    q, k, v = (operands[name] for name in "qkv")
    (out, lse), vjp = cupy_flash.attention_vjp(q, k, v, return_lse=True, **direct)
    np.testing.assert_array_equal(forward["out"], out)
    np.testing.assert_array_equal(forward["lse"], lse)
    for name, gradient in vjp(saved["dout"], saved["dlse"])._asdict().items():
        if gradient is not None:
            np.testing.assert_array_equal(backward[name], gradient)
    exact = cupy_flash.attention(*(x.astype(np.float64) for x in (q, k, v)), **options)
    low = cupy_flash.attention(q, k, v, **options)
    assert_matches_reference(forward["out"], exact, low, "float16", "out")


@pytest.mark.exhaustive
def test_handler_runs_derivatives_from_frames():
    """A JVP, and a double backward, which is a JVP followed by further kernels and has the workspaces of both."""
    shapes = {"q": (1, 20, 2, 16), "k": (1, 20, 1, 16), "v": (1, 20, 1, 16)}
    x = {name: normal(n, *shape).astype(np.float32) for n, (name, shape) in enumerate(shapes.items())}
    tangents = {f"t{name}": normal(10 + n, *shape).astype(np.float32) for n, (name, shape) in enumerate(shapes.items())}
    options = dict(causal=True, softcap=3.0, backend="simulator")
    settings = static(**options)
    operands = x | tangents
    results = run_frame(static_call.Call("JVP", settings, tuple(operands)), operands)
    direct = cupy_flash.attention_jvp(*operands.values(), return_lse=True, **options)
    for name, expected in zip(("out", "tout", "lse", "tlse"), direct, strict=True):
        np.testing.assert_array_equal(results[name], expected)
    saved = {"dout": normal(20, *shapes["q"]).astype(np.float32), "out": results["out"], "lse": results["lse"]}
    operands |= saved
    second = run_frame(static_call.Call("double backward", settings, tuple(operands)), operands)
    direct = cupy_flash.attention_double_backward(
        *tangents.values(), saved["dout"], *x.values(), *list(saved.values())[1:], **options
    )
    assert set(second) == {"dq", "dk", "dv", "ddout"}
    for name, actual in second.items():
        np.testing.assert_array_equal(actual, getattr(direct, name))


@pytest.mark.exhaustive
@pytest.mark.parametrize("ordinal", range(4))
def test_each_device_computes_its_shard_of_dropout_and_mods(ordinal):
    """2 sequences and 4 heads are sharded over 2 x 2 devices; a device knows its shard by its ordinal."""
    q, k, v = normal(1, 2, 24, 4, 64), normal(2, 2, 24, 2, 64), normal(3, 2, 24, 2, 64)
    table = np.random.default_rng(4).normal(size=(2, 4)).astype(np.float32)
    options = dict(dropout=0.3, seed=5, backend="simulator")
    mod = cupy_flash.Mod(lambda s, b, h, i, j: s * table[b, h] + 0.1 * h)
    out, lse = cupy_flash.attention(q, k, v, score_mod=mod, return_lse=True, **options)
    b, h = divmod(ordinal, 2)
    shard = {
        "q": q[b : b + 1, :, 2 * h : 2 * h + 2].copy(), "k": k[b : b + 1, :, h : h + 1].copy(),
        "v": v[b : b + 1, :, h : h + 1].copy(), "array0": table,
    }  # fmt: skip
    places = {f"0:{n}": [n // 2, n % 2 * 2] for n in range(4)}
    settings = static(**options, score_mod=mod.encoded)._replace(whole_heads=4, places=places)
    results = run_frame(static_call.Call("forward", settings, tuple(shard)), shard, ordinal)
    np.testing.assert_array_equal(results["out"], out[b : b + 1, :, 2 * h : 2 * h + 2])
    np.testing.assert_array_equal(results["lse"], lse[b : b + 1, 2 * h : 2 * h + 2])


@pytest.mark.exhaustive
def test_handler_appends_to_a_cache_and_reads_it_from_frames():
    caches = {"k_cache": normal(3, 2, 32, 2, 64), "v_cache": normal(4, 2, 32, 2, 64)}
    rows = {"k": normal(1, 2, 3, 2, 64), "v": normal(2, 2, 3, 2, 64)}
    lengths = {"cache_seqlens": np.array([5, 2], np.int32)}
    expected = {name: cache.copy() for name, cache in caches.items()}
    cupy_flash.append_to_kv_cache(*rows.values(), *expected.values(), **lengths)
    settings = dict.fromkeys(kv_cache.CacheStatic._fields) | {"backend": "simulator", "layout": "bshd", "causal": True}
    settings |= {"function": "cached", "rotary_interleaved": True, "return_lse": False}
    operands = rows | caches | lengths
    run_frame(kv_cache.CacheCall("append", kv_cache.CacheStatic(**settings), tuple(operands)), operands)
    for name, appended in expected.items():
        np.testing.assert_array_equal(caches[name], appended)
    operands = {"q": normal(5, 2, 1, 4, 64), **caches, "cache_seqlens": lengths["cache_seqlens"] + 3}
    results = run_frame(kv_cache.CacheCall("cached", kv_cache.CacheStatic(**settings), tuple(operands)), operands)
    arrays = (operands["q"], *caches.values())
    options = dict(cache_seqlens=operands["cache_seqlens"], return_lse=True)
    direct = cupy_flash.attention_with_kv_cache(*arrays, backend="simulator", **options)
    for one, other in zip(results.values(), direct, strict=True):
        np.testing.assert_array_equal(one, other)


def test_handler_runs_an_indexer_from_a_frame(monkeypatch):
    """Its workspaces are results of the call, too; on a GPU the kernels are loaded before."""
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator")
    arrays = [x.astype(np.float32) for x in indexer_cases.normal(q_len=5)]
    operands = dict(zip(("q", "weights", "k", "selected", "target", "row_weights"), arrays, strict=True))
    operands["selected"] = operands["selected"].astype(np.int32)
    options = indexer.IndexerStatic("selection_loss", *Rule(0), "simulator")
    call = indexer.IndexerCall(static_call.LOSS_BACKWARD, options, tuple(operands))
    found = run_frame(call, operands)
    _, gradients = cupy_flash.selection_loss_vjp(*operands.values())
    for x, expected in zip(found.values(), gradients, strict=True):
        np.testing.assert_array_equal(x, expected)
    loaded = []
    monkeypatch.setattr(dispatch, "load", lambda launches, on: loaded.extend(launches))
    dispatch.load_indexer("gradients", *call.pose(operands))
    assert [launch.function for launch in loaded][:2] == ["selection_loss", "loss_sum"] and len(loaded) == 7


def test_errors_of_a_frame_and_its_metadata():
    q = np.zeros((1, 4, 2, 8), np.float32)
    call = static_call.Call("forward", static(), ("q", "k", "v"))
    attributes = {"call": call.text, "outputs": "0 1"}
    results = [np.zeros_like(q), np.zeros((1, 2, 4), np.float32)]
    code, message = Xla().call([q, q[:, :3], q], results, attributes, platform="cpu")
    assert code == ffi_structs.INVALID_ARGUMENT and "k and v must have one length, not 3 and 4" in message
    code, message = Xla().call([q, q, q], results, attributes)  # there is no GPU here
    assert code in (ffi_structs.UNIMPLEMENTED, ffi_structs.INTERNAL) or message is None
    metadata = ffi_structs.Metadata()
    base = ffi_structs.Extension(type=ffi_structs.METADATA)
    extension = ffi_structs.MetadataExtension(base, ctypes.pointer(metadata))
    xla = Xla()
    metadata_call = ffi_structs.CallFrame(extension_start=ctypes.addressof(extension), api=ctypes.pointer(xla.api))
    assert not ffi_handler.HANDLERS["cuda"](ctypes.addressof(metadata_call))
    assert (metadata.api_version.major_version, metadata.api_version.minor_version) == (0, 3)
    assert metadata.traits == ffi_structs.COMMAND_BUFFER_COMPATIBLE


def test_workspaces_of_a_gpu_are_results_of_the_call():
    settings = static(backend="simulator:sm_90a")
    call = static_call.Call("backward", settings, ("q", "k", "v", "dout", "out", "lse", "dlse"))
    recorder = primitive.Recorder("cpu")
    shapes = [(1, 256, 4, 64)] * 5 + [(1, 4, 256)] * 2
    dtypes = [np.dtype(np.float16)] * 5 + [np.dtype(np.float32)] * 2
    named = zip(call.names, shapes, dtypes, strict=True)
    written, outputs = primitive.allocations(
        call, recorder, {name: recorder.array(shape, dtype) for name, shape, dtype in named}
    )
    assert len(written) > len(outputs) == 3
    assert [written[index] for index in outputs] == list(zip(shapes, dtypes, strict=True))[:3]


def test_a_call_is_parsed_from_its_text():
    settings = static(window=(3, None), scale=np.float32(0.3), softcap=2.5, causal="top_left", seed=2**64 - 1)
    call = static_call.Call("forward", settings, ("q", "k", "v"))
    parsed = static_call.parse(call.text)
    assert parsed == call and type(parsed.static.scale) is float and type(parsed.static.window) is tuple

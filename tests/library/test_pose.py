"""The checks of a call are cached: a repeated call skips them, and still gives the problem or error of a checked
call.
"""

import weakref

import ml_dtypes
import numpy as np
import pytest

from cupy_flash.arrays import Array
from cupy_flash.problem import build as module
from cupy_flash.problem.build import pose
from cupy_flash.problem.records import ARRAYS, MODS, NAMES, Options, Packed, Saved


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def int32(*values):
    return np.array(values, np.int32)


Q, K, V = zeros(2, 3, 4, 8), zeros(2, 5, 2, 8), zeros(2, 5, 2, 6)
OUT, LSE = zeros(2, 3, 4, 6), zeros(2, 4, 3)
FORTRAN = np.asfortranarray(Q)
BF16 = dict(zip("qkv", (x.astype(ml_dtypes.bfloat16) for x in (Q, K, V)), strict=True))
FP8 = {name: x.astype(ml_dtypes.float8_e4m3fn) for name, x in zip("qkv", (Q, K, V), strict=True)}
PACKED = dict(q=zeros(6, 4, 8), k=zeros(9, 2, 8), v=zeros(9, 2, 6))

# Valid and invalid calls that differ little: in the type of an equal value, or in the contents of an array.
CALLS = {
    "plain": {},
    "strides": dict(q=FORTRAN),
    "dtype": dict(k=zeros(2, 5, 2, 8, dtype=np.float64)),
    "bfloat16": BF16,
    "fp8": FP8,
    "fp8-descale": FP8 | dict(k_descale=zeros(2, 2)),
    "fp8-other-descale": FP8 | dict(v_descale=zeros(2, 2)),
    "fp8-negative-descale": FP8 | dict(k_descale=zeros(2, 2) - 1),
    "descale-alone": dict(q_descale=zeros(2, 2)),
    "fewer-keys": dict(k=K[:, :4], v=V[:, :4]),
    "no-match": dict(v=V[:, :4]),
    "bhsd": dict(layout="bhsd"),
    "no-layout": dict(layout=None),
    "causal": dict(causal=True),
    "causal-int": dict(causal=1),
    "causal-float": dict(causal=1.0),
    "causal-numpy": dict(causal=np.True_),
    "top-left": dict(causal="top_left"),
    "window": dict(window=(1, 0)),
    "window-list": dict(window=[1, 0]),
    "window-bools": dict(window=(True, False)),
    "window-floats": dict(window=(1.0, 0.0)),
    "window-none": dict(window=(None, None)),
    "window-one-none": dict(window=(None,)),
    "window-int": dict(window=1),
    "scale": dict(scale=1.0),
    "scale-int": dict(scale=1),
    "scale-bool": dict(scale=True),
    "scale-array": dict(scale=np.ones(())),
    "softcap": dict(softcap=1.0),
    "softcap-bool": dict(softcap=True),
    "dropout": dict(dropout=0.5, seed=1),
    "dropout-other-seed": dict(dropout=0.5, seed=2),
    "dropout-seed-array": dict(dropout=0.5, seed=np.array([1])),
    "dropout-seed-of-bool": dict(dropout=0.5, seed=True),
    "dropout-negative-seed": dict(dropout=0.5, seed=-1),
    "seed-alone": dict(seed=1),
    "sink": dict(sink=zeros(4)),
    "sink-number": dict(sink=1.0),
    "bias": dict(bias=zeros(3, 5)),
    "bias-bool": dict(bias=zeros(3, 5, dtype=bool)),
    "bias-number": dict(bias=0.0),
    "mask": dict(mask=zeros(3, 5, dtype=bool)),
    "mask-floating": dict(mask=zeros(3, 5)),
    "alibi": dict(alibi_slopes=zeros(4)),
    "alibi-batch": dict(alibi_slopes=zeros(2, 4)),
    "lengths": dict(kv_lengths=int32(5, 0)),
    "other-lengths": dict(kv_lengths=int32(1, 2)),
    "lengths-too-long": dict(kv_lengths=int32(5, 6)),
    "deterministic": dict(deterministic=True),
    "deterministic-int": dict(deterministic=1),
    "return-lse-int": dict(return_lse=1),
    "backend": dict(backend="cpu"),
    "no-backend": dict(backend="gpu"),
    "engine": dict(engine="simt"),
    "no-engine": dict(engine="fast"),
    "backward": dict(saved=Saved(OUT, OUT, LSE)),
    "backward-dlse": dict(saved=Saved(OUT, OUT, LSE, LSE)),
    "backward-no-bias": dict(saved=Saved(OUT, OUT, LSE, None, False)),
    "backward-no-seed": dict(saved=Saved(OUT, OUT, LSE), dropout=0.5),
    "backward-no-lse": dict(saved=Saved(OUT, OUT, None)),
    "packed": PACKED | dict(packed=Packed(int32(0, 4, 6), int32(0, 0, 9), 4, 9)),
    "packed-longer": PACKED | dict(packed=Packed(int32(0, 4, 6), int32(0, 0, 9), 5, 9)),
    "packed-too-short": PACKED | dict(packed=Packed(int32(0, 4, 6), int32(0, 0, 9), 4, 8)),
    "packed-past-the-end": PACKED | dict(packed=Packed(int32(0, 4, 7), int32(0, 0, 9), 4, 9)),
    "packed-float": PACKED | dict(packed=Packed(int32(0, 4, 6), int32(0, 0, 9), 4.0, 9)),
    "packed-unreadable": dict(window=(), packed=Packed([0], [0], 1, 0)),  # the lists and window are invalid
    "not-packed": PACKED,
}


def result(*, q=Q, k=K, v=V, packed=None, saved=None, **options):
    """Return the problem of a call, or its error, as text, in which 1 and True differ."""
    try:
        stated, operands = pose("case", (q, k, v), Options(**options), packed, saved)
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    given = {name: getattr(operands, name) for name in operands._fields}
    return repr(stated), {
        name: (x.pointer, x.strides, x.shape, x.dtype.name) if isinstance(x, Array) else x for name, x in given.items()
    }


def forget():
    module._check_facts.cache_clear()
    module._check_options.cache_clear()


@pytest.fixture(autouse=True)
def forgotten():
    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def alone():
    """Return the result of every call, made with empty caches."""
    results = {}
    for name, call in CALLS.items():
        forget()
        results[name] = result(**call)
    return results


@pytest.mark.parametrize("name", CALLS)
def test_no_earlier_call_changes_a_later_one(name, alone):
    for other, call in CALLS.items():
        forget()
        result(**CALLS[name])
        assert result(**call) == alone[other], f"{other} after {name}"


def test_a_legal_call_is_checked_once(monkeypatch):
    first, _ = pose("case", (Q, K, V), Options(causal=True))

    def never(*_):
        raise AssertionError("checked again")

    monkeypatch.setattr(module, "check_shapes", never)
    again, operands = pose("case", (FORTRAN, K.copy(), V.copy()), Options(causal=True))
    assert again is first
    assert operands.q.owner is FORTRAN
    with pytest.raises(AssertionError, match="checked again"):
        pose("case", (Q, K, V), Options(causal=False))


def test_options_are_checked_once_for_all_lengths():
    """In a decode the length changes in every call and the options do not."""
    options = Options(causal=True, softcap=2.0)
    for length in (5, 6, 7):
        longer, _ = pose("case", (Q, zeros(2, length, 2, 8), zeros(2, length, 2, 6)), options)
        assert (longer.kv_len, longer.softcap) == (length, 2.0)
    assert (module._check_facts.cache_info().misses, module._check_options.cache_info().misses) == (3, 1)
    for softcap, error in ((-2.0, ValueError), (True, TypeError)):  # 1 == True, but True is not a number here
        pose("case", (Q, K, V), Options(softcap=1))
        with pytest.raises(error, match="softcap must be"):
            pose("case", (Q, K, V), Options(softcap=softcap))
    for dim in (16, 4):  # the default scale depends on the head dimension
        x = zeros(2, 3, 4, dim)
        assert pose("case", (x, x, x), Options())[0].scale == dim**-0.5


def test_values_are_checked_at_every_call():
    """The contents of arrays are checked in every call, because they may change between calls."""
    lengths, bounds = int32(5, 5), int32(0, 4, 6)
    pose("case", (Q, K, V), Options(kv_lengths=lengths))
    packed = tuple(PACKED.values()), Options(), Packed(bounds, int32(0, 0, 9), 4, 9)
    pose("case", *packed)
    lengths[1], bounds[1] = 6, 5
    with pytest.raises(ValueError, match=r"kv_lengths must be in \[0, 5\], not 5 to 6"):
        pose("case", (Q, K, V), Options(kv_lengths=lengths))
    with pytest.raises(ValueError, match="max_seqlen_q is 4, but the longest sequence has 5 tokens"):
        pose("case", *packed)


class Changing:
    """A number whose value may change between calls; it is hashed by identity."""

    def __float__(self):
        return self.value


def test_mutable_options_are_read_at_every_call():
    scale, window = Changing(), [1, 0]
    for scale.value in (1.0, 2.0):
        assert pose("case", (Q, K, V), Options(scale=scale))[0].scale == scale.value
    for window[0] in (1, 2):
        assert pose("case", (Q, K, V), Options(window=window))[0].mask.left == window[0]


def test_the_environment_is_read_at_every_call(monkeypatch):
    monkeypatch.delenv("CUPY_FLASH_BACKEND", raising=False)
    assert pose("case", (Q, K, V), Options())[0].backend is None
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "simulator")
    assert pose("case", (Q, K, V), Options())[0].backend == "simulator"
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "gpu")
    with pytest.raises(ValueError, match="CUPY_FLASH_BACKEND must be one of"):
        pose("case", (Q, K, V), Options())


def test_every_call_draws_another_seed():
    seeds = {pose("case", (Q, K, V), Options(dropout=0.5))[1].seed for _ in range(3)}
    assert len(seeds) == 3


def test_every_option_and_feature_is_a_fact_or_read_at_every_call():
    """The cache key must cover each option: a plain option by value, an array by its facts, a mod by its traced
    text.
    """
    arrays = {"seed", *(feature.name for feature in (*ARRAYS, *MODS))}
    others = set(module.TABLE.plain) | {"window", "statistics"}
    assert others | arrays == set(NAMES) and not others & arrays


def test_caches_are_bounded_and_keep_no_array_alive():
    assert module._check_facts.cache_info().maxsize == module.CACHED < 10_000
    q = zeros(2, 7, 4, 8)
    alive = weakref.ref(q)
    pose("case", (q, K, V), Options(bias=zeros(7, 5)))
    del q
    assert module._check_facts.cache_info().currsize == 1 and alive() is None

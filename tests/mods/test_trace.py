"""Tracing: functions of NumPy, torch and jax, captured arrays and numbers, reuse of traces, and errors."""

import collections
import copy
import enum
import fractions
import functools
import gc
import math
import pickle
import types
import weakref
from math import erf

import numpy as np
import pytest
from producers import Producer

import cupy_flash
from cupy_flash.arrays import as_array
from cupy_flash.mods import trace
from cupy_flash.mods.trace import Mod, decoded, traced

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
jnp = jax.numpy


def text(score_mod=None, mask_mod=None):
    return traced(score_mod, mask_mod).text


def expressions(score_mod=None, mask_mod=None):
    return str(traced(score_mod, mask_mod).program)


@pytest.fixture
def kept(monkeypatch):
    """Start with an empty store of traces; the list has an entry per trace made since."""
    monkeypatch.setattr(trace, "_kept", {})
    made = []
    program = trace._program
    monkeypatch.setattr(trace, "_program", lambda *args: made.append(1) or program(*args))
    return made


# Each row has one function in the spellings of operators, methods, NumPy, torch and jax, which must give one text.
SPELLINGS = {
    "where": [
        lambda s, b, h, q, kv: np.where(q < kv, s, 0.0),
        lambda s, b, h, q, kv: torch.where(kv > q, s, 0.0),
        lambda s, b, h, q, kv: jnp.where(q < kv, s, 0.0),
        lambda s, b, h, q, kv: torch.where(~(q >= kv), s, 0.0),
        lambda s, b, h, q, kv: s.where(q < kv, 0.0),
    ],
    "functions": [
        lambda s, b, h, q, kv: np.tanh(s) + np.exp2(s) - np.log1p(np.abs(s)) + np.sqrt(np.square(np.tan(s))),
        lambda s, b, h, q, kv: torch.tanh(s) + torch.exp2(s) - torch.log1p(s.abs()) + torch.sqrt(s.tan().square()),
        lambda s, b, h, q, kv: jnp.tanh(s) + jnp.exp2(s) - jnp.log1p(abs(s)) + jnp.sqrt(jnp.tan(s) * jnp.tan(s)),
        lambda s, b, h, q, kv: s.tanh() + 2**s - s.abs().log1p() + (torch.tan(s) ** 2).sqrt(),
    ],
    "clip": [
        lambda s, b, h, q, kv: s + np.clip(q - kv, -5, 5),
        lambda s, b, h, q, kv: s + torch.clamp(q - kv, -5, 5),
        lambda s, b, h, q, kv: s + jnp.clip(q - kv, min=-5, max=5),
        lambda s, b, h, q, kv: s + (q - kv).clamp(min=-5, max=5),
        lambda s, b, h, q, kv: s + np.minimum(np.maximum(q - kv, -5), 5),
    ],
    "comparisons and logic": [
        lambda s, b, h, q, kv: s * ((q >= kv) & (kv != 3) | ~(q == 9)),
        lambda s, b, h, q, kv: s * np.logical_or(np.logical_and(kv <= q, kv != 3), np.not_equal(q, 9)),
        lambda s, b, h, q, kv: s * torch.logical_or(torch.logical_and(torch.ge(q, kv), torch.ne(kv, 3)), q != 9),
        lambda s, b, h, q, kv: s * jnp.logical_or(jnp.logical_and(q >= kv, kv != 3), jnp.logical_not(q == 9)),
    ],
    "integers": [
        lambda s, b, h, q, kv: s + (q // 7 - kv % 7) + (q & 3) + (kv << 2) + (q ^ kv),
        lambda s, b, h, q, kv: (
            s + (np.floor_divide(q, 7) - np.mod(kv, 7)) + np.bitwise_and(q, 3) + (kv << 2) + (q ^ kv)
        ),
        lambda s, b, h, q, kv: s + (divmod(q, 7)[0] - divmod(kv, 7)[1]) + (q & 3) + (kv << 2) + (q ^ kv),
        lambda s, b, h, q, kv: (
            s
            + (torch.div(q, 7, rounding_mode="floor") - torch.remainder(kv, 7))
            + torch.bitwise_and(q, 3)
            + torch.bitwise_left_shift(kv, 2)
            + torch.bitwise_xor(q, kv)
        ),
    ],
    "conversions": [
        lambda s, b, h, q, kv: s + q.astype(np.float32) / 3 + (s > 0).astype(np.int32),
        lambda s, b, h, q, kv: s + q.float() / 3 + (s > 0).int(),
        lambda s, b, h, q, kv: s + q.to(torch.float32) / 3 + (s > 0).to(torch.int32),
        lambda s, b, h, q, kv: s + q.astype(jnp.float32) / 3 + (s > 0).astype(jnp.int32),
    ],
    "activations": [
        lambda s, b, h, q, kv: torch.sigmoid(s) + torch.relu(s) + torch.nn.functional.silu(s),
        lambda s, b, h, q, kv: s.sigmoid() + torch.nn.functional.relu(s) + s * torch.sigmoid(s),
        lambda s, b, h, q, kv: jax.nn.sigmoid(s) + jax.nn.relu(s) + jax.nn.silu(s),
    ],
    "gelu": [
        lambda s, b, h, q, kv: torch.nn.functional.gelu(s, approximate="tanh"),
        lambda s, b, h, q, kv: jax.nn.gelu(s),
    ],
    "softplus and logaddexp": [
        lambda s, b, h, q, kv: torch.nn.functional.softplus(s) + torch.logaddexp(s, -s),
        lambda s, b, h, q, kv: jax.nn.softplus(s) + jnp.logaddexp(s, -s),
        lambda s, b, h, q, kv: -torch.nn.functional.logsigmoid(-s) + np.logaddexp(s, -s),
    ],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_all_spellings_make_one_text(name):
    texts = {text(spelling) for spelling in SPELLINGS[name]}
    assert len(texts) == 1, "\n\n".join(texts)


TABLES = {
    "numpy": np.arange(12, dtype=np.float32).reshape(3, 4),
    "torch": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "jax": jnp.arange(12, dtype=jnp.float32).reshape(3, 4),
}
table = TABLES["numpy"]


class Bias:
    def __init__(self, table, width):
        self.table, self.width = table, width

    def __call__(self, score, b, h, q, kv):
        return score + self.table[h, (q - kv) % self.width]

    def method(self, score, b, h, q, kv):
        return self(score, b, h, q, kv)

    @property
    def first(self):
        return self.table


class Module(torch.nn.Module):
    def __init__(self, table):
        super().__init__()
        self.table = torch.nn.Parameter(table)

    def forward(self, score, b, h, q, kv):
        return score + self.table[h, (q - kv) % 4]


def ways_to_capture(table):
    """Return mods that read table[h, (q - kv) % 4], each with the table captured in another way."""

    def inner(h, distance):
        return table[h, distance % 4]

    def default(score, b, h, q, kv, table=table):
        return score + table[h, (q - kv) % 4]

    def keyword(score, b, h, q, kv, *, table=table):
        return score + table[h, (q - kv) % 4]

    def first(tables, score, b, h, q, kv):
        return score + tables["a"][0][h, (q - kv) % 4]

    holder, tables = Bias(table, 4), {"a": [table]}
    namespace = types.SimpleNamespace(table=table)
    return {
        "closure": lambda score, b, h, q, kv: score + table[h, (q - kv) % 4],
        "nested function": lambda score, b, h, q, kv: score + inner(h, q - kv),
        "default": default,
        "keyword default": keyword,
        "partial": functools.partial(first, tables),
        "keyword partial": functools.partial(keyword, table=table),
        "containers": lambda score, b, h, q, kv: score + tables["a"][0][h, (q - kv) % 4],
        "callable object": holder,
        "method": holder.method,
        "property": lambda score, b, h, q, kv: score + holder.first[h, (q - kv) % 4],
        "attribute": lambda score, b, h, q, kv: score + namespace.table[h, (q - kv) % 4],
        "indices one by one": lambda score, b, h, q, kv: score + table[h][(q - kv) % 4],
    }


@pytest.mark.parametrize("framework", TABLES)
@pytest.mark.parametrize("place", ways_to_capture(table))
def test_arrays_are_found_wherever_they_are(place, framework):
    mod = traced(ways_to_capture(TABLES[framework])[place], None)
    assert str(mod.program) == "score: score + array0[h, ((q - kv) % 4)]"
    assert mod.arrays[0] is TABLES[framework]


def test_a_global_array_and_a_module():
    assert traced(lambda score, b, h, q, kv: score * table[h, 0], None).arrays[0] is table
    module = Module(TABLES["torch"])
    for function in (module, module.forward):
        assert traced(function, None).arrays[0] is module.table


def test_one_array_in_two_places_is_one_slot(kept):
    a, b = np.ones(9, np.int32), np.zeros(9, np.int32)

    def same(x, y):
        return lambda batch, h, q, kv: (x[q] == y[kv]) & (q >= kv)

    mods = [traced(None, same(*arrays)) for arrays in ((a, b), (b, b), (b, a), (a, a))]
    assert [[x is a for x in mod.arrays] for mod in mods] == [[True, False], [False], [False, True], [True]]
    assert len(kept) == 2


def test_score_and_mask_share_a_graph():
    mod = traced(lambda s, b, h, q, kv: s + table[h, q], lambda b, h, q, kv: table[h, q] > 0)
    assert (len(mod.arrays), mod.text.count("load")) == (1, 1)


def test_rows_are_reduced():
    rows = np.ones((3, 4), np.int64)
    weights = np.ones((2, 4), np.float32)

    def mask(b, h, q, kv):
        return (rows[q] == kv.unsqueeze(-1)).any(-1) | (rows[q, :] > 4).all()

    assert traced(None, mask).text.count("load=") == 4
    assert expressions(lambda s, b, h, q, kv: s + np.dot(weights[h], weights[h])).count("array0[h, ") == 8
    assert expressions(lambda s, b, h, q, kv: s + weights[h] @ weights[h]).count("array0[h, ") == 8
    assert traced(lambda s, b, h, q, kv: s * weights[h].sum(), None).text.count("load=") == 4


def test_zero_dimensional_arrays_are_captured():
    for value in (np.array(2.5, np.float32), torch.tensor(2.5), jnp.float32(2.5)):
        mod = traced(lambda s, b, h, q, kv, value=value: s * value, None)
        assert str(mod.program) == "score: score * array0[]"


def test_masks_of_torch_combine():
    from torch.nn.attention.flex_attention import and_masks, or_masks

    ids = np.arange(9) // 3
    causal = lambda b, h, q, kv: q >= kv  # noqa: E731
    document = lambda b, h, q, kv: ids[q] == ids[kv]  # noqa: E731
    assert expressions(None, and_masks(causal, document)) == "mask: (kv <= q) & (array0[q] == array0[kv])"
    assert expressions(None, or_masks(causal, document)) == "mask: (kv <= q) | (array0[q] == array0[kv])"


def test_a_choice_of_minus_infinity_at_the_root_is_a_mask():
    assert expressions(lambda s, b, h, q, kv: np.where(q >= kv, s * 2, -np.inf)) == "score: score * 2, mask: kv <= q"
    hidden = lambda s, b, h, q, kv: np.where(q < kv, -math.inf, np.where(kv > 8, s, -math.inf))  # noqa: E731
    assert expressions(hidden, lambda b, h, q, kv: h == 0) == "mask: (n0 < kv) & ((kv <= q) & (h == 0))"


def test_a_condition_that_reads_the_score_stays_in_the_score():
    """Masks are computed without scores, so such a condition stays; conditions of positions around or in it do not."""
    inf, where = np.inf, np.where
    small = "score: where((score <= 1), score, -inf)"
    assert expressions(lambda s, b, h, q, kv: where(s <= 1, s, -inf)) == small
    assert expressions(lambda s, b, h, q, kv: where(q < kv, -inf, where(s <= 1, s, -inf))) == f"{small}, mask: kv <= q"
    assert expressions(lambda s, b, h, q, kv: where(s <= 1, where(q < kv, -inf, s), -inf)) == f"{small}, mask: kv <= q"
    assert expressions(lambda s, b, h, q, kv: where(np.tanh(s) > 1, -inf, where(s < q, s, -inf))) == (
        "score: where((1 < tanh(score)), -inf, where((score < real(q)), score, -inf))"
    )
    assert expressions(lambda s, b, h, q, kv: where((q >= kv) & (s <= 1), s, -inf)) == (
        "score: where(((kv <= q) & (score <= 1)), score, -inf)"
    )
    assert expressions(lambda s, b, h, q, kv: where(s <= 1, -inf, -inf)) == "score: -inf"


# ------------------------------------------------------------------------------------------------------ numbers


def sliding(width, offset=0):
    return lambda b, h, q, kv: (q - kv <= width) & (kv >= q - offset - width)


def test_numbers_are_arguments(kept):
    mods = [traced(None, sliding(width)) for width in (512, 100, 7)]
    assert len({mod.text for mod in mods}) == 1
    assert [set(mod.numbers) for mod in mods] == [{512}, {100}, {7}]
    assert len(kept) == 1
    assert text(lambda s, b, h, q, kv: s * 0.5 + kv * 7.5) == text(lambda s, b, h, q, kv: s * 0.25 + kv * 3.5)


def test_numbers_that_simplify_or_divide_stay_in_the_text(kept):
    def divided(n):
        return lambda s, b, h, q, kv: s + q // n

    assert [traced(divided(n), None).numbers for n in (3, 5, 3, 5)] == [()] * 4
    assert len(kept) == 2
    assert expressions(lambda s, b, h, q, kv: s * 1 + 0 + s**3) == "score: score + (score ** 3)"
    assert expressions(None, lambda b, h, q, kv: q & 15 == 3) == "mask: (q & 15) == n0"


def test_arithmetic_of_numbers_is_repeated_in_every_call(kept):
    def of(width):
        return lambda s, b, h, q, kv: s * (2 * width + 5) + (1 << width)

    mods = [traced(of(width), None) for width in (3, 4, 10)]
    assert [sorted(mod.numbers) for mod in mods] == [[8, 11], [13, 16], [25, 1024]]
    assert len(kept) == 1


def test_a_number_that_python_uses_is_part_of_the_trace(kept):
    def repeated(n, flag):
        def mod(s, b, h, q, kv):
            for k in range(n):
                s = s + k * kv
            return s * math.sqrt(n) if flag else s

        return mod

    for n, flag in ((3, True), (4, True), (3, False), (3, True), (4, True)):
        lengths = traced(repeated(n, flag), None).text.count("add")
        assert lengths == (3, 4)[n == 4] - 1
    assert len(kept) == 3


def test_a_condition_of_a_number_keeps_only_its_truth(kept):
    def of(width):
        return lambda b, h, q, kv: q - kv < width if width > 100 else q >= kv

    assert [traced(None, of(width)).numbers for width in (512, 256, 50, 1000, 4)] == [(512,), (256,), (), (1000,), ()]
    assert len(kept) == 2


def test_a_number_of_another_kind_is_traced_again(kept):
    def of(x):
        return lambda s, b, h, q, kv: s + x * kv

    assert [traced(of(x), None).program.numbers for x in (5, 5.5, 2**40)] == [("int",), ("real",), ("long",)]


def test_shapes_are_numbers(kept):
    def of(table):
        return lambda s, b, h, q, kv: s + table[np.minimum(q, table.shape[0] - 1)] + table[-1]

    assert [traced(of(np.ones(n, np.float32)), None).numbers for n in (5, 9)] == [(4,), (8,)]
    assert len(kept) == 1


class Size(enum.IntEnum):
    WIDE = 7


class Whole(int):
    """An int with a name of its own."""


@pytest.mark.parametrize("number", [np.float32(2.5), np.float64(2.5), np.int8(5), Size.WIDE, Whole(5)], ids=repr)
def test_numbers_of_other_types_are_python_numbers(kept, number):
    """torch operators pass a Mod as text, which can hold only the digits of an int or a float."""
    width = 3
    for _ in range(2):
        mod = traced(lambda s, b, h, q, kv: s * number + number * kv * (width * number), None)
        assert {type(value) for value in mod.numbers} <= {int, float}
        assert decoded(mod.encoded, mod.arrays).numbers == mod.numbers
    assert len(kept) == 1


def test_numbers_of_numpy_on_the_left_of_a_comparison_are_no_arrays():
    width = np.int64(7)
    assert text(None, lambda b, h, q, kv: width >= q - kv) == text(None, lambda b, h, q, kv: q - kv <= 7)


# ------------------------------------------------------------------------------------------------------ kept traces


def test_a_mask_that_is_rebuilt_is_not_traced_again(kept):
    def document(ids):
        same = lambda b, h, q, kv: ids[q] == ids[kv]  # noqa: E731
        return lambda b, h, q, kv: same(b, h, q, kv) & (q >= kv)

    for n in range(5, 9):
        ids = np.arange(n)
        assert traced(None, document(ids)).arrays == (ids,)
    assert len(kept) == 1


def test_other_dtypes_and_ranks_are_traced_again(kept):
    def of(table):
        return lambda s, b, h, q, kv: s + table[h]

    for array in (np.ones(3, np.float32), np.ones(3), torch.ones(3), np.ones(3, np.float32)):
        assert traced(of(array), None).arrays[0] is array
    assert len(kept) == 3


def test_a_changed_attribute_item_or_global_is_seen(kept, monkeypatch):
    holder, tables = Bias(np.ones((2, 4)), 4), [np.ones(2)]

    def mod(s, b, h, q, kv):
        return holder(s, b, h, q, kv) + tables[0][h] + table[0, 0]

    traced(mod, None)
    holder.table, tables[0] = np.zeros((2, 4)), np.zeros(2)
    monkeypatch.setitem(globals(), "table", np.zeros((3, 4), np.float32))
    assert all(not array.any() for array in traced(mod, None).arrays)
    assert len(kept) == 1
    holder.width = 5
    assert "% 5" in expressions(mod)
    tables.append(1)
    traced(mod, None)
    assert len(kept) == 3


def test_a_global_that_hides_a_builtin_is_seen(kept):
    space = {}
    exec("def mod(s, b, h, q, kv): return s + abs(q - kv)", space)
    assert "abs" in expressions(space["mod"])
    space["abs"] = lambda x: x * 3.5
    assert expressions(space["mod"]) == "score: score + (real((q - kv)) * n0)"


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_trace_does_not_keep_what_a_mod_captures(is_cached):
    """Cached traces hold no captured object, and no reference cycle delays the release of one."""

    def references():
        owner, array = Plain(), np.ones(9, np.float32)
        owner.array = array
        keys = {owner: 1.5}

        def cached(s, b, h, q, kv):
            return s + owner.array[q]

        def not_cached(s, b, h, q, kv):
            return s + owner.array[q] * sum(keys.values())

        traced(cached if is_cached else not_cached, None)
        return weakref.ref(owner), weakref.ref(array)

    gc.collect()
    gc.disable()
    try:
        assert [reference() for reference in references()] == [None, None]
    finally:
        gc.enable()


def test_captures_that_cannot_be_compared_are_traced_in_every_call(kept):
    chosen = {1, 2}
    mod = lambda s, b, h, q, kv: s * 3 if 2 in chosen else s  # noqa: E731
    made_inside = lambda s, b, h, q, kv: s + torch.arange(5)[kv]  # noqa: E731
    assert expressions(mod) == "score: score * real(n0)"
    chosen.clear()
    assert expressions(mod) == ""
    assert expressions(made_inside) == expressions(made_inside) == "score: score + real(array0[kv])"
    assert len(kept) == 4


def test_the_store_is_bounded(kept, monkeypatch):
    monkeypatch.setattr(trace, "MOST_TRACES", 3)
    for n in range(3, 9):
        traced(lambda s, b, h, q, kv, n=n: s // n, None)
    assert sum(map(len, trace._kept.values())) <= 3


def test_a_mod_keeps_arrays_and_numbers():
    mod = Mod(mask_mod=sliding(512), score_mod=lambda s, b, h, q, kv: s + table[h, q])
    assert "array0 float32 (3, 4); n0 = 512" in repr(mod)
    other = np.zeros((3, 4), np.float32)
    assert mod.with_arrays((other,)).arrays[0] is other
    with pytest.raises(TypeError, match="score_mod or mask_mod must be given"):
        Mod()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda mod: pickle.loads(pickle.dumps(mod))])
def test_a_copy_of_a_mod_is_equal(duplicate):
    """Mods with long chains of operations can be copied; copied together with its array, a Mod captures the copy."""

    def long(s, b, h, q, kv):
        for n in range(3, 1000):
            s = s * kv + n
        return s + table[h, q]

    mod = Mod(long)
    (copied, array), members = duplicate([mod, mod.arrays[0]]), ("text", "names", "numbers")
    assert [getattr(copied, name) for name in members] == [getattr(mod, name) for name in members]
    assert repr(copied) == repr(mod)
    assert copied.arrays[0] is array


# ----------------------------------------------------------------------------------------------------------- errors

tensor = torch.ones(64)
unreadable = np.ones(3, np.complex64)
ERRORS = {
    "if": (lambda s, b, h, q, kv: s if s > 0 else 0.0, r"bool\(\) asks for .* where\(condition, a, b\) instead of if"),
    "and": (lambda s, b, h, q, kv: s * (q > kv and kv > 0), "`&` instead of `and`"),
    "max": (lambda s, b, h, q, kv: max(s, q), r"bool\(\)"),
    "range": (lambda s, b, h, q, kv: sum(range(q)), r"range\(\), asks for the value"),
    "list": (lambda s, b, h, q, kv: s + [1, 2, 3][q], "indexing a list or tuple.* make the list an array"),
    "dict": (lambda s, b, h, q, kv: s + {0: 1}[q], "cannot be a key of a dict .* an array, and index it"),
    "few parameters": (lambda s, b, h, q: s, r"it takes \(s, b, h, q\) but .* 5 .*\(score, b, h, q, kv\)"),
    "many parameters": (lambda s, b, h, q, kv, table: s, "missing a required argument: 'table'.* functools.partial"),
    "tensor": (lambda s, b, h, q, kv: s + torch.tensor(tensor)[kv], "cannot be made a tensor: .* indexed as it is"),
    "as_tensor": (lambda s, b, h, q, kv: s + torch.as_tensor(q), "cannot be made a tensor: .* before the mod"),
    "copy of an array": (lambda s, b, h, q, kv: s + np.array(table)[h, q], "captured array cannot be made an array"),
    "assignment": (lambda s, b, h, q, kv: table.__setitem__(0, 1.0), "a mod changes no array"),
    "object": (lambda s, b, h, q, kv: s + PLAIN, "not with Plain, which has no __radd__: read an attribute"),
    "object of NumPy": (lambda s, b, h, q, kv: np.add(s, PLAIN), "not with Plain"),
    "order": (lambda s, b, h, q, kv: s if PLAIN < 3 else 2, "not with Plain, which has no __lt__"),
    "float of an object": (lambda s, b, h, q, kv: s * float(PLAIN), "which has no __float__"),
    "format": (lambda s, b, h, q, kv: s * len(f"{q:d}"), "format 'd' asks for the value"),
    "iteration": (lambda s, b, h, q, kv: sum(x for x in s), "iteration over a traced number"),
    "float": (lambda s, b, h, q, kv: float(s), r"float\(\)"),
    "math": (lambda s, b, h, q, kv: math.exp(s), r"takes Python numbers: write np\.exp or torch\.exp"),
    "function of math": (lambda s, b, h, q, kv: erf(table[h, kv]), r"math\.erf .*: write torch\.erf"),
    "several of math": (lambda s, b, h, q, kv: math.hypot(2, s), r"call math\.hypot; it can call abs, .*, where"),
    "slice": (lambda s, b, h, q, kv: s + table[h, :3], "take it before the mod"),
    "row": (lambda s, b, h, q, kv: s + table[h], "return one number, not a row of 4"),
    "none": (lambda s, b, h, q, kv: None, "return one number, not None"),
    "plane": (lambda s, b, h, q, kv: s + table, r"index the captured array further, \(3, 4\) is left"),
    "float index": (lambda s, b, h, q, kv: s + table[h, s], "an index must be an integer, not floating"),
    "bool index": (lambda s, b, h, q, kv: s + table[h, q > 1], "an index must be an integer, not a bool"),
    "many indices": (lambda s, b, h, q, kv: s + table[h, q, kv], r"3 indices of a captured array of shape \(3, 4\)"),
    "torch function": (lambda s, b, h, q, kv: torch.lgamma(s), "cannot call lgamma; it can call abs, .*, where"),
    "method": (lambda s, b, h, q, kv: s.softmax(-1), "has no 'softmax'"),
    "in place": (lambda s, b, h, q, kv: torch.relu_(s), "relu_ works in place"),
    "NumPy function": (lambda s, b, h, q, kv: np.cumsum(s), "cannot call cumsum"),
    "jax function": (lambda s, b, h, q, kv: jnp.cumsum(s), "cannot call cumsum"),
    "reduction": (lambda s, b, h, q, kv: np.add.reduce(s), "np.add.reduce is not elementwise"),
    "array": (lambda s, b, h, q, kv: np.asarray(s), "cannot be made an array"),
    "string": (lambda s, b, h, q, kv: "x", "not with str"),
    "complex": (lambda s, b, h, q, kv: s * 1j, "not with complex"),
    "float bits": (lambda s, b, h, q, kv: s & 1, "& takes integers or bools"),
    "no rows": (lambda s, b, h, q, kv: s @ table[h], "a product of rows takes two rows"),
    "rows": (lambda s, b, h, q, kv: np.dot(table[h], table[h, :][:3]), "rows of different lengths, 3 and 4"),
    "where": (lambda s, b, h, q, kv: torch.where(q > kv), "where takes a condition and two branches"),
    "dtype": (lambda s, b, h, q, kv: s + unreadable[h], "a captured array cannot be complex64"),
    "operator of an object": (lambda s, b, h, q, kv: s * THIRD, "not with Fraction"),
    "order of an object": (lambda s, b, h, q, kv: s * (q < THIRD), "not with Fraction"),
    "None": (lambda s, b, h, q, kv: s * None, "not with NoneType"),
    "text": (lambda s, b, h, q, kv: s + "1", "not with str"),
    "huge": (lambda s, b, h, q, kv: s + 2**70, "does not fit 64 bits"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_to_write_and_where(name):
    function, message = ERRORS[name]
    with pytest.raises(TypeError, match=message) as error:
        traced(function, None)
    line = function.__code__.co_firstlineno
    assert f'File "{__file__}", line {line}: "{name}": (lambda' in str(error.value)


def test_a_mask_is_no_bias():
    with pytest.raises(TypeError, match="an additive bias is a score_mod"):
        traced(None, lambda b, h, q, kv: q * 0.5)
    assert expressions(None, lambda b, h, q, kv: q - kv) == "mask: (q - kv) != 0"
    with pytest.raises(TypeError, match=r"it must be a function \(b, h, q, kv\), not int"):
        traced(None, 3)


def test_an_error_of_the_users_function_is_not_changed():
    def mod(score, b, h, q, kv):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        traced(mod, None)


def test_too_large_mods_are_refused():
    def long(s, b, h, q, kv):
        for n in range(5000):
            s = s * (kv + n)
        return s

    with pytest.raises(ValueError, match="operations, more than 4096"):
        traced(long, None)
    with pytest.raises(TypeError, match="make it an array"):
        traced(lambda s, b, h, q, kv, x=list(range(2000)): s + x[3], None)
    tables = [np.ones(3) for _ in range(33)]
    with pytest.raises(ValueError, match="at most 32 arrays"):
        traced(lambda s, b, h, q, kv: sum((t[h] for t in tables), s), None)


class Plain:
    pass


class EqualToAll:
    def __eq__(self, other):
        return True


class Base:
    def mod(self, s, b, h, q, kv):
        return s * 3


class Derived(Base):
    def mod(self, *arguments):
        return super().mod(*arguments) * 2


class Holds3:
    def __contains__(self, item):
        return item == 3

    def __getitem__(self, index):
        return 10.0


class Own:
    def __init__(self):
        self.factor = 2.0

    def __lt__(self, other):
        return self.factor < other

    def __float__(self):
        return self.factor

    def __bool__(self):
        return self.factor > 5

    def __rmul__(self, other):
        return other * self.factor

    def __neg__(self):
        return -self.factor

    def __index__(self):
        return int(self.factor)


@functools.lru_cache
def two(x):
    return 2.0


THIRD = fractions.Fraction(1, 3)
TABLES_BY_NAME = collections.OrderedDict(table=np.ones(64, np.float32))
QUEUE = collections.deque([TABLES_BY_NAME["table"]])
ARRAY, PLAIN, SEVEN, EQUAL, HOLDS, OWN = np.ones(64, np.float32), Plain(), 7, EqualToAll(), Holds3(), Own()
SAME = ARRAY


@pytest.mark.parametrize(
    ("mod", "factor"),
    [
        pytest.param(lambda s, b, h, q, kv: s * 2 if isinstance(ARRAY, np.ndarray) else s, 2, id="isinstance-array"),
        pytest.param(lambda s, b, h, q, kv: s * 2 if isinstance(PLAIN, Plain) else s, 2, id="isinstance-class"),
        pytest.param(lambda s, b, h, q, kv: s * 2 if isinstance(SEVEN, (int, str)) else s, 2, id="isinstance-int"),
        pytest.param(lambda s, b, h, q, kv: s * 2 if type(SEVEN) is int else s, 2, id="type-of-int"),
        pytest.param(lambda s, b, h, q, kv: s * 2 if type(PLAIN) is Plain else s, 2, id="type-of-object"),
        pytest.param(lambda s, b, h, q, kv: s * 2 if EQUAL == 4 else s, 2, id="own-equality"),
        pytest.param(lambda s, b, h, q, kv: s * 2 if 3 in HOLDS else s, 2, id="own-contains"),
        pytest.param(lambda s, b, h, q, kv: s * two(3), 2, id="lru-cache"),
        pytest.param(lambda s, b, h, q, kv: s * 2 if ARRAY is SAME and ARRAY is not tensor else s, 2, id="is"),
        pytest.param(lambda s, b, h, q, kv: s * vars(OWN)["factor"], 2, id="vars"),
        pytest.param(lambda s, b, h, q, kv: s * 2 if PLAIN and not OWN else s, 2, id="own-bool"),
        pytest.param(lambda s, b, h, q, kv: s * 2 if OWN < 3 else s, 2, id="own-order"),
        pytest.param(lambda s, b, h, q, kv: s * OWN, 2, id="own-multiplication"),
        pytest.param(lambda s, b, h, q, kv: s * abs(-OWN), 2, id="own-negation"),
        pytest.param(lambda s, b, h, q, kv: s * float(OWN), 2, id="own-float"),
        pytest.param(lambda s, b, h, q, kv: s * [0.0, 1.0, 2.0][OWN], 2, id="own-index"),
    ],
)
def test_python_operations_on_traced_numbers(mod, factor):
    assert traced(mod, None).text == traced(lambda s, b, h, q, kv: s * float(factor), None).text


@pytest.mark.parametrize(
    "mod",
    [
        pytest.param(lambda s, b, h, q, kv: s + TABLES_BY_NAME["table"][q], id="ordered"),
        pytest.param(lambda s, b, h, q, kv: s + QUEUE[0][q], id="deque"),
        pytest.param(jax.jit(lambda s, b, h, q, kv: s + ARRAY[q]), id="jit"),
    ],
)
def test_containers_and_wrappers_hold_arrays(kept, mod):
    assert [str(traced(mod, None).program) for _ in range(2)] == ["score: score + array0[q]"] * 2
    assert len(kept) == 1


def test_functions_of_math_take_captured_numbers(kept):
    """ldexp takes only an int as exponent; math.floor(x) calls x.__floor__, which traced numbers have."""
    mods = [
        traced(lambda s, b, h, q, kv, x=x, n=n: s * math.ldexp(math.sqrt(x), n) + erf(x) + math.floor(s), None)
        for x, n in ((2.0, 3), (2.0, 3), (2.0, 4))
    ]
    assert [set(mod.numbers) for mod in mods] == [{math.sqrt(2) * 2**n, math.erf(2)} for n in (3, 3, 4)]
    assert len(kept) == 2


@functools.singledispatch
def scaled(x, score):
    return score * x[0]


@scaled.register
def _(x: int, score):
    return score << x


@scaled.register(float)
def _(x, score):
    return score * x


def test_singledispatch_chooses_by_the_type_of_what_is_captured(kept):
    for x, expected in (
        (7, "score: score + real((q << 7))"),
        (0.25, "score: score + (real(q) * n0)"),
        (np.ones(3, np.float32), "score: score + (real(q) * array0[0])"),
        (np.zeros(3, np.float32), "score: score + (real(q) * array0[0])"),
    ):
        mod = traced(lambda s, b, h, q, kv, x=x: s + scaled(x, q), None)
        assert str(mod.program) == expected
        assert all(array is x for array in mod.arrays)
    assert len(kept) == 3


def test_singledispatch_of_the_score_and_a_later_registration(kept):
    choose = functools.singledispatch(lambda s, b, h, q, kv: s + ARRAY[q])
    assert [str(traced(choose, None).program) for _ in range(2)] == ["score: score + array0[q]"] * 2
    assert len(kept) == 1
    choose.register(object, lambda s, b, h, q, kv: s * 2)
    assert str(traced(choose, None).program) == "score: score * 2"


def test_a_wrapper_gives_what_its_function_takes():
    """functools.wraps gives a wrapper the signature of the function inside, whose parameters may differ."""

    def scaled(score, b, h, q_idx, kv_idx, *, width):
        return score * width

    @functools.wraps(scaled)
    def wrapper(*inputs):
        return scaled(*inputs, width=5.5)

    mod = traced(wrapper, None)
    assert (str(mod.program), mod.numbers) == ("score: score * n0", (5.5,))


def test_a_partial_keeps_its_attributes(kept):
    def scale(factor, s):
        return s * factor

    for width, offset in ((2.5, 4.5), (2.5, 5.5)):
        part = functools.update_wrapper(functools.partial(scale, width), scale)
        part.offset = offset
        mod = traced(lambda s, b, h, q, kv, part=part: part(s) + part.offset, None)
        assert set(mod.numbers) == {width, offset}
    assert len(kept) == 1


class PrintedOtherwise:
    """A dtype or a shape that prints in a way of its own, as those of TensorFlow do."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, PrintedOtherwise) and self.value == other.value

    __hash__ = None

    def __repr__(self):
        return f"<the: {self.value!r}>"


def other_library(x):
    """Return an array of a library that is known by DLPack alone."""
    array = Producer(x)
    array.shape, array.dtype = x.shape, PrintedOtherwise(str(x.dtype))
    return array


def test_captured_arrays_of_any_library_with_dlpack(kept):
    """The dtype of such an array is that of the memory that it exports."""
    for weights in (TABLES["torch"], TABLES["torch"] + 1):
        array = other_library(weights)
        mod = lambda s, b, h, q, kv, array=array: s + array[h, q]  # noqa: E731
        assert "array0 float32 (3, 4)" in repr(traced(mod, None))
        q = torch.randn(1, 4, 3, 8)
        out = cupy_flash.attention(*[other_library(q)] * 3, score_mod=mod)
        expected = cupy_flash.attention(q, q, q, score_mod=lambda s, b, h, q, kv, w=weights: s + w[h, q])
        np.testing.assert_array_equal(as_array(out, "out").numpy(), expected)
    assert len(kept) == 2
    refused = other_library(torch.ones(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="a captured array cannot be complex64"):
        traced(lambda s, b, h, q, kv: s + refused[q], None)
    refused.device_ = (99, 0)
    with pytest.raises(TypeError, match="a captured array .*Producer.*DLPack device type 99 is neither"):
        traced(lambda s, b, h, q, kv: s + refused[q], None)


def test_numbers_have_a_dtype_of_the_library_that_a_mod_uses():
    lowest = float(torch.finfo(torch.float32).min)
    expected = traced(lambda s, b, h, q, kv: s + lowest, None)
    for mod in (
        lambda s, b, h, q, kv: s + torch.finfo(s.dtype).min,
        lambda s, b, h, q, kv: s + float(np.finfo(s.dtype).min),
    ):
        assert str(traced(mod, None)) == str(expected)
    made_inside = traced(lambda s, b, h, q, kv: s + torch.tensor(2.5, dtype=s.dtype, device=s.device), None)
    assert made_inside.arrays[0].dtype == torch.float32


def test_a_tensor_chooses_like_its_method_where():
    mod = traced(lambda s, b, h, q, kv: torch.zeros(()).where(q < kv, s), None)
    assert str(mod.program) == "score: where((q < kv), array0[], score)"


def test_the_size_of_an_array_is_that_of_its_library():
    numbers = {
        "numpy": traced(lambda s, b, h, q, kv: s + TABLES["numpy"].size, None),
        "torch": traced(lambda s, b, h, q, kv: s + TABLES["torch"].size(0) * TABLES["torch"].size()[1], None),
    }
    assert {name: mod.numbers for name, mod in numbers.items()} == {"numpy": (12,), "torch": (12,)}


def test_user_defined_operators_are_traced_in_every_call():
    owner = Own()

    def mod(s, b, h, q, kv):
        return torch.where(owner < q, s * float(owner), s) + vars(owner)["factor"]

    owner.factor = 3.0
    first = traced(mod, None)
    owner.factor = 7.5
    assert str(traced(mod, None)) == str(first).replace("= 3", "= 7.5")


def test_an_attribute_that_a_mod_sets_is_read_by_the_rest_of_it():
    owner = Plain()

    def mod(s, b, h, q, kv):
        owner.factor = 3.0
        return s * owner.factor

    assert str(traced(mod, None)) == str(traced(lambda s, b, h, q, kv: s * 3.0, None))
    assert not hasattr(owner, "factor")


def test_super_finds_the_next_class():
    assert str(traced(Derived().mod, None)) == str(traced(lambda s, b, h, q, kv: s * 3 * 2, None))


def test_an_attribute_that_appears_is_noticed():
    owner = Plain()

    def mod(s, b, h, q, kv):
        return s * getattr(owner, "factor", 3.0)

    assert traced(mod, None).numbers == traced(lambda s, b, h, q, kv: s * 3.0, None).numbers
    owner.factor = 5.0
    assert traced(mod, None).numbers == (5.0,)


def test_attributes_with_names_that_are_no_identifiers():
    parameters = torch.nn.ParameterList([torch.ones(4), torch.arange(4.0)])
    (array,) = traced(lambda s, b, h, q, kv: s + parameters[1][kv], None).arrays
    assert array is parameters[1]

"""flash_attn_with_kvcache has flash-attn's names and rules, and computes attention_with_kv_cache."""

import numpy as np
import pytest
import torch
from cache_cases import CacheCase
from torch._subclasses.fake_tensor import FakeTensorMode

from cupy_flash import UnsupportedError, attention_with_kv_cache, reference
from cupy_flash.adapters.torch import flash_attn_with_kvcache


def tensors(**changes):
    """Return (q, k_cache, v_cache) and the other arguments of a call as torch tensors, and the NumPy call."""
    call = CacheCase(**dict(appended=2, q_len=2) | changes).call()
    options = {n: torch.from_numpy(x.copy()) if isinstance(x, np.ndarray) else x for n, x in call.options.items()}
    return [torch.from_numpy(x.copy()) for x in call[:3]], options, call


OURS = {"softmax_scale": "scale", "window_size": "window", "sinks": "sink", "page_table": "block_table"}


@pytest.mark.parametrize(
    "sizes, flash_options",
    [
        ({}, dict(causal=True)),
        ({}, dict(causal=False)),
        ({}, dict(causal=True, softmax_scale=0.3, softcap=2.0, window_size=(torch.tensor(5), 0))),
        (dict(page=8), dict(causal=True)),
        (dict(alibi="h", sink=True), dict(causal=True)),
        (dict(packed=(2, 3)), dict(causal=True)),
        (dict(batch_idx=(2, 0)), dict(causal=True, softcap=0.0)),
        (dict(leftpad=(1, 4)), dict(causal=True)),
        (dict(rotary=(8, False)), dict(causal=True)),
    ],
    ids=["causal", "full", "options", "paged", "alibi-sink", "packed", "batch-idx", "leftpad", "rotary"],
)
def test_equals_attention_with_kv_cache(sizes, flash_options):
    arrays, options, _ = tensors(**sizes)
    same = [x.clone() for x in arrays]
    options = {
        name: x for name, x in options.items() if name not in ("causal", "window", "scale", "softcap", "split_size")
    }
    renamed = {"sink": "sinks", "block_table": "page_table"}
    given = {renamed.get(name, name): x for name, x in options.items()} | flash_options
    out, lse = flash_attn_with_kvcache(*arrays, **given, return_softmax_lse=True)
    core = {OURS.get(name, name): x for name, x in given.items()}
    core["softcap"] = core.get("softcap") or None
    expected, expected_lse = attention_with_kv_cache(*same, **core, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)
    for cache, other in zip(arrays[1:], same[1:], strict=True):
        torch.testing.assert_close(cache, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rows, appended", [(3, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 9)}], ids=["full", "causal", "local"])
def test_queries_are_rotated_as_flash_attn_does(rows, appended, options):
    """flash-attn rotates query i by n_b + i if the call is causal or local, else by n_b, the length before the call."""
    arrays, given, call = tensors(q_len=rows, appended=appended, rotary=(8, True))
    given = {name: given[name] for name in ("k", "v", "cache_seqlens", "rotary_cos", "rotary_sin")}
    before = given["cache_seqlens"].clone()
    out = flash_attn_with_kvcache(*arrays, **given, **options)
    advance = np.arange(rows) if options else np.zeros(rows, int)
    positions = before.numpy()[:, None] + advance
    q = call.q.astype(np.float64)
    cos, sin = (call.options[name].astype(np.float64)[positions][:, :, None] for name in ("rotary_cos", "rotary_sin"))
    x, y = q[..., 0:8:2].copy(), q[..., 1:8:2].copy()
    q[..., 0:8:2], q[..., 1:8:2] = x * cos - y * sin, x * sin + y * cos
    window = options.get("window_size")
    expected, *_ = reference.attention_with_kv_cache(
        q, *(x.numpy().astype(np.float64) for x in arrays[1:]), cache_seqlens=before.numpy() + appended,
        causal=options.get("causal", False), window=window,
    )  # fmt: skip
    np.testing.assert_allclose(out, expected.astype(np.float64), atol=2e-6)


def test_sides_without_a_bound_are_no_window():
    """A side None is unbounded, like -1. The call is then neither causal nor windowed, so flash-attn rotates all
    queries of sequence b by its length before the append.
    """
    arrays, given, _ = tensors(q_len=3, appended=3, rotary=(8, True))
    given = {name: given[name] for name in ("k", "v", "cache_seqlens", "rotary_cos", "rotary_sin")}
    before = [cache.clone() for cache in arrays[1:]]
    expected = flash_attn_with_kvcache(*arrays, **given)
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(arrays[0], *before, **given), expected)
    for cache, same in zip(arrays[1:], before, strict=True):
        torch.testing.assert_close(cache, same, rtol=0, atol=0, equal_nan=True)
    for window in (None, (None, None), (None, -1)):
        assert torch.equal(flash_attn_with_kvcache(*arrays, **given, window_size=window), expected)
    assert not torch.equal(flash_attn_with_kvcache(*arrays, **given, window_size=(35, 35)), expected)


REFUSED = {
    "options": (dict(softcap=-1.0, softmax_scale=float("nan")), ValueError, "2 requirements are not met"),
    "alibi-and-rows": (dict(alibi_slopes=torch.ones(7), k=torch.zeros(2, 2, 2, 8)), ValueError, "2 requirements"),
    "out": (dict(out=torch.empty(1)), ValueError, "out must be"),
    "alibi-of-numpy": (dict(alibi_slopes=np.ones(4, "f4")), TypeError, "must be of one type"),
    "batch-of-q": (dict(q=torch.zeros(3, 3, 4, 16)), ValueError, "requirements are not met"),
    "grad": (dict(q=torch.zeros(2, 3, 4, 16, requires_grad=True)), ValueError, "q require grad"),
    "rows-of-the-table": (dict(rotary_cos=torch.ones(25, 4), rotary_sin=torch.ones(25, 4), causal=True), ValueError,
                          r"positions\[5\] is 25 and must be in \[0, 24\]"),
    "one-row-of-the-block-table": (dict(block_table=torch.zeros(2).int(), num_splits=2), ValueError, "block_table"),
}  # fmt: skip


@pytest.mark.parametrize("name, compiled", [*((name, False) for name in REFUSED), ("rows-of-the-table", True)])
def test_a_refused_call_writes_nothing(name, compiled):
    """All is checked before anything is written, also if flash-attn's rotation needs an append, then an attention."""
    changes, error, text = REFUSED[name]
    (q, *caches), given, _ = tensors(q_len=3, appended=2, rotary=(8, True))
    given = {name: given[name] for name in ("k", "v", "cache_seqlens", "rotary_cos", "rotary_sin")}
    before = [cache.clone() for cache in caches]
    arguments = {"q": q, "k_cache": caches[0], "v_cache": caches[1]} | given | changes
    function = flash_attn_with_kvcache
    if compiled:  # the backend eager has no functionalization, which would write to clones
        function = torch.compile(function, backend="eager", fullgraph=True)
    with pytest.raises(error, match=text):
        function(**arguments)
    for cache, same in zip(caches, before, strict=True):
        torch.testing.assert_close(cache, same, rtol=0, atol=0, equal_nan=True)


def test_tensors_without_memory():
    """This call runs as a separate append and attention; on fake tensors the operators compute only the shapes."""
    (q, *caches), given, _ = tensors(q_len=3, appended=2, rotary=(8, True))
    given = {name: given[name] for name in ("k", "v", "cache_seqlens", "rotary_cos", "rotary_sin")}
    with FakeTensorMode() as mode:
        out = flash_attn_with_kvcache(
            *map(mode.from_tensor, (q, *caches)), **{name: mode.from_tensor(x) for name, x in given.items()}
        )
    assert out.shape == q.shape and out.dtype == q.dtype


def test_num_splits():
    """num_splits=1 is one piece; num_splits=n gives pieces of 1/n of the capacity, rounded up to 64 keys."""
    arrays, options, _ = tensors(lengths=(300, 900), capacity=1000, appended=None)
    given = dict(cache_seqlens=options["cache_seqlens"], causal=True)
    for splits, size in ((1, 1024), (3, 384), (100, 64)):
        out = flash_attn_with_kvcache(*arrays, **given, num_splits=splits)
        expected = attention_with_kv_cache(*arrays, **given, split_size=size)
        torch.testing.assert_close(out, expected, rtol=0, atol=0)
        alone = flash_attn_with_kvcache(*(x[1:] for x in arrays), cache_seqlens=given["cache_seqlens"][1:], causal=True,
                                        num_splits=splits)  # fmt: skip
        torch.testing.assert_close(alone, out[1:], rtol=0, atol=0)
    with pytest.raises(ValueError, match="num_splits and split_size"):
        flash_attn_with_kvcache(*arrays, **given, num_splits=2, split_size=64)


@pytest.mark.parametrize(
    "options, error, text",
    [
        (dict(q_descale=torch.zeros(1)), UnsupportedError, "q_descale is not supported"),
        (dict(attention_chunk=64), UnsupportedError, "attention_chunk is not supported"),
        (dict(k=None, v=None, rotary_cos=torch.ones(50, 4)), ValueError, "rotary_cos and rotary_sin need k and v"),
        (dict(rotary_seqlens=torch.zeros(2)), UnsupportedError, "rotary_seqlens .*attention_with_kv_cache takes pos"),
        (dict(cu_seqlens_k_new=torch.zeros(3)), UnsupportedError, "packed if and only if q is: append the rows with"),
        (dict(block_table=torch.zeros(1), page_table=torch.zeros(1)), ValueError, "names of one argument"),
        (dict(num_splits=-1), ValueError, "num_splits must be at least 0"),
    ],
    ids=["q-descale", "attention-chunk", "rotary-alone", "rotary-seqlens", "bounds", "tables", "num-splits"],
)
def test_refusals(options, error, text):
    arrays, given, _ = tensors()
    given = {name: given[name] for name in ("k", "v", "cache_seqlens")} | options
    with pytest.raises(error, match=text):
        flash_attn_with_kvcache(*arrays, **given)


def given_to_flash(sizes):
    """Return (q, k_cache, v_cache) and the keyword arguments of a call that appends."""
    arrays, options, _ = tensors(**sizes)
    kept = ("k", "v", "cache_seqlens", "block_table", "cu_seqlens_q", "max_seqlen_q")
    return arrays, {name: options[name] for name in kept if name in options} | {"causal": True}


PACKED, PAGED = dict(packed=(2, 3)), dict(page=8)
FP8 = torch.float8_e4m3fn
REASONS = {
    "padded-rows": (PACKED, lambda q, x: dict(k=x["k"][None], v=x["v"][None]), UnsupportedError,
                    r"packed if and only if q is: append the rows with cupy_flash\.append_to_kv_cache first"),
    "other-lengths": (PACKED, lambda q, x: dict(cu_seqlens_k_new=torch.tensor([0, 1, 5]).int()), UnsupportedError,
                      r"cu_seqlens_k_new is \[0, 1, 5\], and cu_seqlens_q \[0, 2, 5\]; append"),
    "bounds-without-values": (PACKED, lambda q, x: dict(cu_seqlens_k_new=x["cu_seqlens_q"].to("meta")),
                              UnsupportedError, "must be cu_seqlens_q itself, because values on a GPU"),
    "leftpad": (PAGED, lambda q, x: dict(cache_leftpad=torch.zeros(2).int()), UnsupportedError,
                "cache_leftpad with block_table"),
    "fp8": (PAGED, lambda q, x: dict(q=q.to(FP8)), UnsupportedError, "q of float8_e4m3fn with a KV cache; caches of"),
    "rows": (PAGED, lambda q, x: dict(cache_batch_idx=torch.tensor([-1, 2]).int()), ValueError,
             r"cache_batch_idx is \[-1, 2\], and block_table has 2 rows"),
    "int64-rows": (PAGED, lambda q, x: dict(cache_batch_idx=torch.tensor([0, 1])), TypeError,
                   "cache_batch_idx must be an int32 tensor, not torch.int64"),
    "one-row": (PAGED, lambda q, x: dict(cache_batch_idx=torch.tensor(0).int()), ValueError, r"\(2, 5\) and \(\)"),
    "capacity": (PAGED, lambda q, x: dict(cache_seqlens=39), ValueError,
                 r"\[1\] is 39 before 2 appended rows, and the capacity is 40, 5 columns of block_table with pages of"),
}  # fmt: skip


@pytest.mark.parametrize("sizes, change, error, text", REASONS.values(), ids=REASONS)
def test_reasons(sizes, change, error, text):
    (q, *caches), given = given_to_flash(sizes)
    before = [cache.clone() for cache in caches]
    with pytest.raises(error, match=text):
        flash_attn_with_kvcache(**{"q": q, "k_cache": caches[0], "v_cache": caches[1]} | given | change(q, given))
    for cache, same in zip(caches, before, strict=True):
        torch.testing.assert_close(cache, same, rtol=0, atol=0, equal_nan=True)


def select_rows(given):
    """Return options with the block table's rows in a table of three rows, from which cache_batch_idx selects them."""
    table = torch.full((3, given["block_table"].shape[1]), 7, dtype=torch.int32)
    table[[2, 0]] = given["block_table"]
    return dict(block_table=None, page_table=table, cache_batch_idx=torch.tensor([2, 0], dtype=torch.int32))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "sizes, change",
    [
        (PACKED, lambda given: dict(rotary_seqlens=None, cu_seqlens_k_new=given["cu_seqlens_q"].long())),
        (PAGED, select_rows),
    ],
    ids=["equal-bounds", "rows-of-a-table"],
)
def test_arguments_of_flash_attention_3(sizes, change, compiled):
    """In a graph two cu_seqlens tensors cannot be compared by value, so one tensor must be passed for both."""
    results = []
    function = torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True)
    for changes in (lambda given: {}, change):
        arrays, given = given_to_flash(sizes)
        given |= changes(given)
        if compiled and "cu_seqlens_k_new" in given:
            with pytest.raises(Exception, match="cu_seqlens_k_new must be cu_seqlens_q itself"):
                function(*arrays, **given)
            given["cu_seqlens_k_new"] = given["cu_seqlens_q"]
        out = (function if compiled and changes is change else flash_attn_with_kvcache)(*arrays, **given)
        results.append((out, *arrays[1:]))
    for expected, same in zip(*results, strict=True):
        torch.testing.assert_close(expected, same, rtol=0, atol=0, equal_nan=True)


def test_a_row_that_no_table_has_is_refused_in_a_graph():
    """The operator refuses the row because its pages do not exist; the graph itself does not check indices."""
    (q, *caches), given = given_to_flash(PAGED)
    before = [cache.clone() for cache in caches]
    given["cache_batch_idx"] = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] is -1, and the pool has 8 pages"):
        torch.compile(flash_attn_with_kvcache, backend="eager", fullgraph=True)(q, *caches, **given)
    for cache, same in zip(caches, before, strict=True):
        torch.testing.assert_close(cache, same, rtol=0, atol=0, equal_nan=True)


def test_tuning_arguments_are_ignored():
    arrays, options, _ = tensors(appended=None)
    expected = flash_attn_with_kvcache(*arrays, cache_seqlens=options["cache_seqlens"])
    out = flash_attn_with_kvcache(
        *arrays, cache_seqlens=options["cache_seqlens"], scheduler_metadata=object(), pack_gqa=True, sm_margin=8,
        cu_seqlens_k_new=torch.zeros(3, dtype=torch.int32),
    )  # fmt: skip
    torch.testing.assert_close(out, expected, rtol=0, atol=0)

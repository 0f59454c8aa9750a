"""Calls on KV caches of torch tensors in host memory from keyed plans: the results, or errors, of posed calls."""

import functools

import kept_plans
import numpy as np
import pytest
import torch

from cupy_flash import append_to_kv_cache, attention_with_kv_cache, device, keyed_plan

CAPACITY, PAGE = 96, 16


@pytest.fixture(autouse=True)
def without_entries():
    keyed_plan.forget()
    yield
    keyed_plan.forget()


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def int32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


Q, K, V = drawn(2, 1, 4, 16), drawn(2, CAPACITY, 2, 16), drawn(2, CAPACITY, 2, 8)
POOLS = tuple(x.reshape(-1, PAGE, 2, x.shape[-1]) for x in (K, V))
TABLE = torch.randperm(2 * CAPACITY // PAGE, generator=torch.Generator().manual_seed(1)).to(torch.int32).reshape(2, -1)


def served():
    return sum(entry.served for entry in keyed_plan._entries.values() if entry is not None)


def outcome(options, inputs=(Q, K, V)):
    """Return the bytes of results, or an error, and whether an entry served the call."""
    before = served()
    try:
        results = attention_with_kv_cache(*inputs, return_lse=True, **options)
    except (TypeError, ValueError) as error:
        return (type(error), str(error)), False
    return tuple((x.numpy().tobytes(), x.shape, x.dtype, type(x)) for x in results), served() > before


posed = functools.partial(kept_plans.posed, outcome)


# {form: (queries and caches, options of a call that is kept, options of a call that its entry serves)}
PAGED = (Q, *POOLS)
FORMS = {
    "whole": ((Q, K, V), {}, {}),
    "lengths": ((Q, K, V), dict(cache_seqlens=int32(5, 96)), dict(cache_seqlens=int32(96, 0))),
    "length": ((Q, K, V), dict(cache_seqlens=5), dict(cache_seqlens=96)),
    "causal": ((Q, K, V), dict(cache_seqlens=int32(5, 96), causal=True), dict(cache_seqlens=int32(7, 1), causal=True)),
    "batch": (
        (Q, K, V), dict(cache_seqlens=int32(5, 96), cache_batch_idx=int32(0, 1)),
        dict(cache_seqlens=int32(5, 96), cache_batch_idx=int32(1, 0)),
    ),
    "left-padding": (
        (Q, K, V), dict(cache_seqlens=int32(5, 96), cache_leftpad=int32(0, 1)),
        dict(cache_seqlens=int32(5, 96), cache_leftpad=int32(3, 0)),
    ),
    "pages": (
        PAGED, dict(cache_seqlens=int32(5, 96), block_table=TABLE),
        dict(cache_seqlens=int32(90, 17), block_table=TABLE.flip(1).contiguous()),
    ),
    "pages-of-one-length": (PAGED, dict(cache_seqlens=5, block_table=TABLE), dict(cache_seqlens=90, block_table=TABLE)),
    "heads-first": (
        tuple(x.transpose(1, 2).contiguous() for x in (Q, K, V)), dict(cache_seqlens=int32(5, 96), layout="bhsd"),
        dict(cache_seqlens=int32(50, 9), layout="bhsd"),
    ),
    "split": ((Q, K, V), dict(cache_seqlens=50, split_size=64), dict(cache_seqlens=70, split_size=64)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_an_entry_computes_what_a_posed_call_does(form):
    inputs, kept, later = FORMS[form]
    assert outcome(kept, inputs) == (posed(kept, inputs), False)
    others = tuple(x + 1 for x in inputs)
    assert outcome(later, others) == (posed(later, others), True)
    assert outcome(later, inputs) == (posed(later, inputs), True)


def test_results_of_a_served_call_without_lse_and_of_parameters():
    for n in range(2):
        out = attention_with_kv_cache(Q, K, V, cache_seqlens=int32(5, 96))
        assert served() == n and type(out) is torch.Tensor
    with torch.no_grad():
        parameter = torch.nn.Parameter(Q)
        again = attention_with_kv_cache(parameter, K, V, cache_seqlens=int32(5, 96))
        attention_with_kv_cache(parameter, K, V, cache_seqlens=int32(5, 96))
    assert torch.equal(out, again) and not again.requires_grad


ILLEGAL = {
    "long": ((Q, K, V), dict(cache_seqlens=int32(5, 97))),
    "negative": ((Q, K, V), dict(cache_seqlens=int32(-1, 96))),
    "long-length": ((Q, K, V), dict(cache_seqlens=97)),
    "negative-length": ((Q, K, V), dict(cache_seqlens=-1)),
    "length-beyond-int64": ((Q, K, V), dict(cache_seqlens=2**80)),
    "batch": ((Q, K, V), dict(cache_seqlens=int32(5, 96), cache_batch_idx=int32(0, 2))),
    "left-padding": ((Q, K, V), dict(cache_seqlens=int32(5, 96), cache_leftpad=int32(0, 97))),
    "long-pages": (PAGED, dict(cache_seqlens=int32(5, 97), block_table=TABLE)),
    "page": (PAGED, dict(cache_seqlens=int32(5, 96), block_table=TABLE + 12)),
    "page-of-a-length": (PAGED, dict(cache_seqlens=96, block_table=TABLE + 12)),
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_contents_that_are_refused_are_posed(what):
    inputs, options = ILLEGAL[what]
    legal = dict(cache_seqlens=int32(5, 96), cache_batch_idx=int32(0, 1), cache_leftpad=int32(0, 1), block_table=TABLE)
    legal = {name: 5 if type(x) is int else legal[name] for name, x in options.items()}
    for n in range(2):
        assert outcome(legal, inputs) == (posed(legal, inputs), n == 1)
    result, was_served = outcome(options, inputs)
    assert not was_served and result == posed(options, inputs) and result[0] is ValueError
    assert outcome(legal, inputs)[1]


LENGTHS = dict(cache_seqlens=int32(5, 90))
MORE = {
    "append": ((Q, K, V), lambda: LENGTHS | dict(k=drawn(2, 1, 2, 16), v=drawn(2, 1, 2, 8))),
    "out": ((Q, K, V), lambda: LENGTHS | dict(out=torch.empty(2, 1, 4, 8))),
    "values-inside-keys": ((Q, K, None), lambda: LENGTHS | dict(head_dim_v=8)),
    "sink": ((Q, K, V), lambda: LENGTHS | dict(sink=torch.ones(4))),
    "slopes": ((Q, K, V), lambda: LENGTHS | dict(alibi_slopes=torch.ones(4))),
    "statistics": ((Q, K, V), lambda: LENGTHS | dict(statistics=("max",), return_lse=True)),
    "mod": ((Q, K, V), lambda: LENGTHS | dict(score_mod=lambda score, b, h, q_idx, kv_idx: score + 1)),
}


@pytest.mark.parametrize("what", MORE)
def test_a_call_with_more_than_lengths_and_pages_is_posed(what):
    inputs, options = MORE[what]
    for _ in range(3):
        attention_with_kv_cache(*inputs, **options())
    assert served() == 0


def test_an_append_is_posed_and_written():
    k_cache, v_cache = K.clone(), V.clone()
    for n in range(3):
        append_to_kv_cache(drawn(2, 1, 2, 16), drawn(2, 1, 2, 8), k_cache, v_cache, cache_seqlens=int32(n, n))
        assert torch.equal(k_cache[:, n], drawn(2, 1, 2, 16)[:, 0])
    assert served() == 0


def test_a_call_on_a_changed_device_or_of_another_backend_is_posed(monkeypatch):
    for n in range(2):
        assert outcome(LENGTHS) == (posed(LENGTHS), n == 1)
    with monkeypatch.context() as patch:
        patch.setattr(device, "blas_threads", lambda: 7)
        assert outcome(LENGTHS) == (posed(LENGTHS), False)
    monkeypatch.setenv("CUPY_FLASH_BACKEND", "cuda")
    assert outcome(LENGTHS) == (posed(LENGTHS), False)


def test_numpy_arrays_are_posed():
    inputs, lengths = tuple(x.numpy() for x in (Q, K, V)), np.array([5, 90], np.int32)
    for _ in range(2):
        attention_with_kv_cache(*inputs, cache_seqlens=lengths)
    assert served() == 0

"""Prefixes that sequences share: the result of the unshared call, with each key of a prefix loaded once."""

from collections import Counter

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cache_cases import references
from quantised import options_of, quantised
from shared_prefixes import CASES, calls, pools_after
from tolerance import assert_matches_reference

import cupy_flash
from cupy_flash.adapters.jax import attention_with_kv_cache as attend_in_jax
from cupy_flash.cpu.decode.keys import Keys
from cupy_flash.cpu.decode.sequences import RowTile

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def run(call):
    return cupy_flash.attention_with_kv_cache(*call[:3], **call.options, return_lse=True)


def check(*sizes, **options):
    call, unshared = calls(*sizes, **options)
    exact, low = references(unshared, np.dtype(np.float32))
    for name, actual, expected, approximate in zip(("out", "lse"), run(call), exact, low, strict=False):
        assert_matches_reference(actual, expected, approximate, np.float32, name)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_the_unshared_call(options):
    """Prefixes of any length; a sequence without one, one with no key of its own, one that sees only its prefix."""
    check([20, 9], [5, 0, 17], 2, [0, 1, -1], **options)
    check([20, 9], [5, 0, 17], 2, [1, 0, 1], **options)


def test_the_bits_of_the_unshared_call():
    """Under split_size, if the lengths of prefixes are multiples of it. Rows are appended to their own pages alone."""
    call, unshared = calls([64, 128], [70, 5, 0], 3, [1, 0, 1], split_size=64)
    expected = *run(unshared), *pools_after(call)
    for a, b in zip((*run(call), *call[1:3]), expected, strict=True):
        assert a.tobytes() == b.tobytes()


def test_a_mask_of_keys_after_the_prefix():
    """Under split_size a chunk that begins in the prefix reaches past it, and past the first key of the mask."""
    mask = np.random.default_rng(1).random((3, 1, 2, 9)) < 0.7
    check([20, 9], [15, 0, 17], 2, [0, 1, -1], mask=mask, split_size=64)


def test_a_key_of_a_prefix_is_loaded_once(monkeypatch):
    call, _ = calls([2048, 512], [5, 0, 17, 3], 1, [0, 0, 1, 0])
    loads, load = Counter(), Keys.load

    def counted(keys, start, stop):
        if keys.stop in (2048, 512):
            loads.update((keys.stop, j) for j in range(start, stop))
        return load(keys, start, stop)

    monkeypatch.setattr(Keys, "load", counted)
    run(call)
    assert len(loads) == 2048 + 512 and set(loads.values()) == {1}


def test_quantised_caches():
    call, _ = calls([20, 9], [5, 0, 17], 2, [0, 1, 0])
    codes = [quantised(x, "int8") for x in call[1:3]]
    own = call._replace(k_cache=codes[0].codes, v_cache=codes[1].codes, options=call.options | options_of(*codes))
    np.testing.assert_allclose(run(own)[0], run(call)[0], atol=0.05)


def test_torch_and_jax():
    call, _ = calls([20, 9], [5, 0, 17], 2, [0, 1, 0])
    call.options.update(k=None, v=None)
    out = run(call)[0]
    tensors = call.map(torch.from_numpy)
    assert run(tensors)[0].numpy().tobytes() == out.tobytes()
    arrays = call.map(jnp.asarray)
    options = {name: x for name, x in arrays.options.items() if x is not None}
    assert np.asarray(attend_in_jax(*arrays[:3], **options)).tobytes() == out.tobytes()


WRONG = {
    "alone": (dict(prefix_lengths=None), "prefix_table, prefix_lengths, prefix_group are given together"),
    "contiguous": (dict(block_table=None), "prefixes are of pages, with block_table"),
    "group": (dict(prefix_group=np.array([0, 2, -1], np.int32)), r"prefix_group\[1\] is 2 and must be in \[-1, 1\]"),
    "length": (dict(prefix_lengths=np.array([20, 40], np.int32)), r"prefix_lengths\[1\] is 40 and must be in"),
    "page": (dict(prefix_table=np.full((2, 4), 99, np.int32)), r"prefix_table\[0, 0\] is 99, and the pool"),
    "own": (dict(cache_seqlens=np.array([5, 40, 0], np.int32)), r"cache_seqlens\[1\] is 40 .* the capacity is 32"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_changes_nothing(changes, text):
    call, _ = calls([20, 9], [5, 0, 17], 2, [0, 1, 0])
    before = call.k_cache.tobytes()
    with pytest.raises(ValueError, match=text):
        run(call._replace(options=call.options | changes))
    assert call.k_cache.tobytes() == before


def test_a_prefix_that_is_left_out_is_found(monkeypatch):
    monkeypatch.setattr(RowTile, "on_prefix", lambda tile: ())
    with pytest.raises(AssertionError):
        check([20, 9], [5, 0, 17], 2, [0, 1, 0])

"""block_mask: tables of exact block classes, for masks that interval arithmetic cannot classify and for torch's
BlockMask.
"""

import numpy as np
import pytest
from planting import change, never, planted

import cupy_flash
from cupy_flash.engines.launch import require_grids
from cupy_flash.gpu import run_plan
from cupy_flash.mask_blocks import block_mask, host_classes, posed
from cupy_flash.mods.plot import HIDDEN, SEEN, SKIPPED, UNMASKED, picture
from cupy_flash.mods.trace import traced
from cupy_flash.simulator import errors
from cupy_flash.simulator.run import start

torch = pytest.importorskip("torch")
flex_attention = pytest.importorskip("torch.nn.attention.flex_attention")

LENGTH, BLOCK = 300, 64
rng = np.random.default_rng(0)
# Long runs of a few segments, so that many blocks are empty or full; the segments' ids are in no order.
segments = np.array([7, 2, 9, 0, 7, 4, 2])[np.arange(LENGTH) // 47].astype(np.int64) * 7919 % 13


def same_segment(b, h, q, kv):
    return segments[q] * segments[q] % 5 == segments[kv] * segments[kv] % 5


def mask_by_head(b, h, q, kv):
    return same_segment(b, h, q, kv) & ((h == 0) | (q >= kv)) & (q - kv < 100 * (b + 1))


def elements(mask_mod, b=0, h=0, q_len=LENGTH, kv_len=LENGTH):
    return mask_mod(b, h, np.arange(q_len)[:, None], np.arange(kv_len)[None, :])


def expected_classes(mask, block):
    """Return the picture of exact block classes, from the mask's elements."""
    result = np.empty(mask.shape, np.uint8)
    for i in range(0, mask.shape[0], block):
        for j in range(0, mask.shape[1], block):
            part = mask[i : i + block, j : j + block]
            cut = np.where(part, SEEN, HIDDEN)
            result[i : i + block, j : j + block] = UNMASKED if part.all() else cut if part.any() else SKIPPED
    return result


@pytest.mark.parametrize("b,h", [(0, 0), (1, 1)])
def test_classes_are_exact(b, h):
    table = block_mask(mask_by_head, 2, 2, LENGTH, LENGTH, block=BLOCK)
    expected = expected_classes(elements(mask_by_head, b, h), BLOCK)
    actual = picture(table, LENGTH, LENGTH, batch=b, head=h, block_q=BLOCK, block_kv=BLOCK)
    np.testing.assert_array_equal(actual, expected)
    by_intervals = picture(mask_by_head, LENGTH, LENGTH, batch=b, head=h, block_q=BLOCK, block_kv=BLOCK)
    assert np.isin(by_intervals, (SKIPPED, UNMASKED)).sum() < np.isin(expected, (SKIPPED, UNMASKED)).sum()


@pytest.mark.parametrize("B,H", [(2, 4), (None, None), (2, None)])
def test_attention_equals_a_dense_mask(B, H):
    q, k, v = rng.normal(size=(3, 2, LENGTH, 4, 8))
    mask_mod = mask_by_head if H else (lambda b, h, q, kv: mask_by_head(b, 0, q, kv)) if B else same_segment
    dense = np.stack([[elements(mask_mod, b, h) for h in range(4)] for b in range(2)])
    expected, vjp = cupy_flash.attention_vjp(q, k, v, mask=dense)
    out, table_vjp = cupy_flash.attention_vjp(q, k, v, mask_mod=block_mask(mask_mod, B, H, LENGTH, LENGTH, block=64))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-12)
    for x, y in zip(table_vjp(out)[:3], vjp(expected)[:3], strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


def test_a_longer_call_is_refused():
    table = block_mask(same_segment, q_len=200, kv_len=LENGTH)
    q, k = rng.normal(size=(1, 201, 1, 8)), rng.normal(size=(1, LENGTH, 1, 8))
    with pytest.raises(
        ValueError, match=r"array0 \(200,\) is indexed by q_idx in dimension 0, and there are 201 queries"
    ):
        cupy_flash.attention(q, k, k, mask_mod=table)


def test_tables_of_torch_tensors():
    on_torch = torch.from_numpy(segments)
    q = torch.randn(1, LENGTH, 2, 8)
    plain = lambda b, h, i, j: on_torch[i] == on_torch[j]  # noqa: E731
    expected = cupy_flash.attention(q, q, q, mask_mod=plain)
    torch.testing.assert_close(
        cupy_flash.attention(q, q, q, mask_mod=block_mask(plain, q_len=300, kv_len=300)), expected
    )
    sliding = block_mask(lambda b, h, i, j: abs(i - j) < 9, q_len=300, kv_len=300, like=q)
    assert cupy_flash.attention(q, q, q, mask_mod=sliding).shape == q.shape


def simulated_classes(mask_mod, q_len, kv_len, heads=(1, 1), block=BLOCK):
    """Return the classes that the kernel of a GPU computes."""
    problem, operands = posed(traced(None, mask_mod), heads, (q_len, kv_len), "simulator")
    return run_plan.block_classes(problem, operands, block, "sm_80", start).numpy().swapaxes(1, 2)


def test_the_kernel_loops_where_the_limits_cut_its_grid(monkeypatch):
    monkeypatch.setattr(run_plan, "GRID_LIMITS", (2**31 - 1, 2, 3))
    expected = host_classes(traced(None, mask_by_head), (2, 2), (110, 70), 32)
    assert set(expected.flat) == {0, 1, 2}
    np.testing.assert_array_equal(simulated_classes(mask_by_head, 110, 70, (2, 2), 32), expected)


@pytest.mark.parametrize(("heads", "q_len"), [((1024, 70), 9), ((1, 1), 70000 * 8)])
def test_a_grid_has_no_more_blocks_than_cuda_starts(heads, q_len):
    works = []
    problem, operands = posed(traced(None, lambda b, h, q, kv: segments[kv] > q), heads, (q_len, 9), "simulator")
    run_plan.block_classes(problem, operands, 8, "sm_80", works.append)
    require_grids(works[0].launches)


@pytest.mark.exhaustive
def test_the_kernel_computes_the_classes_of_the_host():
    """Only the pairs that exist determine the class of a block at the end of a sequence."""
    expected = host_classes(traced(None, mask_by_head), (2, 2), (250, LENGTH), BLOCK)
    assert set(expected.flat) == {0, 1, 2}
    np.testing.assert_array_equal(simulated_classes(mask_by_head, 250, LENGTH, (2, 2)), expected)


PLANTED = {
    "a block that interval arithmetic cuts counts as cut": never("count-pairs"),
    "another thread's pairs are not counted": change(
        "truth-of-block", "__syncthreads_or(seen.may_not) != 0", "seen.may_not"
    ),
    "keys past the end count": change("existing-pairs", "|| j >= p.kv_len", ""),
    "the classes of one head for all": change("class-of-block", "head *", "0 *"),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("bug", PLANTED.values(), ids=PLANTED)
def test_planted_bug_of_the_kernel_is_found(bug, monkeypatch):
    expected = host_classes(traced(None, mask_by_head), (2, 2), (250, LENGTH), BLOCK)
    with planted(monkeypatch, bug), pytest.raises((AssertionError, errors.SimulationError)):
        np.testing.assert_array_equal(simulated_classes(mask_by_head, 250, LENGTH, (2, 2)), expected)


def test_errors_of_block_mask():
    with pytest.raises(TypeError, match="q_len and kv_len must be given"):
        block_mask(same_segment)
    with pytest.raises(ValueError, match="q_len must be at least 1, not 0, block must be at least 1, not -1"):
        block_mask(same_segment, q_len=0, kv_len=8, block=-1)
    with pytest.raises(TypeError, match=r"must be a function \(b, h, q_idx, kv_idx\), not int"):
        block_mask(3, q_len=8, kv_len=8)


# ------------------------------------------------------------------------------------------------ torch's BlockMask


def prefix(b, h, q, kv):
    return (kv <= q) | (kv < 50 * (b + 1) + 10 * h)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("B,H", [(2, 4), (None, None)])
def test_a_block_mask_from_torch(B, H):
    mask_mod = prefix if B else (lambda b, h, q, kv: prefix(0, 0, q, kv))
    mask = flex_attention.create_block_mask(mask_mod, B, H, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=64)
    q, k, v = torch.randn(3, 2, LENGTH, 4, 8, dtype=torch.float64)
    flex = flex_attention.flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(1, 2)
    for given in (mask, block_mask(mask), cupy_flash.Mod(mask_mod=mask)):
        torch.testing.assert_close(cupy_flash.attention(q, k, v, mask_mod=given), flex)


def test_a_block_mask_without_a_function():
    """BlockMask.from_kv_blocks has no function for elements, so its blocks are the mask."""
    counts = torch.tensor([[[1, 2, 0, 1, 1]]], dtype=torch.int32)
    indices = torch.tensor([[[[2, 0, 0, 0, 0], [4, 1, 0, 0, 0], [0] * 5, [3, 1, 2, 4, 0], [0] * 5]]], dtype=torch.int32)
    mask = flex_attention.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=64, seq_lengths=(LENGTH, LENGTH))
    seen = torch.zeros(5, 5, dtype=torch.bool)
    seen[0, 2] = seen[1, 4] = seen[1, 1] = seen[3, 3] = seen[4, 0] = True
    dense = seen.repeat_interleave(64, 0).repeat_interleave(64, 1)[:LENGTH, :LENGTH]
    q = torch.randn(1, LENGTH, 2, 8)
    torch.testing.assert_close(
        cupy_flash.attention(q, q, q, mask_mod=mask), cupy_flash.attention(q, q, q, mask=dense[None, None])
    )


def edited_block_mask(heads):
    """A causal mask of blocks of 64 x 32 in which query block 1 sees key blocks 7 in full and 9 in part, and not 0.

    The causal mask_mod itself is False in key blocks 7 and 9.
    """
    made = flex_attention.create_block_mask(
        lambda b, h, q, kv: kv <= q, None, heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=(64, 32)
    )
    full_counts, full, counts, partial = (
        x.clone() for x in (made.full_kv_num_blocks, made.full_kv_indices, made.kv_num_blocks, made.kv_indices)
    )
    full_counts[..., 1], full[..., 1, 0] = 2, 7
    full[..., 1, 1] = 1
    counts[..., 1], partial[..., 1, :3] = 3, torch.tensor([9, 3, 2], dtype=torch.int32)
    table = flex_attention.BlockMask.from_kv_blocks(
        counts, partial, full_counts, full, (64, 32), made.mask_mod, (LENGTH, LENGTH)
    )
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    seen[64:128, :32] = False
    seen[64:128, 7 * 32 : 8 * 32] = True
    return table, seen


@pytest.mark.parametrize("heads", [None, 4])
def test_a_block_mask_with_edited_full_blocks_as_lists_of_key_blocks(heads):
    mask, seen = edited_block_mask(heads)
    selected, kb, rows, mask_mod = cupy_flash.selected_from_block_mask(mask)
    assert (tuple(selected.shape), selected.dtype, kb, rows) == ((1, heads or 1, 5, 10), torch.int32, 32, 64)
    assert selected[0, -1, :2].tolist() == [[0, 1, *[-1] * 8], [1, 2, 3, 7, 9, *[-1] * 5]]
    q, k, v = torch.randn(3, 2, LENGTH, 4, 8, dtype=torch.float64, requires_grad=True)
    lists = dict(selected=selected, selected_block=kb, selected_rows=rows)
    found, expected = (
        torch.autograd.grad(cupy_flash.attention(q, k, v, **options).square().sum(), (q, k, v))
        for options in (dict(lists, mask_mod=mask_mod), dict(mask=seen[None, None]))
    )
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_a_block_mask_that_lists_nothing_as_lists():
    nothing = flex_attention.create_block_mask(
        lambda b, h, q, kv: q < 0, None, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=64
    )
    selected, kb, rows, mask_mod = cupy_flash.selected_from_block_mask(nothing)
    assert selected.shape == (1, 1, 5, 0)
    q = torch.randn(1, LENGTH, 4, 8)
    lists = dict(selected=selected, selected_block=kb, selected_rows=rows)
    assert not cupy_flash.attention(q, q, q, mask_mod=mask_mod, **lists).any()
    with pytest.raises(TypeError, match="block_mask must be a BlockMask of torch, not int"):
        cupy_flash.selected_from_block_mask(3)

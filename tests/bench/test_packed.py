"""The model of the order of blocks in packed batches: the kernel's order, and how evenly blocks end."""

import shutil

import numpy as np
import pytest
from planting import change, planted

from bench.__main__ import main
from bench.kernel_development import packed
from cupy_flash.jit import nvrtc, source
from cupy_flash.simulator import Memory, launch, pack

KERNEL = """#include "key_blocks.cuh"
extern "C" __global__ void order(int* cu_seqlens_k, int batch, int* out) {
  Params p;
  p.cu_seqlens_k = cu_seqlens_k, p.batch = batch;
  BlockIndex block(p);
  int* to = out + 3 * (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
  to[0] = block.batch, to[1] = block.kv_head, to[2] = block.tile;
}"""
# Sequences without keys, of equal length, and behind the 32 that a warp counts at once.
LENGTHS = {
    "unequal": [130, 0, 700, 128, 640, 1, 701],
    "many": [1 + 97 * n % 500 for n in range(70)],
}
BLOCK_KV = 128


def order_of_kernel(monkeypatch, folder, lengths, heads):
    """Return (sequence, head, tile) of each block of the grid of a backward, in the order of their indices."""
    shutil.copytree(source.kernel_folder(), folder)
    (folder / "order.cu").write_text(KERNEL)
    with monkeypatch.context() as patch:
        patch.setattr(source, "kernel_folder", lambda: folder)
        text = source.assemble("order", {"LONGEST_FIRST": True, "PACKED": True, "BLOCK_KV": BLOCK_KV})
    ptx = nvrtc.compile(text, "order", "compute_90").ptx
    grid = (-(-max(lengths) // BLOCK_KV), heads, len(lengths) + 1)
    bounds, out, memory = np.cumsum([0, *lengths], dtype=np.int32), np.zeros((np.prod(grid), 3), np.int32), Memory()
    parameters = pack(ptx, "order", memory.add(bounds, "bounds"), len(lengths), memory.add(out, "out"))
    launch(ptx, "order", grid, (32, 1, 1), parameters, memory=memory)
    return list(map(tuple, out.tolist())), grid


@pytest.mark.parametrize(("lengths", "heads"), [("unequal", 3), ("unequal", 50), ("many", 2)])
def test_order_of_the_kernel(monkeypatch, tmp_path, lengths, heads):
    """The blocks behind those of the sequences have each tile of the rows past the last sequence once."""
    lengths = LENGTHS[lengths]
    blocks, (tiles, _, _) = order_of_kernel(monkeypatch, tmp_path / "kernels", lengths, heads)
    expected = list(packed.longest_first(lengths, heads, BLOCK_KV))
    assert blocks[: len(expected)] == expected
    others = blocks[len(expected) :]
    assert {batch for batch, _, _ in others} == {len(lengths)}
    assert [block for block in others if block[2] < tiles] == [
        (len(lengths), head, tile) for tile in range(tiles) for head in range(heads)
    ]


@pytest.mark.parametrize(
    "bug",
    [
        change("tiles-of-number", "number / heads", "number"),
        change("sequence-of-number", "tiles * heads", "tiles"),
        change("tile-of-number", "number / size", "tiles - 1 - number / size"),
        change("past-the-last-sequence", "p.batch", "0"),
        change("most-tiles", "+ BLOCK_KV - 1", ""),
    ],
)
def test_planted_bug_of_the_order_is_found(bug, monkeypatch, tmp_path):
    with planted(monkeypatch, bug):
        blocks, _ = order_of_kernel(monkeypatch, tmp_path / "kernels", LENGTHS["unequal"], 3)
    expected = list(packed.longest_first(LENGTHS["unequal"], 3, BLOCK_KV))
    assert blocks[: len(expected)] != expected or blocks[len(expected)][0] != len(LENGTHS["unequal"])


def test_a_large_batch_keeps_the_order_of_the_grid(monkeypatch, tmp_path):
    lengths = [5] * 128 + [200]
    blocks, (tiles, heads, _) = order_of_kernel(monkeypatch, tmp_path / "kernels", lengths, 1)
    assert blocks == [(batch, head, tile) for batch in range(130) for head in range(heads) for tile in range(tiles)]


def test_evenness():
    assert packed.evenness([1, 1, 2], 0, 2) == 3 / 2  # the long block starts when the others have ended
    assert packed.evenness([2, 1, 1], 0, 2) == 1
    assert packed.evenness([1, 1], 2, 2) == 1 + packed.EMPTY


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kv_heads", packed.KV_HEADS[:2])
def test_packed_batches_reach_the_mark(kv_heads, causal):
    for lengths in packed.batches():
        assert packed.backward(lengths, causal, kv_heads, (64, 128, 384), 132)[1] < packed.MARK
        assert packed.forward(lengths, causal, kv_heads, (128, 128, 384), 132)[1] < packed.MARK


def test_command(capsys):
    assert main(["packed"]) == 0
    assert "delta, backward, dq" in capsys.readouterr().out

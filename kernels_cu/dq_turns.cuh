// Deterministic dQ: the turns of the blocks of key_blocks.cuh at a tile of dQ. Included behind Rings, whose ring `turn`
// is full while it is the turn of this block.
#pragma once
#include "dq_sums.cuh"
#include "key_blocks.cuh"
#include "walk.cuh"

// Returns how many tiles of keys add to the tile of dQ at q_start before the tile at kv_start: all later tiles of keys
// that the queries of this tile see.
__device__ unsigned int blocks_before(const Band& band, int q_start, int kv_start) {
  return (band.kv_end(min(q_start + BLOCK_Q, band.q_len)) - 1) / BLOCK_KV - kv_start / BLOCK_KV;
}

// Deterministic dQ. A separate warp waits for this block's turns and passes them on, so that the consumers' loop
// contains neither the latency of an acquire nor that of a release. The block also takes its turn at tiles of dQ that
// the mask_mod hides from it, because the blocks after it count its turn.
__device__ void take_turns(const Params& p, Rings& rings, const Sequence& sequence, const Band& band,
                           const BlockIndex& block) {
  for (BlockTiles kv_tiles(sequence, block.tile); kv_tiles.valid(); kv_tiles.next()) {
    QTiles q_tiles(p, band, block.kv_head, kv_tiles.kv_start);
    for (int head = block.kv_head * p.group; head < q_tiles.head_end; ++head) {
      DqSemaphore semaphore(p, sequence, head);
      for (int q_start = q_tiles.first; q_start < q_tiles.visible.end; q_start += BLOCK_Q) {
        unsigned int before = blocks_before(band, q_start, kv_tiles.kv_start);
        if (lane_id() == 0) semaphore.wait(q_start, before);  // @wait-blocks-before
        if (q_tiles.head == head && q_tiles.start == q_start) {
          if (lane_id() == 0) mbarrier_arrive(rings.turn.full());
          ++rings.turn.index;
          rings.turn.acquire();  // @wait-added-dQ: all consumer warps have added
          q_tiles.next();
        }
        if (lane_id() == 0) semaphore.signal(q_start, before);
      }
    }
  }
}

// The loads of a backward with TMA. Included behind Rings, which has a ring for each operand, and Maps.
#pragma once
#include "key_blocks.cuh"
#include "walk.cuh"

__device__ void load_tiles(const Params& p, const Maps& maps, Rings& rings, const Sequence& sequence, const Band& band,
                           const BlockIndex& block) {
  int batch = PACKED ? 0 : sequence.batch;
  for (BlockTiles kv_tiles(sequence, block.tile); kv_tiles.valid(); kv_tiles.next()) {
    if (issues_loads()) {
      Box keys = sequence.key_box(kv_tiles.kv_start);
      rings.K.load(maps.k, keys.row, block.kv_head, keys.batch);
      rings.V.load(maps.v, keys.row, block.kv_head, keys.batch);
    }
    for (QTiles q_tiles(p, band, block.kv_head, kv_tiles.kv_start); q_tiles.valid(); q_tiles.next()) {
      if (!issues_loads()) continue;
      rings.Q.load(maps.q, sequence.q_start + q_tiles.start, q_tiles.head, batch);
      rings.dO.load(maps.dout, sequence.q_start + q_tiles.start, q_tiles.head, batch);
    }
  }
}

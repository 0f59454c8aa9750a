// The tiles that a mainloop visits, loaded into a ring of slots, STAGES - 1 tiles ahead.
#pragma once
#include "load.cuh"

// `Slot` has the addresses of the operands of a tile. loads.load_next(slot, tiles) loads the current tile of the walk
// `tiles` and moves the walk to the next tile.
template <typename Slot, typename Tiles, typename Loads>
struct TileStream {
  Tiles loaded;  // the tile to load next
  Loads loads;
  Pipeline<STAGES, Slot::BYTES> slots;

  __device__ TileStream(const Tiles& tiles, const Loads& loads, unsigned int smem)
      : loaded(tiles), loads(loads), slots(smem) {}
  __device__ void load() {
    if (loaded.valid()) loads.load_next(Slot(slots.next()), loaded);
    slots.commit();
  }
  // Starts the loads of all slots but one.
  __device__ void fill() {
    for (int stage = 0; stage < STAGES - 1; ++stage) load();
  }
  // Waits for the next tile, and returns its slot.
  __device__ Slot wait() {
    if constexpr (STAGES == 1) {
      __syncthreads();  // @stream.barrier-before-load
      load();
    }
    return Slot(slots.wait());
  }
  // Loads the tile that is STAGES - 1 ahead. Called after the first products of a tile are issued, so that addresses
  // are computed while the tensor cores run.
  __device__ void load_ahead() {
    if constexpr (STAGES > 1) load();
  }
};

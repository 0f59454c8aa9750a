// Signals and rings of tiles between the roles of a block, with the fences that tensor memory needs.
#pragma once
#include "../blackwell.cuh"
#include "../wgmma/tile.cuh"

// An address that is computed at each use: the compiler would hold the descriptors of all steps in registers.
__device__ inline unsigned int recomputed(unsigned int address) {
  asm volatile("" : "+r"(address));
  return address;
}

// An mbarrier by which one role signals another. A role that waits before the other has signalled for the first time
// passes `passes`.
struct Signal {
  unsigned int mbarrier;
  unsigned int parity;

  __device__ Signal(unsigned int mbarrier, bool passes = false) : mbarrier(mbarrier), parity(passes) {}
  __device__ void wait() {
    mbarrier_wait(mbarrier, parity);
    parity ^= 1;  // @signal-parity
    tcgen05_fence_after();
  }
  // Arrives once for a warp, after the accesses of all its lanes.
  __device__ void arrive() const {
    tcgen05_fence_before();
    __syncwarp();  // @accesses-of-all-lanes
    if (lane_id() == 0) mbarrier_arrive(mbarrier);
  }
};

// Ring of tiles. A slot is empty once the mma that read it are complete.
template <int SLOTS, int ROWS_OF_TILE, int DIM>
struct Ring : TileRing<SLOTS, ROWS_OF_TILE, DIM> {
  using TileRing<SLOTS, ROWS_OF_TILE, DIM>::TileRing;

  __device__ void init() const {
#pragma unroll
    for (int n = 0; n < 2 * SLOTS; ++n) mbarrier_init(this->mbarriers + 8 * n, 1);
  }
  __device__ void wait() const {
    TileRing<SLOTS, ROWS_OF_TILE, DIM>::wait();
    tcgen05_fence_after();
  }
  __device__ void release() {
    if (issues_loads()) tcgen05_commit(this->empty());  // @release-by-commit
    ++this->index;
  }
  // Waits until all slots are empty, so that no mma signals an mbarrier of a block that has ended.
  __device__ void drain() {
#pragma unroll
    for (int n = 0; n < SLOTS; ++n, ++this->index) this->acquire();
  }
};

// Ring of shared-memory slots that a producer fills with TMA and consumer warps read.
#pragma once
#include "hopper.cuh"

constexpr int WARPGROUP = 128;  // threads
// Threads of the consumer warps. In a decode THREADS does not count the producer warp; in the wgmma kernels it counts
// the producer warpgroup, and each consumer warpgroup computes 64 rows.
constexpr int CONSUMERS = TMA_KV ? THREADS : THREADS - WARPGROUP;

// Bytes of the full and the empty mbarriers of a ring.
__device__ constexpr int mbarrier_bytes(int slots) {
  return 2 * 8 * slots;
}

// Ring of SLOTS shared-memory slots, each with a full and an empty mbarrier; producer and consumers each keep their own
// index, from which the parity follows. A full phase completes after PRODUCERS arrivals, an empty phase after one
// arrival per consumer warp of all blocks of the cluster. All slots start empty.
template <int SLOTS, int SLOT_BYTES, int PRODUCERS, int CLUSTER_SIZE = 1>
struct SlotRing {
  static constexpr int BYTES = SLOTS * SLOT_BYTES, MBARRIER_BYTES = mbarrier_bytes(SLOTS);

  unsigned int start;
  unsigned int mbarriers;
  unsigned int index = 0;

  __device__ SlotRing(unsigned int start, unsigned int mbarriers) : start(start), mbarriers(mbarriers) {}
  __device__ void init() const {
#pragma unroll
    for (int n = 0; n < SLOTS; ++n) {
      mbarrier_init(mbarriers + 8 * n, PRODUCERS);
      mbarrier_init(mbarriers + 8 * (SLOTS + n), CLUSTER_SIZE * CONSUMERS / WARP);  // @init-empty-slot
    }
  }
  __device__ unsigned int parity() const { return index / SLOTS % 2; }  // @slot-parity
  __device__ unsigned int slot() const { return start + index % SLOTS * SLOT_BYTES; }
  __device__ unsigned int full() const { return mbarriers + 8 * (index % SLOTS); }
  __device__ unsigned int empty() const { return mbarriers + 8 * (SLOTS + index % SLOTS); }

  // Producer: waits until the slot is empty.
  __device__ void acquire() const { mbarrier_wait(empty(), parity() ^ 1); }  // @wait-empty-slot
  // Consumer: waits until the slot is full.
  __device__ void wait() const { mbarrier_wait(full(), parity()); }  // @wait-full-slot
  // Consumer: signals that this warp has finished reading the slot.
  __device__ void release() {
    if (CLUSTER_SIZE > 1 && lane_id() < CLUSTER_SIZE)
      mbarrier_arrive_cluster(empty(), lane_id());  // @release-slot-of-cluster
    else if (lane_id() == 0)
      mbarrier_arrive(empty());  // @release-slot
    ++index;
  }
};

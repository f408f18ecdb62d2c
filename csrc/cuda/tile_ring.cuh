// The ring through which the roles of a CTA learn of its tiles.
//
// A scheduler thread runs ahead of the others: it decodes the next tile, makes it known, waits
// until the tile's inputs are there and passes that on. So nobody else reads plans or counters, and
// the (slow) proxy fence between another CTA's ordinary stores and our copy engine is off the path
// of the loader.
#pragma once

#include "cuda/faults.cuh"

namespace jax_mok::cuda {

constexpr int kTileRing = 4;

template <typename Tile>
struct TileRing {
  Tile tiles[kTileRing];
  uint64_t known[kTileRing];     // 1 arrival: the entry can be read
  uint64_t ready[kTileRing];     // 1 arrival: the inputs can be loaded
  uint64_t done[kTileRing];      // all arrivals: everybody has finished with the tile
  uint64_t released[kTileRing];  // 1 arrival: the entry can be overwritten

  __device__ void init(int arrivals_when_done) {
    for (int i = 0; i < kTileRing; ++i) {
      mbarrier_init(&known[i], 1);
      mbarrier_init(&ready[i], 1);
      mbarrier_init(&done[i], arrivals_when_done);
      mbarrier_init(&released[i], 1);
    }
  }
};

// Position of a role in the ring.
struct RingCursor {
  uint32_t count = 0;
  MOK_DEVICE int slot() const { return count % kTileRing; }
  MOK_DEVICE uint32_t parity() const { return count / kTileRing & 1; }
  MOK_DEVICE void advance() { ++count; }
};

}  // namespace jax_mok::cuda

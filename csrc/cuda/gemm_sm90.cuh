// The pipeline of one 128 x 256 tile: a loader thread brings stages of both operands into shared
// memory by TMA, two consumer warpgroups multiply them, 64 rows each.
#pragma once

#include "cuda/tile_ring.cuh"
#include "cuda/wgmma.cuh"

namespace jax_mok::cuda {

constexpr int kStages = 4;
constexpr int kABytes = kBlockRows * kTileK * 2;
constexpr int kBBytes = kTileColumns * kTileK * 2;
constexpr int kConsumerWarps = 8;

struct Stages {
  uint8_t a[kStages][kABytes];  // 128 rows of 128 bytes
  uint8_t b[kStages][kBBytes];  // four panels of 64 columns; gate|up tiles: two gate, two up
};
struct StageBarriers {
  uint64_t full[kStages];   // the copy engine's bytes
  uint64_t empty[kStages];  // 1 arrival per consumer warp

  __device__ void init() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&empty[i], kConsumerWarps);
    }
  }
};
struct StageCursor {
  int stage = 0;
  uint32_t parity = 0;
  MOK_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// One thread. Weights never wait for anything, so the first stage's are asked for before the tile's
// rows are known to be there. Columns past the end of a weight tensor arrive as zeros.
__device__ inline void run_loader(const ForwardParams& p, Stages& stages, StageBarriers& barriers,
                                  TileRing& ring, const volatile uint32_t* cta_abort) {
  const ForwardMaps& maps = p.maps;
  StageCursor to;
  for (RingCursor at;; at.advance()) {
    if (!wait_barrier(&ring.known[at.slot], at.parity, cta_abort)) return;
    const Tile tile = ring.tiles[at.slot];
    if (tile.work == Work::kEnd) return;
    const bool shared = tile.work == Work::kSharedGateUp || tile.work == Work::kSharedDown;
    const bool down = tile.work == Work::kDown || tile.work == Work::kSharedDown;
    const CUtensorMap* a =
        down ? (shared ? &maps.shared_h : &maps.h) : (shared ? &maps.x : &maps.x_ring);
    const CUtensorMap* b =
        down ? (shared ? &maps.s_down : &maps.w_down) : (shared ? &maps.s_gate : &maps.w_gate);
    const CUtensorMap* up = shared ? &maps.s_up : &maps.w_up;
    const int panel = tile.n * (down ? 4 : 2);
    for (int k = 0; k < tile.k_blocks; ++k, to.advance()) {
      if (!wait_barrier(&barriers.empty[to.stage], to.parity ^ 1, cta_abort)) return;
      uint64_t* full = &barriers.full[to.stage];
      const int b_row = tile.b_row + k * kTileK;
      mbarrier_arrive_expect(full, kABytes + kBBytes);
      tma_load_3d(stages.b[to.stage], b, full, 0, b_row, panel);
      if (!down) tma_load_3d(stages.b[to.stage] + kBBytes / 2, up, full, 0, b_row, panel);
      if (k == 0 && !wait_barrier(&ring.ready[at.slot], at.parity, cta_abort)) return;
      tma_load_2d(stages.a[to.stage], a, full, k * kTileK, tile.a_row);
    }
  }
}

// The product of a tile, by one consumer warpgroup (0 or 1). Stages are given back one behind, when
// their products are known to have read them. After an abort it runs on with whatever the stages
// hold, without waiting: leaving a loop with products in flight would cost the compiler's
// pipelining.
MOK_DEVICE void multiply(float (&d)[128], const Stages& stages, StageBarriers& barriers,
                         StageCursor& from, int k_blocks, int warpgroup,
                         const volatile uint32_t* cta_abort) {
  const bool leader = threadIdx.x % 32 == 0;
  int previous = -1;
  for (int k = 0; k < k_blocks; ++k, from.advance()) {
    wait_barrier(&barriers.full[from.stage], from.parity, cta_abort);
    const uint32_t a = descriptor_k_major(stages.a[from.stage] + warpgroup * (kABytes / 2));
    const uint32_t b = descriptor_n_major(stages.b[from.stage]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTileK / 16; ++i)
      wgmma_64x256x16(d, a + i * kKMajorStepK16, b + i * kNMajorStepK16, (k | i) != 0);
    wgmma_commit();
    if (previous >= 0) {
      wgmma_wait<1>();
      if (leader) mbarrier_arrive(&barriers.empty[previous]);
    }
    previous = from.stage;
  }
  wgmma_wait<0>();
  if (leader) mbarrier_arrive(&barriers.empty[previous]);
}

}  // namespace jax_mok::cuda

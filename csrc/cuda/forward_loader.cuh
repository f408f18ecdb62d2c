// The forward's loader: which operands a tile's stages hold.
#pragma once

#include "cuda/forward_tiles.cuh"
#include "cuda/gemm_sm90.cuh"

namespace jax_mok::cuda {

constexpr int kForwardStages = 4;
using ForwardStages = Stages<kForwardStages>;

// One thread. Weights never wait for anything, so the first stage's are asked for before the tile's
// rows are known to be there. Columns past the end of a weight tensor arrive as zeros.
__device__ inline void run_loader(const ForwardParams& p, ForwardStages& stages,
                                  StageBarriers<kForwardStages>& barriers, TileRing<Tile>& ring,
                                  AbortWord cta_abort) {
  const ForwardMaps& maps = p.maps;
  StageCursor<kForwardStages> to;
  LastLoads last;
  // Only of a call that is given up something may still be on its way at the end.
  const auto land = [&] {
    for (int i = 0; i < kForwardStages; ++i) last.wait(i, &barriers.full[i]);
  };
  for (RingCursor at;; at.advance()) {
    if (!wait_barrier(&ring.known[at.slot()], at.parity(), cta_abort)) return land();
    const Tile tile = ring.tiles[at.slot()];
    if (tile.work == Work::kEnd) return land();
    const bool shared = tile.work == Work::kSharedGateUp || tile.work == Work::kSharedDown;
    const bool down = tile.work == Work::kDown || tile.work == Work::kSharedDown;
    const CUtensorMap* a =
        down ? (shared ? &maps.shared_h : &maps.h) : (shared ? &maps.x : &maps.x_ring);
    const CUtensorMap* b =
        down ? (shared ? &maps.s_down : &maps.w_down) : (shared ? &maps.s_gate : &maps.w_gate);
    const CUtensorMap* up = shared ? &maps.s_up : &maps.w_up;
    const int panel = tile.n * (down ? 4 : 2);
    for (int k = 0; k < tile.k_blocks; ++k, to.advance()) {
      // Consumers of a call that is given up hand back stages that their bytes are still on the way
      // to.
      if (!wait_barrier(&barriers.empty[to.stage], to.parity ^ 1, cta_abort) || cta_abort.raised())
        return land();
      last.begin(to.stage, to.parity);
      uint64_t* full = &barriers.full[to.stage];
      const int b_row = tile.b_row + k * kTileK;
      mbarrier_arrive_expect(full, kABytes + kBBytes);
      tma_load_3d(stages.b[to.stage], b, full, 0, b_row, panel);
      if (!down) tma_load_3d(stages.b[to.stage] + kBBytes / 2, up, full, 0, b_row, panel);
      const bool ready = k > 0 || wait_barrier(&ring.ready[at.slot()], at.parity(), cta_abort);
      tma_load_2d(stages.a[to.stage], a, full, k * kTileK, tile.a_row);
      if (!ready) return land();  // the stage has got whatever was there
    }
  }
}

}  // namespace jax_mok::cuda

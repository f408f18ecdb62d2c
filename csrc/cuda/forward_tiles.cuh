// The sequence of tiles of one CTA in the forward, and what a finished tile means to the others: a
// scheduler thread hands tiles over (see tile_ring.cuh), a second thread signals what is done.
#pragma once

#include "cuda/tile_ring.cuh"

namespace jax_mok::cuda {

enum class Work : int32_t { kGateUp, kDown, kSharedGateUp, kSharedDown, kEnd };

struct alignas(16) Tile {
  Work work;
  int32_t n;         // which column tile
  int32_t k_blocks;  // depth of the product, in stages
  int32_t a_row;     // first row in the tensor map of the activations
  int32_t b_row;     // first row in the tensor map of the weights
  int32_t block;     // block of rows: of the plan, or of the local tokens for the shared experts
  int32_t expert;    // index into the expert tensors of this launch
  int32_t h_slot;    // block of the hidden ring that is written (gate|up) or read (down)
};
MOK_DEVICE FaultPhase phase_of(Work work) {
  return work == Work::kGateUp || work == Work::kSharedGateUp ? FaultPhase::kGateUp
                                                              : FaultPhase::kDown;
}

class Scheduler {
 public:
  __device__ Scheduler(const ForwardParams& p, const Watch& watch, int v, TileRing<Tile>& ring)
      : p_(p), watch_(watch), map_(p.block_map(v)), v_(v), ring_(ring) {}

  // One thread. Worker w of `workers` takes tiles w, w + workers, ... of the total order.
  __device__ void run(int worker, int workers) {
    const int shared = num_shared_tiles();
    const int total =
        shared + static_cast<int>(plan::num_block_tiles(p_.geometry.shape, map_.num_blocks));
    RingCursor at;
    int filled = 0;
    for (int i = worker;; i += workers, ++filled, at.advance()) {
      if (filled >= kTileRing && !wait_barrier_timed(watch_, &ring_.released[at.slot()],
                                                     at.parity() ^ 1, FaultPhase::kGateUp, i))
        return;
      if (i >= total) {
        ring_.tiles[at.slot()].work = Work::kEnd;
        mbarrier_arrive(&ring_.known[at.slot()]);
        return;
      }
      const Tile tile = i < shared ? shared_tile(i) : routed_tile(i - shared);
      if (stuck(p_, watch_, phase_of(tile.work))) return;
      ring_.tiles[at.slot()] = tile;
      mbarrier_arrive(&ring_.known[at.slot()]);
      jitter(p_, 0x10000 + i);
      if (!wait_inputs(tile, i)) return;
      fence_async_proxy();
      mbarrier_arrive(&ring_.ready[at.slot()]);
    }
  }

 private:
  // Shared experts come first, in groups of blocks like the routed ones: all their gate|up tiles,
  // then all their down tiles.
  __device__ int num_shared_tiles() const {
    const Geometry& g = p_.geometry;
    return g.shared_blocks * (g.shared_gate_up_tiles + g.shape.down_tiles);
  }
  __device__ Tile shared_tile(int i) const {
    const Geometry& g = p_.geometry;
    const int gate_up = g.shared_blocks * g.shared_gate_up_tiles;
    const bool down = i >= gate_up;
    if (down) i -= gate_up;
    const int n_tiles = down ? g.shape.down_tiles : g.shared_gate_up_tiles;
    const int group_blocks = g.shape.group_blocks;
    const int first = i / (n_tiles * group_blocks) * group_blocks;
    const int blocks = min(group_blocks, g.shared_blocks - first);
    i -= first * n_tiles;
    const int block = first + i % blocks;
    const int slot = v_ * g.shared_blocks + block;
    Tile t;
    t.work = down ? Work::kSharedDown : Work::kSharedGateUp;
    t.n = i / blocks;
    t.k_blocks = (down ? g.shared_intermediate : g.hidden) / kTileK;
    t.a_row = down ? slot * kBlockRows : v_ * g.shape.num_tokens + block * kBlockRows;
    t.b_row = 0;
    t.block = block;
    t.expert = 0;
    t.h_slot = slot;
    return t;
  }

  __device__ Tile routed_tile(int i) const {
    const Geometry& g = p_.geometry;
    const plan::Tile planned = plan::tile_at(g.shape, map_, plan::Pass::kForward, i);
    const bool down = planned.phase == plan::Phase::kDown;
    const int first_expert = v_ * g.shape.num_local_experts;
    const int x_slot =
        v_ * g.shape.ring_blocks + plan::ring_slot(planned.block, g.shape.ring_blocks);
    Tile t;
    t.work = down ? Work::kDown : Work::kGateUp;
    t.n = planned.n;
    t.k_blocks = (down ? g.intermediate : g.hidden) / kTileK;
    t.block = planned.block;
    t.expert = first_expert + map_.block_expert[planned.block];
    t.h_slot =
        v_ * g.shape.macrobatch_blocks + plan::ring_slot(planned.block, g.shape.macrobatch_blocks);
    t.a_row = (down ? t.h_slot : x_slot) * kBlockRows;
    t.b_row = t.expert * (down ? g.intermediate : g.hidden);
    return t;
  }

  __device__ bool wait_inputs(const Tile& t, int i) const {
    switch (t.work) {
      case Work::kGateUp: {
        // The whole group must be there: CTAs that share a weight tile then start together.
        const plan::Group group = plan::group_of_block(p_.geometry.shape, map_, t.block);
        const int last = plan::gating_block(plan::Pass::kForward, group);
        return wait_tokens(last, i) && wait_tokens(t.block, i) && wait_hidden_free(t.block, i);
      }
      case Work::kDown:
        return wait_hidden(t.block, i);
      case Work::kSharedDown:
        return wait_counter(watch_, p_.shared_full(v_) + t.block, p_.geometry.shared_gate_up_tiles,
                            FaultPhase::kDown, i, t.block);
      default:
        return true;
    }
  }
  __device__ bool wait_tokens(int block, int i) const {
    const plan::Shape& s = p_.geometry.shape;
    const int slot = plan::ring_slot(block, s.ring_blocks);
    const uint32_t target = plan::x_full_target(s, block / s.ring_blocks);
    return wait_counter(watch_, p_.x_full(v_) + slot, target, FaultPhase::kGateUp, i, slot);
  }
  __device__ bool wait_hidden_free(int block, int i) const {
    const plan::Shape& s = p_.geometry.shape;
    const int generation = block / s.macrobatch_blocks;
    if (generation == 0) return true;
    const int slot = plan::ring_slot(block, s.macrobatch_blocks);
    return wait_counter(watch_, p_.h_empty(v_) + slot,
                        plan::h_empty_target(s, plan::Pass::kForward, generation),
                        FaultPhase::kGateUp, i, slot);
  }
  __device__ bool wait_hidden(int block, int i) const {
    const plan::Shape& s = p_.geometry.shape;
    const int slot = plan::ring_slot(block, s.macrobatch_blocks);
    return wait_counter(watch_, p_.h_full(v_) + slot,
                        plan::h_full_target(s, block / s.macrobatch_blocks), FaultPhase::kDown, i,
                        slot);
  }

  const ForwardParams& p_;
  const Watch& watch_;
  const plan::BlockMap map_;
  const int v_;
  TileRing<Tile>& ring_;
};

// One thread: once a tile's results are stored, tells the other CTAs of the rank that its outputs
// are full and its inputs free.
__device__ inline void run_signaller(const ForwardParams& p, const Watch& watch, int v,
                                     TileRing<Tile>& ring) {
  const plan::Shape& s = p.geometry.shape;
  for (RingCursor at;; at.advance()) {
    if (!wait_barrier_timed(watch, &ring.known[at.slot()], at.parity(), FaultPhase::kGateUp, -1))
      return;
    const Tile tile = ring.tiles[at.slot()];
    if (tile.work == Work::kEnd) return;
    if (!wait_barrier_timed(watch, &ring.done[at.slot()], at.parity(), phase_of(tile.work),
                            tile.block))
      return;
    const int h_slot = plan::ring_slot(tile.block, s.macrobatch_blocks);
    switch (tile.work) {
      case Work::kGateUp:
        add_release_gpu(p.h_full(v) + h_slot, 1);
        add_release_gpu(p.x_empty(v) + plan::ring_slot(tile.block, s.ring_blocks), 1);
        break;
      case Work::kDown:
        add_release_gpu(p.h_empty(v) + h_slot, 1);
        break;
      case Work::kSharedGateUp:
        add_release_gpu(p.shared_full(v) + tile.block, 1);
        break;
      default:
        break;
    }
    mbarrier_arrive(&ring.released[at.slot()]);
  }
}

}  // namespace jax_mok::cuda

// The sequence of tiles of one CTA in the backward.
//
// Shared experts first, then macrobatches from last to first. In each: the gradients of the hidden
// layer of all blocks, the gradients of the tokens, then the weights' gradients, one expert after
// the other. See plan/order.h for the order, tile_ring.cuh for how a CTA's roles learn of it.
#pragma once

#include "cuda/backward_params.cuh"
#include "cuda/tile_ring.cuh"

namespace jax_mok::cuda {

enum class GradWork : int32_t {
  kHidden,         // gate|up computed again, 128 hidden columns at a time
  kHiddenSaved,    // gate|up saved, 256 hidden columns
  kInput,          // 256 columns of the block's part of dx
  kDownWeight,     // 128 x 256 of dW_down
  kGateUpWeight,   // 128 x 128 of dW_gate and of dW_up
  kBias,           // 512 columns of the gradients of b_gate, b_up and b_down
  kMacrobatchEnd,  // nothing to compute: what was read may be overwritten
  kEnd
};

struct alignas(16) GradTile {
  GradWork work;
  int32_t shared;       // 1: of the shared experts
  int32_t m, n;         // row tile (weights) and column tile
  int32_t num_stages;   // weights: 64-row pieces of the expert's rows here; 0: it has none
  int32_t token_row;    // first row of the block in x and dy
  int32_t hidden_row;   // and in h, d_gate and d_up
  int32_t block;        // of the plan, or of the local tokens; weights: the last of the segment
  int32_t expert;       // index into the expert tensors of this launch; shared: the virtual rank
  int32_t weight_tile;  // weights and biases: index among the expert's tiles
  int32_t skip;         // weights: 1: the last block's second half is padding
  int32_t open_in;      // weights: buffer of the open sum to go on with, or -1
  int32_t progress;     // block of the plan down to which hidden gradients are under way
  int32_t open_out;     // weights: buffer that the sum stays in, or -1: it is complete
};

MOK_DEVICE FaultPhase phase_of(GradWork work) {
  switch (work) {
    case GradWork::kHidden:
    case GradWork::kHiddenSaved:
      return FaultPhase::kGradHidden;
    case GradWork::kInput:
      return FaultPhase::kGradInput;
    default:
      return FaultPhase::kGradWeight;
  }
}

// 64-row pieces of a segment, in the order of the sum: blocks from last to first.
struct WeightRow {
  int32_t block_step;  // blocks below the segment's last one
  int32_t row;         // of the piece, relative to the first row of the last block
};
MOK_DEVICE WeightRow weight_row(const GradTile& t, int stage) {
  const int piece = stage + (stage > 0 ? t.skip : 0);
  return {piece / 2, (piece & 1) * kTileK - piece / 2 * kBlockRows};
}

class GradScheduler {
 public:
  __device__ GradScheduler(const BackwardParams& p, const Watch& watch, int v, int worker,
                           int workers, TileRing<GradTile>& ring)
      : p_(p),
        watch_(watch),
        map_(p.block_map(v)),
        v_(v),
        worker_(worker),
        workers_(workers),
        ring_(ring) {}

  // One thread. Block tiles go round the workers, a weight tile has one owner.
  __device__ void run() {
    const plan::Shape& s = p_.geometry.shape;
    if (!run_shared()) return;
    const int macrobatches = plan::num_macrobatches(s, map_.num_blocks);
    // Without any block there are still gradients to clear.
    for (int m = max(macrobatches, 1) - 1; m >= 0; --m) {
      // The rings hold one macrobatch, and everybody has to be done with the one before.
      if (m + 1 < macrobatches &&
          !wait(p_.macrobatch_done(v_) + m + 1, workers_, FaultPhase::kGradHidden, m))
        return;
      if (!run_blocks(m) || !run_weights(m)) return;
      if (macrobatches > 1) {
        GradTile end = {};
        end.work = GradWork::kMacrobatchEnd;
        end.block = m;
        end.progress = plan::macrobatch_range(s, map_.num_blocks, m).first;
        if (!put(end)) return;
      }
    }
    GradTile end = {};
    end.work = GradWork::kEnd;
    put(end);
  }

 private:
  __device__ bool run_shared() {
    const Geometry& g = p_.geometry;
    const int inner = g.shared_hidden_tiles, hidden_tiles = g.shared_blocks * inner;
    const int total = hidden_tiles + g.shared_blocks * g.shape.down_tiles;
    int i = worker_;
    for (; i < total; i += workers_) {
      const bool second = i >= hidden_tiles;
      const int n_tiles = second ? g.shape.down_tiles : inner;
      int j = second ? i - hidden_tiles : i;
      const int group = g.shape.group_blocks;
      const int first = j / (n_tiles * group) * group;
      const int blocks = min(group, g.shared_blocks - first);
      j -= first * n_tiles;
      GradTile t = shared_tile(first + j % blocks);
      t.work = second ? GradWork::kInput : GradWork::kHidden;
      t.n = j / blocks;
      if (!put(t)) return false;
    }
    if (g.shared_blocks == 0) return true;
    const int weight_tiles = g.shared_down_weight_tiles + g.shared_gate_up_weight_tiles;
    for (i -= total; i < weight_tiles; i += workers_) {
      GradTile t = shared_tile(g.shared_blocks - 1);
      set_weight_tile(t, i, g.shared_intermediate, g.shared_down_weight_tiles);
      const int rows = g.shape.num_tokens - (g.shared_blocks - 1) * kBlockRows;
      t.skip = rows <= kTileK;
      t.num_stages = 2 * g.shared_blocks - t.skip;
      if (!put(t)) return false;
    }
    return true;
  }
  __device__ GradTile shared_tile(int block) const {
    const Geometry& g = p_.geometry;
    GradTile t = {};
    t.shared = 1;
    t.block = block;
    t.token_row = v_ * g.shape.num_tokens + block * kBlockRows;
    t.hidden_row = (v_ * g.shared_blocks + block) * kBlockRows;
    t.expert = v_;
    t.progress = map_.num_blocks;
    t.open_in = t.open_out = -1;
    return t;
  }

  __device__ GradTile routed_tile(int block, int expert) const {
    const Geometry& g = p_.geometry;
    const int capacity = g.shape.macrobatch_blocks;
    GradTile t = {};
    t.block = block;
    t.token_row = t.hidden_row = (v_ * capacity + plan::ring_slot(block, capacity)) * kBlockRows;
    t.expert = v_ * g.shape.num_local_experts + expert;
    t.progress = plan::macrobatch_of(g.shape, block) *
                 capacity;  // weights and tokens: all of the macrobatch
    t.open_in = t.open_out = -1;
    return t;
  }
  __device__ bool run_blocks(int m) {
    const plan::Shape& s = p_.geometry.shape;
    const int64_t first = plan::phase_first_tile(s, map_.num_blocks, m, plan::Phase::kGradHidden);
    const int64_t end = plan::phase_first_tile(s, map_.num_blocks, m, plan::Phase::kGradInput) +
                        plan::phase_tiles(s, map_.num_blocks, m, plan::Phase::kGradInput);
    for (int64_t i = plan::first_owned(first, worker_, workers_); i < end; i += workers_) {
      const plan::Tile planned = plan::tile_at(s, map_, plan::Pass::kBackward, i);
      GradTile t = routed_tile(planned.block, map_.block_expert[planned.block]);
      t.n = planned.n;
      if (planned.phase == plan::Phase::kGradHidden) t.progress = planned.block;
      t.work = planned.phase == plan::Phase::kGradInput      ? GradWork::kInput
               : p_.is_saved(map_.num_blocks, planned.block) ? GradWork::kHiddenSaved
                                                             : GradWork::kHidden;
      if (!put(t)) return false;
    }
    return true;
  }

  // Experts from last to first, those without rows where they stand: every expert has its turn in
  // one macrobatch, or in all those that it spans.
  __device__ bool run_weights(int m) {
    const plan::Shape& s = p_.geometry.shape;
    const plan::BlockRange range = plan::macrobatch_range(s, map_.num_blocks, m);
    const bool top = range.end == map_.num_blocks;
    const int last = top ? s.num_local_experts - 1 : map_.block_expert[range.end - 1];
    const int first =
        m == 0 ? 0 : min(map_.block_expert[range.first], map_.block_expert[range.first - 1] + 1);
    const int tiles = s.grad_weight_tiles;
    for (int e = last; e >= first; --e) {
      const int shift = static_cast<int>(int64_t{e} * tiles % workers_);
      int n = worker_ - shift;
      if (n < 0) n += workers_;
      if (n >= tiles) continue;
      const int begin = max(map_.expert_first_block[e], range.first);
      const int end = min(map_.expert_first_block[e + 1], range.end);
      GradTile t = routed_tile(max(end - 1, 0), e);
      if (end > begin) {
        const plan::Group segment = {begin, end - begin, e};
        const bool starts = plan::starts_weight_sum(map_, segment);
        t.skip = starts && last_rows(e) <= kTileK;
        t.num_stages = 2 * (end - begin) - t.skip;
        if (!starts) t.open_in = (m + 1) & 1;
        if (!plan::ends_weight_sum(map_, segment)) t.open_out = m & 1;
      }
      for (; n < tiles; n += workers_) {
        set_weight_tile(t, n, p_.geometry.intermediate, p_.geometry.down_weight_tiles);
        if (!put(t)) return false;
      }
    }
    return true;
  }
  // Rows of an expert's last block.
  __device__ int last_rows(int e) const {
    const plan::Shape& s = p_.geometry.shape;
    const int32_t* counts = p_.array<int32_t>(p_.geometry.workspace.counts, v_);
    int rows = 0;
    for (int source = 0; source < s.num_ranks; ++source)
      rows += counts[source * s.num_local_experts + e];
    return (rows - 1) % kBlockRows + 1;
  }
  // Neighbouring tiles share rows of both operands, and their owners run at the same time.
  __device__ void set_weight_tile(GradTile& t, int tile, int inner, int down_tiles) const {
    t.weight_tile = tile;
    const int gate_up_tiles =
        t.shared ? p_.geometry.shared_gate_up_weight_tiles : p_.geometry.gate_up_weight_tiles;
    if (tile < down_tiles) {
      const int rows = static_cast<int>(plan::ceil_div(inner, kBlockRows));
      t.work = GradWork::kDownWeight;
      t.m = tile % rows;
      t.n = tile / rows;
    } else if (tile < down_tiles + gate_up_tiles) {
      const int columns = static_cast<int>(plan::ceil_div(inner, kGateUpColumns));
      t.work = GradWork::kGateUpWeight;
      t.m = (tile - down_tiles) / columns;
      t.n = (tile - down_tiles) % columns;
    } else {
      t.work = GradWork::kBias;
      t.n = tile - down_tiles - gate_up_tiles;
    }
  }

  __device__ bool put(const GradTile& tile) {
    const int i = num_put_++;
    if (i >= kTileRing && !wait_barrier_timed(watch_, &ring_.released[at_.slot()], at_.parity() ^ 1,
                                              phase_of(tile.work), i))
      return false;
    if (!wait_outbox(tile) || stuck(p_, watch_, phase_of(tile.work))) return false;
    ring_.tiles[at_.slot()] = tile;
    mbarrier_arrive(&ring_.known[at_.slot()]);
    jitter(p_, 0x10000 + i);
    if (!wait_inputs(tile)) return false;
    fence_async_proxy();
    mbarrier_arrive(&ring_.ready[at_.slot()]);
    at_.advance();
    return true;
  }

  // Hidden gradients are turned into rows where the outbox lies. Tiles with operands come after
  // that because their operands do (see the loader's make_room); the weights of an expert without
  // rows have none.
  __device__ bool wait_outbox(const GradTile& t) {
    const bool weight = t.work == GradWork::kDownWeight || t.work == GradWork::kGateUpWeight;
    const bool wait = after_hidden_ && weight && t.num_stages == 0;
    if (t.work == GradWork::kHidden || t.work == GradWork::kHiddenSaved)
      after_hidden_ = true;
    else if (weight || t.work == GradWork::kInput)
      after_hidden_ = false;
    if (!wait) return true;
    const RingCursor last = {at_.count - 1};
    return wait_barrier_timed(watch_, &ring_.released[last.slot()], last.parity(), phase_of(t.work),
                              t.block);
  }

  __device__ bool wait_inputs(const GradTile& t) const {
    const Geometry& g = p_.geometry;
    switch (t.work) {
      case GradWork::kHidden:
      case GradWork::kHiddenSaved: {
        if (t.shared) return true;
        // The whole group must be there: CTAs that share a weight tile then start together.
        const plan::Group group = plan::group_of_block(g.shape, map_, t.block);
        return wait_rows(plan::gating_block(plan::Pass::kBackward, group)) && wait_rows(t.block);
      }
      case GradWork::kInput:
        if (t.shared)
          return wait(p_.shared_full(v_) + t.block, g.shared_hidden_tiles, FaultPhase::kGradInput,
                      t.block);
        return wait_hidden(t);
      case GradWork::kDownWeight:
      case GradWork::kGateUpWeight:
      case GradWork::kBias:
        if (t.shared)
          return wait(p_.all_shared_full(v_), g.shared_blocks * g.shared_hidden_tiles,
                      FaultPhase::kGradWeight, t.block);
        return t.num_stages == 0 || wait_hidden(t);
      default:
        return true;
    }
  }
  __device__ bool wait_rows(int block) const {
    const plan::Shape& s = p_.geometry.shape;
    const int generation =
        plan::ring_generation(plan::Pass::kBackward, map_.num_blocks, block, s.ring_blocks);
    return wait(p_.x_full(v_) + plan::ring_slot(block, s.ring_blocks),
                plan::x_full_target(s, generation), FaultPhase::kGradHidden, block);
  }
  // All hidden gradients of the expert down to this macrobatch's first block of it.
  __device__ bool wait_hidden(const GradTile& t) const {
    const plan::Shape& s = p_.geometry.shape;
    const plan::Group segment = plan::segment_of_block(s, map_, t.block);
    const int blocks = map_.expert_first_block[segment.expert + 1] - segment.first_block;
    return wait(p_.expert_full(v_) + segment.expert, blocks * s.gate_up_tiles, phase_of(t.work),
                t.block);
  }
  __device__ bool wait(const uint32_t* counter, uint32_t target, FaultPhase phase,
                       int block) const {
    return wait_counter(watch_, counter, target, phase, block,
                        static_cast<int>(counter - p_.x_full(v_)));
  }

  const BackwardParams& p_;
  const Watch& watch_;
  const plan::BlockMap map_;
  const int v_, worker_, workers_;
  TileRing<GradTile>& ring_;
  RingCursor at_;
  int num_put_ = 0;
  bool after_hidden_ = false;  // what left the consumers last were hidden gradients
};

}  // namespace jax_mok::cuda

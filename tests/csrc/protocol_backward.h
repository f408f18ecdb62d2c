// What the roles of a compute worker have in common in the backward, and the first of them: the
// scheduler, as in csrc/cuda/backward_tiles.cuh.
#pragma once

#include "protocol.h"

namespace test {

class ComputeRole : public Role {
 public:
  ComputeRole(World& world, int32_t rank, int32_t worker, const std::string& role, int32_t index)
      : Role(world, rank, "worker " + std::to_string(worker) + " " + role, index, Pass::kBackward),
        worker_(worker),
        cta_(*me.compute[worker]) {}

 protected:
  const int32_t worker_;
  ComputeWorker& cta_;

  const GradFacts& grad() const { return w.setup.grad; }
  int32_t warps() const { return w.setup.consumer_warps; }
  int32_t workers() const { return w.setup.compute_workers; }
  int32_t panels() const { return grad().panels; }
  int32_t hidden_tiles(const GradTile& t) const {
    return t.shared ? grad().shared_hidden_tiles : s.gate_up_tiles;
  }
  int32_t columns(const GradTile& t) const { return grad().hidden_columns(hidden_tiles(t)); }
  HiddenRows& hidden_rows(const GradTile& t) const { return t.shared ? me.shared : me.routed; }
  // The expert's number over all ranks, as it enters values.
  int32_t expert(const GradTile& t) const {
    return t.shared ? kSharedExpert : rank_ * s.num_local_experts + t.expert;
  }
  // First row of a block in the token rings, or in the local tokens; and in the hidden rows.
  int64_t token_row(const GradTile& t, int32_t block) const {
    return t.shared ? int64_t{block} * s.block_rows : hidden_row(t, block);
  }
  int64_t hidden_row(const GradTile& t, int32_t block) const {
    return t.shared ? int64_t{block} * s.block_rows : ring_row(s, block, 0, s.macrobatch_blocks);
  }
  bool is_saved(const GradTile& t, int32_t block) const {
    return w.setup.save && !t.shared &&
           left_in_ring(plan().num_blocks(), block, s.macrobatch_blocks);
  }
  // The stage-th half block of a weight tile's rows: blocks from last to first.
  struct Piece {
    int32_t block, first_row;
  };
  Piece piece(const GradTile& t, int32_t stage) const {
    const int32_t i = stage + (stage > 0 ? t.skip : 0);
    return {t.block - i / 2, i % 2 * (s.block_rows / 2)};
  }
  uint64_t& open_sum(int32_t buffer, const GradTile& t, int32_t warp) const {
    const int32_t which = fault(Fault::kOneOpenSum) ? 0 : buffer;
    return me.open_sums[(int64_t{which} * s.grad_weight_tiles + t.n) * warps() + warp];
  }
  Results& weight_results(const GradTile& t) const {
    return t.shared ? me.shared_weight : me.weight;
  }
  int64_t weight_index(const GradTile& t, int32_t panel, int32_t warp) const {
    const int32_t tile = t.shared ? t.n : t.expert * s.grad_weight_tiles + t.n;
    return (int64_t{tile} * w.setup.weight_panels + panel) * warps() + warp;
  }
};

// Shared experts first, then macrobatches from last to first.
class Scheduler : public ComputeRole {
 public:
  Scheduler(World& world, int32_t rank, int32_t worker)
      : ComputeRole(world, rank, worker, "scheduler", 0) {}

 private:
  RingCursor<kTileRing> at_;
  int32_t num_put_ = 0;
  bool after_hidden_ = false;  // what left the consumers last were hidden gradients

  Program run() override {
    at_ = {};
    num_put_ = 0;
    after_hidden_ = false;
    co_await run_shared();
    const int32_t macrobatches = num_macrobatches(s, plan().num_blocks());
    for (int32_t m = std::max(macrobatches, 1) - 1; m >= 0; --m) {
      if (m + 1 < macrobatches && !fault(Fault::kNoMacrobatchWait) &&
          !fault(Fault::kNoTileMacrobatchWait))
        co_await wait(me.macrobatch_done[m + 1], workers());
      co_await run_blocks(m);
      co_await run_weights(m);
      if (macrobatches > 1) {
        GradTile end;
        end.work = GradWork::kMacrobatchEnd;
        end.block = m;
        end.progress = macrobatch_range(s, plan().num_blocks(), m).first;
        co_await put(end);
      }
    }
    co_await put({});
  }

  Program run_shared() {
    const int32_t inner = grad().shared_hidden_tiles, blocks = w.setup.shared_blocks();
    const int32_t hidden = blocks * inner, total = hidden + blocks * s.down_tiles;
    int32_t i = worker_;
    for (; i < total; i += workers()) {
      const bool second = i >= hidden;
      const int32_t n_tiles = second ? s.down_tiles : inner;
      int32_t j = second ? i - hidden : i;
      const int32_t first = j / (n_tiles * s.group_blocks) * s.group_blocks;
      const int32_t in_group = std::min(s.group_blocks, blocks - first);
      j -= first * n_tiles;
      GradTile t = shared_tile(first + j % in_group);
      t.work = second ? GradWork::kInput : GradWork::kHidden;
      t.n = j / in_group;
      co_await put(t);
    }
    if (blocks == 0) co_return;
    const WeightTiles tiles = shared_weight_tiles(grad().shared_weights);
    for (i -= total; i < tiles.count(); i += workers()) {
      GradTile t = shared_tile(blocks - 1);
      t.n = i;
      t.work = weight_work(tiles, i);
      t.skip = s.num_tokens - (blocks - 1) * s.block_rows <= s.block_rows / 2;
      t.num_stages = 2 * blocks - t.skip;
      co_await put(t);
    }
  }
  GradTile shared_tile(int32_t block) const {
    GradTile t;
    t.shared = true;
    t.block = block;
    t.progress = plan().num_blocks();
    return t;
  }
  GradTile routed_tile(int32_t block, int32_t local_expert) const {
    GradTile t;
    t.block = block;
    t.expert = local_expert;
    // Weights and tokens: all of the macrobatch.
    t.progress = macrobatch_of(s, block) * s.macrobatch_blocks;
    return t;
  }
  static GradWork weight_work(const WeightTiles& tiles, int32_t n) {
    switch (tiles.kind(n)) {
      case WeightKind::kDown:
        return GradWork::kDownWeight;
      case WeightKind::kGateUp:
        return GradWork::kGateUpWeight;
      default:
        return GradWork::kBias;
    }
  }

  Program run_blocks(int32_t m) {
    const BlockMap map = plan().map();
    const int64_t first = phase_first_tile(s, map.num_blocks, m, Phase::kGradHidden);
    const int64_t end = phase_first_tile(s, map.num_blocks, m, Phase::kGradInput) +
                        phase_tiles(s, map.num_blocks, m, Phase::kGradInput);
    for (int64_t i = first_owned(first, worker_, workers()); i < end; i += workers()) {
      const Tile planned = tile_at(s, map, Pass::kBackward, i);
      GradTile t = routed_tile(planned.block, map.block_expert[planned.block]);
      t.n = planned.n;
      if (planned.phase == Phase::kGradHidden) t.progress = planned.block;
      t.work = planned.phase == Phase::kGradInput ? GradWork::kInput
               : is_saved(t, planned.block)       ? GradWork::kHiddenSaved
                                                  : GradWork::kHidden;
      co_await put(t);
    }
  }

  // Experts from last to first, those without rows where they stand.
  Program run_weights(int32_t m) {
    const BlockMap map = plan().map();
    const BlockRange range = macrobatch_range(s, map.num_blocks, m);
    const bool top = range.end == map.num_blocks;
    const int32_t last = top ? s.num_local_experts - 1 : map.block_expert[range.end - 1];
    const int32_t first =
        m == 0 ? 0 : std::min(map.block_expert[range.first], map.block_expert[range.first - 1] + 1);
    const int32_t tiles = s.grad_weight_tiles;
    for (int32_t e = last; e >= first; --e) {
      int32_t n = worker_ - static_cast<int32_t>(int64_t{e} * tiles % workers());
      if (n < 0) n += workers();
      if (n >= tiles) continue;
      const int32_t begin = std::max(map.expert_first_block[e], range.first);
      const int32_t end = std::min(map.expert_first_block[e + 1], range.end);
      GradTile t = routed_tile(std::max(end - 1, 0), e);
      if (end > begin) {
        const Group segment = {begin, end - begin, e};
        const bool starts = starts_weight_sum(map, segment);
        const int32_t last_rows = (plan().expert_rows[e] - 1) % s.block_rows + 1;
        t.skip = starts && (last_rows <= s.block_rows / 2 || fault(Fault::kSkipsRows));
        t.num_stages = 2 * (end - begin) - t.skip;
        if (!starts) t.open_in = (m + 1) & 1;
        if (!ends_weight_sum(map, segment)) t.open_out = m & 1;
      } else if (fault(Fault::kNothingForEmpty)) {
        continue;
      }
      for (; n < tiles; n += workers()) {
        t.n = n;
        t.work = weight_work(routed_weight_tiles(tiles), n);
        co_await put(t);
      }
    }
  }

  Program put(GradTile tile) {
    const int32_t i = num_put_++, slot = at_.slot();
    if (i >= kTileRing && !fault(Fault::kNoReleased))
      co_await wait(cta_.released[slot], at_.parity() ^ 1);
    co_await wait_outbox(tile);
    cta_.tiles[slot] = tile;
    cta_.known[slot].arrive();
    co_await wait_inputs(tile);
    cta_.ready[slot].arrive();
    at_.advance();
  }

  // The weights of an expert without rows have no operands, whose stages would tell the consumers
  // that the others have done with the outbox.
  Program wait_outbox(GradTile t) {
    const bool weight = t.work == GradWork::kDownWeight || t.work == GradWork::kGateUpWeight;
    const bool waits = after_hidden_ && weight && t.num_stages == 0;
    if (t.work == GradWork::kHidden || t.work == GradWork::kHiddenSaved)
      after_hidden_ = true;
    else if (weight || t.work == GradWork::kInput)
      after_hidden_ = false;
    if (!waits || fault(Fault::kNoRoomForEmpty)) co_return;
    const RingCursor<kTileRing> last = {at_.count - 1};
    co_await wait(cta_.released[last.slot()], last.parity());
  }

  Program wait_inputs(GradTile t) {
    switch (t.work) {
      case GradWork::kHidden:
      case GradWork::kHiddenSaved:
        if (t.shared || fault(Fault::kNoTokensFull)) break;
        co_await wait_rows(gating_block(Pass::kBackward, group_of_block(s, plan().map(), t.block)));
        co_await wait_rows(t.block);
        break;
      case GradWork::kInput:
        if (!t.shared)
          co_await wait_hidden(t);
        else if (!fault(Fault::kNoSharedFull))
          co_await wait(me.shared_full[t.block], grad().shared_hidden_tiles);
        break;
      case GradWork::kDownWeight:
      case GradWork::kGateUpWeight:
      case GradWork::kBias:
        if (t.shared) {
          if (!fault(Fault::kNoAllSharedFull))
            co_await wait(me.all_shared_full,
                          int64_t{w.setup.shared_blocks()} * grad().shared_hidden_tiles);
        } else if (t.num_stages > 0) {
          co_await wait_hidden(t);
        }
        break;
      default:
        break;
    }
  }
  Until wait_rows(int32_t block) {
    return wait(me.grad_x_full[x_slot(block)], x_full_target(s, generation(block, s.ring_blocks)));
  }
  // All hidden gradients of the expert down to this macrobatch's first block of it.
  Until wait_hidden(const GradTile& t) {
    const Group segment = segment_of_block(s, plan().map(), t.block);
    const int32_t blocks =
        fault(Fault::kSmallHiddenTarget)
            ? segment.num_blocks
            : plan().expert_first_block[segment.expert + 1] - segment.first_block;
    return wait(me.expert_full[segment.expert],
                fault(Fault::kNoHiddenWait) ? 0 : int64_t{blocks} * s.gate_up_tiles);
  }
};

}  // namespace test

// The backward's loader: which operands a tile's stages hold.
#pragma once

#include "cuda/alternating_sm90.cuh"
#include "cuda/backward_tiles.cuh"

namespace jax_mok::cuda {

constexpr int kBackwardStages = 3;
using BackwardStages = Stages<kBackwardStages>;

// How tiles use shared memory. Both kinds of hidden gradients turn results into rows in places of
// their own, and recomputed ones have other stages.
enum class SharedUse { kNone, kHidden, kHiddenSaved, kOther };
MOK_DEVICE SharedUse shared_use(GradWork work) {
  return work == GradWork::kHidden        ? SharedUse::kHidden
         : work == GradWork::kHiddenSaved ? SharedUse::kHiddenSaved
                                          : SharedUse::kOther;
}

// One thread. As in the forward, a tile's weights are asked for before its rows are known to be
// there. Columns past the end of a tensor arrive as zeros, rows past the end of an expert's weights
// as those of the next: what is made of them is not stored.
class GradLoader {
 public:
  __device__ GradLoader(const BackwardParams& p, int v, BackwardStages& stages,
                        StageBarriers<kBackwardStages>& barriers, AlternatingStages& pairs,
                        AlternatingBarriers& pair_barriers, TileRing<GradTile>& ring,
                        volatile int32_t* progress, AbortWord cta_abort)
      : p_(p),
        num_blocks_(p.block_map(v).num_blocks),
        stages_(stages),
        barriers_(barriers),
        pairs_(pairs),
        pair_barriers_(pair_barriers),
        ring_(ring),
        progress_(progress),
        cta_abort_(cta_abort) {}

  __device__ void run() {
    for (;; at_.advance()) {
      if (!wait_barrier(&ring_.known[at_.slot()], at_.parity(), cta_abort_)) break;
      const GradTile tile = ring_.tiles[at_.slot()];
      *progress_ = tile.progress;
      if (!make_room(tile)) break;
      if (tile.work == GradWork::kEnd) break;
      ready_ = false;
      if (!load(tile)) break;
      mbarrier_arrive(&ring_.done[at_.slot()]);
    }
    // Only of a call that is given up something may still be on its way.
#pragma unroll 1
    for (int i = 0; i < kBackwardStages; ++i) last_.wait(i, &barriers_.full[i]);
#pragma unroll 1
    for (int i = 0; i < 4; ++i) last_.wait(kBackwardStages + i, &pair_barriers_.full[0][0] + i);
  }

 private:
  __device__ bool load(const GradTile& t) {
    switch (t.work) {
      case GradWork::kHidden:
        return load_hidden(t);
      case GradWork::kHiddenSaved:
        return load_saved(t);
      case GradWork::kInput:
        return load_input(t);
      case GradWork::kDownWeight:
        return load_down_weight(t);
      case GradWork::kGateUpWeight:
        return load_gate_up_weight(t);
      default:
        return true;
    }
  }
  __device__ const NetworkMaps& maps(const GradTile& t) const {
    return t.shared ? p_.shared : p_.routed;
  }
  __device__ int inner(const GradTile& t) const {
    return t.shared ? p_.geometry.shared_intermediate : p_.geometry.intermediate;
  }
  // First row of the expert in a weight tensor with `rows` rows each.
  __device__ int weight_row_of(const GradTile& t, int rows) const {
    return t.shared ? 0 : t.expert * rows;
  }

  // Memory that is used in another way than before: first everybody must have done with it.
  __device__ bool make_room(const GradTile& t) {
    const SharedUse before = use_;
    use_ = shared_use(t.work);
    if (use_ == before || before == SharedUse::kNone) return true;
    RingCursor last = {at_.count - 1};
    return wait_barrier(&ring_.released[last.slot()], last.parity(), cta_abort_);
  }

  // Stages of x (W_gate | W_up) and of dy W_down^T take turns.
  __device__ bool load_hidden(const GradTile& t) {
    const NetworkMaps& m = maps(t);
    const int hidden = p_.geometry.hidden;
    const int gate_row = weight_row_of(t, hidden), down_row = weight_row_of(t, inner(t));
    const int end = min((t.n + 1) * p_.geometry.hidden_tile_columns, inner(t));
    for (int column = t.n * p_.geometry.hidden_tile_columns; column < end;
         column += kGateUpColumns) {
      for (int k = 0; k < hidden; k += kTileK) {
        const int pair = pair_to_.pair();
        uint64_t* full = pair_barriers_.full[pair];
        auto& wide = pairs_.b[pair].wide;
        if (!begin_pair(0, kABytes + kBBytes)) return false;
        load_panels(full, wide, m.gate, column, gate_row + k, 2);
        load_panels(full, wide + 2 * kPanelBytes, m.up, column, gate_row + k, 2);
        const bool ready = rows_ready();
        load_rows(full, pairs_.a[pair][0], m.x, k, t.token_row, 2);
        if (!ready) return false;  // the stage has got whatever was there; likewise below

        if (!begin_pair(1, kABytes + kNarrowBBytes)) return false;
        load_rows(full + 1, pairs_.b[pair].narrow, m.down, k, down_row + column, 2);
        load_rows(full + 1, pairs_.a[pair][1], m.dy, k, t.token_row, 2);
        pair_to_.advance();
      }
    }
    return true;
  }
  // dy W_down^T.
  __device__ bool load_saved(const GradTile& t) {
    const NetworkMaps& m = maps(t);
    const int down_row = weight_row_of(t, inner(t)) + t.n * p_.geometry.hidden_tile_columns;
    for (int k = 0; k < p_.geometry.hidden; k += kTileK) {
      if (!begin(kABytes + kBBytes)) return false;
      load_rows(b(), m.down, k, down_row, 4);
      const bool ready = rows_ready();
      load_rows(a(), m.dy, k, t.token_row, 2);
      if (!ready) return false;
      to_.advance();
    }
    return true;
  }
  // d_gate W_gate^T + d_up W_up^T.
  __device__ bool load_input(const GradTile& t) {
    const NetworkMaps& m = maps(t);
    const int row = weight_row_of(t, p_.geometry.hidden) + t.n * kTileColumns;
    for (int half = 0; half < 2; ++half) {
      const CUtensorMap& weights = half == 0 ? m.gate : m.up;
      const CUtensorMap& rows = half == 0 ? m.d_gate : m.d_up;
      for (int k = 0; k < inner(t); k += kTileK) {
        if (!begin(kABytes + kBBytes)) return false;
        load_rows(b(), weights, k, row, 4);
        const bool ready = rows_ready();
        load_rows(a(), rows, k, t.hidden_row, 2);
        if (!ready) return false;
        to_.advance();
      }
    }
    return true;
  }
  // (w h)^T dy.
  __device__ bool load_down_weight(const GradTile& t) {
    const NetworkMaps& m = maps(t);
    for (int stage = 0; stage < t.num_stages; ++stage) {
      if (!rows_ready() || !begin(kABytes + kBBytes)) return false;
      const int row = weight_row(t, stage).row;
      load_panels(a(), m.h, t.m * kBlockRows, t.hidden_row + row, 2);
      load_panels(b(), m.dy, t.n * kTileColumns, t.token_row + row, 4);
      to_.advance();
    }
    return true;
  }
  // x^T (d_gate | d_up).
  __device__ bool load_gate_up_weight(const GradTile& t) {
    const NetworkMaps& m = maps(t);
    const int column = t.n * kGateUpColumns;
    for (int stage = 0; stage < t.num_stages; ++stage) {
      if (!rows_ready() || !begin(kABytes + kBBytes)) return false;
      const WeightRow at = weight_row(t, stage);
      const bool saved = !t.shared && p_.is_saved(num_blocks_, t.block - at.block_step);
      const CUtensorMap& x = saved ? p_.saved_x_map : m.x;
      load_panels(a(), x, t.m * kBlockRows, t.token_row + at.row, 2);
      load_panels(b(), m.d_gate, column, t.hidden_row + at.row, 2);
      load_panels(b() + 2 * kPanelBytes, m.d_up, column, t.hidden_row + at.row, 2);
      to_.advance();
    }
    return true;
  }

  __device__ uint8_t* a() const { return stages_.a[to_.stage]; }
  __device__ uint8_t* b() const { return stages_.b[to_.stage]; }
  // Until a stage is free; not in a call that is given up: its consumers hand back stages that
  // their bytes are still on the way to.
  __device__ bool wait_free(uint64_t* empty, uint32_t parity) const {
    return wait_barrier(empty, parity ^ 1, cta_abort_) && !cta_abort_.raised();
  }
  __device__ bool begin(uint32_t bytes) {
    if (!wait_free(&barriers_.empty[to_.stage], to_.parity)) return false;
    last_.begin(to_.stage, to_.parity);
    mbarrier_arrive_expect(&barriers_.full[to_.stage], bytes);
    return true;
  }
  __device__ bool begin_pair(int narrow, uint32_t bytes) {
    const int pair = pair_to_.pair();
    if (!wait_free(&pair_barriers_.empty[pair][narrow], pair_to_.parity())) return false;
    last_.begin(kBackwardStages + 2 * pair + narrow, pair_to_.parity());
    mbarrier_arrive_expect(&pair_barriers_.full[pair][narrow], bytes);
    return true;
  }
  __device__ bool rows_ready() {
    if (!ready_) ready_ = wait_barrier(&ring_.ready[at_.slot()], at_.parity(), cta_abort_);
    return ready_;
  }
  // `panels` panels of 64 rows x 64 columns: next to each other, or below each other.
  __device__ static void load_panels(uint64_t* full, uint8_t* to, const CUtensorMap& map,
                                     int column, int row, int panels) {
    for (int i = 0; i < panels; ++i)
      tma_load_2d(to + i * kPanelBytes, &map, full, column + i * 64, row);
  }
  __device__ static void load_rows(uint64_t* full, uint8_t* to, const CUtensorMap& map, int column,
                                   int row, int panels) {
    for (int i = 0; i < panels; ++i)
      tma_load_2d(to + i * kPanelBytes, &map, full, column, row + i * 64);
  }
  // Into the current stage.
  __device__ void load_panels(uint8_t* to, const CUtensorMap& map, int column, int row,
                              int panels) const {
    load_panels(&barriers_.full[to_.stage], to, map, column, row, panels);
  }
  __device__ void load_rows(uint8_t* to, const CUtensorMap& map, int column, int row,
                            int panels) const {
    load_rows(&barriers_.full[to_.stage], to, map, column, row, panels);
  }

  const BackwardParams& p_;
  const int num_blocks_;
  BackwardStages& stages_;
  StageBarriers<kBackwardStages>& barriers_;
  AlternatingStages& pairs_;
  AlternatingBarriers& pair_barriers_;
  TileRing<GradTile>& ring_;
  volatile int32_t* const progress_;  // of the CTA, for its dispatcher
  const AbortWord cta_abort_;
  RingCursor at_;
  StageCursor<kBackwardStages> to_;
  PairCursor pair_to_;
  LastLoads last_;
  SharedUse use_ = SharedUse::kNone;
  bool ready_ = false;
};

}  // namespace jax_mok::cuda

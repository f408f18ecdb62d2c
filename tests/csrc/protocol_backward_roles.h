// The roles of a compute worker in the backward that follow its scheduler, as in csrc/cuda: loader
// (backward_loader.cuh), consumer warps (backward_sm90.cu, backward_epilogue.cuh), storer
// (backward_outbox.cuh). Only shapes are smaller: a stage of a product over the hidden size stands
// for all of them, a hidden tile has `panels` columns.
#pragma once

#include "protocol_backward.h"

namespace test {

// What the stages of a tile hold, and in which order.
class GradLoader : public ComputeRole {
 public:
  GradLoader(World& world, int32_t rank, int32_t worker)
      : ComputeRole(world, rank, worker, "loader", 0) {}

 private:
  RingCursor<kTileRing> at_;
  RingCursor<kStages> to_;
  RingCursor<kPairs> pair_to_;
  SharedUse use_ = SharedUse::kNone;
  // A stage of either kind that is being filled.
  struct Filling {
    Barrier* full = nullptr;
    int32_t left = 0;  // copies not landed yet
  };
  std::array<Filling, kStages> filling_;
  std::array<Filling, 2 * kPairs> pair_filling_;
  Filling* current_ = nullptr;
  uint64_t* fill_ = nullptr;  // where the next values go

  Program run() override {
    at_ = {};
    to_ = {};
    pair_to_ = {};
    use_ = SharedUse::kNone;
    for (;; at_.advance()) {
      co_await wait(cta_.known[at_.slot()], at_.parity());
      const GradTile tile = cta_.tiles[at_.slot()];
      tell_progress(tile);
      co_await make_room(tile);
      if (tile.work == GradWork::kEnd) co_return;
      co_await load(tile);
      cta_.done[at_.slot()].arrive();
    }
  }

  // The worker's dispatcher keeps near it.
  void tell_progress(const GradTile& t) {
    if (t.work == GradWork::kEnd && fault(Fault::kNoProgressAtEnd)) return;
    if (t.work == GradWork::kMacrobatchEnd && fault(Fault::kNoProgressAtMacrobatchEnd)) return;
    cta_.progress.store(t.progress, std::memory_order_relaxed);
  }

  // Memory that is used in another way than before: first everybody must have done with it.
  Program make_room(GradTile t) {
    const SharedUse before = use_;
    use_ = shared_use(t.work);
    if (use_ == before || before == SharedUse::kNone || fault(missing_wait(before, use_)))
      co_return;
    const RingCursor<kTileRing> last = {at_.count - 1};
    co_await wait(cta_.released[last.slot()], last.parity());
  }
  static Fault missing_wait(SharedUse before, SharedUse next) {
    if (next == SharedUse::kOther)
      return before == SharedUse::kHidden ? Fault::kNoRoomAfterHidden : Fault::kNoRoomAfterSaved;
    if (before != SharedUse::kOther) return Fault::kNoRoomBetweenHiddens;
    return next == SharedUse::kHidden ? Fault::kNoRoomBeforeHidden : Fault::kNoRoomBeforeSaved;
  }

  Program load(GradTile t) {
    const int64_t tokens = token_row(t, t.block), rows = hidden_row(t, t.block);
    const HiddenRows& hidden = hidden_rows(t);
    const std::vector<uint64_t>&x = t.shared ? me.x : me.grad_ring_x,
          &dy = t.shared ? me.dy : me.grad_ring_dy;
    const int32_t all = s.block_rows, half = s.block_rows / 2;
    switch (t.work) {
      case GradWork::kHidden:  // x and dy take turns
        for (int32_t panel = 0; panel < panels(); ++panel, pair_to_.advance())
          for (const auto* array : {&x, &dy}) {
            co_await open_pair(array == &dy);
            load_tokens(t, *array, tokens, all);
            landed(*current_);
          }
        break;
      case GradWork::kHiddenSaved:
        co_await open_stage();
        load_tokens(t, dy, tokens, all);
        close_stage();
        break;
      case GradWork::kInput:
        for (const auto* array : {&hidden.d_gate, &hidden.d_up}) {
          co_await open_stage();
          load_hidden(t, *array, rows, all);
          close_stage();
        }
        break;
      case GradWork::kDownWeight:
        for (int32_t stage = 0; stage < t.num_stages; ++stage) {
          co_await open_stage();
          const Piece p = piece(t, stage);
          load_hidden(t, hidden.h, hidden_row(t, p.block) + p.first_row, half);
          load_tokens(t, dy, token_row(t, p.block) + p.first_row, half);
          close_stage();
        }
        break;
      case GradWork::kGateUpWeight:
        for (int32_t stage = 0; stage < t.num_stages; ++stage) {
          co_await open_stage();
          const Piece p = piece(t, stage);
          const bool saved = is_saved(t, p.block) && !fault(Fault::kIgnoresSaved);
          load_tokens(t, saved ? me.ring_x : x, token_row(t, p.block) + p.first_row, half);
          load_hidden(t, hidden.d_gate, hidden_row(t, p.block) + p.first_row, half);
          load_hidden(t, hidden.d_up, hidden_row(t, p.block) + p.first_row, half);
          close_stage();
        }
        break;
      default:
        break;
    }
  }

  // The next stage is free, and the tile's rows can be loaded.
  Program open_stage() {
    const int32_t i = to_.slot();
    if (!fault(Fault::kNoStageEmpty)) co_await wait(cta_.stage_empty[i], to_.parity() ^ 1);
    co_await rows_ready();
    fill(filling_[i], cta_.stage_full[i], cta_.stage(i));
  }
  void close_stage() {
    landed(*current_);
    to_.advance();
  }
  Program open_pair(bool narrow) {
    const int32_t i = 2 * pair_to_.slot() + narrow;
    if (!fault(Fault::kNoStageEmpty)) co_await wait(cta_.pair_empty[i], pair_to_.parity() ^ 1);
    co_await rows_ready();
    fill(pair_filling_[i], cta_.pair_full[i], cta_.pair_stage(i));
  }
  Until rows_ready() {
    if (fault(Fault::kNoReady)) return pause();
    return wait(cta_.ready[at_.slot()], at_.parity());
  }
  void fill(Filling& filling, Barrier& full, uint64_t* to) {
    filling = {&full, 1};  // until all copies are asked for
    current_ = &filling;
    fill_ = to;
  }
  static void landed(Filling& filling) {
    if (--filling.left == 0) filling.full->arrive();
  }
  void load_rows(const std::vector<uint64_t>& from, int64_t first, int32_t count) {
    if (count > 0) {
      ++current_->left;
      loads_.add({&from[first], fill_, count, 1, ~uint64_t{0},
                  [filling = current_] { landed(*filling); }});
    }
    fill_ += count;
  }
  // Rows past the end of the local tokens are whatever lies there.
  void load_tokens(const GradTile& t, const std::vector<uint64_t>& from, int64_t row,
                   int32_t rows) {
    const int32_t there =
        t.shared ? static_cast<int32_t>(std::clamp<int64_t>(s.num_tokens - row, 0, rows)) : rows;
    load_rows(from, row, there);
    fill_ += rows - there;
  }
  void load_hidden(const GradTile& t, const std::vector<uint64_t>& from, int64_t row,
                   int32_t rows) {
    load_rows(from, row * columns(t), rows * columns(t));
  }
};

// One consumer warp: its rows of every block tile, its part of every weight tile.
class GradConsumer : public ComputeRole {
 public:
  GradConsumer(World& world, int32_t rank, int32_t worker, int32_t warp)
      : ComputeRole(world, rank, worker, "consumer", warp) {}

 private:
  RingCursor<kTileRing> at_;
  RingCursor<kStages> from_;
  RingCursor<kPairs> pair_from_;
  RingCursor<kOutboxSlots> to_;
  // Stages of the product so far, as they were when they were given back.
  std::vector<std::vector<uint64_t>> product_;

  int32_t warp() const { return index_; }
  int32_t first_row() const { return s.block_rows / warps() * warp(); }
  int32_t end_row() const { return s.block_rows / warps() * (warp() + 1); }

  Program run() override {
    at_ = {};
    from_ = {};
    pair_from_ = {};
    to_ = {};
    for (;; at_.advance()) {
      co_await wait(cta_.known[at_.slot()], at_.parity());
      const GradTile& tile = cta_.tiles[at_.slot()];  // read where it stands
      if (tile.work == GradWork::kEnd) co_return;
      switch (tile.work) {
        case GradWork::kHidden:
          for (int32_t panel = 0; panel < panels(); ++panel) {
            co_await multiply_pair();
            co_await hidden_panel(tile, panel, [&](int32_t row) {
              return gate_up_value(product_[0][row], expert(tile), tile.n);
            });
          }
          break;
        case GradWork::kHiddenSaved:
          co_await multiply(1);
          for (int32_t panel = 0; panel < panels(); ++panel)
            co_await hidden_panel(tile, panel, [&](int32_t row) {
              return me.ring_h[(hidden_row(tile, tile.block) + row) * s.gate_up_tiles + tile.n];
            });
          break;
        case GradWork::kInput:
          co_await multiply(2);
          co_await input(tile);
          break;
        case GradWork::kDownWeight:
        case GradWork::kGateUpWeight:
          co_await weight(tile);
          break;
        case GradWork::kBias:
          co_await wait(cta_.ready[at_.slot()], at_.parity());
          co_await bias(tile);
          bias_dots(tile);
          break;
        default:
          break;
      }
      co_await pause();
      cta_.done[at_.slot()].arrive();
    }
  }

  // Products are read as late as they can be: when their stage is given back, one behind.
  Program multiply(int32_t stages) {
    product_.clear();
    RingCursor<kStages> before;
    for (int32_t i = 0; i < stages; ++i) {
      co_await wait(cta_.stage_full[from_.slot()], from_.parity());
      if (i > 0) give_back(before.slot());
      before = from_;
      from_.advance();
    }
    if (stages == 0) co_return;
    co_await pause();
    give_back(before.slot());
  }
  // The product's stages: x, then dy.
  Program multiply_pair() {
    product_.clear();
    for (int32_t i = 2 * pair_from_.slot(); i <= 2 * pair_from_.slot() + 1; ++i) {
      co_await wait(cta_.pair_full[i], pair_from_.parity());
      co_await pause();
      read_stage(cta_.pair_stage(i), s.block_rows, cta_.pair_empty[i]);
    }
    pair_from_.advance();
  }
  void give_back(int32_t i) { read_stage(cta_.stage(i), cta_.stage_size, cta_.stage_empty[i]); }
  void read_stage(const uint64_t* stage, size_t size, Barrier& empty) {
    product_.emplace_back(stage, stage + size);
    empty.arrive();
  }

  // ---- outbox ----
  Until open(int32_t ahead) {
    const RingCursor<kOutboxSlots> at = {to_.count + ahead};
    if (fault(Fault::kNoOutboxEmpty)) return pause();
    return wait(cta_.outbox_empty[at.slot()], at.parity() ^ 1);
  }
  uint64_t* slot(int32_t ahead) {
    return cta_.slot(RingCursor<kOutboxSlots>{to_.count + ahead}.slot());
  }
  void close(int32_t slots) {
    for (int32_t i = 0; i < slots; ++i, to_.advance()) cta_.outbox_full[to_.slot()].arrive();
  }

  // The product's last stage holds dy. Results become rows in the warp's own piece of the outbox,
  // and the warp itself stores them.
  Program hidden_panel(const GradTile& t, int32_t panel, std::function<uint64_t(int32_t)> gate_up) {
    const std::vector<uint64_t>& dy = product_.back();
    const int32_t rows = s.block_rows / warps();
    for (int32_t i = 0; i < kOutboxSlots; ++i) co_await open(i);
    uint64_t* const staging = cta_.staging(warp(), rows);
    std::vector<uint64_t> h;
    for (int32_t row = first_row(); row < end_row(); ++row) {
      const HiddenGradient value = is_padding_row(t, row)
                                       ? HiddenGradient{kPaddingValue, kPaddingValue, kPaddingValue}
                                       : hidden_gradient(gate_up(row), dy[row], panel);
      uint64_t* const to = staging + (row - first_row());
      to[0] = value.h;
      to[rows] = value.d_gate;
      to[2 * rows] = value.d_up;
      h.push_back(value.h);
    }
    co_await pause();
    HiddenRows& to = hidden_rows(t);
    const uint64_t* from = staging;
    for (auto* array : {&to.h, &to.d_gate, &to.d_up}) {
      for (int32_t row = first_row(); row < end_row(); ++row)
        (*array)[(hidden_row(t, t.block) + row) * columns(t) + t.n * panels() + panel] = *from++;
      co_await pause();
    }
    for (int32_t row = first_row(); row < end_row(); ++row)
      store_dot(t, row, t.n * panels() + panel, dot_value(h[row - first_row()]));
  }
  // Rows of no token have weight zero, whatever was loaded for them.
  bool is_padding_row(const GradTile& t, int32_t row) const {
    const int64_t in_plan = int64_t{t.block} * s.block_rows + row;
    return t.shared ? in_plan >= s.num_tokens : is_padding(plan().rows[in_plan]);
  }
  void store_dot(const GradTile& t, int32_t row, int32_t part, uint64_t value) {
    if (is_padding_row(t, row)) return;
    const int64_t in_plan = int64_t{t.block} * s.block_rows + row;
    if (t.shared) {
      me.shared_dots.write(in_plan * columns(t) + part, value, epoch(),
                           "shared part of <h, dh> written twice");
      return;
    }
    const RowSource to = plan().rows[in_plan];
    w.ranks[to.rank]->dots.write((int64_t{to.token} * s.top_k + to.slot) * (columns(t) + 1) + part,
                                 value, epoch(), "part of <h, dh> written twice");
  }

  // A row lies across all slots.
  Program input(const GradTile& t) {
    for (int32_t i = 0; i < kOutboxSlots; ++i) co_await open(i);
    for (int32_t row = first_row(); row < end_row(); ++row)
      slot(row % kOutboxSlots)[row] =
          dx_value(&product_[0][row * columns(t)], &product_[1][row * columns(t)], columns(t),
                   expert(t), t.n);
    co_await pause();
    close(kOutboxSlots);
  }

  Program weight(const GradTile& t) {
    uint64_t sum = 0;
    if (t.open_in >= 0) sum = open_sum(t.open_in, t, warp());
    co_await multiply(t.num_stages);
    const int32_t half = s.block_rows / 2, width = columns(t);
    for (int32_t stage = 0; stage < t.num_stages; ++stage) {
      const uint64_t* a = product_[stage].data();
      for (int32_t row = 0; row < half; ++row)
        sum = add_row(
            sum, t.work == GradWork::kDownWeight
                     ? down_weight_value(a + row * width, a[half * width + row], width, t.n)
                     : gate_up_weight_value(a[row], a + half + row * width,
                                            a + half + half * width + row * width, width, t.n));
    }
    if (t.open_out >= 0) {
      open_sum(t.open_out, t, warp()) = sum;
      co_return;
    }
    const bool together = w.setup.weight_panels_together;
    for (int32_t panel = 0; panel < w.setup.weight_panels; ++panel) {
      const int32_t ahead = together ? panel : 0;
      co_await open(ahead);
      slot(ahead)[warp()] = sum;
      if (!together) close(1);
    }
    co_await pause();
    if (together) close(w.setup.weight_panels);
  }

  // Read where the rows lie. Every warp has columns of its own.
  Program bias(const GradTile& t) {
    uint64_t sum = t.open_in >= 0 ? open_sum(t.open_in, t, warp()) : 0;
    const int32_t blocks = (t.num_stages + t.skip) / 2, width = columns(t);
    for (int32_t b = 0; b < blocks; ++b) {
      for (int32_t row = 0; row < s.block_rows; ++row) {
        const int64_t at = hidden_row(t, t.block - b) + row;
        sum = add_row(sum, bias_value(&me.routed.d_gate[at * width], &me.routed.d_up[at * width],
                                      me.grad_ring_dy[at], width, t.n));
      }
      co_await pause();
    }
    if (t.open_out >= 0) {
      open_sum(t.open_out, t, warp()) = sum;
      co_return;
    }
    for (int32_t panel = 0; panel < w.setup.weight_panels; ++panel)
      me.weight.write(weight_index(t, panel, warp()), sum, epoch(), "bias gradient written twice");
  }
  // <b_down, dy> of every bias_tiles-th row of the segment.
  void bias_dots(const GradTile& t) {
    const WeightTiles tiles = routed_weight_tiles(s.grad_weight_tiles);
    const int32_t rows = (t.num_stages + t.skip) / 2 * s.block_rows;
    for (int32_t i = t.n - tiles.down - tiles.gate_up + warp() * tiles.bias; i < rows;
         i += warps() * tiles.bias) {
      GradTile of = t;
      of.block = t.block - i / s.block_rows;
      const int32_t row = i % s.block_rows;
      store_dot(of, row, columns(t),
                bias_dot_value(me.grad_ring_dy[token_row(of, of.block) + row]));
    }
  }
};

// Hands the outbox to the copy engine and tells the other workers.
class Storer : public ComputeRole {
 public:
  Storer(World& world, int32_t rank, int32_t worker)
      : ComputeRole(world, rank, worker, "storer", 0) {}

 private:
  RingCursor<kTileRing> tile_at_;
  RingCursor<kOutboxSlots> at_;

  Program run() override {
    tile_at_ = {};
    at_ = {};
    for (;; tile_at_.advance()) {
      const int32_t slot = tile_at_.slot();
      co_await wait(cta_.known[slot], tile_at_.parity());
      const GradTile tile = cta_.tiles[slot];
      if (tile.work == GradWork::kEnd) break;
      const bool hidden = tile.work == GradWork::kHidden || tile.work == GradWork::kHiddenSaved;
      if (hidden && fault(Fault::kNoHiddenWritten)) tell_hidden(tile);
      co_await store(tile);
      if (!fault(Fault::kNoDone)) co_await wait(cta_.done[slot], tile_at_.parity());
      if (hidden && !fault(Fault::kNoHiddenWritten)) tell_hidden(tile);
      if (tile.work == GradWork::kMacrobatchEnd) signal(me.macrobatch_done[tile.block]);
      cta_.released[slot].arrive();
    }
    co_await until([this] { return stores_.written(0); });
  }

  Program store(GradTile t) {
    switch (t.work) {
      case GradWork::kInput:
        co_await store_input(t);
        break;
      case GradWork::kDownWeight:
      case GradWork::kGateUpWeight:
        if (t.open_out < 0) co_await store_weight(t);
        break;
      default:
        break;
    }
  }

  // What the consumers have stored can be read.
  void tell_hidden(const GradTile& t) {
    if (t.shared) {
      signal(me.shared_full[t.block]);
      signal(me.all_shared_full);
    } else {
      signal(me.expert_full[t.expert]);
    }
  }

  Program store_weight(GradTile t) {
    for (int32_t panel = 0; panel < w.setup.weight_panels; ++panel) {
      Results& to = weight_results(t);
      const int64_t first = weight_index(t, panel, 0);
      co_await wait_full(at_);
      stores_.add(
          {cta_.slot(at_.slot()), &to.values[first], warps(), 1, ~uint64_t{0}, [this, &to, first] {
             for (int32_t warp = 0; warp < warps(); ++warp)
               to.written(first + warp, epoch(), "weight gradient written twice");
           }});
      stores_.commit();
      co_await give_back(1);
    }
  }

  // Every row goes to its own place.
  Program store_input(GradTile t) {
    RingCursor<kOutboxSlots> at = at_;
    for (int32_t i = 0; i < kOutboxSlots; ++i, at.advance()) co_await wait_full(at);
    for (int32_t row = 0; row < s.block_rows; ++row) {
      const int64_t in_plan = int64_t{t.block} * s.block_rows + row;
      Results* to = &me.shared_dx;
      int64_t index = in_plan * s.down_tiles + t.n;
      if (t.shared) {
        if (in_plan >= s.num_tokens) continue;
      } else {
        const RowSource route = plan().rows[in_plan];
        if (is_padding(route)) continue;
        Rank& source = *w.ranks[route.rank];
        if (w.track)
          require(source.combined == static_cast<uint32_t>(launch_),
                  "slot overwritten before the last launch's sum", route.rank, route.token);
        to = &source.slots;
        index = combine_slot(route.token, route.slot, s.num_tokens) * s.down_tiles + t.n;
      }
      const uint64_t* from =
          cta_.slot(RingCursor<kOutboxSlots>{at_.count + row % kOutboxSlots}.slot());
      stores_.add({from + row, &to->values[index], 1, 1, ~uint64_t{0},
                   [this, to, index] { to->written(index, epoch(), "dx slot written twice"); }});
    }
    stores_.commit();
    co_await give_back(kOutboxSlots);
  }

  Until wait_full(const RingCursor<kOutboxSlots>& at) {
    if (fault(Fault::kNoOutboxFull)) return pause();
    return wait(cta_.outbox_full[at.slot()], at.parity());
  }
  // Once the copy engine has read them.
  Program give_back(int32_t slots) {
    if (!fault(Fault::kNoOutboxRead)) co_await until([this] { return stores_.read(0); });
    for (int32_t i = 0; i < slots; ++i, at_.advance()) cta_.outbox_empty[at_.slot()].arrive();
  }
};

}  // namespace test

// The actors of one rank in both passes (front: publish, wait for the kernel, sum; dispatchers) and
// those that compute in the forward (loaders, consumers).
#pragma once

#include "protocol.h"

namespace test {

// Publishes the rank's rows, and when the kernel's own work and that of all peers is pushed, sums
// the slots of every token in slot order.
class Front : public Actor {
 public:
  Front(World& world, int32_t rank) : Actor(world, rank, "front") {}

  bool step() override {
    switch (state_) {
      case State::kReset:
        me.reset(w.setup, plan().num_blocks());
        if (!forward()) me.poison(w.setup);
        return go(State::kRows);
      case State::kRows:
        if (i_ == s.num_tokens) {
          me.started.store(epoch(), std::memory_order_release);
          return go(State::kPublish);
        }
        me.x[i_] = token_value(launch().salt, rank_, i_);
        me.dy[i_] = gradient_value(launch().salt, rank_, i_);
        return ++i_, true;
      case State::kPublish:
        if (i_ == s.num_ranks) return go(State::kKernel);
        w.ranks[i_]->published[rank_].store(epoch(), std::memory_order_release);
        return ++i_, true;
      case State::kKernel:
        if (!reached(me.finished, w.workers_per_rank(pass()))) return false;
        if (!forward()) check_weights();
        return go(State::kPush);
      case State::kPush:
        if (i_ == s.num_ranks) return go(State::kPeers);
        w.ranks[i_]->pushed[rank_].store(epoch(), std::memory_order_release);
        return ++i_, true;
      case State::kPeers:
        if (i_ == s.num_ranks) return go(State::kSum);
        if (!fault(Fault::kNoPushed) && !reached(me.pushed[i_], epoch())) return false;
        return ++i_, true;
      case State::kSum:
        if (i_ == s.num_tokens) {
          ++me.combined;
          ++launch_;
          return go(State::kReset);
        }
        sum(i_);
        if (!forward()) sum_dots(i_);
        return ++i_, true;
    }
    return false;
  }

 private:
  enum class State { kReset, kRows, kPublish, kKernel, kPush, kPeers, kSum };
  State state_ = State::kReset;
  int32_t i_ = 0;

  bool go(State next) {
    state_ = next;
    i_ = 0;
    return true;
  }

  // In slot order, then what the shared experts have added.
  void sum(int32_t token) {
    uint64_t total = 0;
    for (int32_t slot = 0; slot < s.top_k; ++slot) {
      if (launch().routing->ids[rank_][token * s.top_k + slot] < 0) continue;
      for (int32_t n = 0; n < s.down_tiles; ++n)
        total =
            then(total, me.slots.read(combine_slot(token, slot, s.num_tokens) * s.down_tiles + n,
                                      epoch(), "a slot was not written"));
    }
    if (!forward() && w.setup.shared_blocks() > 0)
      for (int32_t n = 0; n < s.down_tiles; ++n)
        total = then(total, me.shared_dx.read(token * s.down_tiles + n, epoch(),
                                              "the shared experts' dx was not written"));
    require(total == launch().expected.y[rank_][token], "wrong sum of a token", rank_, token);
  }

  // Gradients of expert weights: parts in the order of the columns.
  void sum_dots(int32_t token) {
    const GradFacts& grad = w.setup.grad;
    const int32_t columns = grad.hidden_columns(s.gate_up_tiles);
    const int32_t parts = columns + (routed_weight_tiles(s.grad_weight_tiles).bias > 0 ? 1 : 0);
    for (int32_t i = token * s.top_k; i < (token + 1) * s.top_k; ++i) {
      if (launch().routing->ids[rank_][i] < 0) continue;
      uint64_t total = 0;
      for (int32_t part = 0; part < parts; ++part)
        total = then(total, me.dots.read(int64_t{i} * (columns + 1) + part, epoch(),
                                         "a part of <h, dh> was not written"));
      require(total == launch().expected.dot[rank_][i], "wrong <h, dh>", rank_, i);
    }
    if (w.setup.shared_blocks() == 0) return;
    const int32_t shared_columns = grad.hidden_columns(grad.shared_hidden_tiles);
    uint64_t total = 0;
    for (int32_t part = 0; part < shared_columns; ++part)
      total = then(total, me.shared_dots.read(int64_t{token} * shared_columns + part, epoch(),
                                              "a shared part of <h, dh> was not written"));
    require(total == launch().expected.shared_dot[rank_][token], "wrong shared <h, dh>", rank_,
            token);
  }

  void check_weights() {
    check_weights(me.weight, launch().expected.weight[rank_], "weight");
    if (w.setup.shared_blocks() > 0)
      check_weights(me.shared_weight, launch().expected.shared_weight[rank_], "shared weight");
  }
  // All panels and warps of a tile have formed the same sum.
  void check_weights(const Results& weight, const std::vector<uint64_t>& expected,
                     const char* what) {
    const int64_t per_tile = int64_t{w.setup.weight_panels} * w.setup.consumer_warps;
    for (size_t tile = 0; tile < expected.size(); ++tile)
      for (int64_t i = 0; i < per_tile; ++i)
        require(weight.read(tile * per_tile + i, epoch(), "a weight gradient was not written") ==
                    expected[tile],
                (std::string("wrong gradient of a ") + what).c_str(), rank_, tile);
  }
};

// csrc/cuda/dispatch.cuh, a warp: takes every count-th unit of rows in the order of the pass
// (backward: blocks from last to first, cotangents and tokens that were not saved) and moves it at
// once, a piece by lane, or a long row in several turns. The rows of a unit are signalled together,
// while the next unit's are loading. Before it waits for anything else than its own copies, it
// signals what it holds back.
class Dispatcher : public Role {
 public:
  Dispatcher(World& world, int32_t rank, int32_t index, Pass acts_in)
      : Role(world, rank, "dispatcher", index, acts_in),
        buffers_(std::min(world.setup.unit_rows * world.setup.row_parts, world.setup.buffers)),
        loaded_(buffers_.size()),
        parity_(buffers_.size()) {}

 private:
  // Where a row comes from: a row of a rank's tokens, the zero row, or a row of this rank's ring.
  struct Source {
    const uint64_t* row = nullptr;
    int32_t ring_slot = -1;
  };

  std::vector<uint64_t> buffers_;  // one of each lane
  std::vector<Barrier> loaded_;
  std::vector<uint32_t> parity_;
  int32_t unsignalled_ = -1;  // unit whose stores are issued but not told of

  int32_t count() const { return w.setup.dispatchers(); }
  int32_t units() const { return plan().num_blocks() * (s.block_rows / w.setup.unit_rows); }
  int32_t step_of(int32_t unit) const { return unit * w.setup.unit_rows / s.block_rows; }
  int32_t block_of(int32_t unit) const {
    return forward() ? step_of(unit) : plan().num_blocks() - 1 - step_of(unit);
  }
  int32_t row_in_block(int32_t unit) const { return unit * w.setup.unit_rows % s.block_rows; }
  bool is_saved(int32_t block) const {
    return w.setup.save && left_in_ring(plan().num_blocks(), block, s.macrobatch_blocks);
  }
  std::vector<Counter>& full() const { return forward() ? me.x_full : me.grad_x_full; }
  // The bits of a row that a piece stands for.
  uint64_t mask(int32_t part) const {
    const int32_t parts = w.setup.row_parts, first = 64 * part / parts;
    return ~uint64_t{0} >> (64 - (64 * (part + 1) / parts - first)) << first;
  }

  // A token of a peer that several experts here want is pulled once, where the ring holds all.
  Source source(int32_t row, bool cotangents) const {
    static const uint64_t zero_row = kPaddingValue;
    const RowSource& from = plan().rows[row];
    if (is_padding(from)) return {&zero_row, -1};
    const bool holds_all = plan().num_blocks() <= s.ring_blocks || fault(Fault::kCopiesInSmallRing);
    const int32_t first =
        (forward() ? plan().first_use : launch().routing->first_use_backward[rank_])[row];
    if (holds_all && from.rank != rank_ && first >= 0) {
      const int32_t slot = ring_slot(first / s.block_rows, s.ring_blocks);
      return {&ring(cotangents)[slot * s.block_rows + first % s.block_rows], slot};
    }
    const Rank& peer = *w.ranks[from.rank];
    return {&(cotangents ? peer.dy : peer.x)[from.token], -1};
  }
  std::vector<uint64_t>& ring(bool cotangents) const {
    return cotangents ? me.grad_ring_dy : forward() ? me.ring_x : me.grad_ring_x;
  }

  Program run() override {
    for (Barrier& b : loaded_) b.reset(1);
    parity_.assign(parity_.size(), 0);
    unsignalled_ = -1;
    for (int32_t r = 0; r < s.num_ranks && !fault(Fault::kNoPublished); ++r)
      co_await wait(me.published[r], epoch());
    for (int32_t unit = index_; unit < units(); unit += count()) {
      co_await make_room(block_of(unit));
      if (!forward()) co_await move(unit, true);
      if (forward() || !is_saved(block_of(unit))) co_await move(unit, false);
      unsignalled_ = unit;
      if (step_of(unit) < s.group_blocks) co_await signal_stored();
    }
    co_await signal_stored();
  }

  // Signals what is held back first, if it has to wait.
  Program wait_for(std::function<bool()> condition) {
    if (condition()) co_return;
    if (!fault(Fault::kHoldsBack)) co_await signal_stored();
    co_await until(condition);
  }

  Program make_room(int32_t block) {
    if (forward()) {
      const int32_t g = block / s.ring_blocks;
      if (g == 0 || fault(Fault::kNoTokensEmpty)) co_return;
      co_await wait_for([this, g, &empty = me.x_empty[x_slot(block)]] {
        return reached(empty, x_empty_target(s, pass(), g));
      });
      co_return;
    }
    if (w.setup.comm_workers == 0)
      co_await wait_for([this, block, &progress = me.compute[index_]->progress] {
        return progress.load(std::memory_order_relaxed) <= block + w.setup.most_ahead();
      });
    const int32_t before = macrobatch_of(s, block) + 1;
    if (before >= num_macrobatches(s, plan().num_blocks()) ||
        fault(Fault::kNoDispatchMacrobatchWait) || fault(Fault::kNoMacrobatchWait))
      co_return;
    co_await wait_for([this, &done = me.macrobatch_done[before]] {
      return reached(done, static_cast<uint32_t>(w.setup.compute_workers));
    });
  }

  Program move(int32_t unit, bool cotangents) {
    const int32_t block = block_of(unit), first = row_in_block(unit), parts = w.setup.row_parts;
    std::vector<Source> from;
    for (int32_t row = 0; row < w.setup.unit_rows; ++row)
      from.push_back(source(block * s.block_rows + first + row, cotangents));
    if (!fault(Fault::kNoCopyWait))
      co_await wait_for([this, &from] {
        for (const Source& row : from)
          if (row.ring_slot >= 0 && !reached(full()[row.ring_slot], x_full_target(s, 0)))
            return false;
        return true;
      });
    Track* const track = w.track && forward() ? &me.track_x[x_slot(block)] : nullptr;
    const int32_t lanes = static_cast<int32_t>(buffers_.size());
    for (int32_t begin = 0; begin < w.setup.unit_rows * parts; begin += lanes) {
      const int32_t active = std::min(lanes, w.setup.unit_rows * parts - begin);
      if (!fault(Fault::kNoBufferRead)) co_await until([this] { return stores_.read(0); });
      for (int32_t lane = 0; lane < active; ++lane) {
        const int32_t piece = begin + lane;
        loads_.add({from[piece / parts].row, &buffers_[lane], 1, 1, mask(piece % parts),
                    [&loaded = loaded_[lane]] { loaded.arrive(); }});
      }
      co_await signal_stored();
      for (int32_t lane = 0; lane < active; ++lane) {
        if (!fault(Fault::kNoLoaded)) co_await wait(loaded_[lane], parity_[lane]);
        parity_[lane] ^= 1;
      }
      for (int32_t lane = 0; lane < active; ++lane) {
        const int32_t piece = begin + lane;
        uint64_t& to = ring(cotangents)[ring_row(s, block, first + piece / parts, s.ring_blocks)];
        if (track != nullptr)
          track->begin_write(user(block), s.block_rows * parts, s.gate_up_tiles);
        to |= mask(piece % parts);  // on its way
        stores_.add({&buffers_[lane], &to, 1, 1, mask(piece % parts), [track, by = user(block)] {
                       if (track != nullptr) track->end_write(by);
                     }});
      }
      stores_.commit();
    }
  }

  Program signal_stored() {
    if (unsignalled_ < 0) co_return;
    if (!fault(Fault::kSignalsEarly)) co_await until([this] { return stores_.written(0); });
    signal(full()[x_slot(block_of(unsignalled_))], w.setup.unit_rows);
    unsignalled_ = -1;
  }
};

// The tiles of a compute worker, between its loader and its consumer.
struct Pipe {
  struct Stage {
    Tile tile;
    std::vector<uint64_t> data;
  };
  std::vector<Stage> stages;
  Counter loaded{0}, consumed{0};  // stages over all launches
  explicit Pipe(int32_t look_ahead) : stages(look_ahead) {}
};

// Both halves of a compute worker derive the same sequence of tiles on their own.
inline std::vector<Tile> tiles_of_worker(const Shape& s, const HostPlan& plan, int32_t worker,
                                         int32_t workers) {
  std::vector<Tile> tiles;
  const int64_t end = num_block_tiles(s, plan.num_blocks());
  for (int64_t t = first_owned(0, worker, workers); t < end; t += workers)
    tiles.push_back(tile_at(s, plan.map(), Pass::kForward, t));
  return tiles;
}

class TileWorker : public Worker {
 public:
  TileWorker(World& world, int32_t rank, int32_t index, Pipe& pipe, const char* role)
      : Worker(world, rank, role + std::to_string(index), Pass::kForward),
        index_(index),
        pipe_(pipe) {}

 protected:
  const int32_t index_;
  Pipe& pipe_;
  std::vector<Tile> tiles_;
  size_t next_ = 0;
  uint32_t stages_done_ = 0;  // over all launches

  void begin() override {
    tiles_ = tiles_of_worker(s, plan(), index_, w.setup.compute_workers);
    next_ = 0;
  }
  bool finished() const override { return next_ == tiles_.size(); }
  Pipe::Stage& stage() { return pipe_.stages[stages_done_ % pipe_.stages.size()]; }
  static bool reads_tokens(const Tile& t) { return t.phase == Phase::kGateUp; }
};

// Waits for a tile's inputs and copies them into a stage, in two steps.
class Loader : public TileWorker {
 public:
  Loader(World& world, int32_t rank, int32_t index, Pipe& pipe)
      : TileWorker(world, rank, index, pipe, "loader ") {}

 private:
  bool half_ = false;
  std::vector<const uint64_t*> from_;

  bool full(int32_t block) const {
    return fault(Fault::kNoTokensFull) ||
           reached(me.x_full[x_slot(block)], x_full_target(s, generation(block, s.ring_blocks)));
  }
  bool ready(const Tile& t) const {
    if (reads_tokens(t))
      return full(t.block) && full(gating_block(pass(), group_of_block(s, plan().map(), t.block)));
    return fault(Fault::kNoHiddenFull) ||
           reached(me.h_full[h_slot(t.block)],
                   h_full_target(s, generation(t.block, w.setup.hidden_ring)));
  }

  bool work() override {
    const Tile t = tiles_[next_];
    if (!half_) {
      if (stages_done_ - pipe_.consumed.load(std::memory_order_acquire) >= pipe_.stages.size())
        return false;
      if (!ready(t)) return false;
      mark(t, &Track::begin_read);
      from_.clear();
      for (int32_t row = 0; row < s.block_rows; ++row) {
        if (reads_tokens(t)) {
          from_.push_back(&me.ring_x[ring_row(s, t.block, row, s.ring_blocks)]);
          continue;
        }
        for (int32_t n = 0; n < s.gate_up_tiles; ++n)
          from_.push_back(
              &me.ring_h[ring_row(s, t.block, row, w.setup.hidden_ring) * s.gate_up_tiles + n]);
      }
      stage().tile = t;
      stage().data.clear();
      copy(0, from_.size() / 2);
      return half_ = true;
    }
    copy(from_.size() / 2, from_.size());
    mark(t, &Track::end_read);
    half_ = false;
    ++next_;
    ++stages_done_;
    signal(pipe_.loaded);
    return true;
  }

  void copy(size_t first, size_t end) {
    for (size_t i = first; i < end; ++i) stage().data.push_back(*from_[i]);
  }
  void mark(const Tile& t, void (Track::*what)(int64_t)) {
    if (!w.track) return;
    Track& track = reads_tokens(t) ? me.track_x[x_slot(t.block)] : me.track_h[h_slot(t.block)];
    (track.*what)(user(t.block));
  }
};

// Computes a loaded tile: stores hidden tiles or pushes result rows to their slots; then signals
// what it has freed and what it has made.
class Consumer : public TileWorker {
 public:
  Consumer(World& world, int32_t rank, int32_t index, Pipe& pipe)
      : TileWorker(world, rank, index, pipe, "consumer ") {}

 private:
  int32_t row_ = 0;

  int32_t expert(const Tile& t) const {
    return rank_ * s.num_local_experts + plan().block_expert[t.block];
  }

  bool work() override {
    if (!reached(pipe_.loaded, stages_done_ + 1)) return false;
    const Tile t = tiles_[next_];
    const int32_t h = h_slot(t.block);
    require(stage().tile == t, "loader and consumer disagree about a tile", t.block, t.n);
    if (t.phase == Phase::kGateUp) {
      if (row_ == 0 && !may_store(t)) return false;
      store(t, row_);
    } else {
      push(t, row_);
    }
    if (++row_ < s.block_rows) return true;
    row_ = 0;
    if (t.phase == Phase::kGateUp) {
      if (w.track) me.track_h[h].end_write(user(t.block));
      signal(me.h_full[h]);
      signal(me.x_empty[x_slot(t.block)]);
    } else {
      signal(me.h_empty[h]);
    }
    return advance();
  }

  bool advance() {
    ++next_;
    ++stages_done_;
    signal(pipe_.consumed);
    return true;
  }

  bool may_store(const Tile& t) {
    const int32_t slot = h_slot(t.block);
    if (!fault(Fault::kNoHiddenEmpty) &&
        !reached(me.h_empty[slot],
                 h_empty_target(s, pass(), generation(t.block, w.setup.hidden_ring))))
      return false;
    if (w.track) me.track_h[slot].begin_write(user(t.block), s.gate_up_tiles, s.down_tiles);
    return true;
  }

  void store(const Tile& t, int32_t row) {
    me.ring_h[ring_row(s, t.block, row, w.setup.hidden_ring) * s.gate_up_tiles + t.n] =
        gate_up_value(stage().data[row], expert(t), t.n);
  }

  void push(const Tile& t, int32_t row) {
    const RowSource to = plan().rows[int64_t{t.block} * s.block_rows + row];
    if (is_padding(to)) return;
    Rank& source = *w.ranks[to.rank];
    const int64_t at = combine_slot(to.token, to.slot, s.num_tokens) * s.down_tiles + t.n;
    if (w.track)
      require(source.combined == static_cast<uint32_t>(launch_),
              "slot overwritten before the last launch's sum", to.rank, to.token);
    source.slots.write(
        at, output_value(&stage().data[row * s.gate_up_tiles], s.gate_up_tiles, expert(t), t.n),
        epoch(), "slot written twice");
  }
};

}  // namespace test

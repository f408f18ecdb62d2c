// The actors of one rank: front (publish, wait for the kernel, sum), pullers, loaders, consumers.
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
        for (auto* counters : {&me.x_full, &me.x_empty, &me.h_full, &me.h_empty})
          for (Counter& c : *counters) c.store(0, std::memory_order_relaxed);
        me.finished.store(0, std::memory_order_relaxed);
        if (!forward()) std::fill(me.weight.begin(), me.weight.end(), kPoison);
        me.started.store(epoch(), std::memory_order_release);
        return go(State::kRows);
      case State::kRows:
        if (i_ == s.num_tokens) return go(State::kPublish);
        me.x[i_] = token_value(launch().salt, rank_, i_);
        me.dy[i_] = gradient_value(launch().salt, rank_, i_);
        return ++i_, true;
      case State::kPublish:
        if (i_ == s.num_ranks) return go(State::kKernel);
        w.ranks[i_]->published[rank_].store(epoch(), std::memory_order_release);
        return ++i_, true;
      case State::kKernel:
        if (!reached(me.finished, w.workers_per_rank())) return false;
        if (!forward())
          require(me.weight == launch().expected.weight[rank_], "wrong weight gradient", rank_,
                  launch_);
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
        return ++i_, true;
    }
    return false;
  }

 private:
  enum class State { kReset, kRows, kPublish, kKernel, kPush, kPeers, kSum };
  static constexpr uint64_t kPoison = 0xdeadbeefdeadbeefu;
  State state_ = State::kReset;
  int32_t i_ = 0;

  bool go(State next) {
    state_ = next;
    i_ = 0;
    return true;
  }

  void sum(int32_t token) {
    uint64_t total = 0;
    for (int32_t slot = 0; slot < s.top_k; ++slot) {
      if (launch().routing->ids[rank_][token * s.top_k + slot] < 0) continue;
      for (int32_t n = 0; n < s.down_tiles; ++n) {
        const int64_t at = combine_slot(token, slot, s.num_tokens) * s.down_tiles + n;
        require(me.slot_epoch[at] == epoch(), "a slot was not written", token, slot);
        total = then(total, me.slots[at]);
      }
    }
    require(total == launch().expected.y[rank_][token], "wrong sum of a token", rank_, token);
  }
};

// A part of the kernel: begins when the rank's kernel has started, says when it has finished.
class Worker : public Actor {
 public:
  using Actor::Actor;
  bool step() final {
    if (!running_) {
      if (!reached(me.started, epoch())) return false;
      running_ = true;
      begin();
      return true;
    }
    if (!finished()) return work();
    running_ = false;
    ++launch_;
    signal(me.finished);
    return true;
  }

 protected:
  virtual void begin() = 0;
  virtual bool finished() const = 0;
  virtual bool work() = 0;

 private:
  bool running_ = false;
};

// Pulls its share of the rows into the ring: first waits for every peer, then takes batches of
// units, all rows of a batch before any of them is signalled.
class Puller : public Worker {
 public:
  Puller(World& world, int32_t rank, int32_t index)
      : Worker(world, rank, "puller " + std::to_string(index)), index_(index) {}

 private:
  const int32_t index_;
  int32_t peers_ready_ = 0;
  int64_t unit_ = 0;             // next unit to take
  int64_t position_ = 0;         // next row in it, in pull order
  int32_t units_taken_ = 0;      // of this batch
  std::vector<int64_t> flying_;  // rows taken, data still under way
  size_t landed_ = 0;            // of flying_

  int64_t total() const { return static_cast<int64_t>(plan().rows.size()); }
  int64_t unit_first(int64_t unit) const { return unit * w.setup.unit_rows; }
  // Row in the row list at a place of the pull order: blocks in the order of the pass.
  int64_t row_at(int64_t position) const {
    const int64_t block = position / s.block_rows;
    return forward() ? position
                     : (plan().num_blocks() - 1 - block) * s.block_rows + position % s.block_rows;
  }
  bool kept(int32_t block) const {
    return w.setup.reuse_tokens && !forward() &&
           left_in_ring(plan().num_blocks(), block, s.ring_blocks);
  }
  int32_t token_reads() const {
    return forward() ? s.gate_up_tiles : s.gate_up_tiles + s.grad_weight_tiles;
  }

  void begin() override {
    peers_ready_ = 0;
    unit_ = index_;
    position_ = unit_first(unit_);
    units_taken_ = 0;
  }
  bool finished() const override { return position_ >= total() && flying_.empty(); }

  bool work() override {
    if (peers_ready_ < s.num_ranks) {
      if (!fault(Fault::kNoPublished) && !reached(me.published[peers_ready_], epoch()))
        return false;
      return ++peers_ready_, true;
    }
    const bool full = units_taken_ == w.setup.units_in_flight || position_ >= total();
    if (full || (flush_before(position_) && !flying_.empty())) return land();
    return take();
  }

  bool flush_before(int64_t position) const {
    return w.setup.flush && !flying_.empty() &&
           macrobatch_of(s, static_cast<int32_t>(flying_.back() / s.block_rows)) !=
               macrobatch_of(s, static_cast<int32_t>(row_at(position) / s.block_rows));
  }

  bool take() {
    const int64_t row = row_at(position_);
    const int32_t block = static_cast<int32_t>(row / s.block_rows), slot = x_slot(block);
    if (!fault(Fault::kNoTokensEmpty) &&
        !reached(me.x_empty[slot], x_empty_target(s, pass(), generation(block, s.ring_blocks))))
      return false;
    if (w.track) {
      if (kept(block)) {
        const int64_t old_user = int64_t{launch_ - 1} << 32 | block;
        me.track_x[slot].adopt(old_user, user(block), token_reads());
      } else {
        me.track_x[slot].begin_write(user(block), s.block_rows, token_reads());
      }
      if (!forward()) me.track_dy[slot].begin_write(user(block), s.block_rows, token_reads());
    }
    const int64_t at = ring_row(s, block, static_cast<int32_t>(row % s.block_rows), s.ring_blocks);
    if (!kept(block)) me.ring_x[at] = ~uint64_t{0};  // on its way
    flying_.push_back(row);
    ++position_;
    if (position_ == total() || position_ == unit_first(unit_ + 1)) {
      ++units_taken_;
      unit_ += w.setup.comm_workers;
      position_ = unit_first(unit_);
    }
    return true;
  }

  // One row's data arrives; after the last the batch is signalled, once per block.
  bool land() {
    if (landed_ < flying_.size()) {
      const int64_t row = flying_[landed_++];
      const RowSource from = plan().rows[row];
      const int32_t block = static_cast<int32_t>(row / s.block_rows), slot = x_slot(block);
      const int64_t at =
          ring_row(s, block, static_cast<int32_t>(row % s.block_rows), s.ring_blocks);
      if (!kept(block)) {
        me.ring_x[at] = is_padding(from) ? kPaddingValue : w.ranks[from.rank]->x[from.token];
        if (w.track) me.track_x[slot].end_write(user(block));
      }
      if (!forward()) {
        me.ring_dy[at] = is_padding(from) ? kPaddingValue : w.ranks[from.rank]->dy[from.token];
        if (w.track) me.track_dy[slot].end_write(user(block));
      }
      return true;
    }
    for (size_t i = 0; i < flying_.size();) {
      const int64_t block = flying_[i] / s.block_rows;
      uint32_t rows = 0;
      while (i < flying_.size() && flying_[i] / s.block_rows == block) ++i, ++rows;
      signal(me.x_full[x_slot(static_cast<int32_t>(block))], rows);
    }
    flying_.clear();
    landed_ = 0;
    units_taken_ = 0;
    return true;
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
inline std::vector<Tile> tiles_of_worker(const Shape& s, const HostPlan& plan, Pass pass,
                                         int32_t worker, int32_t workers) {
  std::vector<Tile> tiles;
  const BlockMap map = plan.map();
  const int32_t macrobatches = num_macrobatches(s, map.num_blocks);
  for (int32_t i = 0; i < macrobatches; ++i) {
    const int32_t m = macrobatch_at(pass, macrobatches, i);
    for (Phase phase : {first_phase(pass), second_phase(pass)}) {
      const int64_t first = phase_first_tile(s, map.num_blocks, m, phase);
      const int64_t end = first + phase_tiles(s, map.num_blocks, m, phase);
      for (int64_t t = first_owned(first, worker, workers); t < end; t += workers)
        tiles.push_back(phase_tile(s, map, m, phase, t - first));
    }
    if (pass == Pass::kForward) continue;
    const BlockRange range = macrobatch_range(s, map.num_blocks, m);
    for (int32_t end = range.end; end > range.first;) {
      const Group segment = segment_of_block(s, map, end - 1);
      for (int32_t n = 0; n < s.grad_weight_tiles; ++n)
        if (weight_tile_owner(s, segment.expert, n, workers) == worker)
          tiles.push_back({Phase::kGradWeight, end - 1, n});
      end = segment.first_block;
    }
  }
  return tiles;
}

class TileWorker : public Worker {
 public:
  TileWorker(World& world, int32_t rank, int32_t index, Pipe& pipe, const char* role)
      : Worker(world, rank, role + std::to_string(index)), index_(index), pipe_(pipe) {}

 protected:
  const int32_t index_;
  Pipe& pipe_;
  std::vector<Tile> tiles_;
  size_t next_ = 0;
  uint32_t stages_done_ = 0;  // over all launches

  void begin() override {
    tiles_ = tiles_of_worker(s, plan(), pass(), index_, w.setup.compute_workers);
    next_ = 0;
  }
  bool finished() const override { return next_ == tiles_.size(); }
  Pipe::Stage& stage() { return pipe_.stages[stages_done_ % pipe_.stages.size()]; }
  // Blocks that a tile reads, in the order it adds them.
  std::vector<int32_t> blocks_of(const Tile& t) const {
    if (t.phase != Phase::kGradWeight) return {t.block};
    const Group segment = segment_of_block(s, plan().map(), t.block);
    std::vector<int32_t> blocks;
    for (int32_t b = t.block; b >= segment.first_block; --b) blocks.push_back(b);
    return blocks;
  }
  bool reads_tokens(const Tile& t) const { return t.phase != second_phase(pass()); }
  bool reads_hidden(const Tile& t) const { return t.phase != first_phase(pass()); }
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
    if (t.phase == first_phase(pass()))
      return full(t.block) && full(gating_block(pass(), group_of_block(s, plan().map(), t.block)));
    for (int32_t b : blocks_of(t))
      if (!fault(Fault::kNoHiddenFull) &&
          !reached(me.h_full[h_slot(b)], h_full_target(s, generation(b, w.setup.hidden_ring))))
        return false;
    return true;
  }

  bool work() override {
    const Tile t = tiles_[next_];
    if (!half_) {
      if (stages_done_ - pipe_.consumed.load(std::memory_order_acquire) >= pipe_.stages.size())
        return false;
      if (!ready(t)) return false;
      from_.clear();
      for (int32_t b : blocks_of(t)) {
        mark(t, b, &Track::begin_read);
        for (int32_t row = 0; row < s.block_rows; ++row) {
          if (reads_tokens(t)) {
            from_.push_back(&me.ring_x[ring_row(s, b, row, s.ring_blocks)]);
            if (!forward()) from_.push_back(&me.ring_dy[ring_row(s, b, row, s.ring_blocks)]);
          }
          if (reads_hidden(t))
            for (int32_t n = 0; n < s.gate_up_tiles; ++n)
              from_.push_back(
                  &me.ring_h[ring_row(s, b, row, w.setup.hidden_ring) * s.gate_up_tiles + n]);
        }
      }
      stage().tile = t;
      stage().data.clear();
      copy(0, from_.size() / 2);
      return half_ = true;
    }
    copy(from_.size() / 2, from_.size());
    for (int32_t b : blocks_of(t)) mark(t, b, &Track::end_read);
    half_ = false;
    ++next_;
    ++stages_done_;
    signal(pipe_.loaded);
    return true;
  }

  void copy(size_t first, size_t end) {
    for (size_t i = first; i < end; ++i) stage().data.push_back(*from_[i]);
  }
  void mark(const Tile& t, int32_t block, void (Track::*what)(int64_t)) {
    if (!w.track) return;
    if (reads_tokens(t)) {
      (me.track_x[x_slot(block)].*what)(user(block));
      if (!forward()) (me.track_dy[x_slot(block)].*what)(user(block));
    }
    if (reads_hidden(t)) (me.track_h[h_slot(block)].*what)(user(block));
  }
};

// Computes a loaded tile: stores hidden tiles, pushes result rows to their slots, or adds to a
// weight tile; then signals what it has freed and what it has made.
class Consumer : public TileWorker {
 public:
  Consumer(World& world, int32_t rank, int32_t index, Pipe& pipe)
      : TileWorker(world, rank, index, pipe, "consumer ") {}

 private:
  int32_t row_ = 0;

  void begin() override {
    TileWorker::begin();
    if (forward()) return;
    for (int32_t e = 0; e < s.num_local_experts; ++e)  // nothing else writes these
      for (int32_t n = 0; n < s.grad_weight_tiles; ++n)
        if (plan().expert_rows[e] == 0 &&
            weight_tile_owner(s, e, n, w.setup.compute_workers) == index_)
          me.weight[e * s.grad_weight_tiles + n] = 0;
  }

  int32_t expert(const Tile& t) const {
    return rank_ * s.num_local_experts + plan().block_expert[t.block];
  }

  bool work() override {
    if (!reached(pipe_.loaded, stages_done_ + 1)) return false;
    const Tile t = tiles_[next_];
    require(stage().tile == t, "loader and consumer disagree about a tile", t.block, t.n);
    if (t.phase == Phase::kGradWeight) return add(t), advance();
    if (row_ == 0 && t.phase == first_phase(pass()) && !may_store(t)) return false;
    if (t.phase == first_phase(pass()))
      store(t, row_);
    else
      push(t, row_);
    if (++row_ < s.block_rows) return true;
    row_ = 0;
    if (t.phase == first_phase(pass())) {
      if (w.track) me.track_h[h_slot(t.block)].end_write(user(t.block));
      signal(me.h_full[h_slot(t.block)]);
      if (forward()) signal(me.x_empty[x_slot(t.block)]);
    } else {
      signal(me.h_empty[h_slot(t.block)]);
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
    if (w.track)
      me.track_h[slot].begin_write(user(t.block), s.gate_up_tiles,
                                   s.down_tiles + (forward() ? 0 : s.grad_weight_tiles));
    return true;
  }

  void store(const Tile& t, int32_t row) {
    const std::vector<uint64_t>& data = stage().data;
    const uint64_t x = forward() ? data[row] : data[2 * row];
    const uint64_t dy = forward() ? 0 : data[2 * row + 1];
    me.ring_h[ring_row(s, t.block, row, w.setup.hidden_ring) * s.gate_up_tiles + t.n] =
        hidden_value(x, dy, expert(t), t.n);
  }

  void push(const Tile& t, int32_t row) {
    const RowSource to = plan().rows[int64_t{t.block} * s.block_rows + row];
    if (is_padding(to)) return;
    Rank& source = *w.ranks[to.rank];
    const int64_t at = combine_slot(to.token, to.slot, s.num_tokens) * s.down_tiles + t.n;
    if (w.track)
      require(source.combined == static_cast<uint32_t>(launch_),
              "slot overwritten before the last launch's sum", to.rank, to.token);
    require(source.slot_epoch[at] != epoch(), "slot written twice", to.token, to.slot);
    source.slots[at] =
        output_value(&stage().data[row * s.gate_up_tiles], s.gate_up_tiles, expert(t), t.n);
    source.slot_epoch[at] = epoch();
  }

  void add(const Tile& t) {
    const Group segment = segment_of_block(s, plan().map(), t.block);
    uint64_t& sum = me.weight[segment.expert * s.grad_weight_tiles + t.n];
    if (starts_weight_sum(plan().map(), segment)) sum = 0;
    const int32_t per_row = 2 + s.gate_up_tiles;
    const uint64_t* data = stage().data.data();
    for (int32_t b : blocks_of(t)) {
      uint64_t part = 0;
      for (int32_t row = 0; row < s.block_rows; ++row, data += per_row)
        part += weight_value(data[0], data[1], data + 2, s.gate_up_tiles, t.n);
      sum = then(sum, part);
      signal(me.x_empty[x_slot(b)]);
      signal(me.h_empty[h_slot(b)]);
    }
  }
};

struct Crew {
  std::vector<std::unique_ptr<Pipe>> pipes;
  std::vector<std::unique_ptr<Actor>> actors;

  explicit Crew(World& world) {
    for (int32_t r = 0; r < world.setup.shape.num_ranks; ++r) {
      actors.push_back(std::make_unique<Front>(world, r));
      for (int32_t i = 0; i < world.setup.comm_workers; ++i)
        actors.push_back(std::make_unique<Puller>(world, r, i));
      for (int32_t i = 0; i < world.setup.compute_workers; ++i) {
        pipes.push_back(std::make_unique<Pipe>(world.setup.look_ahead));
        actors.push_back(std::make_unique<Loader>(world, r, i, *pipes.back()));
        actors.push_back(std::make_unique<Consumer>(world, r, i, *pipes.back()));
      }
    }
  }
};

// ---- one thread, random interleaving ----
struct Outcome {
  enum Kind { kDone, kDeadlock, kViolation } kind;
  std::string text;
};

// Lets random actors step until all are done or none can. Some actors are much slower than others.
inline Outcome simulate(World& world, Rng& rng) {
  Crew crew(world);
  std::vector<Actor*> tickets;
  for (const auto& actor : crew.actors)
    tickets.insert(tickets.end(), size_t{1} << (2 * pick(rng, 0, 2)), actor.get());
  const auto all_done = [&] {
    for (const auto& actor : crew.actors)
      if (!actor->done()) return false;
    return true;
  };
  size_t idle = 0;
  try {
    while (true) {
      Actor* actor = tickets[rng() % tickets.size()];
      if (!actor->done() && actor->step()) {
        idle = 0;
        continue;
      }
      if (++idle < 20) continue;
      if (all_done()) return {Outcome::kDone, ""};
      bool moved = false;  // steps have no effect when they return false: one sweep decides
      for (const auto& other : crew.actors)
        if (!other->done() && other->step()) moved = true;
      if (!moved) {
        std::string waiting;
        for (const auto& other : crew.actors)
          if (!other->done()) waiting += (waiting.empty() ? "" : ", ") + other->where();
        return {Outcome::kDeadlock, "no progress; waiting: " + waiting};
      }
      idle = 0;
    }
  } catch (const Violation& e) {
    return {Outcome::kViolation, e.what()};
  }
}

}  // namespace test

// The whole protocol of a call among several ranks, as small actors that take one step at a time:
// publish, pull into rings, both GEMMs, push to slots, sum; and the backward, with the roles and
// the counters of csrc/cuda/backward_sm90.cu. Step order is up to the caller: random interleavings
// (protocol_test, deadlock_test) or one thread per actor (threads_test). Numbers are hashes, so a
// stale or misplaced row changes the result.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <stdexcept>

#include "cases.h"
#include "protocol_program.h"
#include "protocol_values.h"

namespace test {

using namespace jax_mok::plan;

// What to get wrong, for negative controls.
enum class Fault {
  kNone,
  kNoTokensFull,   // compute does not wait for rows
  kNoTokensEmpty,  // forward: dispatch does not wait for a free slot
  kNoHiddenFull,   // forward
  kNoHiddenEmpty,  // forward
  kNoPublished,    // dispatch does not wait for the peer's rows
  kNoPushed,       // the sum does not wait for the peers
  // Dispatch.
  kHoldsBack,          // waits while a moved unit is not signalled yet
  kSignalsEarly,       // signals a unit whose stores are under way
  kNoBufferRead,       // loads into a buffer that a store still reads
  kNoLoaded,           // stores what has not been loaded yet
  kNoCopyWait,         // copies a row inside the ring without waiting for it
  kCopiesInSmallRing,  // copies inside a ring that does not hold all blocks
  // Backward.
  kNoMacrobatchWait,           // neither dispatch nor tiles wait for the macrobatch before
  kNoDispatchMacrobatchWait,   // dispatch does not
  kNoTileMacrobatchWait,       // tiles do not
  kNoProgressAtEnd,            // a loader does not say that its worker has no more tiles
  kNoProgressAtMacrobatchEnd,  // or none of this macrobatch
  kSmallHiddenTarget,          // hidden gradients of this macrobatch only are counted on
  kNoHiddenWait,
  kOneOpenSum,  // one buffer of open sums instead of two
  kNoSharedFull,
  kNoAllSharedFull,
  kNoReady,       // the loader does not wait for a tile's inputs
  kNoDone,        // a tile's end is told before consumers and loader are done with it
  kNoReleased,    // an entry of the tile ring is overwritten at once
  kNoStageEmpty,  // a stage is loaded before it has been read
  kNoOutboxEmpty,
  kNoOutboxFull,
  kNoOutboxRead,     // a slot of the outbox is given back before it has been read
  kNoHiddenWritten,  // hidden gradients are told of before they are written
  // Shared memory that is used in another way is not waited for: see make_room().
  kNoRoomBeforeHidden,    // for recomputed hidden gradients
  kNoRoomAfterHidden,     // after them
  kNoRoomBetweenHiddens,  // between recomputed and saved ones
  kNoRoomBeforeSaved,     // for saved ones, after anything but recomputed ones
  kNoRoomAfterSaved,      // after them, but for recomputed ones
  kNoRoomForEmpty,        // by the scheduler, for weights of an expert without rows
  kNothingForEmpty,       // experts without rows are left out
  kSkipsRows,             // the second half of a last block is left out, though it has rows
  kIgnoresSaved,          // saved tokens, which are not pulled, are looked for in the ring
};

struct Setup {
  Shape shape;
  int32_t compute_workers = 1;
  int32_t comm_workers = 0;  // 0: a role of every compute worker, else workers of their own
  // Dispatch: rows of a unit, which divide block_rows, pieces of a row, and pieces that a worker
  // holds. A unit fits the buffers, or it is one row that is moved in several turns.
  int32_t unit_rows = 2, row_parts = 1, buffers = 2;
  int32_t look_ahead = 1;   // forward: tiles a loader may be ahead of its consumer
  int32_t hidden_ring = 0;  // shape.macrobatch_blocks, other values only in negative controls
  // Backward.
  GradFacts grad;
  bool save = false;  // the forward has left its last blocks; then shape.ring_blocks must be
                      // shape.macrobatch_blocks
  int32_t consumer_warps = 2;          // of a compute worker; divides block_rows, which is even
  int32_t weight_panels = 1;           // slots of the outbox that a weight tile takes, at most 4
  bool weight_panels_together = true;  // they are filled together, or one by one
  // Blocks that the dispatcher of a compute worker may be ahead of its loader; negative: as many as
  // in the kernel. With less than group_blocks - 1 it deadlocks.
  int32_t dispatch_lead = -1;
  Fault fault = Fault::kNone;

  int32_t dispatchers() const { return comm_workers > 0 ? comm_workers : compute_workers; }
  int32_t most_ahead() const {
    return dispatch_lead >= 0
               ? dispatch_lead
               : compute_workers * 3 / (2 * shape.gate_up_tiles) + 2 * shape.group_blocks;
  }
  // The backward's token rings hold a macrobatch.
  Shape backward_shape() const {
    Shape s = shape;
    s.ring_blocks = s.macrobatch_blocks;
    s.rows_in_flight = 0;
    return s;
  }
  int32_t shared_blocks() const {
    return grad.shared_hidden_tiles > 0
               ? static_cast<int32_t>(ceil_div(shape.num_tokens, shape.block_rows))
               : 0;
  }
};

struct Routing {
  Ids ids;
  std::vector<HostPlan> plans;
  std::vector<std::vector<int32_t>> first_use_backward;  // as HostPlan::first_use

  Routing(const Shape& s, Ids ids_of_ranks) : ids(std::move(ids_of_ranks)) {
    for (int32_t r = 0; r < s.num_ranks; ++r) {
      plans.push_back(build(s, pointers(ids).data(), r));
      const std::vector<RowSource>& rows = plans.back().rows;
      std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>> rows_of_token;
      for (size_t row = 0; row < rows.size(); ++row)
        if (!is_padding(rows[row]))
          rows_of_token[{rows[row].rank, rows[row].token}].push_back(static_cast<int32_t>(row));
      first_use_backward.emplace_back(rows.size(), -1);
      for (const auto& [token, all] : rows_of_token)
        for (size_t i = 0; i < all.size(); ++i)
          first_use_backward.back()[all[i]] =
              first_use_of(all.data(), static_cast<int32_t>(all.size()), static_cast<int32_t>(i), s,
                           Pass::kBackward);
    }
  }
};

// One kernel launch; a backward launch follows the forward launch with the same routing and salt.
struct Launch {
  Pass pass;
  const Routing* routing;
  uint64_t salt;
  Expected expected;
};

inline Launch make_launch(const Setup& setup, Pass pass, const Routing& routing, uint64_t salt) {
  return {pass, &routing, salt,
          pass == Pass::kForward ? expected_forward(setup.shape, routing.ids, salt)
                                 : expected_backward(setup.shape, setup.grad, routing.ids, salt)};
}

struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};
inline void require(bool condition, const char* what, int64_t a = 0, int64_t b = 0) {
  if (!condition)
    throw Violation(std::string(what) + " (" + std::to_string(a) + ", " + std::to_string(b) + ")");
}

// Who uses a ring slot, so that reuse while it is read, reads before it is full and second writes
// are seen at once. Only for one thread: with real threads the sanitizer and the values must tell.
struct Track {
  int64_t user = -1;
  int32_t writes = 0, writes_wanted = 0, reads = 0, reads_wanted = 0, active = 0;

  bool done() const {
    return user < 0 || (writes == writes_wanted && reads == reads_wanted && active == 0);
  }
  void begin_write(int64_t new_user, int32_t new_writes, int32_t new_reads) {
    if (user != new_user) {
      require(done(), "slot reused before its last reader is done: user, next", user, new_user);
      *this = {new_user, 0, new_writes, 0, new_reads, 0};
    }
    require(writes < writes_wanted, "slot written more often than wanted", user, writes);
  }
  void end_write(int64_t by) {
    require(user == by, "slot taken away while it is written", user, by);
    ++writes;
  }
  void begin_read(int64_t by) {
    require(user == by, "read of a slot that holds another block", user, by);
    require(writes == writes_wanted, "read of a slot that is not full", user, writes);
    ++active;
  }
  void end_read(int64_t by) {
    require(user == by, "slot overwritten while it is read", user, by);
    --active;
    ++reads;
    require(reads <= reads_wanted, "slot read more often than counted", user, reads);
  }
};

using Counter = std::atomic<uint32_t>;
inline bool reached(const Counter& c, uint32_t target) {
  return c.load(std::memory_order_acquire) >= target;
}
inline void signal(Counter& c, uint32_t amount = 1) {
  c.fetch_add(amount, std::memory_order_release);
}

// mbarrier: a phase is complete when all arrivals have come, and then the next one begins.
class Barrier {
 public:
  void reset(uint32_t arrivals) {
    arrivals_ = arrivals;
    arrived_.store(0, std::memory_order_relaxed);
  }
  void arrive() { signal(arrived_); }
  // Whether the phase of this parity is complete, or was the last one before a fresh barrier.
  bool passed(uint32_t parity) const {
    return (arrived_.load(std::memory_order_acquire) / arrivals_ & 1) != parity;
  }

 private:
  uint32_t arrivals_ = 1;
  Counter arrived_{0};
};

// Position of a role in a ring of kSize entries.
template <int32_t kSize>
struct RingCursor {
  uint32_t count = 0;
  int32_t slot() const { return count % kSize; }
  uint32_t parity() const { return count / kSize & 1; }
  void advance() { ++count; }
};

// ---- shared memory of a compute worker in the backward ----
constexpr int32_t kTileRing = 4, kStages = 3, kPairs = 2, kOutboxSlots = 4;

enum class GradWork {
  kHidden,
  kHiddenSaved,
  kInput,
  kDownWeight,
  kGateUpWeight,
  kBias,
  kMacrobatchEnd,
  kEnd
};
struct GradTile {
  GradWork work = GradWork::kEnd;
  bool shared = false;
  int32_t n = 0;           // column tile, or index among the expert's weight tiles
  int32_t num_stages = 0;  // weights: half blocks of the expert's rows here; 0: it has none
  int32_t block = 0;       // of the plan or of the local tokens; weights: the segment's last
  int32_t expert = 0;      // local
  int32_t skip = 0;        // weights: 1: the last block's second half is padding
  int32_t open_in = -1, open_out = -1;  // weights: buffers of open sums
  int32_t progress = 0;  // block of the plan down to which hidden gradients are under way
};

// How tiles use shared memory.
enum class SharedUse { kNone, kHidden, kHiddenSaved, kOther };
inline SharedUse shared_use(GradWork work) {
  return work == GradWork::kHidden        ? SharedUse::kHidden
         : work == GradWork::kHiddenSaved ? SharedUse::kHiddenSaved
                                          : SharedUse::kOther;
}

struct ComputeWorker {
  std::array<GradTile, kTileRing> tiles;
  std::array<Barrier, kTileRing> known, ready, done, released;
  std::array<Barrier, kStages> stage_full, stage_empty;
  std::array<Barrier, 2 * kPairs> pair_full, pair_empty;
  std::array<Barrier, kOutboxSlots> outbox_full, outbox_empty;
  std::atomic<int32_t> progress{0};  // that of the tile which the loader is at
  // Stages, then the outbox. Recomputed hidden gradients have two pairs of stages of their own, in
  // the same place, of which the last reaches into the outbox. Behind it every consumer warp has a
  // piece of the outbox where it turns hidden gradients, recomputed or not, into rows.
  std::vector<uint64_t> memory;
  size_t stage_size = 0, slot_size = 0;

  uint64_t* stage(int32_t i) { return &memory[i * stage_size]; }
  uint64_t* slot(int32_t i) { return &memory[kStages * stage_size + i * slot_size]; }
  uint64_t* pair_stage(int32_t i) { return i < kStages ? stage(i) : slot(i - kStages); }
  uint64_t* staging(int32_t warp, int32_t rows) {
    return slot(2 * kPairs - kStages) + int64_t{warp} * 3 * rows;
  }

  void reset(const Setup& setup, int32_t num_blocks) {
    const auto all = [](auto& barriers, int32_t arrivals) {
      for (Barrier& b : barriers) b.reset(arrivals);
    };
    all(known, 1);
    all(ready, 1);
    all(done, setup.consumer_warps + 1);  // and the loader
    all(released, 1);
    all(stage_full, 1);
    all(stage_empty, setup.consumer_warps);
    all(pair_full, 1);
    all(pair_empty, setup.consumer_warps);
    all(outbox_full, setup.consumer_warps);
    all(outbox_empty, 1);
    const size_t most_columns = setup.grad.hidden_columns(
        std::max(setup.shape.gate_up_tiles, setup.grad.shared_hidden_tiles));
    stage_size = setup.shape.block_rows * (2 * most_columns + 1);
    slot_size = setup.shape.block_rows;
    progress.store(num_blocks, std::memory_order_relaxed);
    memory.assign(kStages * stage_size + kOutboxSlots * slot_size, 0);
  }
};

// Rows of the hidden layer in the backward: [rows][columns] each.
struct HiddenRows {
  std::vector<uint64_t> h, d_gate, d_up;
  void fill(size_t size, uint64_t value) {
    for (auto* array : {&h, &d_gate, &d_up}) array->assign(size, value);
  }
};

// Something that is written once in a launch.
struct Results {
  std::vector<uint64_t> values;
  std::vector<uint32_t> epochs;  // of the launch that wrote them
  explicit Results(size_t size) : values(size), epochs(size) {}
  void write(int64_t at, uint64_t value, uint32_t epoch, const char* what) {
    require(epochs[at] != epoch, what, at);
    values[at] = value;
    epochs[at] = epoch;
  }
  void written(int64_t at, uint32_t epoch, const char* what) {
    require(epochs[at] != epoch, what, at);
    epochs[at] = epoch;
  }
  uint64_t read(int64_t at, uint32_t epoch, const char* what) const {
    require(epochs[at] == epoch, what, at);
    return values[at];
  }
};

// What one rank has: its part of the symmetric heap, its rings, its counters.
struct Rank {
  std::vector<uint64_t> x, dy;             // [T]; peers read these
  Results slots;                           // [top_k][T][down_tiles]; peers write these
  Results dots;                            // [T * top_k][hidden columns + 1]; likewise
  std::vector<Counter> published, pushed;  // [num_ranks], written by the peers: epochs
  Counter started{0}, finished{0};         // kernel boundary on this rank
  std::vector<Counter> x_full, x_empty, h_full, h_empty;
  std::vector<uint64_t> ring_x;  // [ring_blocks][block_rows]; the forward's, and what it saves
  std::vector<uint64_t> ring_h;  // [hidden_ring][block_rows][gate_up_tiles]; likewise
  std::vector<Track> track_x, track_h;
  uint32_t combined = 0;  // launches summed; read by others only in one thread

  // Backward.
  std::vector<Counter> grad_x_full, expert_full, shared_full, macrobatch_done;
  Counter all_shared_full{0};
  std::vector<uint64_t> grad_ring_x, grad_ring_dy;  // [macrobatch_blocks][block_rows]
  HiddenRows routed, shared;
  Results weight, shared_weight;    // [expert * tiles + n][panels][consumer_warps]
  Results shared_dx;                // [T][down_tiles]
  Results shared_dots;              // [T][hidden columns]
  std::vector<uint64_t> open_sums;  // [2][grad_weight_tiles][consumer_warps]
  std::vector<std::unique_ptr<ComputeWorker>> compute;

  explicit Rank(const Setup& setup) : Rank(setup, setup.shape) {}

  // A kernel that begins finds all counters zero.
  void reset(const Setup& setup, int32_t num_blocks) {
    for (auto* counters : {&x_full, &x_empty, &h_full, &h_empty, &grad_x_full, &expert_full,
                           &shared_full, &macrobatch_done})
      for (Counter& c : *counters) c.store(0, std::memory_order_relaxed);
    all_shared_full.store(0, std::memory_order_relaxed);
    finished.store(0, std::memory_order_relaxed);
    for (auto& worker : compute) worker->reset(setup, num_blocks);
  }
  // Nothing that an earlier launch left is of any use, but for what the forward saves.
  void poison(const Setup& setup) {
    const Shape& s = setup.shape;
    grad_ring_x.assign(s.macrobatch_blocks * s.block_rows, kPoison);
    grad_ring_dy.assign(grad_ring_x.size(), kPoison);
    routed.fill(grad_ring_x.size() * setup.grad.hidden_columns(s.gate_up_tiles), kPoison);
    shared.fill(size_t{1} * setup.shared_blocks() * s.block_rows *
                    setup.grad.hidden_columns(setup.grad.shared_hidden_tiles),
                kPoison);
    open_sums.assign(2 * s.grad_weight_tiles * setup.consumer_warps, kPoison);
  }
  static constexpr uint64_t kPoison = 0xdeadbeefdeadbeefu;

 private:
  Rank(const Setup& setup, const Shape& s)
      : x(s.num_tokens),
        dy(s.num_tokens),
        slots(int64_t{s.top_k} * s.num_tokens * s.down_tiles),
        dots(int64_t{s.top_k} * s.num_tokens * (setup.grad.hidden_columns(s.gate_up_tiles) + 1)),
        published(s.num_ranks),
        pushed(s.num_ranks),
        x_full(s.ring_blocks),
        x_empty(s.ring_blocks),
        h_full(setup.hidden_ring),
        h_empty(setup.hidden_ring),
        ring_x(s.ring_blocks * s.block_rows),
        ring_h(setup.hidden_ring * s.block_rows * s.gate_up_tiles),
        track_x(s.ring_blocks),
        track_h(setup.hidden_ring),
        grad_x_full(s.macrobatch_blocks),
        expert_full(s.num_local_experts),
        shared_full(setup.shared_blocks()),
        macrobatch_done(max_macrobatches(s)),
        weight(s.num_local_experts * s.grad_weight_tiles * setup.weight_panels *
               setup.consumer_warps),
        shared_weight(setup.grad.shared_weights * setup.weight_panels * setup.consumer_warps),
        shared_dx(s.num_tokens * s.down_tiles),
        shared_dots(s.num_tokens * setup.grad.hidden_columns(setup.grad.shared_hidden_tiles)) {
    for (int32_t i = 0; i < setup.compute_workers; ++i)
      compute.push_back(std::make_unique<ComputeWorker>());
  }
};

struct World {
  Setup setup;
  Shape backward_shape;
  bool track;         // use Track and `combined`
  uint64_t seed = 0;  // of the order in which copies land
  std::vector<Launch> launches;
  std::vector<std::unique_ptr<Rank>> ranks;

  World(const Setup& with, std::vector<Launch> run, bool one_thread)
      : setup(with), track(one_thread), launches(std::move(run)) {
    if (setup.hidden_ring == 0) setup.hidden_ring = setup.shape.macrobatch_blocks;
    backward_shape = setup.backward_shape();
    for (int32_t r = 0; r < setup.shape.num_ranks; ++r)
      ranks.push_back(std::make_unique<Rank>(setup));
  }
  // Actors that take part in a launch on one rank.
  int32_t workers_per_rank(Pass pass) const {
    const int32_t roles = pass == Pass::kForward ? 2 : 3 + setup.consumer_warps;
    return setup.dispatchers() + roles * setup.compute_workers;
  }
  int32_t num_launches() const { return static_cast<int32_t>(launches.size()); }
};

// Runs its part of launch after launch. step() does a little and returns true, or returns false if
// it must wait; it never waits inside.
class Actor {
 public:
  Actor(World& world, int32_t rank, std::string role, Pass acts_in = Pass::kForward)
      : w(world),
        s(acts_in == Pass::kForward ? world.setup.shape : world.backward_shape),
        me(*world.ranks[rank]),
        rank_(rank),
        role_(std::move(role)) {}
  virtual ~Actor() = default;
  virtual bool step() = 0;
  bool done() const { return launch_ == w.num_launches(); }
  std::string where() const {
    return "rank " + std::to_string(rank_) + " " + role_ + " launch " + std::to_string(launch_);
  }

 protected:
  World& w;
  const Shape& s;
  Rank& me;
  int32_t rank_, launch_ = 0;

  uint32_t epoch() const { return launch_ + 1; }
  const Launch& launch() const { return w.launches[launch_]; }
  const HostPlan& plan() const { return launch().routing->plans[rank_]; }
  Pass pass() const { return launch().pass; }
  bool forward() const { return pass() == Pass::kForward; }
  bool fault(Fault f) const { return w.setup.fault == f; }
  int64_t user(int32_t block) const { return int64_t{launch_} << 32 | block; }
  int32_t generation(int32_t block, int32_t capacity) const {
    return ring_generation(pass(), plan().num_blocks(), block, capacity);
  }
  int32_t x_slot(int32_t block) const { return ring_slot(block, s.ring_blocks); }
  int32_t h_slot(int32_t block) const { return ring_slot(block, w.setup.hidden_ring); }

 private:
  std::string role_;
};

// A part of the kernel of one pass: begins when the rank's kernel has started, says when it has
// finished. Launches of the other pass go by.
class Worker : public Actor {
 public:
  Worker(World& world, int32_t rank, std::string role, Pass acts_in)
      : Actor(world, rank, std::move(role), acts_in), acts_in_(acts_in) {}
  bool step() final {
    if (pass() != acts_in_) return ++launch_, true;
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
  const Pass acts_in_;
  bool running_ = false;
};

// A role of the kernel, written as the kernel has it: one program whose waits are explicit.
// Copies that it hands to the copy engine land at any time, whatever the role itself waits for.
class Role : public Worker {
 public:
  Role(World& world, int32_t rank, const std::string& role, int32_t index, Pass acts_in)
      : Worker(world, rank, role + " " + std::to_string(index), acts_in),
        index_(index),
        rng_(++world.seed) {}

 protected:
  const int32_t index_;
  Copies loads_, stores_;  // to shared memory, and from it

  virtual Program run() = 0;
  Until until(std::function<bool()> condition) { return {program_, std::move(condition)}; }
  Until wait(const Barrier& barrier, uint32_t parity) {
    return until([&barrier, parity] { return barrier.passed(parity); });
  }
  Until wait(const Counter& counter, int64_t target) {
    return until([&counter, target] { return reached(counter, static_cast<uint32_t>(target)); });
  }
  // Somebody else may act.
  Until pause() { return {program_, nullptr}; }

 private:
  Rng rng_;
  RunningProgram program_;

  void begin() override { program_.start(run()); }
  bool finished() const override { return program_.done() && loads_.empty() && stores_.empty(); }
  bool work() override {
    const bool copies_first = rng_() % 2 == 0;
    return (copies_first && copy()) || program_.step() || (!copies_first && copy());
  }
  bool copy() {
    const bool which = rng_() % 2 == 0;
    return (which ? loads_ : stores_).step(rng_) || (which ? stores_ : loads_).step(rng_);
  }
};

}  // namespace test

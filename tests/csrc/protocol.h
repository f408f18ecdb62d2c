// The whole protocol of a call among several ranks, as small actors that take one step at a time:
// publish, pull into rings, both GEMMs, push to slots, sum; and the backward in reverse. Step order
// is up to the caller: random interleavings (protocol_test, deadlock_test) or one thread per actor
// (threads_test). Numbers are hashes, so a stale or misplaced row changes the result.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>

#include "cases.h"
#include "protocol_values.h"

namespace test {

using namespace jax_mok::plan;

// Waits to leave out, for negative controls.
enum class Fault {
  kNone,
  kNoTokensFull,   // compute does not wait for rows
  kNoTokensEmpty,  // pull does not wait for a free slot
  kNoHiddenFull,
  kNoHiddenEmpty,
  kNoPublished,  // pull does not wait for the peer's rows
  kNoPushed,     // the sum does not wait for the peers
};

struct Setup {
  Shape shape;
  int32_t comm_workers = 1;
  int32_t unit_rows = 1;        // rows that share one signal
  int32_t units_in_flight = 1;  // taken by a worker before it signals the first of them
  int32_t compute_workers = 1;
  int32_t look_ahead = 1;     // tiles a loader may be ahead of its consumer
  int32_t hidden_ring = 0;    // shape.macrobatch_blocks, other values only in negative controls
  bool flush = false;         // pullers signal everything before they enter a new macrobatch
  bool reuse_tokens = false;  // the backward takes from the ring what the forward left there
  Fault fault = Fault::kNone;
};

// Distance from a puller's oldest unsignalled row to the row it may wait for: its units are
// comm_workers units apart.
inline int32_t rows_in_flight(const Setup& s) {
  return (s.units_in_flight - 1) * s.comm_workers * s.unit_rows + s.unit_rows - 1;
}

struct Routing {
  Ids ids;
  std::vector<HostPlan> plans;
  Routing(const Shape& s, Ids ids_of_ranks) : ids(std::move(ids_of_ranks)) {
    for (int32_t r = 0; r < s.num_ranks; ++r) plans.push_back(build(s, pointers(ids).data(), r));
  }
};

// One kernel launch; a backward launch follows the forward launch with the same routing and salt.
struct Launch {
  Pass pass;
  const Routing* routing;
  uint64_t salt;
  Expected expected;
};

inline Launch make_launch(const Shape& s, Pass pass, const Routing& routing, uint64_t salt) {
  return {pass, &routing, salt, expected_results(s, routing.ids, pass, salt)};
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
  // The forward's block stays for the backward.
  void adopt(int64_t old_user, int64_t new_user, int32_t new_reads) {
    if (user == new_user) return;
    require(user == old_user && done(), "kept block is not in its slot", user, old_user);
    *this = {new_user, writes_wanted, writes_wanted, 0, new_reads, 0};
  }
};

using Counter = std::atomic<uint32_t>;
inline bool reached(const Counter& c, uint32_t target) {
  return c.load(std::memory_order_acquire) >= target;
}
inline void signal(Counter& c, uint32_t amount = 1) {
  c.fetch_add(amount, std::memory_order_release);
}

// What one rank has: its part of the symmetric heap, its rings, its counters.
struct Rank {
  std::vector<uint64_t> x, dy;             // [T]; peers read these
  std::vector<uint64_t> slots;             // [top_k][T][down_tiles]; peers write these
  std::vector<uint32_t> slot_epoch;        // launch that wrote a slot
  std::vector<Counter> published, pushed;  // [num_ranks], written by the peers: epochs
  Counter started{0}, finished{0};         // kernel boundary on this rank
  std::vector<Counter> x_full, x_empty, h_full, h_empty;
  std::vector<uint64_t> ring_x, ring_dy;  // [ring_blocks][block_rows]
  std::vector<uint64_t> ring_h;           // [hidden_ring][block_rows][gate_up_tiles]
  std::vector<Track> track_x, track_dy, track_h;
  std::vector<uint64_t> weight;  // [num_local_experts][grad_weight_tiles]
  uint32_t combined = 0;         // launches summed; read by others only in one thread

  Rank(const Shape& s, int32_t hidden_ring)
      : x(s.num_tokens),
        dy(s.num_tokens),
        slots(int64_t{s.top_k} * s.num_tokens * s.down_tiles),
        slot_epoch(slots.size()),
        published(s.num_ranks),
        pushed(s.num_ranks),
        x_full(s.ring_blocks),
        x_empty(s.ring_blocks),
        h_full(hidden_ring),
        h_empty(hidden_ring),
        ring_x(s.ring_blocks * s.block_rows),
        ring_dy(ring_x.size()),
        ring_h(hidden_ring * s.block_rows * s.gate_up_tiles),
        track_x(s.ring_blocks),
        track_dy(s.ring_blocks),
        track_h(hidden_ring),
        weight(s.num_local_experts * s.grad_weight_tiles) {}
};

struct World {
  Setup setup;
  bool track;  // use Track and `combined`
  std::vector<Launch> launches;
  std::vector<std::unique_ptr<Rank>> ranks;

  World(const Setup& with, std::vector<Launch> run, bool one_thread)
      : setup(with), track(one_thread), launches(std::move(run)) {
    if (setup.hidden_ring == 0) setup.hidden_ring = setup.shape.macrobatch_blocks;
    for (int32_t r = 0; r < setup.shape.num_ranks; ++r)
      ranks.push_back(std::make_unique<Rank>(setup.shape, setup.hidden_ring));
  }
  int32_t workers_per_rank() const { return setup.comm_workers + 2 * setup.compute_workers; }
  int32_t num_launches() const { return static_cast<int32_t>(launches.size()); }
};

// Runs its part of launch after launch. step() does a little and returns true, or returns false if
// it must wait; it never waits inside.
class Actor {
 public:
  Actor(World& world, int32_t rank, std::string role)
      : w(world),
        s(world.setup.shape),
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

}  // namespace test

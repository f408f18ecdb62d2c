// Negative controls: set-ups that must deadlock do, protocols with a wait left out are caught, and
// the same simulation without the flaw runs through. They show that protocol_test can fail.
#include <map>

#include "check.h"
#include "protocol_cases.h"

using namespace test;

namespace {

struct Tally {
  int done = 0, deadlock = 0, violation = 0;
  std::string last;
  void add(const Outcome& outcome) {
    ++(outcome.kind == Outcome::kDone       ? done
       : outcome.kind == Outcome::kDeadlock ? deadlock
                                            : violation);
    if (outcome.kind != Outcome::kDone) last = outcome.text;
  }
};

// One expert a rank with many rows: groups and macrobatches are full.
Setup busy_setup() {
  Setup setup;
  Shape& s = setup.shape;
  s.num_ranks = 2;
  s.num_tokens = 24;
  s.top_k = 1;
  s.num_local_experts = 1;
  s.block_rows = 2;
  s.gate_up_tiles = 2;
  s.down_tiles = 2;
  s.grad_weight_tiles = 2;
  s.group_blocks = 3;
  s.macrobatch_blocks = 4;
  s.ring_blocks = 4;
  s.source_order = SourceOrder::kInterleaved;
  setup.compute_workers = 3;
  setup.comm_workers = 2;
  setup.look_ahead = 2;
  return setup;
}

// Every token goes to expert 0 or 1 in turn, so both ranks have the same full blocks.
Ids even_ids(const Shape& s) {
  std::vector<int32_t> ids;
  for (int32_t token = 0; token < s.num_tokens; ++token) ids.push_back(token % 2);
  return Ids(s.num_ranks, ids);
}

// `rounds` random interleavings. The plan is built from the legal set-up; ring_blocks and
// hidden_ring may then be smaller than check() allows.
Tally many(const Setup& legal, const std::vector<Pass>& passes, int32_t ring_blocks,
           int32_t hidden_ring, int rounds = 40) {
  const Routing routing(legal.shape, even_ids(legal.shape));
  Setup setup = legal;
  setup.shape.ring_blocks = ring_blocks;
  setup.hidden_ring = hidden_ring;
  Rng rng(9);
  Tally tally;
  for (int round = 0; round < rounds; ++round) {
    std::vector<Launch> launches;
    for (Pass pass : passes)
      launches.push_back(make_launch(legal.shape, pass, routing, 1 + launches.size() / 2));
    World world(setup, std::move(launches), true);
    tally.add(simulate(world, rng));
  }
  return tally;
}

Tally many(const Setup& legal, const std::vector<Pass>& passes) {
  return many(legal, passes, legal.shape.ring_blocks, legal.shape.macrobatch_blocks);
}

const std::vector<Pass> kOnlyForward{Pass::kForward};
const std::vector<Pass> kBoth{Pass::kForward, Pass::kBackward};

}  // namespace

TEST(token_ring_smaller_than_its_group_deadlocks) {
  Setup setup = busy_setup();
  for (int32_t ring : {1, 2, 3, 4}) {
    const Tally tally = many(setup, kOnlyForward, ring, setup.shape.macrobatch_blocks);
    const bool enough = ring >= setup.shape.group_blocks;
    CHECK(tally.deadlock == (enough ? 0 : 40) && tally.violation == 0, "ring ", ring, ": ",
          tally.deadlock, " deadlocks, ", tally.violation, " violations; ", tally.last);
  }
}

TEST(rows_in_flight_need_ring_beyond_the_group) {
  Setup setup = busy_setup();
  setup.comm_workers = 1;
  setup.unit_rows = setup.shape.block_rows;
  setup.units_in_flight = 3;  // two blocks ahead of the oldest unsignalled row
  setup.shape.rows_in_flight = 2 * setup.shape.block_rows;
  const int32_t bound = 5;
  setup.shape.ring_blocks = bound;
  CHECK(min_ring_blocks(setup.shape) == bound);
  for (int32_t ring : {3, 4, 5}) {
    const Tally tally = many(setup, kOnlyForward, ring, setup.shape.macrobatch_blocks);
    if (ring < bound)
      CHECK(tally.deadlock > 0 && tally.violation == 0, "ring ", ring, ": ", tally.deadlock);
    else
      CHECK(tally.done == 40, "ring ", ring, ": ", tally.last);
  }
}

TEST(hidden_ring_smaller_than_the_macrobatch_deadlocks) {
  Setup setup = busy_setup();
  setup.compute_workers = 1;  // several may by luck split the tiles so that it runs through
  for (int32_t ring : {1, 3, 4}) {
    const Tally tally = many(setup, kOnlyForward, setup.shape.ring_blocks, ring);
    CHECK(tally.deadlock == (ring < 4 ? 40 : 0) && tally.violation == 0, "ring ", ring, ": ",
          tally.deadlock, "; ", tally.last);
  }
}

TEST(backward_token_ring_smaller_than_the_macrobatch_deadlocks) {
  const Setup setup = busy_setup();
  for (int32_t ring : {3, 4}) {
    const Tally tally = many(setup, kBoth, ring, setup.shape.macrobatch_blocks);
    CHECK(tally.deadlock == (ring < 4 ? 40 : 0) && tally.violation == 0, "ring ", ring, ": ",
          tally.deadlock, "; ", tally.last);
  }
}

TEST(backward_rows_in_flight_over_a_macrobatch_boundary) {
  Setup setup = busy_setup();
  setup.comm_workers = 1;
  setup.unit_rows = 3;  // the second unit crosses blocks and macrobatches
  setup.units_in_flight = 2;
  setup.shape.rows_in_flight = rows_in_flight(setup);
  setup.shape.ring_blocks = static_cast<int32_t>(min_ring_blocks_backward(setup.shape));
  CHECK(many(setup, kBoth).done == 40);
  setup.shape.rows_in_flight = 0;
  setup.shape.ring_blocks = setup.shape.macrobatch_blocks;
  CHECK(many(setup, kBoth).deadlock > 0);
  setup.flush = true;  // signalling all of a macrobatch first makes the plain ring enough
  CHECK(many(setup, kBoth).done == 40);
}

TEST(every_missing_wait_is_noticed) {
  const std::map<Fault, const char*> faults{
      {Fault::kNoTokensFull, "tokens full"}, {Fault::kNoTokensEmpty, "tokens empty"},
      {Fault::kNoHiddenFull, "hidden full"}, {Fault::kNoHiddenEmpty, "hidden empty"},
      {Fault::kNoPublished, "published"},    {Fault::kNoPushed, "pushed"},
  };
  Setup setup = busy_setup();
  CHECK(many(setup, kBoth).done == 40);
  for (const auto& [fault, name] : faults) {
    setup.fault = fault;
    const Tally tally = many(setup, {Pass::kForward, Pass::kBackward, Pass::kForward});
    CHECK(tally.violation >= 20 && tally.deadlock == 0, name, ": ", tally.violation,
          " of 40 caught, ", tally.deadlock, " deadlocks");
  }
}

// ---- why results are pushed ----
// Results stay in a ring of `ring_blocks` blocks at the expert's rank until their sources pull
// them, each token in a fixed order. Nothing here depends on the interleaving: more progress never
// hurts.
namespace {

enum class PullOrder { kSlot, kLocalExpertThenOwner };

bool pull_from_ring_deadlocks(const Shape& s, const Ids& ids, int64_t ring_blocks,
                              PullOrder order) {
  struct Place {
    int32_t rank, block;
  };
  std::vector<std::vector<ReferenceBlock>> blocks;
  std::map<std::tuple<int32_t, int32_t, int32_t>, Place> place;
  for (int32_t r = 0; r < s.num_ranks; ++r) {
    blocks.push_back(reference_blocks(s, ids, r));
    for (size_t b = 0; b < blocks[r].size(); ++b)
      for (const RowSource& row : blocks[r][b].rows)
        if (row.rank >= 0) place[{row.rank, row.token, row.slot}] = {r, static_cast<int32_t>(b)};
  }
  std::vector<std::vector<Place>> wanted;  // of each token, in its order
  for (int32_t r = 0; r < s.num_ranks; ++r)
    for (int32_t token = 0; token < s.num_tokens; ++token) {
      std::vector<std::pair<int32_t, int32_t>> slots;  // (sort key, slot)
      for (int32_t slot = 0; slot < s.top_k; ++slot) {
        const int32_t id = ids[r][token * s.top_k + slot];
        if (id < 0) continue;
        const int32_t key =
            order == PullOrder::kSlot
                ? slot
                : local(id, s.num_local_experts) * s.num_ranks + owner(id, s.num_local_experts);
        slots.push_back({key, slot});
      }
      std::sort(slots.begin(), slots.end());
      wanted.emplace_back();
      for (const auto& [key, slot] : slots) wanted.back().push_back(place.at({r, token, slot}));
    }
  std::vector<size_t> pulled(wanted.size(), 0), made(s.num_ranks, 0);
  std::vector<std::vector<int32_t>> unread(s.num_ranks);  // rows of a block not pulled yet
  for (int32_t r = 0; r < s.num_ranks; ++r)
    for (const ReferenceBlock& block : blocks[r])
      unread[r].push_back(std::count_if(block.rows.begin(), block.rows.end(),
                                        [](const RowSource& row) { return row.rank >= 0; }));
  for (bool moved = true; moved;) {
    moved = false;
    for (int32_t r = 0; r < s.num_ranks; ++r) {
      const int64_t free = static_cast<int64_t>(made[r]) - ring_blocks;
      if (made[r] < blocks[r].size() && (free < 0 || unread[r][free] == 0)) {
        ++made[r];
        moved = true;
      }
    }
    for (size_t t = 0; t < wanted.size(); ++t) {
      if (pulled[t] == wanted[t].size()) continue;
      const Place p = wanted[t][pulled[t]];
      if (static_cast<size_t>(p.block) < made[p.rank]) {
        --unread[p.rank][p.block];
        ++pulled[t];
        moved = true;
      }
    }
  }
  for (size_t t = 0; t < wanted.size(); ++t)
    if (pulled[t] != wanted[t].size()) return true;
  return false;
}

}  // namespace

TEST(pulling_results_from_a_ring_in_slot_order_deadlocks) {
  Shape s = busy_setup().shape;
  s.num_ranks = 4;
  s.num_tokens = 40;
  s.top_k = 4;
  s.num_local_experts = 4;
  s.block_rows = 4;
  int slot_order = 0, whole_buffer = 0, expert_order = 0;
  for (int seed = 0; seed < 40; ++seed) {
    Rng rng(seed);
    const Ids ids = random_ids(rng, s, Skew::kUniform);
    slot_order += pull_from_ring_deadlocks(s, ids, 3, PullOrder::kSlot);
    whole_buffer += pull_from_ring_deadlocks(s, ids, max_blocks(s), PullOrder::kSlot);
    expert_order += pull_from_ring_deadlocks(s, ids, 1, PullOrder::kLocalExpertThenOwner);
  }
  CHECK(slot_order == 40, slot_order, " of 40");
  CHECK(whole_buffer == 0, whole_buffer, " of 40");
  CHECK(expert_order == 0, expert_order, " of 40");
}

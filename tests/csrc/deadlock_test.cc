// Negative controls: set-ups that must deadlock do, protocols with a wait left out are caught, and
// the same simulation without the flaw runs through. They show that protocol_test can fail.
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
  s.grad_weight_tiles = 3;
  s.group_blocks = 3;
  s.macrobatch_blocks = 4;
  s.ring_blocks = 4;
  s.source_order = SourceOrder::kInterleaved;
  setup.compute_workers = 3;
  setup.comm_workers = 2;
  setup.look_ahead = 2;
  return setup;
}

// Every token goes to the top_k experts after its own number.
Ids even_ids(const Shape& s) {
  std::vector<int32_t> ids;
  for (int32_t token = 0; token < s.num_tokens; ++token)
    for (int32_t slot = 0; slot < s.top_k; ++slot)
      ids.push_back((token + slot) % (s.num_ranks * s.num_local_experts));
  return Ids(s.num_ranks, ids);
}

constexpr int kRounds = 20;

// Random interleavings. The plan is built from the legal set-up; ring_blocks, hidden_ring and
// lead_blocks may then be smaller than check() allows.
Tally many(const Setup& legal, const std::vector<Pass>& passes, const Ids& ids, int32_t ring_blocks,
           int32_t hidden_ring, int32_t lead_blocks) {
  const Routing routing(legal.shape, ids);
  Setup setup = legal;
  setup.shape.ring_blocks = ring_blocks;
  setup.shape.lead_blocks = lead_blocks;
  setup.hidden_ring = hidden_ring;
  Rng rng(9);
  Tally tally;
  for (int round = 0; round < kRounds; ++round) {
    std::vector<Launch> launches;
    for (Pass pass : passes)
      launches.push_back(make_launch(legal, pass, routing, 1 + launches.size() / 2));
    World world(setup, std::move(launches), true);
    tally.add(simulate(world, rng));
  }
  return tally;
}
Tally many(const Setup& legal, const std::vector<Pass>& passes, const Ids& ids) {
  return many(legal, passes, ids, legal.shape.ring_blocks, legal.shape.macrobatch_blocks,
              legal.shape.lead_blocks);
}
Tally many(const Setup& legal, int32_t ring_blocks, int32_t hidden_ring) {
  return many(legal, {Pass::kForward}, even_ids(legal.shape), ring_blocks, hidden_ring,
              legal.shape.lead_blocks);
}

// Runs through as it is, and is caught with any of these faults in a tenth of the rounds at least.
struct Control {
  Fault fault;
  const char* name;
};
void all_caught(Setup setup, const std::vector<Pass>& passes, const Ids& ids,
                const std::vector<Control>& controls) {
  const Tally good = many(setup, passes, ids);
  CHECK(good.done == kRounds, good.last);
  for (const Control& control : controls) {
    setup.fault = control.fault;
    const Tally tally = many(setup, passes, ids);
    const int caught = tally.violation + tally.deadlock;
    CHECK(caught >= kRounds / 10, control.name, ": caught in ", caught, " of ", kRounds, " rounds");
  }
}

}  // namespace

TEST(token_ring_smaller_than_its_group_deadlocks) {
  Setup setup = busy_setup();
  for (int32_t ring : {1, 2, 3, 4}) {
    const Tally tally = many(setup, ring, setup.shape.macrobatch_blocks);
    const bool enough = ring >= setup.shape.group_blocks;
    CHECK(tally.deadlock == (enough ? 0 : kRounds) && tally.violation == 0, "ring ", ring, ": ",
          tally.deadlock, " deadlocks, ", tally.violation, " violations; ", tally.last);
  }
}

TEST(rows_in_flight_need_ring_beyond_the_group) {
  Setup setup = busy_setup();
  setup.comm_workers = 1;
  setup.fault = Fault::kHoldsBack;  // waits for a slot with a unit (here a block) not signalled
  setup.shape.rows_in_flight = setup.unit_rows;
  setup.shape.ring_blocks = static_cast<int32_t>(min_ring_blocks(setup.shape));
  CHECK(setup.shape.ring_blocks == 4 && setup.unit_rows == setup.shape.block_rows);
  for (int32_t ring : {3, 4}) {
    const Tally tally = many(setup, ring, setup.shape.macrobatch_blocks);
    CHECK((ring == 4 ? tally.done : tally.deadlock) == kRounds, "ring ", ring, ": ", tally.deadlock,
          " deadlocks; ", tally.last);
  }
  setup.fault = Fault::kNone;  // so the ring need not be larger than a group
  CHECK(many(setup, 3, setup.shape.macrobatch_blocks).done == kRounds);
}

TEST(lead_smaller_than_a_group_deadlocks) {
  Setup setup = busy_setup();
  Shape& s = setup.shape;
  s.macrobatch_blocks = s.ring_blocks = 12;
  s.lead_blocks = s.group_blocks;
  setup.compute_workers = 1;  // several may by luck split the tiles so that it runs through
  for (int32_t lead : {1, 3, 4}) {
    const Tally tally =
        many(setup, {Pass::kForward}, even_ids(s), s.ring_blocks, s.macrobatch_blocks, lead);
    CHECK((lead >= s.group_blocks ? tally.done : tally.deadlock) == kRounds, "lead ", lead, ": ",
          tally.deadlock, " deadlocks; ", tally.last);
  }
}

TEST(hidden_ring_smaller_than_the_macrobatch_deadlocks) {
  Setup setup = busy_setup();
  setup.compute_workers = 1;  // several may by luck split the tiles so that it runs through
  for (int32_t ring : {1, 3, 4}) {
    const Tally tally = many(setup, setup.shape.ring_blocks, ring);
    CHECK(tally.deadlock == (ring < 4 ? kRounds : 0) && tally.violation == 0, "ring ", ring, ": ",
          tally.deadlock, "; ", tally.last);
  }
}

TEST(every_missing_wait_of_the_forward_is_noticed) {
  const Pass f = Pass::kForward;
  Setup setup = busy_setup();
  for (const int32_t lead :
       {0, setup.shape.group_blocks}) {  // phases follow each other, take turns
    setup.shape.lead_blocks = lead;
    all_caught(setup, {f, f, f, f}, even_ids(setup.shape),
               {{Fault::kNoTokensFull, "tokens full"},
                {Fault::kNoTokensEmpty, "tokens empty"},
                {Fault::kNoHiddenFull, "hidden full"},
                {Fault::kNoHiddenEmpty, "hidden empty"},
                {Fault::kNoPublished, "published"},
                {Fault::kNoPushed, "pushed"},
                {Fault::kSignalsEarly, "signals rows that are not stored"},
                {Fault::kNoLoaded, "stores what is not loaded"},
                {Fault::kNoBufferRead, "buffer read"}});
  }
}

namespace {

// Two experts a rank, whose blocks the macrobatches cut; neighbouring tiles have other workers.
Setup busy_backward_setup() {
  Setup setup = busy_setup();
  setup.shape.num_local_experts = 2;
  setup.shape.top_k = 2;
  setup.shape.num_tokens = 16;
  setup.shape.macrobatch_blocks = setup.shape.ring_blocks = 5;
  setup.compute_workers = 4;
  setup.grad = {2, 2, 3};
  setup.weight_panels = 2;
  return setup;
}

}  // namespace

TEST(every_missing_wait_of_the_backward_is_noticed) {
  const Setup setup = busy_backward_setup();
  all_caught(setup, {Pass::kBackward}, even_ids(setup.shape),
             {{Fault::kNoTokensFull, "tokens full"},
              {Fault::kNoPublished, "published"},
              {Fault::kNoPushed, "pushed"},
              {Fault::kHoldsBack, "holds rows back while it waits"},
              {Fault::kSignalsEarly, "signals rows that are not stored"},
              {Fault::kNoLoaded, "stores what is not loaded"},
              {Fault::kNoBufferRead, "buffer read"},
              {Fault::kNoMacrobatchWait, "macrobatch done"},
              {Fault::kNoDispatchMacrobatchWait, "macrobatch done, dispatch"},
              {Fault::kSmallHiddenTarget, "hidden gradients of earlier macrobatches"},
              {Fault::kNoHiddenWait, "hidden gradients"},
              {Fault::kOneOpenSum, "one open sum"},
              {Fault::kNoSharedFull, "shared full"},
              {Fault::kNoAllSharedFull, "all shared full"},
              {Fault::kNoReady, "ready"},
              {Fault::kNoDone, "done"},
              {Fault::kNoReleased, "released"},
              {Fault::kNoStageEmpty, "stage empty"},
              {Fault::kNoOutboxEmpty, "outbox empty"},
              {Fault::kNoOutboxFull, "outbox full"},
              {Fault::kNoOutboxRead, "outbox read"},
              {Fault::kNoHiddenWritten, "hidden gradients written"},
              {Fault::kSkipsRows, "rows left out"}});
}

// A tile's rows come only once dispatch has waited for the macrobatch before, and its other inputs
// only after those: that tiles wait for it too is not what keeps them right.
TEST(dispatch_alone_keeps_macrobatches_apart) {
  Setup setup = busy_backward_setup();
  setup.fault = Fault::kNoTileMacrobatchWait;
  const Tally tally = many(setup, {Pass::kBackward}, even_ids(setup.shape));
  CHECK(tally.done == kRounds, tally.last);
}

// The dispatcher of a compute worker keeps near its loader. Some tile needs a whole group.
TEST(dispatch_nearer_than_a_group_deadlocks) {
  Setup setup = busy_backward_setup();
  Shape& s = setup.shape;
  s.num_tokens = 12;  // 6 blocks an expert
  s.group_blocks = 3;
  const Ids ids = even_ids(s);
  const auto run = [&](int32_t compute_workers, int32_t comm_workers, int32_t dispatch_lead) {
    setup.compute_workers = compute_workers;
    setup.comm_workers = comm_workers;
    setup.dispatch_lead = dispatch_lead;
    return many(setup, {Pass::kBackward}, ids);
  };
  for (const int32_t macrobatch : {12, 5}) {
    s.macrobatch_blocks = s.ring_blocks = macrobatch;
    // With several workers it may by luck be the one at the last block that brings the first.
    const Tally near = run(1, 0, s.group_blocks - 2);
    CHECK(near.deadlock == kRounds, near.deadlock, " of ", kRounds);
    for (const int32_t workers : {1, 4})
      for (const int32_t lead : {s.group_blocks - 1, 2 * s.group_blocks, -1}) {
        const Tally tally = run(workers, 0, lead);
        CHECK(tally.done == kRounds, workers, " workers, lead ", lead, ": ", tally.last);
      }
    // Dedicated workers have no limit.
    const Tally dedicated = run(1, 2, s.group_blocks - 2);
    CHECK(dedicated.done == kRounds, dedicated.last);
  }
  // What is held back while it is too far ahead belongs to the group, unless the lead is larger.
  // Macrobatches and copies inside the ring are no reason to wait here.
  s.num_ranks = 1;
  s.num_local_experts = 4;
  s.macrobatch_blocks = s.ring_blocks = 12;
  setup.fault = Fault::kHoldsBack;
  const Ids of_one_rank = {ids[0]};
  for (const int32_t lead : {s.group_blocks - 1, s.group_blocks}) {
    setup.compute_workers = 1;
    setup.dispatch_lead = lead;
    setup.comm_workers = 0;
    const Tally tally = many(setup, {Pass::kBackward}, of_one_rank);
    CHECK((lead < s.group_blocks ? tally.deadlock : tally.done) == kRounds, "lead ", lead, ": ",
          tally.deadlock, " deadlocks; ", tally.last);
  }
}

// Workers without tiles, whose dispatchers have rows to bring all the same.
TEST(loaders_without_tiles_let_the_dispatch_go_on) {
  Setup setup = busy_setup();
  Shape& s = setup.shape;
  s.num_ranks = s.num_local_experts = 1;
  s.gate_up_tiles = s.down_tiles = s.grad_weight_tiles = 1;
  s.group_blocks = 1;
  s.block_rows = 4;
  setup.unit_rows = 1;
  setup.compute_workers = 10;
  setup.comm_workers = 0;
  setup.dispatch_lead = 2 * s.group_blocks;
  const auto all_deadlock = [&](int32_t blocks, Fault fault, const char* name) {
    s.num_tokens = blocks * s.block_rows;
    s.macrobatch_blocks = s.ring_blocks = 4;
    setup.fault = Fault::kNone;
    const Tally good = many(setup, {Pass::kBackward}, even_ids(s));
    CHECK(good.done == kRounds, name, ": ", good.last);
    setup.fault = fault;
    const Tally bad = many(setup, {Pass::kBackward}, even_ids(s));
    CHECK(bad.deadlock == kRounds, name, ": ", bad.deadlock, " of ", kRounds, "; ", bad.last);
  };
  // 8 block tiles and one of weights for 10 workers: the last has none.
  all_deadlock(4, Fault::kNoProgressAtEnd, "end");
  // Workers 6 and 7 have none in the second of three macrobatches.
  all_deadlock(12, Fault::kNoProgressAtMacrobatchEnd, "end of a macrobatch");
}

// Rows of more pieces than a worker has buffers, which are used again within a row.
TEST(long_rows_wait_for_their_buffers) {
  Setup setup = busy_backward_setup();
  setup.unit_rows = 1;
  setup.row_parts = 3;
  for (Pass pass : {Pass::kForward, Pass::kBackward})
    all_caught(setup, {pass}, even_ids(setup.shape),
               {{Fault::kSignalsEarly, "signals rows that are not stored"},
                {Fault::kNoLoaded, "stores what is not loaded"},
                {Fault::kNoBufferRead, "buffer read"}});
}

TEST(copies_inside_the_ring_wait_and_need_a_ring_of_all_blocks) {
  Setup setup = busy_backward_setup();
  Shape& s = setup.shape;
  s.num_local_experts = 4;
  s.num_tokens = 12;  // 3 blocks an expert
  const Ids ids = even_ids(s);
  s.macrobatch_blocks = s.ring_blocks = 6;
  for (Pass pass : {Pass::kForward, Pass::kBackward})
    all_caught(setup, {pass}, ids, {{Fault::kCopiesInSmallRing, "copies in a small ring"}});
  s.macrobatch_blocks = s.ring_blocks = 12;
  for (Pass pass : {Pass::kForward, Pass::kBackward})
    all_caught(setup, {pass}, ids, {{Fault::kNoCopyWait, "copied before it is there"}});
}

TEST(saved_rows_are_not_in_the_ring) {
  Setup setup = busy_backward_setup();
  setup.save = true;
  all_caught(setup, {Pass::kForward, Pass::kBackward}, even_ids(setup.shape),
             {{Fault::kIgnoresSaved, "ignores what is saved"}});
}

TEST(memory_used_in_another_way_is_waited_for) {
  Setup setup = busy_backward_setup();
  const Ids ids = even_ids(setup.shape);
  const Control before = {Fault::kNoRoomBeforeHidden, "before recomputed hidden gradients"},
                after = {Fault::kNoRoomAfterHidden, "after them"};
  all_caught(setup, {Pass::kBackward}, ids, {before, after});
  // One macrobatch.
  setup.shape.macrobatch_blocks = setup.shape.ring_blocks = 16;
  all_caught(setup, {Pass::kBackward}, ids, {before, after});
  // Some blocks are saved and others are not, also of one macrobatch.
  setup = busy_backward_setup();
  setup.save = true;
  all_caught(setup, {Pass::kForward, Pass::kBackward}, ids,
             {after, {Fault::kNoRoomBetweenHiddens, "between recomputed and saved ones"}});
  // All are.
  setup.grad.shared_hidden_tiles = setup.grad.shared_weights = 0;
  setup.shape.macrobatch_blocks = setup.shape.ring_blocks = 16;
  all_caught(setup, {Pass::kForward, Pass::kBackward}, ids,
             {{Fault::kNoRoomAfterSaved, "after saved ones"}});
  // The stages are the same, and the outbox has been read when consumers take it as a whole.
  setup = busy_backward_setup();
  setup.save = true;
  setup.fault = Fault::kNoRoomBeforeSaved;
  const Tally tally = many(setup, {Pass::kForward, Pass::kBackward}, ids);
  CHECK(tally.done == kRounds, tally.last);
}

// Workers whose hidden gradients are followed at once by weights of an expert without rows: no
// stage of those tells the consumers that the others have done with the outbox, so the scheduler
// holds them back.
TEST(weights_without_rows_wait_for_the_outbox) {
  Setup setup = busy_setup();
  Shape& s = setup.shape;
  s.num_ranks = 1;
  s.num_tokens = s.block_rows = 4;
  s.down_tiles = 1;
  s.grad_weight_tiles = 4;
  s.group_blocks = s.macrobatch_blocks = s.ring_blocks = 1;
  const Ids ids = even_ids(s);
  s.num_local_experts = 4;
  setup.compute_workers = 4;
  setup.grad.panels = 2;
  setup.weight_panels = 4;
  for (const bool save : {false, true}) {
    setup.save = save;
    all_caught(setup, {Pass::kForward, Pass::kBackward}, ids,
               {{Fault::kNoRoomForEmpty, "weights of nobody"}});
  }
}

TEST(experts_without_rows_have_gradients) {
  Setup setup = busy_backward_setup();
  const Ids ids = even_ids(setup.shape);
  setup.shape.num_local_experts = 4;  // of which two are never asked for
  all_caught(setup, {Pass::kBackward}, ids, {{Fault::kNothingForEmpty, "left out"}});
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

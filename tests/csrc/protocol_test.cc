// The whole protocol under random interleavings: it never stops, every slot is used in turn and
// written once, and all sums are those computed from the ids alone.
#include "check.h"
#include "protocol_cases.h"

using namespace test;

namespace {

// What the forwards that ran had to deal with, ranks counted one by one.
struct SeenForward {
  int turns = 0, turns_in_several_macrobatches = 0, turns_in_small_rings = 0;
  int no_turns = 0, no_turns_in_several_macrobatches = 0, no_turns_in_small_rings = 0;

  void add(const Setup& setup, const Routing& routing) {
    const Shape& s = setup.shape;
    for (const HostPlan& plan : routing.plans) {
      const int32_t blocks = plan.num_blocks();
      const bool several = num_macrobatches(s, blocks) > 1, small_ring = s.ring_blocks < blocks;
      if (turns_of(s, Pass::kForward, std::min(blocks, s.macrobatch_blocks)).rounds > 0) {
        ++turns;
        turns_in_several_macrobatches += several;
        turns_in_small_rings += small_ring;
      } else {
        ++no_turns;
        no_turns_in_several_macrobatches += several;
        no_turns_in_small_rings += small_ring;
      }
    }
  }
  int least() const {
    return std::min({turns, turns_in_several_macrobatches, turns_in_small_rings, no_turns,
                     no_turns_in_several_macrobatches, no_turns_in_small_rings});
  }
};

// What the backwards that ran had to deal with, ranks counted one by one.
struct Seen {
  int several_macrobatches = 0, cut_experts = 0, cut_twice = 0, no_rows = 0, padded_halves = 0;
  int all_saved = 0, part_saved = 0, none_saved = 0, copies = 0, shared = 0;
  int dedicated = 0, in_compute_workers = 0, one_worker = 0;
  int kept_near = 0, kept_near_in_a_macrobatch = 0, kept_near_by_the_least_lead = 0;

  void add(const Setup& setup, const Routing& routing) {
    const Shape s = setup.backward_shape();
    for (int32_t r = 0; r < s.num_ranks; ++r) {
      const HostPlan& plan = routing.plans[r];
      const int32_t blocks = plan.num_blocks(), macrobatches = num_macrobatches(s, blocks);
      several_macrobatches += macrobatches > 1;
      bool cut = false, twice = false, none = false, half = false, copy = false;
      for (int32_t e = 0; e < s.num_local_experts; ++e) {
        const int32_t first = plan.expert_first_block[e];
        const int32_t segments = expert_segments(s, first, plan.expert_first_block[e + 1] - first);
        const int32_t rows = plan.expert_rows[e];
        cut |= segments > 1;
        twice |= segments > 2;
        none |= rows == 0;
        half |= rows > 0 && (rows - 1) % s.block_rows < s.block_rows / 2;
      }
      for (size_t row = 0; row < plan.rows.size(); ++row)
        copy |= plan.rows[row].rank != r && routing.first_use_backward[r][row] >= 0;
      cut_experts += cut;
      cut_twice += twice;
      no_rows += none && macrobatches > 1;
      padded_halves += half;
      copies += copy && blocks <= s.ring_blocks;
      all_saved += setup.save && blocks > 0 && blocks <= s.macrobatch_blocks;
      part_saved += setup.save && blocks > s.macrobatch_blocks;
      none_saved += !setup.save && blocks > 0;
      // Nobody has begun yet when the first blocks are brought.
      const bool near = setup.comm_workers == 0 && setup.most_ahead() < blocks;
      kept_near += near;
      kept_near_in_a_macrobatch +=
          near && setup.most_ahead() < std::min(blocks, s.macrobatch_blocks);
      kept_near_by_the_least_lead += near && setup.most_ahead() == s.group_blocks - 1;
    }
    shared += setup.shared_blocks() > 0;
    dedicated += setup.comm_workers > 0;
    in_compute_workers += setup.comm_workers == 0;
    one_worker += setup.compute_workers == 1;
  }
  int least() const {
    return std::min({several_macrobatches, cut_experts, cut_twice, no_rows, padded_halves,
                     all_saved, part_saved, none_saved, copies, shared, dedicated,
                     in_compute_workers, one_worker, kept_near, kept_near_in_a_macrobatch,
                     kept_near_by_the_least_lead});
  }
};

void run(Rng& rng, const Setup& setup, const std::vector<Pass>& passes, Skew skew,
         const std::string& about, Seen* seen = nullptr, SeenForward* seen_forward = nullptr) {
  CHECK(check(setup.shape) == nullptr, about, ": ", check(setup.shape));
  std::vector<std::unique_ptr<Routing>> routings;
  std::vector<Launch> launches;
  uint64_t salt = 0;
  for (Pass pass : passes) {
    if (pass == Pass::kForward) {  // a backward repeats the routing of the forward before it
      routings.push_back(
          std::make_unique<Routing>(setup.shape, random_ids(rng, setup.shape, skew)));
      salt = rng();
    }
    launches.push_back(make_launch(setup, pass, *routings.back(), salt));
    if (pass == Pass::kBackward && seen != nullptr) seen->add(setup, *routings.back());
    if (pass == Pass::kForward && seen_forward != nullptr)
      seen_forward->add(setup, *routings.back());
  }
  World world(setup, std::move(launches), true);
  const Outcome outcome = simulate(world, rng);
  CHECK(outcome.kind == Outcome::kDone, about, ": ", outcome.text, "; ", describe(setup.shape));
}

}  // namespace

TEST(forward_with_the_smallest_ring) {
  Rng rng(1);
  SeenForward seen;
  for (int round = 0; round < 1200; ++round)
    run(rng, random_setup(rng, 4, 16, 5), {Pass::kForward, Pass::kForward},
        static_cast<Skew>(round % kNumSkews), "round " + std::to_string(round), nullptr, &seen);
  CHECK(seen.least() >= 200, "a case that the test is for came up only ", seen.least(), " times");
}

TEST(forward_then_backward) {
  Rng rng(2);
  Seen seen;
  for (int round = 0; round < 900; ++round)
    run(rng, random_setup(rng, 4, 16, 5), {Pass::kForward, Pass::kBackward},
        static_cast<Skew>(round % kNumSkews), "round " + std::to_string(round), &seen);
  CHECK(seen.least() >= 50, "a case that the test is for came up only ", seen.least(), " times");
}

TEST(launch_after_launch_without_cleaning) {
  Rng rng(3);
  const Pass f = Pass::kForward, b = Pass::kBackward;
  for (int round = 0; round < 100; ++round)
    run(rng, random_setup(rng, 3, 10, 4), {f, b, f, f, b, f, b, f, b},
        static_cast<Skew>(pick(rng, 0, kNumSkews - 1)), "round " + std::to_string(round));
}

// The smallest rings: one block, which one worker or several go through.
TEST(one_block_rings) {
  Rng rng(4);
  for (int round = 0; round < 200; ++round) {
    Setup setup = random_setup(rng, 3, 12, 4);
    setup.shape.group_blocks = setup.shape.macrobatch_blocks = setup.shape.ring_blocks = 1;
    if (round % 2 == 0) setup.compute_workers = 1;
    if (round % 4 < 2) setup.comm_workers = 0;
    run(rng, setup, {Pass::kForward, Pass::kBackward}, static_cast<Skew>(round % kNumSkews),
        "round " + std::to_string(round));
  }
}

// The kernel's eight consumer warps, and one expert that every macrobatch cuts.
TEST(eight_warps_and_a_sum_that_stays_open) {
  Rng rng(9);
  for (int round = 0; round < 40; ++round) {
    Setup setup = random_setup(rng, 2, 40, 2);
    Shape& s = setup.shape;
    s.num_tokens = 40;
    s.block_rows = 8;
    s.group_blocks = 1;
    s.macrobatch_blocks = s.ring_blocks = pick(rng, 1, 3);
    setup.consumer_warps = 8;
    setup.compute_workers = pick(rng, 1, 2);
    run(rng, setup, {Pass::kForward, Pass::kBackward}, Skew::kOneExpert,
        "round " + std::to_string(round));
  }
}

TEST(no_tokens_at_all) {
  Rng rng(5);
  for (int round = 0; round < 20; ++round) {
    Setup setup = random_setup(rng, 4, 1, 4);
    setup.shape.num_tokens = 0;
    run(rng, setup, {Pass::kForward, Pass::kBackward}, Skew::kUniform, "empty");
  }
}

TEST(more_experts_than_workers) {
  Rng rng(6);
  Setup setup = random_setup(rng, 1, 1, 1);
  setup.shape.num_ranks = 2;
  setup.shape.num_local_experts = 300;
  setup.shape.num_tokens = 40;
  setup.shape.top_k = 4;
  run(rng, setup, {Pass::kForward, Pass::kBackward}, Skew::kZipf, "300 experts");
}

TEST(seventy_two_ranks) {
  Rng rng(7);
  Setup setup = random_setup(rng, 1, 1, 1);
  setup.shape.num_ranks = 72;
  setup.shape.num_local_experts = 2;
  setup.shape.num_tokens = 3;
  setup.shape.top_k = 4;
  run(rng, setup, {Pass::kForward, Pass::kBackward, Pass::kForward}, Skew::kZipf, "72 ranks");
}

// A group of 8 blocks, a macrobatch of many groups, a token ring of little more than one group: the
// GPU's proportions, 4 rows to the block.
TEST(gpu_proportions) {
  Rng rng(8);
  for (int round = 0; round < 12; ++round) {
    Setup setup;
    Shape& s = setup.shape;
    s = random_shape(rng, 1, 1, 1);
    s.num_ranks = 4;
    s.num_tokens = 120;
    s.top_k = 4;
    s.num_local_experts = 3;
    s.block_rows = 4;
    s.gate_up_tiles = 2;
    s.down_tiles = 3;
    s.group_blocks = 8;
    s.macrobatch_blocks = 48;
    s.lead_blocks = round % 3 == 0 ? 0 : 12;
    s.source_order = SourceOrder::kInterleaved;
    s.rows_in_flight = 0;
    setup.comm_workers = round % 4 < 2 ? 6 : 0;
    setup.compute_workers = 6;
    setup.look_ahead = 3;
    s.ring_blocks = static_cast<int32_t>(min_ring_blocks(s));
    run(rng, setup, {Pass::kForward, round % 4 == 2 ? Pass::kBackward : Pass::kForward},
        round % 2 ? Skew::kZipf : Skew::kUniform, "round " + std::to_string(round));
  }
}

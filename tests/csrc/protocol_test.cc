// The whole protocol under random interleavings: it never stops, every slot is used in turn and
// written once, and all sums are those computed from the ids alone.
#include "check.h"
#include "protocol_cases.h"

using namespace test;

namespace {

void run(Rng& rng, const Setup& setup, const std::vector<Pass>& passes, Skew skew,
         const std::string& about) {
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
    launches.push_back(make_launch(setup.shape, pass, *routings.back(), salt));
  }
  World world(setup, std::move(launches), true);
  const Outcome outcome = simulate(world, rng);
  CHECK(outcome.kind == Outcome::kDone, about, ": ", outcome.text, "; ", describe(setup.shape));
}

}  // namespace

TEST(forward_with_the_smallest_ring) {
  Rng rng(1);
  for (int round = 0; round < 1200; ++round)
    run(rng, random_setup(rng, false, 4, 16, 5), {Pass::kForward, Pass::kForward},
        static_cast<Skew>(round % kNumSkews), "round " + std::to_string(round));
}

TEST(forward_then_backward) {
  Rng rng(2);
  for (int round = 0; round < 1200; ++round)
    run(rng, random_setup(rng, true, 4, 16, 5), {Pass::kForward, Pass::kBackward},
        static_cast<Skew>(round % kNumSkews), "round " + std::to_string(round));
}

TEST(launch_after_launch_without_cleaning) {
  Rng rng(3);
  const Pass f = Pass::kForward, b = Pass::kBackward;
  for (int round = 0; round < 100; ++round)
    run(rng, random_setup(rng, true, 3, 10, 4), {f, b, f, f, b, f, b, f, b},
        static_cast<Skew>(pick(rng, 0, kNumSkews - 1)), "round " + std::to_string(round));
}

TEST(one_block_rings) {
  Rng rng(4);
  for (int round = 0; round < 100; ++round) {
    Setup setup = random_setup(rng, true, 3, 12, 4);
    setup.unit_rows = setup.units_in_flight = 1;
    setup.shape.rows_in_flight = 0;
    setup.shape.group_blocks = setup.shape.macrobatch_blocks = setup.shape.ring_blocks = 1;
    run(rng, setup, {Pass::kForward, Pass::kBackward}, static_cast<Skew>(round % kNumSkews),
        "round " + std::to_string(round));
  }
}

TEST(no_tokens_at_all) {
  Rng rng(5);
  for (int round = 0; round < 20; ++round) {
    Setup setup = random_setup(rng, true, 4, 1, 4);
    setup.shape.num_tokens = 0;
    run(rng, setup, {Pass::kForward, Pass::kBackward}, Skew::kUniform, "empty");
  }
}

TEST(more_experts_than_workers) {
  Rng rng(6);
  Setup setup = random_setup(rng, true, 1, 1, 1);
  setup.shape.num_ranks = 2;
  setup.shape.num_local_experts = 300;
  setup.shape.num_tokens = 40;
  setup.shape.top_k = 4;
  run(rng, setup, {Pass::kForward, Pass::kBackward}, Skew::kZipf, "300 experts");
}

TEST(seventy_two_ranks) {
  Rng rng(7);
  Setup setup = random_setup(rng, true, 1, 1, 1);
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
    s.source_order = SourceOrder::kInterleaved;
    setup.comm_workers = 6;
    setup.unit_rows = 2;
    setup.units_in_flight = 2;
    setup.compute_workers = 6;
    setup.look_ahead = 3;
    s.rows_in_flight = rows_in_flight(setup);
    s.ring_blocks = static_cast<int32_t>(min_ring_blocks(s));
    run(rng, setup, {Pass::kForward, Pass::kForward}, round % 2 ? Skew::kZipf : Skew::kUniform,
        "round " + std::to_string(round));
  }
}

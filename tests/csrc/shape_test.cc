// Shape: every bad field is named, capacities hold and are reached, large systems fit in int32.
#include <cstring>

#include "cases.h"
#include "check.h"
#include "plan/shape.h"

using namespace jax_mok::plan;

namespace {

Shape good() {
  Shape s{};
  s.num_ranks = 8;
  s.num_tokens = 4096;
  s.top_k = 8;
  s.num_local_experts = 48;
  s.block_rows = 128;
  s.gate_up_tiles = 16;
  s.down_tiles = 28;
  s.group_blocks = 8;
  s.macrobatch_blocks = 256;
  s.ring_blocks = 48;
  s.source_order = SourceOrder::kInterleaved;
  s.rows_in_flight = 132 * 2 * 4;
  return s;
}

}  // namespace

TEST(every_bad_field_is_named) {
  CHECK(check(good()) == nullptr, check(good()));
  struct Bad {
    int32_t Shape::* field;
    int32_t value;
    const char* name;
  };
  const Bad bad[] = {
      {&Shape::num_ranks, 0, "num_ranks"},
      {&Shape::num_tokens, -1, "num_tokens"},
      {&Shape::top_k, 0, "top_k"},
      {&Shape::num_local_experts, 0, "num_local_experts"},
      {&Shape::block_rows, 0, "block_rows"},
      {&Shape::gate_up_tiles, 0, "gate_up_tiles"},
      {&Shape::down_tiles, -3, "down_tiles"},
      {&Shape::group_blocks, 0, "group_blocks"},
      {&Shape::macrobatch_blocks, 7, "macrobatch_blocks"},
      {&Shape::ring_blocks, 16, "ring_blocks"},
      {&Shape::rows_in_flight, -1, "rows_in_flight"},
      {&Shape::grad_weight_tiles, -1, "grad_weight_tiles"},
      {&Shape::num_tokens, INT32_MAX, "num_tokens"},
      {&Shape::num_ranks, INT32_MAX, "num_ranks"},
      {&Shape::top_k, INT32_MAX, "top_k"},
      {&Shape::num_local_experts, INT32_MAX, "num_local_experts"},
      {&Shape::gate_up_tiles, INT32_MAX, "gate_up_tiles"},
      {&Shape::down_tiles, 1 << 24, "down_tiles"},
      {&Shape::grad_weight_tiles, (1 << 24) + 1, "grad_weight_tiles"},
  };
  for (const Bad& b : bad) {
    Shape s = good();
    s.*b.field = b.value;
    const char* wrong = check(s);
    CHECK(wrong != nullptr, b.name, " = ", b.value, " was accepted");
    CHECK(std::strstr(wrong, b.name) != nullptr, b.name, " = ", b.value, " gives: ", wrong);
  }
  Shape s = good();
  s.source_order = static_cast<SourceOrder>(2);
  CHECK(check(s) != nullptr && std::strstr(check(s), "source_order") != nullptr);
}

TEST(the_backward_needs_more) {
  Shape s = good();
  CHECK(std::strstr(check_backward(s), "grad_weight_tiles") != nullptr);
  s.grad_weight_tiles = 10;
  CHECK(std::strstr(check_backward(s), "ring_blocks") != nullptr);
  s.ring_blocks = s.macrobatch_blocks;
  CHECK(std::strstr(check_backward(s), "ring_blocks") != nullptr);
  s.ring_blocks = s.macrobatch_blocks + 9;  // 1056 rows in flight may lie 9 blocks ahead
  CHECK(check_backward(s) == nullptr);
  s.ring_blocks = s.macrobatch_blocks;
  s.rows_in_flight = 0;
  CHECK(check_backward(s) == nullptr);
  s.block_rows = 0;
  CHECK(std::strstr(check_backward(s), "block_rows") != nullptr);
}

TEST(smallest_ring_is_accepted_and_one_less_is_not) {
  Shape s = good();
  s.rows_in_flight = 129;
  s.ring_blocks = 10;
  CHECK(min_ring_blocks(s) == 10, min_ring_blocks(s));
  CHECK(check(s) == nullptr, check(s));
  s.ring_blocks = 9;
  CHECK(check(s) != nullptr);
  s.rows_in_flight = 0;
  s.ring_blocks = 8;
  CHECK(check(s) == nullptr, check(s));
}

TEST(an_nvl72_rack_fits) {
  Shape s = good();
  s.num_ranks = 72;
  s.num_tokens = 16384;
  s.num_local_experts = 8;
  CHECK(check(s) == nullptr, check(s));
  CHECK(max_rows(s) == int64_t{72} * 16384 * 8);
  CHECK(max_blocks(s) * s.block_rows < INT32_MAX);
  s.num_local_experts = 512;  // more experts than any GPU has SMs
  s.top_k = 16;
  CHECK(check(s) == nullptr, check(s));
  s.num_tokens = 1 << 21;  // 72 * 2^21 * 16 rows do not fit
  CHECK(check(s) != nullptr);
}

// Brute force over all ways to spread rows over experts: the capacity is met and exact.
TEST(max_blocks_is_the_exact_maximum) {
  for (int32_t experts = 1; experts <= 4; ++experts)
    for (int32_t rows = 0; rows <= 9; ++rows)
      for (int32_t block_rows = 1; block_rows <= 4; ++block_rows) {
        Shape s = good();
        s.num_ranks = 1;
        s.num_tokens = rows;
        s.top_k = 1;
        s.num_local_experts = experts;
        s.block_rows = block_rows;
        int64_t most = 0;
        std::vector<int32_t> left{rows};
        // count in base (rows + 1): digits are the rows of the experts
        int64_t codes = 1;
        for (int32_t e = 0; e < experts; ++e) codes *= rows + 1;
        for (int64_t code = 0; code < codes; ++code) {
          int64_t rest = code, sum = 0, blocks = 0;
          for (int32_t e = 0; e < experts; ++e, rest /= rows + 1) {
            sum += rest % (rows + 1);
            blocks += (rest % (rows + 1) + block_rows - 1) / block_rows;
          }
          if (sum <= rows) most = std::max(most, blocks);
        }
        CHECK(max_blocks(s) == most, "experts ", experts, " rows ", rows, " block ", block_rows,
              ": ", max_blocks(s), " against ", most);
      }
}

TEST(capacities_of_nothing_are_zero) {
  Shape s = good();
  s.num_tokens = 0;
  s.grad_weight_tiles = 5;
  CHECK(check(s) == nullptr, check(s));
  CHECK(max_rows(s) == 0 && max_blocks(s) == 0 && max_groups(s) == 0 && max_segments(s) == 0 &&
        max_tiles(s) == 0 && max_macrobatches(s) == 0);
}

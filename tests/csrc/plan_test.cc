// Host plan: rows, counts, blocks and dedup against a naive reference, a hand-written case, and the
// same plan put together the way a GPU would, every piece alone and in any order.
#include <cstring>
#include <functional>
#include <map>

#include "cases.h"
#include "check.h"

using namespace jax_mok::plan;
using test::Ids;
using test::Rng;
using test::Skew;

namespace {

std::string text(const RowSource& r) {
  return "(" + std::to_string(r.rank) + "," + std::to_string(r.token) + "," +
         std::to_string(r.slot) + ")";
}

void check_against_reference(const Shape& s, const Ids& ids, int32_t rank, const HostPlan& plan,
                             const std::string& about) {
  const auto expert_rows = test::reference_rows(s, ids, rank);
  const auto blocks = test::reference_blocks(s, ids, rank);
  CHECK(plan.block_expert.size() == blocks.size(), about);
  CHECK(plan.rows.size() == blocks.size() * s.block_rows, about);
  CHECK(plan.expert_first_block.size() == static_cast<size_t>(s.num_local_experts) + 1, about);
  for (int32_t e = 0; e < s.num_local_experts; ++e) {
    CHECK(plan.expert_rows[e] == static_cast<int32_t>(expert_rows[e].size()), about, " e ", e);
    for (int32_t source = 0; source < s.num_ranks; ++source) {
      int32_t count = 0;
      for (const RowSource& r : expert_rows[e]) count += r.rank == source;
      CHECK(plan.count(source, e) == count, about, " source ", source, " expert ", e);
    }
    for (size_t b = 0; b < blocks.size(); ++b) {
      const bool inside = plan.expert_first_block[e] <= static_cast<int32_t>(b) &&
                          static_cast<int32_t>(b) < plan.expert_first_block[e + 1];
      CHECK(inside == (blocks[b].expert == e), about, " block ", b, " expert ", e);
    }
  }
  for (size_t b = 0; b < blocks.size(); ++b) {
    CHECK(plan.block_expert[b] == blocks[b].expert, about, " block ", b);
    for (int32_t i = 0; i < s.block_rows; ++i) {
      const RowSource got = plan.rows[b * s.block_rows + i];
      CHECK(got == blocks[b].rows[i], about, " block ", b, " row ", i, ": ", text(got), " against ",
            text(blocks[b].rows[i]));
    }
  }
  // dedup, the slow way
  std::map<std::pair<int32_t, int32_t>, int32_t> seen;
  int32_t macrobatch = 0;
  for (size_t row = 0; row < plan.rows.size(); ++row) {
    if (static_cast<int32_t>(row / s.block_rows) / s.macrobatch_blocks != macrobatch) {
      macrobatch = static_cast<int32_t>(row / s.block_rows) / s.macrobatch_blocks;
      seen.clear();
    }
    int32_t expected = -1;
    if (!is_padding(plan.rows[row])) {
      const auto [it, fresh] =
          seen.insert({{plan.rows[row].rank, plan.rows[row].token}, static_cast<int32_t>(row)});
      if (!fresh) expected = it->second;
    }
    CHECK(plan.first_use[row] == expected, about, " row ", row, ": ", plan.first_use[row],
          " against ", expected);
  }
}

// What a plan kernel does: prefix sums over experts, then every row, block, group, segment and tile
// by itself. The pieces run in random order and write each place exactly once.
HostPlan build_in_pieces(Rng& rng, const Shape& s, const Ids& ids, int32_t rank) {
  HostPlan p;
  const int32_t experts = s.num_local_experts;
  std::vector<std::function<void()>> pieces;
  const auto run = [&] {
    std::shuffle(pieces.begin(), pieces.end(), rng);
    for (auto& piece : pieces) piece();
    pieces.clear();
  };
  p.counts.assign(static_cast<size_t>(s.num_ranks) * experts, 0);
  for (int32_t source = 0; source < s.num_ranks; ++source)
    for (int32_t id : ids[source])
      pieces.push_back([&, source, id] {
        if (valid_expert(id, s.num_ranks * experts) && owner(id, experts) == rank)
          ++p.counts[source * experts + local(id, experts)];
      });
  run();
  p.expert_rows.assign(experts, 0);
  for (int32_t e = 0; e < experts; ++e)
    pieces.push_back([&, e] {
      for (int32_t source = 0; source < s.num_ranks; ++source)
        p.expert_rows[e] += p.count(source, e);
    });
  run();
  std::vector<int32_t> first_group(experts + 1, 0), first_segment(experts + 1, 0);
  p.expert_first_block.assign(experts + 1, 0);
  for (int32_t e = 0; e < experts; ++e) {  // three exclusive scans
    const int32_t first = p.expert_first_block[e];
    const int32_t blocks = num_blocks(p.expert_rows[e], s.block_rows);
    p.expert_first_block[e + 1] = first + blocks;
    first_group[e + 1] = first_group[e] + expert_groups(s, first, blocks);
    first_segment[e + 1] = first_segment[e] + expert_segments(s, first, blocks);
  }
  p.block_expert.assign(p.expert_first_block[experts], -1);
  p.groups.assign(first_group[experts], Group{-1, -1, -1});
  p.segments.assign(first_segment[experts], Group{-1, -1, -1});
  p.rows.assign(p.block_expert.size() * s.block_rows, padding_row());
  p.first_use.assign(p.rows.size(), -1);
  for (int32_t e = 0; e < experts; ++e) {
    const int32_t first = p.expert_first_block[e];
    const int32_t blocks = p.expert_first_block[e + 1] - first;
    for (int32_t b = 0; b < blocks; ++b)
      pieces.push_back([&, b, e, first] { p.block_expert[first + b] = e; });
    for (int32_t i = 0; i < first_group[e + 1] - first_group[e]; ++i)
      pieces.push_back([&, e, i, first, blocks] {
        p.groups[first_group[e] + i] = expert_group(s, first, blocks, e, i);
      });
    for (int32_t i = 0; i < first_segment[e + 1] - first_segment[e]; ++i)
      pieces.push_back([&, e, i, first, blocks] {
        p.segments[first_segment[e] + i] = expert_segment(s, first, blocks, e, i);
      });
  }
  for (int32_t source = 0; source < s.num_ranks; ++source)
    for (int32_t token = 0; token < s.num_tokens; ++token)
      pieces.push_back([&, source, token] {
        std::vector<int32_t> token_rows(s.top_k, -1);
        for (int32_t slot = 0; slot < s.top_k; ++slot) {
          const int32_t at = token * s.top_k + slot, id = ids[source][at];
          if (!valid_expert(id, s.num_ranks * experts) || owner(id, experts) != rank) continue;
          int32_t j = 0;  // earlier rows of this source for this expert
          for (int32_t i = 0; i < at; ++i) j += ids[source][i] == id;
          const int32_t e = local(id, experts);
          const int32_t row =
              p.expert_first_block[e] * s.block_rows +
              row_position(&p.counts[e], experts, s.num_ranks, source, j, s.source_order);
          CHECK(is_padding(p.rows[row]), "row ", row, " is written twice");
          p.rows[row] = {source, token, slot};
          token_rows[slot] = row;
        }
        for (int32_t slot = 0; slot < s.top_k; ++slot)
          if (token_rows[slot] >= 0)
            p.first_use[token_rows[slot]] = first_use_of(token_rows.data(), s.top_k, slot, s);
      });
  run();
  p.tiles.assign(num_block_tiles(s, p.num_blocks()), Tile{Phase::kGateUp, -1, -1});
  for (size_t i = 0; i < p.tiles.size(); ++i)
    pieces.push_back([&, i] { p.tiles[i] = tile_at(s, p.map(), Pass::kForward, i); });
  run();
  return p;
}

void check_equal(const HostPlan& a, const HostPlan& b, const std::string& about) {
  CHECK(a.counts == b.counts, about);
  CHECK(a.expert_rows == b.expert_rows, about);
  CHECK(a.expert_first_block == b.expert_first_block, about);
  CHECK(a.block_expert == b.block_expert, about);
  CHECK(a.rows == b.rows, about);
  CHECK(a.first_use == b.first_use, about);
  CHECK(a.groups == b.groups, about);
  CHECK(a.segments == b.segments, about);
  CHECK(a.tiles == b.tiles, about);
}

}  // namespace

TEST(written_by_hand) {
  // 2 ranks with 2 experts each, 3 tokens a rank, 2 slots. Seen from rank 1 (experts 2 and 3):
  //   rank 0: token 0 -> 2,3   token 1 -> 2,0   token 2 -> 1,2
  //   rank 1: token 0 -> 0,1   token 1 -> 3,2   token 2 -> -1,2
  const Ids ids{{2, 3, 2, 0, 1, 2}, {0, 1, 3, 2, -1, 2}};
  Shape s{};
  s.num_ranks = 2;
  s.num_tokens = 3;
  s.top_k = 2;
  s.num_local_experts = 2;
  s.block_rows = 2;
  s.gate_up_tiles = 2;
  s.down_tiles = 1;
  s.grad_weight_tiles = 1;
  s.group_blocks = 2;
  s.macrobatch_blocks = 3;
  s.ring_blocks = 3;
  s.source_order = SourceOrder::kInterleaved;
  const HostPlan plan = build(s, test::pointers(ids).data(), 1);
  CHECK((plan.counts == std::vector<int32_t>{3, 1, 2, 1}));
  CHECK((plan.expert_rows == std::vector<int32_t>{5, 2}));
  CHECK((plan.expert_first_block == std::vector<int32_t>{0, 3, 4}));
  CHECK((plan.block_expert == std::vector<int32_t>{0, 0, 0, 1}));
  const std::vector<RowSource> rows{{0, 0, 0}, {1, 1, 1},    {0, 1, 0}, {1, 2, 1},
                                    {0, 2, 1}, {-1, -1, -1}, {0, 0, 1}, {1, 1, 0}};
  CHECK(plan.rows == rows);
  // expert 3's rows lie in the second macrobatch, so nothing is shared with expert 2's
  CHECK((plan.first_use == std::vector<int32_t>(8, -1)));
  CHECK((plan.groups == std::vector<Group>{{0, 2, 0}, {2, 1, 0}, {3, 1, 1}}));
  CHECK((plan.segments == std::vector<Group>{{0, 3, 0}, {3, 1, 1}}));
  const Phase up = Phase::kGateUp, down = Phase::kDown;
  const std::vector<Tile> tiles{{up, 0, 0},   {up, 1, 0}, {up, 0, 1},   {up, 1, 1},
                                {up, 2, 0},   {up, 2, 1}, {down, 0, 0}, {down, 1, 0},
                                {down, 2, 0}, {up, 3, 0}, {up, 3, 1},   {down, 3, 0}};
  CHECK(plan.tiles == tiles);
  const Phase hidden = Phase::kGradHidden, input = Phase::kGradInput, weight = Phase::kGradWeight;
  const std::vector<Tile> backward{{hidden, 3, 0}, {hidden, 3, 1}, {input, 3, 0},  {weight, 3, 0},
                                   {hidden, 2, 0}, {hidden, 2, 1}, {hidden, 1, 0}, {hidden, 0, 0},
                                   {hidden, 1, 1}, {hidden, 0, 1}, {input, 2, 0},  {input, 1, 0},
                                   {input, 0, 0},  {weight, 2, 0}};
  CHECK(backward_tiles(s, plan) == backward);

  s.macrobatch_blocks = 4;  // one macrobatch: token (0, 0) and (1, 1) are pulled once
  s.ring_blocks = 4;
  const HostPlan one = build(s, test::pointers(ids).data(), 1);
  CHECK((one.first_use == std::vector<int32_t>{-1, -1, -1, -1, -1, -1, 0, 1}));

  s.source_order = SourceOrder::kSequential;
  const HostPlan sequential = build(s, test::pointers(ids).data(), 1);
  const std::vector<RowSource> in_order{{0, 0, 0}, {0, 1, 0},    {0, 2, 1}, {1, 1, 1},
                                        {1, 2, 1}, {-1, -1, -1}, {0, 0, 1}, {1, 1, 0}};
  CHECK(sequential.rows == in_order);
  CHECK((sequential.first_use == std::vector<int32_t>{-1, -1, -1, -1, -1, -1, 0, 3}));
}

TEST(matches_the_naive_reference) {
  Rng rng(1);
  for (int round = 0; round < 2000; ++round) {
    const Shape s = test::random_shape(rng, 6, 24, 8);
    CHECK(check(s) == nullptr, check(s));
    const Ids ids = test::random_ids(rng, s, static_cast<Skew>(round % test::kNumSkews));
    for (int32_t rank = 0; rank < s.num_ranks; ++rank) {
      const std::string about = "round " + std::to_string(round) + " rank " + std::to_string(rank);
      CHECK(check_ids(s, s.num_ranks * s.num_local_experts, ids[rank].data(), rank, nullptr),
            about);
      const HostPlan plan = build(s, test::pointers(ids).data(), rank);
      check_against_reference(s, ids, rank, plan, about);
      CHECK(static_cast<int64_t>(plan.block_expert.size()) <= max_blocks(s), about);
      CHECK(static_cast<int64_t>(plan.groups.size()) <= max_groups(s), about);
      CHECK(static_cast<int64_t>(plan.segments.size()) <= max_segments(s), about);
      CHECK(static_cast<int64_t>(backward_tiles(s, plan).size()) <= max_tiles(s), about);
    }
  }
}

TEST(pieces_in_any_order_give_the_same_plan) {
  Rng rng(2);
  for (int round = 0; round < 1000; ++round) {
    const Shape s = test::random_shape(rng, 5, 16, 8);
    const Ids ids = test::random_ids(rng, s, static_cast<Skew>(round % test::kNumSkews));
    const int32_t rank = test::pick(rng, 0, s.num_ranks - 1);
    check_equal(build_in_pieces(rng, s, ids, rank), build(s, test::pointers(ids).data(), rank),
                "round " + std::to_string(round));
  }
}

TEST(seventy_two_ranks_and_many_experts) {
  Rng rng(3);
  Shape s = test::random_shape(rng, 1, 1, 1);
  s.num_ranks = 72;
  s.num_tokens = 9;
  s.num_local_experts = 4;
  s.top_k = 8;
  s.source_order = SourceOrder::kInterleaved;
  const Ids wide = test::random_ids(rng, s, Skew::kZipf);
  for (int32_t rank : {0, 35, 71})
    check_against_reference(s, wide, rank, build(s, test::pointers(wide).data(), rank), "72 ranks");

  s.num_ranks = 2;
  s.num_tokens = 40;
  s.num_local_experts = 600;  // most experts get nothing
  const Ids sparse = test::random_ids(rng, s, Skew::kUniform);
  check_against_reference(s, sparse, 1, build(s, test::pointers(sparse).data(), 1), "600 experts");
}

// A sum over an expert's rows in kSequential order must not depend on how tokens are spread.
TEST(sequential_rows_do_not_depend_on_the_number_of_ranks) {
  Rng rng(4);
  Shape one = test::random_shape(rng, 1, 1, 1);
  one.num_ranks = 1;
  one.num_tokens = 24;
  one.num_local_experts = 12;
  one.top_k = 3;
  one.source_order = SourceOrder::kSequential;
  const Ids all = test::random_ids(rng, one, Skew::kUniform);
  const auto expected = test::reference_rows(one, all, 0);
  for (int32_t ranks : {2, 3, 4, 6, 12}) {
    Shape s = one;
    s.num_ranks = ranks;
    s.num_tokens = one.num_tokens / ranks;
    s.num_local_experts = one.num_local_experts / ranks;
    Ids ids(ranks);
    const size_t part = all[0].size() / ranks;
    for (int32_t r = 0; r < ranks; ++r)
      ids[r].assign(all[0].begin() + r * part, all[0].begin() + (r + 1) * part);
    for (int32_t r = 0; r < ranks; ++r) {
      const HostPlan plan = build(s, test::pointers(ids).data(), r);
      for (int32_t e = 0; e < s.num_local_experts; ++e)
        for (int32_t i = 0; i < plan.expert_rows[e]; ++i) {
          const RowSource got = plan.rows[plan.expert_first_block[e] * s.block_rows + i];
          const RowSource want = expected[r * s.num_local_experts + e][i];
          CHECK(got.rank * s.num_tokens + got.token == want.token && got.slot == want.slot,
                "ranks ", ranks, " rank ", r, " expert ", e, " row ", i);
        }
    }
  }
}

TEST(row_positions_of_large_counts) {
  // rows beyond 2^30: sums are taken in 64 bits
  const std::vector<int32_t> counts{700'000'000, 5, 700'000'000, 0};
  const auto at = [&](int32_t source, int32_t j, SourceOrder order) {
    return row_position(counts.data(), 1, 4, source, j, order);
  };
  CHECK(at(2, 699'999'999, SourceOrder::kInterleaved) == 1'400'000'004);
  CHECK(at(0, 699'999'999, SourceOrder::kInterleaved) == 1'400'000'003);
  CHECK(at(2, 0, SourceOrder::kSequential) == 700'000'005);
  CHECK(combine_slot(7, 3, 1 << 30) == 3 * (int64_t{1} << 30) + 7);
}

TEST(bad_ids_are_found) {
  Shape s{};
  s.num_tokens = 2;
  s.top_k = 3;
  const auto find = [&](std::vector<int32_t> ids, IdError* error) {
    *error = {};
    return check_ids(s, 4, ids.data(), 5, error);
  };
  IdError e;
  CHECK(find({0, 1, 2, -1, -1, 3}, &e));
  CHECK(find({-1, -1, -1, -1, -1, -1}, &e));
  CHECK(find({3, 2, 1, 3, 2, 1}, &e));  // the same expert in two tokens is fine
  CHECK(!find({0, 1, 2, 0, 4, 1}, &e));
  CHECK(e.kind == IdError::Kind::kOutOfRange && e.rank == 5 && e.token == 1 && e.slot == 1 &&
        e.id == 4);
  CHECK(describe(e, 4).find("expert_ids[1, 1] of rank 5 is 4") != std::string::npos,
        describe(e, 4));
  CHECK(!find({0, -2, 2, 0, 3, 1}, &e));
  CHECK(e.kind == IdError::Kind::kOutOfRange && e.token == 0 && e.slot == 1 && e.id == -2);
  CHECK(!find({0, 1, 2, 3, 1, 3}, &e));
  CHECK(e.kind == IdError::Kind::kRepeated && e.token == 1 && e.slot == 2 && e.id == 3);
  CHECK(!find({INT32_MAX, 1, 2, 3, 1, 3}, &e) && e.id == INT32_MAX);
  CHECK(!find({INT32_MIN, 1, 2, 3, 1, 3}, &e) && e.id == INT32_MIN);
  CHECK(!check_ids(s, 4, std::vector<int32_t>{9, 9, 9, 9, 9, 9}.data(), 0, nullptr));
}

TEST(build_refuses_what_check_refuses) {
  Rng rng(5);
  Shape s = test::random_shape(rng, 2, 3, 2);
  const Ids ids = test::random_ids(rng, s, Skew::kUniform);
  const auto message = [&](const Shape& shape, int32_t rank) -> std::string {
    try {
      build(shape, test::pointers(ids).data(), rank);
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "";
  };
  CHECK(message(s, s.num_ranks).find("rank must be from 0 to") == 0);
  CHECK(message(s, -1).find("given -1") != std::string::npos);
  s.ring_blocks = 0;
  CHECK(message(s, 0).find("ring_blocks must be") == 0, message(s, 0));
  CHECK(message(s, 0).find("ring_blocks=0") != std::string::npos, message(s, 0));
}

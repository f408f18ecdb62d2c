// Tile order: every tile once, groups inside one expert and one macrobatch, the block running
// fastest, closed forms equal to the naive nested loops, ring slots and counter targets equal to
// what a walk over the whole order counts.
#include <map>
#include <set>

#include "cases.h"
#include "check.h"

using namespace jax_mok::plan;
using test::Ids;
using test::Rng;
using test::Skew;

namespace {

std::string text(const Tile& t) {
  return "(" + std::to_string(static_cast<int>(t.phase)) + "," + std::to_string(t.block) + "," +
         std::to_string(t.n) + ")";
}

// Groups found by walking over the blocks; `most` = most blocks of one.
std::vector<Group> naive_runs(const Shape& s, const std::vector<int32_t>& block_expert,
                              int32_t most) {
  std::vector<Group> runs;
  for (int32_t b = 0; b < static_cast<int32_t>(block_expert.size()); ++b) {
    const bool fresh = runs.empty() || block_expert[b] != runs.back().expert ||
                       b % s.macrobatch_blocks == 0 || runs.back().num_blocks == most;
    if (fresh) runs.push_back({b, 0, block_expert[b]});
    ++runs.back().num_blocks;
  }
  return runs;
}

// The order as kernel.md tells it, by nested loops.
std::vector<Tile> naive_order(const Shape& s, const std::vector<int32_t>& block_expert, Pass pass) {
  const bool forward = pass == Pass::kForward;
  std::map<int32_t, std::vector<Group>> groups, segments;  // by macrobatch
  for (const Group& g : naive_runs(s, block_expert, s.group_blocks))
    groups[g.first_block / s.macrobatch_blocks].push_back(g);
  for (const Group& g : naive_runs(s, block_expert, INT32_MAX))
    segments[g.first_block / s.macrobatch_blocks].push_back(g);
  std::vector<int32_t> macrobatches;
  for (const auto& entry : groups) macrobatches.push_back(entry.first);
  if (!forward) std::reverse(macrobatches.begin(), macrobatches.end());
  std::vector<Tile> order;
  for (int32_t m : macrobatches) {
    std::vector<Group> of_m = groups[m], pieces = segments[m];
    if (!forward) {
      std::reverse(of_m.begin(), of_m.end());
      std::reverse(pieces.begin(), pieces.end());
    }
    const auto block_tiles = [&](Phase phase, int32_t tiles) {
      std::vector<Tile> result;
      for (const Group& g : of_m)
        for (int32_t n = 0; n < tiles; ++n)
          for (int32_t i = 0; i < g.num_blocks; ++i)
            result.push_back(
                {phase, forward ? g.first_block + i : g.first_block + g.num_blocks - 1 - i, n});
      return result;
    };
    const auto first = block_tiles(forward ? Phase::kGateUp : Phase::kGradHidden, s.gate_up_tiles);
    const auto second = block_tiles(forward ? Phase::kDown : Phase::kGradInput, s.down_tiles);
    size_t a = 0, b = 0;
    const auto take = [&](const std::vector<Tile>& from, size_t& at, size_t tiles) {
      for (; tiles > 0 && at < from.size(); --tiles) order.push_back(from[at++]);
    };
    const bool turns = forward && s.lead_blocks > 0;
    take(first, a, turns ? static_cast<size_t>(s.lead_blocks) * s.gate_up_tiles : first.size());
    while (b < second.size()) {
      take(first, a, s.gate_up_tiles);
      take(second, b, s.down_tiles);
    }
    if (forward) continue;
    for (const Group& g : pieces)
      for (int32_t n = 0; n < s.grad_weight_tiles; ++n)
        order.push_back({Phase::kGradWeight, g.first_block + g.num_blocks - 1, n});
  }
  return order;
}

struct Layout {
  Shape s;
  HostPlan plan;
};

Layout random_layout(Rng& rng, int round) {
  Layout l{test::random_shape(rng, 4, 60, 9), {}};
  const Ids ids = test::random_ids(rng, l.s, static_cast<Skew>(round % test::kNumSkews));
  l.plan = build(l.s, test::pointers(ids).data(), test::pick(rng, 0, l.s.num_ranks - 1));
  return l;
}

}  // namespace

TEST(groups_and_segments) {
  Rng rng(1);
  for (int round = 0; round < 15000; ++round) {
    const auto [s, plan] = random_layout(rng, round);
    CHECK(plan.groups == naive_runs(s, plan.block_expert, s.group_blocks), "round ", round);
    CHECK(plan.segments == naive_runs(s, plan.block_expert, INT32_MAX), "round ", round);
    for (const Group& g : plan.groups) {
      CHECK(g.num_blocks >= 1 && g.num_blocks <= s.group_blocks, "round ", round);
      CHECK(macrobatch_of(s, g.first_block) == macrobatch_of(s, g.first_block + g.num_blocks - 1),
            "round ", round);
      for (int32_t b = g.first_block; b < g.first_block + g.num_blocks; ++b) {
        CHECK(plan.block_expert[b] == g.expert, "round ", round);
        CHECK(group_of_block(s, plan.map(), b) == g, "round ", round, " block ", b);
      }
      CHECK(gating_block(Pass::kForward, g) == g.first_block + g.num_blocks - 1);
      CHECK(gating_block(Pass::kBackward, g) == g.first_block);
    }
    std::set<int32_t> started, ended;
    for (auto g = plan.segments.rbegin(); g != plan.segments.rend(); ++g) {
      for (int32_t b = g->first_block; b < g->first_block + g->num_blocks; ++b)
        CHECK(segment_of_block(s, plan.map(), b) == *g, "round ", round, " block ", b);
      CHECK(starts_weight_sum(plan.map(), *g) == started.insert(g->expert).second);
      if (ends_weight_sum(plan.map(), *g)) CHECK(ended.insert(g->expert).second);
    }
    CHECK(started == ended, "round ", round);
  }
}

TEST(order_is_the_naive_one_and_closed_forms_agree) {
  Rng rng(2);
  for (int round = 0; round < 2000; ++round) {
    const auto [s, plan] = random_layout(rng, round);
    const BlockMap map = plan.map();
    const auto forward = naive_order(s, plan.block_expert, Pass::kForward);
    CHECK(plan.tiles == forward, "round ", round);
    const auto backward = backward_tiles(s, plan);
    CHECK(backward == naive_order(s, plan.block_expert, Pass::kBackward), "round ", round);

    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      int64_t index = 0;
      std::set<std::tuple<int, int, int>> seen;
      for (const Tile& t : pass == Pass::kForward ? forward : backward) {
        CHECK(unpack(pack(t)) == t, "round ", round, text(t));
        CHECK(seen.insert({static_cast<int>(t.phase), t.block, t.n}).second, text(t), " twice");
        if (t.phase == Phase::kGradWeight) continue;
        CHECK(pass_of(t.phase) == pass);
        const Tile at = tile_at(s, map, pass, index);
        CHECK(at == t, "round ", round, " index ", index, ": ", text(at), " against ", text(t));
        CHECK(tile_index(s, map, t) == index, "round ", round, " tile ", text(t));
        ++index;
      }
      CHECK(index == num_block_tiles(s, map.num_blocks), "round ", round);
    }
    size_t weight_tiles = 0;
    for (const Tile& t : backward) weight_tiles += t.phase == Phase::kGradWeight;
    CHECK(weight_tiles == plan.segments.size() * s.grad_weight_tiles, "round ", round);
  }
}

// Workers that walk macrobatch by macrobatch, phase by phase, each taking its own indices, together
// do the whole order, and a weight tile never changes its owner.
TEST(workers_share_the_order) {
  Rng rng(3);
  for (int round = 0; round < 1500; ++round) {
    auto [s, plan] = random_layout(rng, round);
    s.lead_blocks = 0;  // phases follow each other
    const BlockMap map = plan.map();
    const int32_t workers = test::pick(rng, 1, 12);
    const int32_t macrobatches = num_macrobatches(s, map.num_blocks);
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      std::vector<int> done(num_block_tiles(s, map.num_blocks), 0);
      for (int32_t w = 0; w < workers; ++w)
        for (int32_t i = 0; i < macrobatches; ++i) {
          const int32_t m = macrobatch_at(pass, macrobatches, i);
          for (Phase phase : {first_phase(pass), second_phase(pass)}) {
            const int64_t first = phase_first_tile(s, map.num_blocks, m, phase);
            const int64_t end = first + phase_tiles(s, map.num_blocks, m, phase);
            for (int64_t t = first_owned(first, w, workers); t < end; t += workers) {
              CHECK(t % workers == w && t >= first && t < end);
              CHECK(phase_tile(s, map, m, phase, t - first) == tile_at(s, map, pass, t));
              ++done[t];
            }
          }
        }
      for (size_t t = 0; t < done.size(); ++t) CHECK(done[t] == 1, "round ", round, " tile ", t);
    }
    std::map<std::pair<int32_t, int32_t>, int32_t> owners;
    for (const Group& g : plan.segments)
      for (int32_t n = 0; n < s.grad_weight_tiles; ++n) {
        const int32_t owner_of_tile = weight_tile_owner(s, g.expert, n, workers);
        CHECK(owner_of_tile >= 0 && owner_of_tile < workers);
        CHECK(owners.insert({{g.expert, n}, owner_of_tile}).first->second == owner_of_tile);
      }
  }
}

TEST(first_owned_index) {
  for (int64_t first = 0; first < 40; ++first)
    for (int32_t workers = 1; workers <= 9; ++workers)
      for (int32_t w = 0; w < workers; ++w) {
        int64_t expected = first;
        while (expected % workers != w) ++expected;
        CHECK(first_owned(first, w, workers) == expected, first, " ", w, " ", workers);
      }
}

// Walk the order, count what every counter gets, and compare at the places where it is waited for.
TEST(slots_generations_and_counter_targets) {
  Rng rng(4);
  for (int round = 0; round < 1500; ++round) {
    auto [s, plan] = random_layout(rng, round);
    const BlockMap map = plan.map();
    for (Pass pass : {Pass::kForward, Pass::kBackward}) {
      if (pass == Pass::kBackward) s.ring_blocks = s.macrobatch_blocks + test::pick(rng, 0, 3);
      const bool forward = pass == Pass::kForward;
      const int32_t h_ring = s.macrobatch_blocks, x_ring = s.ring_blocks;
      std::vector<uint32_t> x_full(x_ring), x_empty(x_ring), h_full(h_ring), h_empty(h_ring);
      std::vector<int32_t> users(x_ring, 0);
      int32_t pulled = 0;
      const auto order = forward ? plan.tiles : backward_tiles(s, plan);
      const auto pull_up_to = [&](int32_t block) {
        for (;; ++pulled) {
          const int32_t b = forward ? pulled : map.num_blocks - 1 - pulled;
          if (pulled == map.num_blocks || (forward ? b > block : b < block)) return;
          const int32_t slot = ring_slot(b, x_ring);
          const int32_t g = ring_generation(pass, map.num_blocks, b, x_ring);
          CHECK(g == users[slot]++, "round ", round, " block ", b);
          CHECK(x_empty[slot] == x_empty_target(s, pass, g), "round ", round, " block ", b);
          x_full[slot] += s.block_rows;
          CHECK(x_full[slot] == x_full_target(s, g), "round ", round, " block ", b);
        }
      };
      for (const Tile& t : order) {
        const int32_t hs = ring_slot(t.block, h_ring), xs = ring_slot(t.block, x_ring);
        const int32_t hg = ring_generation(pass, map.num_blocks, t.block, h_ring);
        if (t.phase == first_phase(pass)) {
          pull_up_to(gating_block(pass, group_of_block(s, map, t.block)));
          CHECK(h_empty[hs] == h_empty_target(s, pass, hg), "round ", round, " ", text(t));
          ++h_full[hs];
          if (forward) ++x_empty[xs];
        } else if (t.phase == second_phase(pass)) {
          CHECK(h_full[hs] == h_full_target(s, hg), "round ", round, " ", text(t));
          ++h_empty[hs];
        } else {
          const Group g = segment_of_block(s, map, t.block);
          for (int32_t b = g.first_block; b < g.first_block + g.num_blocks; ++b) {
            ++x_empty[ring_slot(b, x_ring)];
            ++h_empty[ring_slot(b, h_ring)];
          }
        }
      }
      CHECK(pulled == map.num_blocks, "round ", round);
      // what the forward leaves is what the backward meets first
      for (int32_t b = 0; b < map.num_blocks; ++b) {
        CHECK(left_in_ring(map.num_blocks, b, x_ring) ==
                  (ring_generation(Pass::kBackward, map.num_blocks, b, x_ring) == 0),
              "round ", round, " block ", b);
        CHECK(ring_row(s, b, s.block_rows - 1, x_ring) < int64_t{x_ring} * s.block_rows);
      }
    }
  }
}

// The largest order check() lets through: indices near 2^31 survive the round trip.
TEST(indices_near_the_limit) {
  const int32_t blocks = 1 << 20;
  std::vector<int32_t> block_expert(blocks), first_block{0, blocks / 3, blocks / 3, blocks};
  for (int32_t b = 0; b < blocks; ++b) block_expert[b] = b < blocks / 3 ? 0 : 2;
  Shape s{};
  s.num_ranks = 1;
  s.num_tokens = blocks * 100 - 1000;
  s.top_k = 1;
  s.num_local_experts = 3;
  s.block_rows = 100;
  s.gate_up_tiles = 1000;
  s.down_tiles = 1040;
  s.group_blocks = 8;
  s.macrobatch_blocks = 1001;
  s.ring_blocks = 77;
  CHECK(check(s) == nullptr, check(s));
  const BlockMap map{blocks, block_expert.data(), first_block.data()};
  const int64_t all = num_block_tiles(s, blocks);
  CHECK(all > 2'139'000'000);
  Rng rng(5);
  for (Pass pass : {Pass::kForward, Pass::kBackward})
    for (int i = 0; i < 20000; ++i) {
      s.lead_blocks = i % 2 * 50;
      const int64_t index = i < 100 ? all - 1 - i : static_cast<int64_t>(rng() % all);
      const Tile t = tile_at(s, map, pass, index);
      CHECK(t.block >= 0 && t.block < blocks && t.n >= 0 && t.n < 1040);
      CHECK(tile_index(s, map, t) == index, index);
    }
}

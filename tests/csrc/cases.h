// Random shapes and routings for the tests, and the naive reference they are held against: queues
// dealt out one row at a time, nothing shared with csrc/plan but its plain structs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "plan/host_plan.h"

namespace test {

using jax_mok::plan::RowSource;
using jax_mok::plan::Shape;
using jax_mok::plan::SourceOrder;
using Rng = std::mt19937_64;

inline int32_t pick(Rng& rng, int32_t low, int32_t high) {  // both inclusive
  return low + static_cast<int32_t>(rng() % static_cast<uint64_t>(high - low + 1));
}

// ids[rank][token * top_k + slot]
using Ids = std::vector<std::vector<int32_t>>;

inline std::vector<const int32_t*> pointers(const Ids& ids) {
  std::vector<const int32_t*> all;
  for (const auto& rank_ids : ids) all.push_back(rank_ids.data());
  return all;
}

enum class Skew { kUniform, kZipf, kOneRank, kOneExpert, kMostlyUnused, kAllUnused };
constexpr int kNumSkews = 6;

// Distinct experts per token, drawn without replacement from the weights of the skew.
inline Ids random_ids(Rng& rng, const Shape& s, Skew skew) {
  const int32_t num_experts = s.num_ranks * s.num_local_experts;
  std::vector<double> weight(num_experts, 1.0);
  const int32_t hot = pick(rng, 0, s.num_ranks - 1) * s.num_local_experts;
  for (int32_t e = 0; e < num_experts; ++e) {
    if (skew == Skew::kZipf) weight[e] = 1.0 / std::pow(1.0 + e, 1.5);
    if (skew == Skew::kOneRank && e / s.num_local_experts != hot / s.num_local_experts)
      weight[e] = 0.0;
    if (skew == Skew::kOneExpert && e != hot) weight[e] = 0.0;
  }
  if (skew == Skew::kZipf) std::shuffle(weight.begin(), weight.end(), rng);
  const double unused = skew == Skew::kMostlyUnused ? 0.9 : skew == Skew::kAllUnused ? 1.0 : 0.05;
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  Ids ids(s.num_ranks);
  for (auto& of_rank : ids) {
    const bool idle = s.num_ranks > 1 && pick(rng, 0, 7) == 0;  // a rank without tokens
    for (int32_t token = 0; token < s.num_tokens; ++token) {
      std::vector<double> left = weight;
      for (int32_t slot = 0; slot < s.top_k; ++slot) {
        const double total = std::accumulate(left.begin(), left.end(), 0.0);
        int32_t id = -1;
        if (!idle && total > 0.0 && uniform(rng) >= unused) {
          double at = uniform(rng) * total;
          for (int32_t e = 0; e < num_experts; ++e) {
            if (left[e] == 0.0) continue;
            id = e;  // the last non-zero one if rounding runs over the end
            if ((at -= left[e]) < 0.0) break;
          }
          left[id] = 0.0;
        }
        of_rank.push_back(id);
      }
    }
  }
  return ids;
}

inline Shape random_shape(Rng& rng, int32_t most_ranks, int32_t most_tokens, int32_t most_experts) {
  Shape s{};
  s.num_ranks = pick(rng, 1, most_ranks);
  s.num_tokens = pick(rng, 0, most_tokens);
  s.num_local_experts = pick(rng, 1, most_experts);
  s.top_k = pick(rng, 1, std::min(6, s.num_ranks * s.num_local_experts));
  s.block_rows = pick(rng, 1, 5);
  s.gate_up_tiles = pick(rng, 1, 4);
  s.down_tiles = pick(rng, 1, 4);
  s.grad_weight_tiles = pick(rng, 1, 4);
  s.group_blocks = pick(rng, 1, 5);
  s.macrobatch_blocks = s.group_blocks + pick(rng, 0, 7);
  s.lead_blocks = pick(rng, 0, 2) == 0 ? 0 : s.group_blocks + pick(rng, 0, 4);
  s.rows_in_flight = pick(rng, 0, 8);
  s.ring_blocks = static_cast<int32_t>(jax_mok::plan::min_ring_blocks(s)) + pick(rng, 0, 4);
  s.source_order = pick(rng, 0, 1) == 0 ? SourceOrder::kInterleaved : SourceOrder::kSequential;
  return s;
}

// rows[e] = the rows of local expert e of `rank`, in order.
inline std::vector<std::vector<RowSource>> reference_rows(const Shape& s, const Ids& ids,
                                                          int32_t rank) {
  std::vector<std::vector<RowSource>> rows(s.num_local_experts);
  for (int32_t e = 0; e < s.num_local_experts; ++e) {
    std::vector<std::vector<RowSource>> queue(s.num_ranks);
    for (int32_t source = 0; source < s.num_ranks; ++source)
      for (int32_t i = 0; i < s.num_tokens * s.top_k; ++i)
        if (ids[source][i] == rank * s.num_local_experts + e)
          queue[source].push_back({source, i / s.top_k, i % s.top_k});
    if (s.source_order == SourceOrder::kSequential) {
      for (const auto& q : queue) rows[e].insert(rows[e].end(), q.begin(), q.end());
      continue;
    }
    for (bool any = true; any;) {
      any = false;
      for (auto& q : queue) {
        if (q.empty()) continue;
        rows[e].push_back(q.front());
        q.erase(q.begin());
        any = true;
      }
    }
  }
  return rows;
}

// One entry per block: its expert and its rows, padded.
struct ReferenceBlock {
  int32_t expert;
  std::vector<RowSource> rows;
};

inline std::vector<ReferenceBlock> reference_blocks(const Shape& s, const Ids& ids, int32_t rank) {
  std::vector<ReferenceBlock> blocks;
  const auto rows = reference_rows(s, ids, rank);
  for (int32_t e = 0; e < s.num_local_experts; ++e) {
    for (size_t i = 0; i < rows[e].size(); ++i) {
      if (i % s.block_rows == 0) blocks.push_back({e, {}});
      blocks.back().rows.push_back(rows[e][i]);
    }
    if (!rows[e].empty()) blocks.back().rows.resize(s.block_rows, RowSource{-1, -1, -1});
  }
  return blocks;
}

}  // namespace test

// The whole plan of one rank, built on the host from every rank's expert ids. The CPU engine runs
// on it, and it is what a device-side plan is compared with.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan/order.h"
#include "plan/routing.h"
#include "plan/shape.h"

namespace jax_mok::plan {

struct HostPlan {
  std::vector<int32_t> counts;              // [num_ranks * num_local_experts], source rank major
  std::vector<int32_t> expert_rows;         // [num_local_experts], without padding
  std::vector<int32_t> expert_first_block;  // [num_local_experts + 1]
  std::vector<int32_t> block_expert;        // [num_blocks]
  std::vector<RowSource> rows;              // [num_blocks * block_rows], padded
  std::vector<int32_t> first_use;           // [rows]: the first row of the same macrobatch with the
                                            // same (rank, token), if it is an earlier one; else -1
  std::vector<Group> groups;                // ascending blocks
  std::vector<Group> segments;              // ascending blocks
  std::vector<Tile> tiles;                  // the forward's, in the total order

  int32_t num_blocks() const { return static_cast<int32_t>(block_expert.size()); }
  int32_t count(int32_t source, int32_t local_expert) const {
    return counts[static_cast<size_t>(source) * expert_rows.size() + local_expert];
  }
  BlockMap map() const { return {num_blocks(), block_expert.data(), expert_first_block.data()}; }
};

inline std::string describe(const Shape& s) {
  const auto field = [](const char* name, int64_t value) {
    return std::string(name) + "=" + std::to_string(value);
  };
  return field("num_ranks", s.num_ranks) + ", " + field("num_tokens", s.num_tokens) + ", " +
         field("top_k", s.top_k) + ", " + field("num_local_experts", s.num_local_experts) + ", " +
         field("block_rows", s.block_rows) + ", " + field("gate_up_tiles", s.gate_up_tiles) + ", " +
         field("down_tiles", s.down_tiles) + ", " + field("group_blocks", s.group_blocks) + ", " +
         field("macrobatch_blocks", s.macrobatch_blocks) + ", " +
         field("ring_blocks", s.ring_blocks) + ", " + field("rows_in_flight", s.rows_in_flight) +
         ", " + field("grad_weight_tiles", s.grad_weight_tiles);
}

// What is wrong with one rank's expert ids, and where.
struct IdError {
  enum class Kind { kOutOfRange, kRepeated };
  int32_t rank, token, slot, id;
  Kind kind;
};

// The one wording of a bad expert id (jax_mok/_cuda.py repeats it for what a GPU reports). `whose`
// and `largest`: the rank and the largest id that is allowed, in words where they are not known.
inline std::string describe(const IdError& e, const std::string& whose,
                            const std::string& largest) {
  const std::string where = "expert_ids[" + std::to_string(e.token) + ", " +
                            std::to_string(e.slot) + "] of " + whose + " is " +
                            std::to_string(e.id);
  if (e.kind == IdError::Kind::kRepeated)
    return where + ", which an earlier slot of the same token has too; ids of a token must differ";
  return where + "; allowed are 0 to " + largest + ", and -1 for unused";
}

inline std::string describe(const IdError& e, int32_t num_experts) {
  return describe(e, "rank " + std::to_string(e.rank), std::to_string(num_experts - 1));
}

// True if the ids [num_tokens, top_k] of a rank are all unused (-1) or in range and distinct within
// their token. Otherwise *error (may be null) tells the first fault.
inline bool check_ids(const Shape& s, int32_t num_experts, const int32_t* ids, int32_t rank,
                      IdError* error) {
  // seen[e] = last token that had expert e: linear in top_k even where top_k is the number of
  // experts
  std::vector<int32_t> seen(static_cast<size_t>(num_experts), -1);
  for (int32_t token = 0; token < s.num_tokens; ++token) {
    for (int32_t slot = 0; slot < s.top_k; ++slot) {
      const int32_t id = ids[int64_t{token} * s.top_k + slot];
      if (id == kUnusedSlot) continue;
      const bool in_range = valid_expert(id, num_experts);
      if (in_range && seen[id] != token) {
        seen[id] = token;
        continue;
      }
      if (error != nullptr)
        *error = {rank, token, slot, id,
                  in_range ? IdError::Kind::kRepeated : IdError::Kind::kOutOfRange};
      return false;
    }
  }
  return true;
}

namespace internal {

// Calls visit(source, token, slot, local expert) for every row that goes to `rank`, in that order.
template <typename Visit>
void for_each_row(const Shape& s, const int32_t* const* ids_of_rank, int32_t rank, Visit visit) {
  // Every rank looks at all ids, so it must be cheap. Smaller ids wrap to large numbers.
  const uint32_t experts = s.num_local_experts, first = rank * experts;
  for (int32_t source = 0; source < s.num_ranks; ++source) {
    const int32_t* id = ids_of_rank[source];
    for (int32_t token = 0; token < s.num_tokens; ++token)
      for (int32_t slot = 0; slot < s.top_k; ++slot, ++id) {
        const uint32_t local_expert = static_cast<uint32_t>(*id) - first;
        if (local_expert < experts) visit(source, token, slot, static_cast<int32_t>(local_expert));
      }
  }
}

}  // namespace internal

// Plan of `rank` from the ids of all ranks: ids_of_rank[r] points to [num_tokens, top_k]. Ids must
// have passed check_ids. Throws std::invalid_argument if check(shape) fails or rank is out of
// range.
inline HostPlan build(const Shape& s, const int32_t* const* ids_of_rank, int32_t rank) {
  if (const char* wrong = check(s))
    throw std::invalid_argument(std::string(wrong) + " (given: " + describe(s) + ")");
  if (rank < 0 || rank >= s.num_ranks)
    throw std::invalid_argument("rank must be from 0 to " + std::to_string(s.num_ranks - 1) +
                                ", given " + std::to_string(rank));
  HostPlan plan;
  const size_t experts = static_cast<size_t>(s.num_local_experts);
  plan.counts.assign(static_cast<size_t>(s.num_ranks) * experts, 0);
  internal::for_each_row(s, ids_of_rank, rank, [&](int32_t source, int32_t, int32_t, int32_t e) {
    ++plan.counts[source * experts + e];
  });

  plan.expert_rows.assign(experts, 0);
  plan.expert_first_block.assign(experts + 1, 0);
  for (int32_t e = 0; e < s.num_local_experts; ++e) {
    for (int32_t source = 0; source < s.num_ranks; ++source)
      plan.expert_rows[e] += plan.count(source, e);
    const int32_t first = plan.expert_first_block[e];
    const int32_t blocks = num_blocks(plan.expert_rows[e], s.block_rows);
    plan.expert_first_block[e + 1] = first + blocks;
    plan.block_expert.insert(plan.block_expert.end(), blocks, e);
    for (int32_t i = 0; i < expert_segments(s, first, blocks); ++i)
      plan.segments.push_back(expert_segment(s, first, blocks, e, i));
    for (int32_t i = 0; i < expert_groups(s, first, blocks); ++i)
      plan.groups.push_back(expert_group(s, first, blocks, e, i));
  }

  plan.rows.assign(static_cast<size_t>(plan.num_blocks()) * s.block_rows, padding_row());
  plan.first_use.assign(plan.rows.size(), -1);
  std::vector<int32_t> next(plan.counts.size(), 0);  // rows placed so far per (source, expert)
  std::vector<int32_t> token_rows;                   // where the rows of the current token went
  int32_t last_source = -1, last_token = -1;
  const auto finish_token = [&] {
    const int32_t n = static_cast<int32_t>(token_rows.size());
    for (int32_t i = 0; i < n; ++i)
      plan.first_use[token_rows[i]] = first_use_of(token_rows.data(), n, i, s);
    token_rows.clear();
  };
  internal::for_each_row(s, ids_of_rank, rank,
                         [&](int32_t source, int32_t token, int32_t slot, int32_t e) {
                           if (source != last_source || token != last_token) finish_token();
                           last_source = source;
                           last_token = token;
                           const int32_t j = next[source * experts + e]++;
                           const int32_t row = plan.expert_first_block[e] * s.block_rows +
                                               row_position(&plan.counts[e], s.num_local_experts,
                                                            s.num_ranks, source, j, s.source_order);
                           plan.rows[row] = {source, token, slot};
                           token_rows.push_back(row);
                         });
  finish_token();

  const int64_t tiles = num_block_tiles(s, plan.num_blocks());
  plan.tiles.reserve(static_cast<size_t>(tiles));
  for (int64_t i = 0; i < tiles; ++i)
    plan.tiles.push_back(tile_at(s, plan.map(), Pass::kForward, i));
  return plan;
}

// The backward's tiles in the total order, the weight gradients of each macrobatch included.
inline std::vector<Tile> backward_tiles(const Shape& s, const HostPlan& plan) {
  std::vector<Tile> tiles;
  const BlockMap map = plan.map();
  const int32_t macrobatches = num_macrobatches(s, map.num_blocks);
  for (int32_t i = 0; i < macrobatches; ++i) {
    const int32_t m = macrobatch_at(Pass::kBackward, macrobatches, i);
    for (Phase phase : {Phase::kGradHidden, Phase::kGradInput})
      for (int64_t t = 0; t < phase_tiles(s, map.num_blocks, m, phase); ++t)
        tiles.push_back(phase_tile(s, map, m, phase, t));
    const BlockRange range = macrobatch_range(s, map.num_blocks, m);
    for (int32_t end = range.end; end > range.first;) {
      const Group segment = segment_of_block(s, map, end - 1);
      for (int32_t n = 0; n < s.grad_weight_tiles; ++n)
        tiles.push_back({Phase::kGradWeight, end - 1, n});
      end = segment.first_block;
    }
  }
  return tiles;
}

}  // namespace jax_mok::plan

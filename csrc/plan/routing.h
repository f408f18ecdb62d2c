// Who owns an expert, and where a routed row lands. A row's place is a closed form of the
// per-source counts: each row finds it alone, without sorting and without atomics that could decide
// an order.
#pragma once

#include <cstdint>

#include "plan/shape.h"

namespace jax_mok::plan {

constexpr int32_t kUnusedSlot = -1;  // an expert id that says: this slot of the token is not used

// Where a row of an expert comes from. rank -1 marks a padding row (token and slot are -1 as well).
struct RowSource {
  int32_t rank, token, slot;
};

MOK_HD RowSource padding_row() { return {-1, -1, -1}; }

MOK_HD bool is_padding(const RowSource& row) { return row.rank < 0; }

MOK_HD bool operator==(const RowSource& a, const RowSource& b) {
  return a.rank == b.rank && a.token == b.token && a.slot == b.slot;
}
MOK_HD bool operator!=(const RowSource& a, const RowSource& b) { return !(a == b); }

// Experts are dealt to the ranks in runs of num_local_experts.
MOK_HD bool valid_expert(int32_t id, int32_t num_experts) { return id >= 0 && id < num_experts; }
MOK_HD int32_t owner(int32_t expert, int32_t num_local_experts) {
  return expert / num_local_experts;
}
MOK_HD int32_t local(int32_t expert, int32_t num_local_experts) {
  return expert % num_local_experts;
}

MOK_HD int32_t num_blocks(int64_t rows, int32_t block_rows) {
  return static_cast<int32_t>(ceil_div(rows, block_rows));
}

// Row index, inside its expert, of the j-th row (in (token, slot) order) that `source` sends to it.
// counts_by_rank[s * stride] is the number of rows that source s sends to this expert.
// Interleaved: row j goes out in round j. Before it come the rows that the earlier rounds took, at
// most j from every source, and those of round j from lower ranks.
MOK_HD int32_t row_position(const int32_t* counts_by_rank, int64_t stride, int32_t num_ranks,
                            int32_t source, int32_t j, SourceOrder order) {
  int64_t position = 0;
  if (order == SourceOrder::kSequential) {
    for (int32_t s = 0; s < source; ++s) position += counts_by_rank[s * stride];
    position += j;
  } else {
    for (int32_t s = 0; s < num_ranks; ++s)
      position += min64(counts_by_rank[s * stride], int64_t{j} + (s < source ? 1 : 0));
  }
  return static_cast<int32_t>(position);
}

// Slot of the combine buffer [top_k][num_tokens] of the source rank that a row's result is pushed
// to: one writer per slot, and the source sums the slots of a token in slot order.
MOK_HD int64_t combine_slot(int32_t token, int32_t slot, int32_t num_tokens) {
  return int64_t{slot} * num_tokens + token;
}

// Dedup: several experts of one rank may want the same token. token_rows[0..num_rows) are the rows
// (of this rank's row list; -1 = slot not for this rank) that one (rank, token) takes; returns the
// one of them in the macrobatch of token_rows[i] that the pass pulls first (the backward: the last
// row), or -1 if that is token_rows[i] itself.
MOK_HD int32_t first_use_of(const int32_t* token_rows, int32_t num_rows, int32_t i, const Shape& s,
                            Pass pass = Pass::kForward) {
  const int64_t per_macrobatch = int64_t{s.macrobatch_blocks} * s.block_rows;
  const int64_t macrobatch = token_rows[i] / per_macrobatch;
  int32_t first = token_rows[i];
  for (int32_t j = 0; j < num_rows; ++j)
    if (token_rows[j] >= 0 && token_rows[j] / per_macrobatch == macrobatch &&
        (pass == Pass::kForward ? token_rows[j] < first : token_rows[j] > first))
      first = token_rows[j];
  return first == token_rows[i] ? -1 : first;
}

}  // namespace jax_mok::plan

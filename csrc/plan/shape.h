// The static facts of one call, equal on all ranks, and the capacities that follow from them.
// Everything here is a pure function usable on the host and in device code; no CUDA types.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define MOK_HD __host__ __device__ inline
#else
#define MOK_HD inline
#endif

namespace jax_mok::plan {

// In which order the rows of one expert follow each other.
enum class SourceOrder : int32_t {
  kInterleaved,  // one row of every source in turn: all peer links are busy at once (GPU)
  kSequential,   // (rank, token, slot): sums over an expert's rows then do not depend on how many
                 // ranks the same tokens are spread over (CPU)
};

enum class Pass : int32_t { kForward, kBackward };

// A *block* is `block_rows` rows of one expert, the last block of an expert is padded. The blocks
// of a rank are numbered expert after expert; experts without rows have none. A *group* (minibatch)
// is a run of blocks handed to the GEMM together, a *macrobatch* is a run of `macrobatch_blocks`
// blocks whatever their experts, so an expert may be split over several.
struct Shape {
  int32_t num_ranks;
  int32_t num_tokens;  // per rank; may be 0
  int32_t top_k;
  int32_t num_local_experts;
  int32_t block_rows;     // rows of a block (the M of a GEMM tile)
  int32_t gate_up_tiles;  // n tiles per block: gate|up GEMM, in the backward the hidden gradient
  int32_t down_tiles;     // n tiles per block: down GEMM, in the backward the input gradient
  int32_t group_blocks;   // most blocks of a group
  int32_t macrobatch_blocks;  // blocks per macrobatch = capacity of the h ring
  int32_t ring_blocks;        // capacity of the token ring; see min_ring_blocks
  SourceOrder source_order;
  int32_t rows_in_flight = 0;     // see min_ring_blocks
  int32_t grad_weight_tiles = 0;  // tiles of an expert's weight gradients (backward only)
  int32_t lead_blocks = 0;        // forward: see order.h
};

MOK_HD int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
MOK_HD int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
MOK_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that can arrive at one rank at most: a token's ids are distinct, so it brings at most
// min(top_k, num_local_experts) rows.
MOK_HD int64_t max_rows(const Shape& s) {
  return int64_t{s.num_ranks} * s.num_tokens * min64(s.top_k, s.num_local_experts);
}

// Experts that can have rows at once.
MOK_HD int64_t max_active_experts(const Shape& s) {
  return min64(max_rows(s), s.num_local_experts);
}

// Every active expert costs one block for its first row; only block_rows more rows buy another.
MOK_HD int64_t max_blocks(const Shape& s) {
  const int64_t active = max_active_experts(s);
  return active + (max_rows(s) - active) / s.block_rows;
}

MOK_HD int64_t max_macrobatches(const Shape& s) {
  return ceil_div(max_blocks(s), s.macrobatch_blocks);
}

// Segments: the pieces that macrobatch boundaries cut experts into. A segment ends with its expert
// or at one of the inner boundaries.
MOK_HD int64_t max_segments(const Shape& s) {
  const int64_t blocks = max_blocks(s);
  return blocks == 0 ? 0 : min64(blocks, max_active_experts(s) + max_macrobatches(s) - 1);
}

// A group ends because it is full, or with its segment.
MOK_HD int64_t max_groups(const Shape& s) {
  return min64(max_blocks(s), max_blocks(s) / s.group_blocks + max_segments(s));
}

// Tiles of the longer direction: with grad_weight_tiles = 0 that of the forward.
MOK_HD int64_t max_tiles(const Shape& s) {
  return max_blocks(s) * (int64_t{s.gate_up_tiles} + s.down_tiles) +
         max_segments(s) * s.grad_weight_tiles;
}

// Smallest token ring that cannot deadlock. A tile starts only when its whole group lies in the
// ring, so the ring holds a group. A communicating worker pulls rows in block order, but may
// already wait for the slot of a later row while rows it took before are not signalled yet; if that
// later row is `rows_in_flight` rows ahead of the oldest unsignalled one, it can be
// ceil(rows_in_flight / block_rows) blocks ahead, and the block that holds its slot must belong to
// a group that is complete without the unsignalled rows.
MOK_HD int64_t min_ring_blocks(const Shape& s) {
  return s.group_blocks + ceil_div(s.rows_in_flight, s.block_rows);
}

// In the backward the weight gradients read a macrobatch's tokens after both other phases, so what
// must be complete is a macrobatch. A worker that signals all rows of one macrobatch before it
// waits for a slot for the next may set rows_in_flight to 0 here.
MOK_HD int64_t min_ring_blocks_backward(const Shape& s) {
  return s.macrobatch_blocks + ceil_div(s.rows_in_flight, s.block_rows);
}

// nullptr, or a sentence that names the field at fault. Every function of plan/ relies on it.
MOK_HD const char* check(const Shape& s) {
  if (s.num_ranks < 1) return "num_ranks must be at least 1";
  if (s.num_tokens < 0) return "num_tokens must not be negative";
  if (s.top_k < 1) return "top_k must be at least 1";
  if (s.num_local_experts < 1) return "num_local_experts must be at least 1";
  if (s.block_rows < 1) return "block_rows must be at least 1";
  if (s.gate_up_tiles < 1) return "gate_up_tiles must be at least 1";
  if (s.down_tiles < 1) return "down_tiles must be at least 1";
  if (s.group_blocks < 1) return "group_blocks must be at least 1";
  if (s.macrobatch_blocks < s.group_blocks)
    return "macrobatch_blocks must be at least group_blocks";
  if (s.rows_in_flight < 0) return "rows_in_flight must not be negative";
  if (s.lead_blocks != 0 && s.lead_blocks < s.group_blocks)
    return "lead_blocks must be 0 or at least group_blocks: a smaller lead deadlocks";
  if (s.grad_weight_tiles < 0) return "grad_weight_tiles must not be negative";
  if (s.ring_blocks < min_ring_blocks(s))
    return "ring_blocks must be at least group_blocks + ceil(rows_in_flight / block_rows): a "
           "smaller ring deadlocks";
  if (s.source_order != SourceOrder::kInterleaved && s.source_order != SourceOrder::kSequential)
    return "source_order must be kInterleaved or kSequential";
  // Experts, rows and tiles are int32 and the counters uint32: refuse what would not fit.
  constexpr int64_t kMost = INT32_MAX;
  constexpr int64_t kMostTiles = 1 << 24;  // of a block or an expert: the n of a packed tile
  if (int64_t{s.num_ranks} * s.num_local_experts > kMost)
    return "num_ranks * num_local_experts is too large: experts must fit in int32";
  if (int64_t{s.num_ranks} * s.num_tokens > kMost / s.top_k || max_blocks(s) > kMost / s.block_rows)
    return "num_ranks * num_tokens * top_k is too large: padded rows must fit in int32";
  if (s.gate_up_tiles > kMostTiles || s.down_tiles > kMostTiles || s.grad_weight_tiles > kMostTiles)
    return "gate_up_tiles, down_tiles and grad_weight_tiles must be at most 2^24";
  // At most 2^31 blocks of at most 2^25 tiles, as many segments of 2^24: no overflow of int64.
  if (max_tiles(s) > kMost)
    return "gate_up_tiles, down_tiles or grad_weight_tiles is too large: the tiles of a rank must "
           "fit in int32";
  return nullptr;
}

// What the backward asks for besides.
MOK_HD const char* check_backward(const Shape& s) {
  if (const char* wrong = check(s)) return wrong;
  if (s.grad_weight_tiles < 1) return "grad_weight_tiles must be at least 1 in the backward";
  if (s.ring_blocks < min_ring_blocks_backward(s))
    return "ring_blocks must be at least macrobatch_blocks + ceil(rows_in_flight / block_rows) in "
           "the backward: a smaller ring deadlocks";
  return nullptr;
}

}  // namespace jax_mok::plan

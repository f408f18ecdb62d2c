// Rows moved between the ranks of a group, by a list: pulled by the ranks that get them, as the
// layer's dispatch does, or pushed by those that have them, by the same number of multiprocessors;
// and how long that takes. A measurement of the links, no part of a layer. A call has the stages of
// a layer's call and shares its heaps; the rules are those of forward.h.
#pragma once

#include "cuda/forward.h"
#include "plan/shape.h"

namespace jax_mok::cuda {

// Equal on all ranks.
struct ExchangeFacts {
  int32_t num_ranks = 2;
  int32_t num_virtual_ranks = 1;  // 1, or num_ranks: then all ranks run in this one launch
  int32_t num_tokens = 0;         // rows that a rank has
  int32_t num_rows = 0;           // places for rows that a rank gets
  int32_t num_moves = 0;          // of a rank's list
  int32_t row_bytes = 0;          // a multiple of 16
  int32_t num_sms = 0;            // CTAs of each rank that move rows
  bool push = false;
  double timeout_seconds = 60.0;
  double start_timeout_seconds = 600.0;
};

// A row from one rank to another. A source rank of -1: no move, which pads a list.
struct alignas(16) Move {
  int32_t source_rank, source_row, target_rank, target_row;
};

// Whether `rank` may make a move: it is the one to make it, and both rows are there.
MOK_HD bool is_allowed(const ExchangeFacts& f, int32_t rank, const Move& m) {
  const auto below = [](int32_t index, int32_t size) { return index >= 0 && index < size; };
  return (f.push ? m.source_rank : m.target_rank) == rank && below(m.source_rank, f.num_ranks) &&
         below(m.target_rank, f.num_ranks) && below(m.source_row, f.num_tokens) &&
         below(m.target_row, f.num_rows);
}

// Device addresses of one rank; with virtual ranks those of all ranks follow each other.
struct ExchangeBuffers {
  const void* x = nullptr;      // [num_tokens, row_bytes]
  const Move* moves = nullptr;  // [num_moves], those that this rank makes
  // [num_rows, row_bytes]: what came; all bits set where nothing did. After a fault: what had come.
  void* rows = nullptr;
  int32_t* ns = nullptr;  // [1], from the first instruction of this rank's CTAs until all that it
                          // moves has landed; -1 after a fault
  void* workspace = nullptr;        // exchange_workspace_bytes(); contents do not matter
  void* heaps[kMaxRanks] = {};      // as in ForwardBuffers
  struct Status* status = nullptr;  // as in ForwardBuffers
  uint64_t call_id = 0;             // as in ForwardBuffers
};

// As for the passes of a layer.
std::string check_exchange(const ExchangeFacts& facts);
size_t exchange_workspace_bytes(const ExchangeFacts& facts);
size_t exchange_heap_bytes(const ExchangeFacts& facts);
cudaError_t prepare_exchange();
cudaError_t launch_exchange(CallStage stage, const ExchangeFacts& facts, int rank,
                            const ExchangeBuffers& buffers, cudaStream_t stream,
                            const TestHooks& hooks = {});

}  // namespace jax_mok::cuda

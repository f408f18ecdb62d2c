// Where everything of a call lies: tile counts, ring capacities, and the byte offsets of the
// workspace (private to a device) and of the heap (symmetric, read and written by the peers).
// Computed once on the host, used as it is by the kernels.
#pragma once

#include <cstdint>

#include "cuda/backward.h"
#include "plan/order.h"
#include "plan/shape.h"

namespace jax_mok::cuda {

constexpr int kBlockRows = 128;      // rows of a GEMM tile
constexpr int kTileColumns = 256;    // columns of a GEMM tile
constexpr int kGateUpColumns = 128;  // hidden columns of a gate|up tile: half gate, half up
constexpr int kTileK = 64;           // depth of one pipeline stage
constexpr int kColumnUnit = 64;      // hidden and intermediate are multiples of it

constexpr int kPartColumns = 128;      // hidden columns of a partial <h, dh>
constexpr int kBiasTileColumns = 512;  // columns of a tile of bias gradients
constexpr int64_t kOpenSumBytes = int64_t{kBlockRows} * kTileColumns * 4;

constexpr int kCommBufferBytes = 16384;                  // shared memory of one communicating warp
constexpr int kMinCommBuffers = 4, kMaxCommBuffers = 8;  // pieces of rows that it holds at once

constexpr int kChunkIds = 128;          // expert ids that one warp of the plan counts
constexpr int kMaxLocalExperts = 2048;  // the plan counts them in shared memory

// An array of the workspace: rank r's part begins at offset + r * bytes.
struct Span {
  int64_t offset, bytes;
};

// Words that the CTAs of one rank share during a call; zeroed at its start.
struct RankControl {
  uint32_t abort;      // not 0: leave as soon as possible
  uint32_t verdict;    // Verdict, decided by one CTA once the peers have pushed their results
  uint32_t ctas_done;  // CTAs whose results are pushed
  uint32_t unused[29];
};
enum Verdict : uint32_t { kPending = 0, kSum = 1, kFail = 2 };

constexpr int kPastCalls = 256;  // that a rank remembers

// Control words at the start of a heap. A call goes by an id that is the same on all ranks and of
// no other call; a word that a peer writes has one writer and holds the id of the call it speaks
// of, so nothing is ever reset. See peers.cuh.
struct HeapControl {
  // Own rank only.
  uint32_t call;            // calls so far, the current one included
  uint32_t published_ctas;  // CTAs that have published their part
  uint32_t copied_ctas;     // likewise, of the tokens
  uint32_t unused;
  uint64_t id;                // of the current call
  uint64_t past[kPastCalls];  // ids of the last calls, the current one included, call n at n modulo
                              // their number
  // By every rank r, at [r].
  uint64_t at[kMaxRanks];      // the call that r is at: its ids can be read
  uint64_t copied[kMaxRanks];  // its tokens can be read
  uint64_t pushed[kMaxRanks];  // all its results for this rank are pushed
  uint64_t failed[kMaxRanks];  // it has given up
};

struct HeapLayout {
  int64_t ids;      // int32 [T, k], and
  int64_t x;        // bf16 [T, H]: for the other ranks
  int64_t dy;       // bf16 [T, H], and
  int64_t weights;  // float32 [T, k]: backward only, for the other ranks
  int64_t slots;    // bf16 [k][T][H]: results, pushed by the owners of the experts
  int64_t parts;    // float32 [parts][T, k]: backward only, partial <h, dh>, pushed likewise
  int64_t bytes;
};

struct WorkspaceLayout {
  Span control;             // RankControl
  Span counters;            // uint32: see the accessors of the parameters
  Span chunk_counts;        // int32 [ranks][El][chunks]; turned into prefix sums over the chunks
  Span counts;              // int32 [ranks][El]
  Span expert_first_block;  // int32 [El + 1]
  Span block_expert;        // int32 [max_blocks]
  Span routes;              // RowRoute or GradRoute [max_blocks * kBlockRows]
  Span token_rows;          // int32 [ranks][T, k]: row that a slot got here, or -1
  Span zero_row;            // bf16 [H]: what padding rows are made of
  Span x_ring;              // bf16 [ring * kBlockRows, H]
  Span h;                   // bf16 [macrobatch * kBlockRows, I]; backward: times the row's weight
  Span shared_h;            // bf16 [shared blocks * kBlockRows, S]
  Span shared_y;            // bf16 [T, H]; backward: the shared experts' part of dx
  // Backward only.
  Span dy_ring;                     // as x_ring
  Span d_gate, d_up;                // as h
  Span shared_d_gate, shared_d_up;  // as shared_h
  Span shared_parts;                // float32 [parts][T]: partial <h, dh> of the shared experts
  Span open_sums;  // float32 [2][tiles][128 * 256]: weight gradients of the expert that
                   // a macrobatch cuts, in fragment order
  int64_t bytes;
};

// Where a row of a block comes from and where its result goes.
struct RowRoute {
  const char* from;  // the token's row, on whichever rank; the zero row for padding
  char* to;          // its combine slot; null for padding
};

// The same in the backward.
struct GradRoute {
  const char* x;   // the token's row; the zero row for padding
  const char* dy;  // its cotangent; the zero row for padding
  char* dx;        // where the row's part of dx goes; null for padding
  float* part;     // where its first partial <h, dh> goes; null for padding
  float weight;    // the slot's expert weight; 0 for padding
};

// How rows are cut into copies. A row travels in `parts` pieces; `rows` neighbouring rows make a
// unit, which one worker moves and signals at once. A unit of several rows fits the buffers.
struct DispatchUnit {
  int32_t rows;
  int32_t parts;
  int32_t part_bytes;  // of every part but the last, which may be shorter
  int32_t buffers;     // pieces that fit a communicating warp's shared memory, at least 4
};

struct Geometry {
  plan::Shape shape;
  plan::Pass pass;
  bool save;  // forward: leave tokens and gate|up; backward: they are there
  int32_t num_virtual_ranks;
  int32_t num_experts;
  int32_t hidden, intermediate, shared_intermediate;
  int32_t shared_blocks, shared_gate_up_tiles, shared_hidden_tiles;
  int32_t num_parts, num_shared_parts;  // partial <h, dh> of a row, the one with b_down included
  int32_t down_weight_tiles, gate_up_weight_tiles, bias_tiles;  // of an expert's gradients
  int32_t shared_down_weight_tiles, shared_gate_up_weight_tiles;
  int32_t hidden_tile_columns;  // of a backward tile of hidden gradients
  int32_t num_chunks;           // of one rank's ids
  int32_t ctas_per_rank;  // CTAs of the persistent kernel, and how many of them only communicate
  int32_t comm_ctas_per_rank;
  DispatchUnit unit;
  WorkspaceLayout workspace;
  HeapLayout heap;
};

MOK_HD int32_t compute_ctas(const Geometry& g) { return g.ctas_per_rank - g.comm_ctas_per_rank; }

Geometry make_geometry(const ForwardFacts& facts, int num_sms,
                       plan::Pass pass = plan::Pass::kForward);

}  // namespace jax_mok::cuda

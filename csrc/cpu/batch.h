// A macrobatch as the engine works on it: which rows lie where in the rings, and which network they
// go through. The shared expert is one more network, its rows are the rank's own tokens, and its
// results go to one more slot.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/layer.h"
#include "plan/host_plan.h"

namespace jax_mok::cpu {

// Consecutive rows of the rings that belong to one expert.
struct Piece {
  int32_t expert;  // local index; num_local_experts for the shared expert
  int64_t ring_row, rows;
  const plan::RowSource* sources;
};

// All rows of an expert within the macrobatch, for the weight gradients.
struct Segment {
  Piece piece;
  bool starts_sum, ends_sum;  // first and last of its expert in the backward's walk
};

// Either rows of routed experts, or of the shared one; never empty.
struct Batch {
  std::vector<Piece> groups;      // at most minibatch_rows rows each
  std::vector<Segment> segments;  // in ascending order
  bool last_of_routed = false;    // the macrobatch that `saved` belongs to
};

// All work of one rank: first the routed batches, in the forward's order, then the shared ones.
struct Schedule {
  plan::HostPlan plan;
  std::vector<plan::RowSource> shared_rows;  // the rank's own tokens, slot top_k
  std::vector<Batch> batches;                // these point into the two above
  int64_t ring_rows = 0;                     // rows that the batches use of a ring
};

// ids_of_rank[r]: [T, k], checked.
std::vector<Schedule> make_schedules(const LayerShape& shape,
                                     const std::vector<const int32_t*>& ids_of_rank);

// The network of a piece.
Ffn network(const LayerShape& shape, const ForwardBuffers& buffers, int32_t expert);
FfnGradients network_gradients(const LayerShape& shape, const BackwardBuffers& buffers,
                               int32_t expert);
// Its intermediate size, which is the same for all pieces of a batch.
int64_t inner_size(const LayerShape& shape, int32_t expert);
int64_t inner_size(const LayerShape& shape, const Batch& batch);
int64_t widest_inner(const LayerShape& shape);

// Slots per token: one per expert of the token, one for the shared expert.
int32_t num_slots(const LayerShape& shape);

// Weight of a row in its token's sum.
float row_weight(const LayerShape& shape, const ForwardBuffers& source, const plan::RowSource& row);

// Calls body(piece, first, count) for short runs of a batch's rows, in parallel.
void for_each_run(const Batch& batch,
                  const std::function<void(const Piece&, int64_t first, int64_t count)>& body);

// Copies the rows of a batch from the arrays [T, H] at their sources into a ring.
void pull(const LayerShape& shape, const Batch& batch, const std::vector<ConstArray>& of_rank,
          float* ring, int64_t stride);

// Calls body(piece, panel) for all pieces and all panels of so many columns, in parallel.
void for_each_panel(const Batch& batch, int64_t columns,
                    const std::function<void(const Piece&, int64_t panel)>& body);

}  // namespace jax_mok::cpu

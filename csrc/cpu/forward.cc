// Forward of one expert-parallel group. Rank after rank and macrobatch after macrobatch: pull the
// rows into the ring, gate|up GEMM and activation, down GEMM, push every row to its slot; then each
// source adds its slots. The workers share the panels of each step.
#include <algorithm>

#include "cpu/batch.h"
#include "cpu/combine.h"
#include "cpu/hidden.h"
#include "cpu/layer.h"
#include "cpu/thread_pool.h"
#include "cpu/workspace.h"

namespace jax_mok::cpu {
namespace {

struct Rings {
  float *x, *h;
  int64_t x_stride, h_stride;
};

void run_batch(const LayerShape& shape, const std::vector<ForwardBuffers>& ranks,
               const std::vector<ConstArray>& xs, const std::vector<Slots>& slots, int32_t rank,
               const Batch& batch, const Rings& rings) {
  const ForwardBuffers& mine = ranks[rank];
  pull(shape, batch, xs, rings.x, rings.x_stride);

  float* const saved = batch.last_of_routed ? mine.saved : nullptr;
  for_each_panel(batch, inner_size(shape, batch), [&](const Piece& piece, int64_t panel) {
    const int64_t tile = piece.rows * kPanel;
    float* const gate = thread_scratch(2 * tile);
    float* const up = gate + tile;
    const Ffn ffn = network(shape, mine, piece.expert);
    pre_activations(piece, ffn, panel, {rings.x + piece.ring_row * rings.x_stride, rings.x_stride},
                    gate, up);
    if (saved != nullptr) save_pre_activations(piece, ffn.gate.cols, panel, gate, up, saved);
    activate(shape.activation, piece.rows, panel_columns(ffn.gate.cols, panel), gate, up,
             rings.h + piece.ring_row * rings.h_stride + panel * kPanel, rings.h_stride);
  });

  for_each_panel(batch, shape.hidden, [&](const Piece& piece, int64_t panel) {
    float* const y = thread_scratch(piece.rows * kPanel);
    const Ffn ffn = network(shape, mine, piece.expert);
    const int64_t first = panel * kPanel, columns = panel_columns(shape.hidden, panel);
    multiply_panel(piece.rows, {rings.h + piece.ring_row * rings.h_stride, rings.h_stride},
                   ffn.down, first, {y, kPanel, false});
    add_bias(piece.rows, ffn.down_bias, first, columns, y);
    push(piece, slots, first, columns, y);
  });
}

}  // namespace

void forward(const LayerShape& shape, const std::vector<ForwardBuffers>& ranks) {
  std::vector<const int32_t*> ids;
  std::vector<ConstArray> xs;
  for (const ForwardBuffers& rank : ranks) {
    ids.push_back(rank.ids);
    xs.push_back(rank.x);
  }
  const std::vector<Schedule> schedules = make_schedules(shape, ids);

  int64_t rows = 0;
  for (const Schedule& schedule : schedules) rows = std::max(rows, schedule.ring_rows);
  Rings rings{};
  rings.x_stride = padded_stride(shape.hidden);
  rings.h_stride = padded_stride(widest_inner(shape));
  BorrowedWorkspace workspace;
  MemoryPlan memory;
  memory.add(&rings.x, {rows, rings.x_stride});
  memory.add(&rings.h, {rows, rings.h_stride});
  float* slot_data;
  memory.add(&slot_data, {shape.num_ranks, num_slots(shape), shape.num_tokens, shape.hidden});
  memory.allocate(*workspace);
  const std::vector<Slots> slots = slots_of_ranks(shape, slot_data);

  for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
    if (ranks[rank].saved != nullptr) clear_unsaved(shape, schedules[rank], ranks[rank].saved);
    for (const Batch& batch : schedules[rank].batches)
      run_batch(shape, ranks, xs, slots, rank, batch, rings);
  }
  for (int32_t rank = 0; rank < shape.num_ranks; ++rank)
    combine(shape, ranks[rank], slots[rank], true, ranks[rank].y);
}

}  // namespace jax_mok::cpu

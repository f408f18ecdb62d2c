// Panels of pre-activations: computed, saved, loaded; results pushed to their slots.
#include "cpu/hidden.h"

#include <algorithm>
#include <cstring>

#include "cpu/thread_pool.h"

namespace jax_mok::cpu {
namespace {

void copy_floats(const float* from, int64_t count, float* to) {
  std::memcpy(to, from, count * sizeof(float));
}

}  // namespace

void pre_activations(const Piece& piece, const Ffn& ffn, int64_t panel, const Rows& x, float* gate,
                     float* up) {
  const int64_t first = panel * kPanel, columns = panel_columns(ffn.gate.cols, panel);
  multiply_panel(piece.rows, x, ffn.gate, first, {gate, kPanel, false});
  multiply_panel(piece.rows, x, ffn.up, first, {up, kPanel, false});
  add_bias(piece.rows, ffn.gate_bias, first, columns, gate);
  add_bias(piece.rows, ffn.up_bias, first, columns, up);
}

void add_bias(int64_t rows, ConstArray bias, int64_t first, int64_t columns, float* tile) {
  if (!bias) return;
  float wide[kPanel];
  read(bias.at(first), columns, wide);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) tile[i * kPanel + j] += wide[j];
}

void save_pre_activations(const Piece& piece, int64_t inner, int64_t panel, const float* gate,
                          const float* up, float* saved) {
  const int64_t first = panel * kPanel, columns = panel_columns(inner, panel);
  for (int64_t i = 0; i < piece.rows; ++i) {
    float* const row = saved + (piece.ring_row + i) * 2 * inner + first;
    copy_floats(gate + i * kPanel, columns, row);
    copy_floats(up + i * kPanel, columns, row + inner);
  }
}

void load_pre_activations(const Piece& piece, int64_t inner, int64_t panel, const float* saved,
                          float* gate, float* up) {
  const int64_t first = panel * kPanel, columns = panel_columns(inner, panel);
  for (int64_t i = 0; i < piece.rows; ++i) {
    const float* const row = saved + (piece.ring_row + i) * 2 * inner + first;
    copy_floats(row, columns, gate + i * kPanel);
    copy_floats(row + inner, columns, up + i * kPanel);
    std::fill(gate + i * kPanel + columns, gate + (i + 1) * kPanel, 0.0f);
    std::fill(up + i * kPanel + columns, up + (i + 1) * kPanel, 0.0f);
  }
}

void clear_unsaved(const LayerShape& shape, const Schedule& schedule, float* saved) {
  std::vector<bool> filled(shape.macrobatch_rows, false);
  for (const Batch& batch : schedule.batches) {
    if (!batch.last_of_routed) continue;
    for (const Piece& group : batch.groups)
      std::fill_n(filled.begin() + group.ring_row, group.rows, true);
  }
  parallel_for((shape.macrobatch_rows + 63) / 64, [&](int64_t run) {
    const int64_t end = std::min(shape.macrobatch_rows, (run + 1) * 64);
    for (int64_t row = run * 64; row < end; ++row)
      if (!filled[row])
        std::fill_n(saved + row * 2 * shape.intermediate, 2 * shape.intermediate, 0.0f);
  });
}

void push(const Piece& piece, const std::vector<Slots>& slots, int64_t first, int64_t columns,
          const float* tile) {
  for (int64_t i = 0; i < piece.rows; ++i) {
    const plan::RowSource& source = piece.sources[i];
    copy_floats(tile + i * kPanel, columns, slots[source.rank].at(source) + first);
  }
}

}  // namespace jax_mok::cpu

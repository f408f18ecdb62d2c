// The steps on panels that forward and backward share: pre-activations of a piece, bias, the saved
// copy, and the push of finished panels.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/batch.h"
#include "cpu/combine.h"

namespace jax_mok::cpu {

// gate, up [rows][kPanel] = panel of x W + b. `x`: the piece's rows in the ring.
void pre_activations(const Piece& piece, const Ffn& ffn, int64_t panel, const Rows& x, float* gate,
                     float* up);

// tile [rows][kPanel]: adds bias[first..first + columns) to every row. No bias, no change.
void add_bias(int64_t rows, ConstArray bias, int64_t first, int64_t columns, float* tile);

// To and from `saved` [macrobatch_rows, 2 * inner]: gate|up of a row at its ring row.
void save_pre_activations(const Piece& piece, int64_t inner, int64_t panel, const float* gate,
                          const float* up, float* saved);
void load_pre_activations(const Piece& piece, int64_t inner, int64_t panel, const float* saved,
                          float* gate, float* up);

// Zeros the rows of `saved` that no row of the last macrobatch will fill.
void clear_unsaved(const LayerShape& shape, const Schedule& schedule, float* saved);

// Columns [first, first + columns) of the piece's rows go from tile [rows][kPanel] to their slots.
void push(const Piece& piece, const std::vector<Slots>& slots, int64_t first, int64_t columns,
          const float* tile);

}  // namespace jax_mok::cpu

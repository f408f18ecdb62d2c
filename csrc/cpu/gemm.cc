// Cuts products into calls of OpenBLAS whose shapes follow from the matrices alone.
#include "cpu/gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/blas.h"

namespace jax_mok::cpu {
namespace {

// Buffers of a thread that only grow.
struct Scratch {
  std::vector<float> rows, weights;
};
Scratch& scratch() {
  static thread_local Scratch buffers;
  return buffers;
}

float* at_least(std::vector<float>& buffer, int64_t count) {
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  return buffer.data();
}

// The float32 weights of a panel, where they lie or widened: `count` runs of `length` numbers.
struct Weights {
  const float* data;
  int64_t stride;
};
Weights panel_weights(const Matrix& b, int64_t offset, int64_t count, int64_t length) {
  if (b.data.dtype == Dtype::kFloat32) return {b.data.f32() + offset, b.cols};
  float* const wide = at_least(scratch().weights, count * length);
  for (int64_t i = 0; i < count; ++i)
    read(b.data.at(offset + i * b.cols), length, wide + i * length);
  return {wide, length};
}

// All rows times one panel. `weights` is an operand whose op() is [columns, depth].
void multiply_tiles(int64_t num_rows, const Rows& a, const Operand& weights, int64_t columns,
                    int64_t depth, const Out& out) {
  float product[kPanel * kTileRows];  // transposed: [columns][16]
  for (int64_t first = 0; first < num_rows; first += kTileRows) {
    const int64_t count = std::min(kTileRows, num_rows - first);
    const float* tile = a.data + first * a.stride;
    int64_t stride = a.stride;
    if (count < kTileRows) {
      float* const padded = at_least(scratch().rows, kTileRows * depth);
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(padded + i * depth, tile + i * stride, depth * sizeof(float));
      std::fill(padded + count * depth, padded + kTileRows * depth, 0.0f);
      tile = padded;
      stride = depth;
    }
    sgemm(columns, kTileRows, depth, weights, {tile, stride, true}, 0.0f, product, kTileRows);
    for (int64_t i = 0; i < count; ++i) {
      float* const to = out.data + (first + i) * out.stride;
      if (out.accumulate)
        for (int64_t j = 0; j < columns; ++j) to[j] += product[j * kTileRows + i];
      else
        for (int64_t j = 0; j < columns; ++j) to[j] = product[j * kTileRows + i];
      std::fill(to + columns, to + kPanel, 0.0f);
    }
  }
}

}  // namespace

void multiply_panel(int64_t num_rows, const Rows& a, const Matrix& b, int64_t first_column,
                    const Out& out) {
  const int64_t columns = std::min(kPanel, b.cols - first_column);
  const Weights w = panel_weights(b, first_column, b.rows, columns);
  multiply_tiles(num_rows, a, {w.data, w.stride, true}, columns, b.rows, out);
}

void multiply_panel_transposed(int64_t num_rows, const Rows& a, const Matrix& b,
                               int64_t first_column, const Out& out) {
  const int64_t columns = std::min(kPanel, b.rows - first_column);
  const Weights w = panel_weights(b, first_column * b.cols, columns, b.cols);
  multiply_tiles(num_rows, a, {w.data, w.stride, false}, columns, b.cols, out);
}

void multiply_outer(int64_t num_out_rows, int64_t num_columns, const Rows& a, const Rows& b,
                    int64_t num_rows, int64_t block_rows, const Out& out) {
  const int64_t blocks = (num_rows + block_rows - 1) / block_rows;
  for (int64_t block = blocks - 1; block >= 0; --block) {
    const int64_t first = block * block_rows;
    const int64_t depth = std::min(block_rows, num_rows - first);
    const bool add = out.accumulate || block < blocks - 1;
    sgemm(num_out_rows, num_columns, depth, {a.data + first * a.stride, a.stride, true},
          {b.data + first * b.stride, b.stride, false}, add ? 1.0f : 0.0f, out.data, out.stride);
  }
}

}  // namespace jax_mok::cpu

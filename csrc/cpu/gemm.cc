// Cuts products into calls of OpenBLAS whose shapes follow from the matrices alone.
#include "cpu/gemm.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

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

// The float32 weights of a panel: `count` runs of `length` numbers, where they lie or copied
// together. Float32 runs are copied only where many tiles read them again: the runs of a matrix
// with a power of two of columns fall into few cache sets.
struct Weights {
  const float* data;
  int64_t stride;
};
Weights panel_weights(const Matrix& b, int64_t offset, int64_t count, int64_t length, bool copy) {
  if (b.data.dtype == Dtype::kFloat32 && !copy) return {b.data.f32() + offset, b.cols};
  float* const wide = at_least(scratch().weights, count * length);
  for (int64_t i = 0; i < count; ++i)
    read(b.data.at(offset + i * b.cols), length, wide + i * length);
  return {wide, length};
}

// to[i][j] (+)= product[j][i] for i < rows, j < columns; product is [columns][kTileRows].
void store_transposed(const float* product, int64_t rows, int64_t columns, const Out& to) {
  int64_t j = 0;
#if defined(__SSE__)
  for (; j + 4 <= columns; j += 4) {
    for (int64_t i = 0; i < rows; i += 4) {
      const float* const from = product + j * kTileRows + i;
      __m128 row[4] = {_mm_loadu_ps(from), _mm_loadu_ps(from + kTileRows),
                       _mm_loadu_ps(from + 2 * kTileRows), _mm_loadu_ps(from + 3 * kTileRows)};
      _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
      for (int64_t q = 0; q < std::min<int64_t>(4, rows - i); ++q) {
        float* const at = to.data + (i + q) * to.stride + j;
        _mm_storeu_ps(at, to.accumulate ? _mm_add_ps(_mm_loadu_ps(at), row[q]) : row[q]);
      }
    }
  }
#endif
  for (; j < columns; ++j) {
    for (int64_t i = 0; i < rows; ++i) {
      float* const at = to.data + i * to.stride + j;
      *at = to.accumulate ? *at + product[j * kTileRows + i] : product[j * kTileRows + i];
    }
  }
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
    const Out to{out.data + first * out.stride, out.stride, out.accumulate};
    store_transposed(product, count, columns, to);
    for (int64_t i = 0; i < count; ++i)
      std::fill(to.data + i * to.stride + columns, to.data + i * to.stride + kPanel, 0.0f);
  }
}

}  // namespace

void multiply_panel(int64_t num_rows, const Rows& a, const Matrix& b, int64_t first_column,
                    const Out& out) {
  // The piece of a panel that all tiles read, 128 KB, stays in the L2 cache. The cuts are part of
  // the sum, so they depend on the matrix alone.
  constexpr int64_t kDepth = 256;
  const int64_t columns = std::min(kPanel, b.cols - first_column);
  for (int64_t k = 0; k < b.rows; k += kDepth) {
    const int64_t depth = std::min(kDepth, b.rows - k);
    const Weights w =
        panel_weights(b, k * b.cols + first_column, depth, columns, num_rows > 2 * kTileRows);
    multiply_tiles(num_rows, {a.data + k, a.stride}, {w.data, w.stride, true}, columns, depth,
                   {out.data, out.stride, out.accumulate || k > 0});
  }
}

void multiply_panel_transposed(int64_t num_rows, const Rows& a, const Matrix& b,
                               int64_t first_column, const Out& out) {
  const int64_t columns = std::min(kPanel, b.rows - first_column);
  const Weights w = panel_weights(b, first_column * b.cols, columns, b.cols, false);
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

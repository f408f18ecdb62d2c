// The products of the CPU engine: some rows times a panel of columns of a weight matrix, and the
// outer products of weight gradients. OpenBLAS does the work, in calls of fixed shape.
//
// Results must not depend on how many rows come along or where a row lies among them. OpenBLAS does
// not promise that (its Haswell kernel rounds differently by the column of its own, column-major
// view), so rows go in tiles of exactly 16, padded with zeros, along the dimension in which each of
// its kernels treats 16 neighbours alike; tests/test_moe_bits.py would see it if one did not.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/dtype.h"

namespace jax_mok::cpu {

constexpr int64_t kPanel = 128;  // columns of a panel: one task of the pool
constexpr int64_t kTileRows = 16;

inline int64_t num_panels(int64_t columns) { return (columns + kPanel - 1) / kPanel; }
// Columns that a panel has: the last one of a matrix may have fewer.
inline int64_t panel_columns(int64_t columns, int64_t panel) {
  return std::min(kPanel, columns - panel * kPanel);
}

// A row-major matrix that lies in memory as [rows, cols].
struct Matrix {
  ConstArray data;
  int64_t rows = 0, cols = 0;
};

// Rows of float32.
struct Rows {
  const float* data;
  int64_t stride;
};

// Where a product goes, or is added.
struct Out {
  float* data;
  int64_t stride;
  bool accumulate;
};

// out[i, 0..kPanel) (+)= row i of a times columns [first_column, first_column + kPanel) of b [K,
// N]; columns past the matrix become zero.
void multiply_panel(int64_t num_rows, const Rows& a, const Matrix& b, int64_t first_column,
                    const Out& out);

// The same with the transpose of b [N, K].
void multiply_panel_transposed(int64_t num_rows, const Rows& a, const Matrix& b,
                               int64_t first_column, const Out& out);

// out [num_out_rows, num_columns] (+)= sum over r < num_rows of a[r, i] * b[r, j], a block of rows
// at a time, from the last to the first. Both the sum of a weight gradient and the walk of the
// backward pass then go the same way, and where the walk is cut (at a block) changes no bit.
void multiply_outer(int64_t num_out_rows, int64_t num_columns, const Rows& a, const Rows& b,
                    int64_t num_rows, int64_t block_rows, const Out& out);

}  // namespace jax_mok::cpu

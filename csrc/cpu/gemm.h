// The one GEMM of the CPU engine: some rows times a panel of 32 columns of a matrix.
//
// Every element of a product is a single chain of fused multiply-adds, in the order of k, that
// starts from zero or from the value already there. Nothing else decides its bits: not the row's
// place in a tile, not how many rows come along, not where k was cut, not the vector width. This is
// what makes results equal for any number of threads, ranks, ring and minibatch rows, and it needs
// no padding rows. A BLAS gives no such promise, and for the few rows of an expert it is also
// slower, as it packs for large matrices.
#pragma once

#include <cstdint>

#include "cpu/dtype.h"

namespace jax_mok::cpu {

constexpr int64_t kPanel = 32;   // columns of a panel
constexpr int64_t kDepth = 256;  // k of one packed piece: 32 KB, so that it stays in the L1 cache

// A row-major matrix that lies in memory as [rows, cols].
struct Matrix {
  ConstArray data;
  int64_t rows = 0, cols = 0;
};

// Rows of float32, read as a[row * row_stride + k * step].
struct Rows {
  const float* data;
  int64_t row_stride, step;
};

// out[i, 0..32) (+)= rows x panel. `out` always gets all 32 columns; those past the matrix hold
// rubbish and must not be read on.
struct Out {
  float* data;
  int64_t row_stride;
  bool accumulate;
};

// Columns [first_column, first_column + 32) of b [K, N].
void multiply_panel(int64_t num_rows, const Rows& a, const Matrix& b, int64_t first_column,
                    const Out& out);

// Columns [first_column, first_column + 32) of the transpose of b [N, K]; k runs over b's columns.
void multiply_panel_transposed(int64_t num_rows, const Rows& a, const Matrix& b,
                               int64_t first_column, const Out& out);

// Panel of float32 rows that are taken from the last to the first: sum over r, descending, of
// a[r, i] * b[r, first_column + j] for i in [0, num_out_rows). `a` points to row 0, column 0.
// Weight gradients use it: the order of a sum then does not depend on where a walk that runs
// backwards cuts the rows.
void multiply_panel_outer(int64_t num_out_rows, const float* a, int64_t a_stride, const float* b,
                          int64_t b_stride, int64_t num_rows, int64_t first_column,
                          int64_t num_columns, const Out& out);

// The vector kernels that this processor has, best first: "avx512", "avx2", "portable".
const char* gemm_kernel_name();

namespace internal {
// c[i, 0..32) (+)= sum over k of a[i * a_row + k * a_step] * b[k * b_step + 0..32).
using TileFunction = void (*)(int64_t rows, int64_t depth, const float* a, int64_t a_row,
                              int64_t a_step, const float* b, int64_t b_step, float* c,
                              int64_t c_row, bool accumulate);
void tiles_avx512(int64_t, int64_t, const float*, int64_t, int64_t, const float*, int64_t, float*,
                  int64_t, bool);
void tiles_avx2(int64_t, int64_t, const float*, int64_t, int64_t, const float*, int64_t, float*,
                int64_t, bool);
void tiles_portable(int64_t, int64_t, const float*, int64_t, int64_t, const float*, int64_t, float*,
                    int64_t, bool);
}  // namespace internal

}  // namespace jax_mok::cpu

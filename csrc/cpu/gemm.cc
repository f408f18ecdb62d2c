// Packs a piece of a matrix into a panel [k][32] and runs the register tiles of this processor.
#include "cpu/gemm.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace jax_mok::cpu {
namespace {

struct Kernel {
  const char* name;
  internal::TileFunction tiles;
};

// JAX_MOK_CPU_KERNEL asks for a lesser kernel than the best, to compare them.
Kernel choose_kernel() {
  const char* wanted = std::getenv("JAX_MOK_CPU_KERNEL");
  const auto allowed = [&](const char* name) {
    return wanted == nullptr || std::strcmp(wanted, name) == 0;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (allowed("avx512") && __builtin_cpu_supports("avx512f"))
    return {"avx512", internal::tiles_avx512};
  if (allowed("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return {"avx2", internal::tiles_avx2};
#endif
  (void)allowed;
  return {"portable", internal::tiles_portable};
}

const Kernel& kernel() {
  static const Kernel chosen = choose_kernel();
  return chosen;
}

// So few rows do not pay for packing: the kernel reads the matrix where it is.
constexpr int64_t kRowsWorthPacking = 13;

void pack_row(ConstArray from, int64_t columns, float* to) {
  if (columns == kPanel) {
    read(from, kPanel, to);
  } else {
    read(from, columns, to);
    std::fill(to + columns, to + kPanel, 0.0f);
  }
}

void read4(ConstArray from, float* to) {
  if (from.dtype == Dtype::kFloat32) {
    std::memcpy(to, from.data, 4 * sizeof(float));
  } else {
    for (int i = 0; i < 4; ++i) to[i] = widen(from.bf16()[i]);
  }
}

// to[k * 32 + j] = from[j * row_length + k] for j < columns, zero from there on.
void pack_transposed(ConstArray from, int64_t row_length, int64_t columns, int64_t depth,
                     float* to) {
  int64_t j = 0;
  for (; j + 4 <= columns; j += 4) {
    int64_t k = 0;
    for (; k + 4 <= depth; k += 4) {
      float block[4][4];
      for (int i = 0; i < 4; ++i) read4(from.at((j + i) * row_length + k), block[i]);
#if defined(__SSE2__)
      __m128 r0 = _mm_loadu_ps(block[0]), r1 = _mm_loadu_ps(block[1]);
      __m128 r2 = _mm_loadu_ps(block[2]), r3 = _mm_loadu_ps(block[3]);
      _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
      _mm_storeu_ps(to + (k + 0) * kPanel + j, r0);
      _mm_storeu_ps(to + (k + 1) * kPanel + j, r1);
      _mm_storeu_ps(to + (k + 2) * kPanel + j, r2);
      _mm_storeu_ps(to + (k + 3) * kPanel + j, r3);
#else
      for (int64_t q = 0; q < 4; ++q)
        for (int i = 0; i < 4; ++i) to[(k + q) * kPanel + j + i] = block[i][q];
#endif
    }
    for (; k < depth; ++k)
      for (int i = 0; i < 4; ++i) read(from.at((j + i) * row_length + k), 1, to + k * kPanel + j + i);
  }
  for (; j < kPanel; ++j)
    for (int64_t k = 0; k < depth; ++k) {
      if (j < columns)
        read(from.at(j * row_length + k), 1, to + k * kPanel + j);
      else
        to[k * kPanel + j] = 0.0f;
    }
}

float* packed_piece() {
  alignas(64) static thread_local float piece[kDepth * kPanel];
  return piece;
}

}  // namespace

const char* gemm_kernel_name() { return kernel().name; }

void multiply_panel(int64_t num_rows, const Rows& a, const Matrix& b, int64_t first_column,
                    const Out& out) {
  const int64_t columns = std::min(kPanel, b.cols - first_column);
  const bool in_place =
      num_rows < kRowsWorthPacking && b.data.dtype == Dtype::kFloat32 && columns == kPanel;
  float* const piece = packed_piece();
  for (int64_t k = 0; k < b.rows; k += kDepth) {
    const int64_t depth = std::min(kDepth, b.rows - k);
    const float* panel = piece;
    int64_t step = kPanel;
    if (in_place) {
      panel = b.data.f32() + k * b.cols + first_column;
      step = b.cols;
    } else {
      for (int64_t i = 0; i < depth; ++i)
        pack_row(b.data.at((k + i) * b.cols + first_column), columns, piece + i * kPanel);
    }
    kernel().tiles(num_rows, depth, a.data + k * a.step, a.row_stride, a.step, panel, step,
                   out.data, out.row_stride, out.accumulate || k > 0);
  }
}

void multiply_panel_transposed(int64_t num_rows, const Rows& a, const Matrix& b,
                               int64_t first_column, const Out& out) {
  const int64_t columns = std::min(kPanel, b.rows - first_column);
  float* const piece = packed_piece();
  for (int64_t k = 0; k < b.cols; k += kDepth) {
    const int64_t depth = std::min(kDepth, b.cols - k);
    pack_transposed(b.data.at(first_column * b.cols + k), b.cols, columns, depth, piece);
    kernel().tiles(num_rows, depth, a.data + k * a.step, a.row_stride, a.step, piece, kPanel,
                   out.data, out.row_stride, out.accumulate || k > 0);
  }
}

void multiply_panel_outer(int64_t num_out_rows, const float* a, int64_t a_stride, const float* b,
                          int64_t b_stride, int64_t num_rows, int64_t first_column,
                          int64_t num_columns, const Out& out) {
  const int64_t columns = std::min(kPanel, num_columns - first_column);
  float* const piece = packed_piece();
  for (int64_t done = 0; done < num_rows; done += kDepth) {
    const int64_t depth = std::min(kDepth, num_rows - done);
    const int64_t last = num_rows - 1 - done;
    for (int64_t i = 0; i < depth; ++i)
      pack_row({b + (last - i) * b_stride + first_column, Dtype::kFloat32}, columns,
               piece + i * kPanel);
    kernel().tiles(num_out_rows, depth, a + last * a_stride, 1, -a_stride, piece, kPanel, out.data,
                   out.row_stride, out.accumulate || done > 0);
  }
}

}  // namespace jax_mok::cpu

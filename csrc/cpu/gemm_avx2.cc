// GEMM tile for x86 with AVX2 and FMA: 6 rows by 16 columns, 12 of the 16 registers hold sums.
#include "cpu/gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define JAX_MOK_TARGET __attribute__((target("avx2,fma")))

namespace jax_mok::cpu::internal {
namespace {
struct Isa {
  using Vector = __m256;
  static constexpr int kWidth = 8, kVectors = 2, kMostRows = 6;
  JAX_MOK_TARGET static inline Vector load(const float* p) { return _mm256_loadu_ps(p); }
  JAX_MOK_TARGET static inline void store(float* p, Vector v) { _mm256_storeu_ps(p, v); }
  JAX_MOK_TARGET static inline Vector broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  JAX_MOK_TARGET static inline Vector zero() { return _mm256_setzero_ps(); }
  JAX_MOK_TARGET static inline Vector multiply_add(Vector a, Vector b, Vector c) {
    return _mm256_fmadd_ps(a, b, c);
  }
};
#include "cpu/gemm_tile.h"
}  // namespace

void tiles_avx2(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_step,
                const float* b, int64_t b_step, float* c, int64_t c_row, bool accumulate) {
  all_tiles(rows, depth, a, a_row, a_step, b, b_step, c, c_row, accumulate);
}
}  // namespace jax_mok::cpu::internal
#endif

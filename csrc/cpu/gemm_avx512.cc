// GEMM tile for x86 with AVX-512: 12 rows by 32 columns, 24 of the 32 registers hold sums.
#include "cpu/gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define JAX_MOK_TARGET __attribute__((target("avx512f")))

namespace jax_mok::cpu::internal {
namespace {
struct Isa {
  using Vector = __m512;
  static constexpr int kWidth = 16, kVectors = 2, kMostRows = 12;
  JAX_MOK_TARGET static inline Vector load(const float* p) { return _mm512_loadu_ps(p); }
  JAX_MOK_TARGET static inline void store(float* p, Vector v) { _mm512_storeu_ps(p, v); }
  JAX_MOK_TARGET static inline Vector broadcast(const float* p) { return _mm512_set1_ps(*p); }
  JAX_MOK_TARGET static inline Vector zero() { return _mm512_setzero_ps(); }
  JAX_MOK_TARGET static inline Vector multiply_add(Vector a, Vector b, Vector c) {
    return _mm512_fmadd_ps(a, b, c);
  }
};
#include "cpu/gemm_tile.h"
}  // namespace

void tiles_avx512(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_step,
                  const float* b, int64_t b_step, float* c, int64_t c_row, bool accumulate) {
  all_tiles(rows, depth, a, a_row, a_step, b, b_step, c, c_row, accumulate);
}
}  // namespace jax_mok::cpu::internal
#endif

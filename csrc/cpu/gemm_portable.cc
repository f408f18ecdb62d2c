// GEMM tile for any processor: 4 rows by 8 columns in vectors of 4 floats (SSE, NEON, ...).
// Where the processor has a fused multiply-add by default (64-bit Arm), it is used, and the bits
// are those of the x86 kernels; plain x86-64 has none, and rounds the product as well.
#include "cpu/gemm.h"

#define JAX_MOK_TARGET

namespace jax_mok::cpu::internal {
namespace {
struct Isa {
  struct Vector {
    float v[4];
  };
  static constexpr int kWidth = 4, kVectors = 2, kMostRows = 4;
  static inline Vector load(const float* p) { return {{p[0], p[1], p[2], p[3]}}; }
  static inline void store(float* p, const Vector& x) {
    for (int i = 0; i < 4; ++i) p[i] = x.v[i];
  }
  static inline Vector broadcast(const float* p) { return {{*p, *p, *p, *p}}; }
  static inline Vector zero() { return {{0, 0, 0, 0}}; }
  static inline Vector multiply_add(const Vector& a, const Vector& b, const Vector& c) {
    Vector r;
    for (int i = 0; i < 4; ++i) {
#if defined(__FP_FAST_FMAF)
      r.v[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
#else
      r.v[i] = a.v[i] * b.v[i] + c.v[i];
#endif
    }
    return r;
  }
};
#include "cpu/gemm_tile.h"
}  // namespace

void tiles_portable(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_step,
                    const float* b, int64_t b_step, float* c, int64_t c_row, bool accumulate) {
  all_tiles(rows, depth, a, a_row, a_step, b, b_step, c, c_row, accumulate);
}
}  // namespace jax_mok::cpu::internal

// OpenBLAS, found when the package is first used: pip brings it (scipy-openblas32), Python passes
// its path. The engine calls it from its own threads, so each call runs on one thread.
#pragma once

#include <cstdint>
#include <string>

namespace jax_mok::cpu {

// Loads the library. Returns what went wrong, or an empty string; later calls do nothing.
std::string load_blas(const std::string& path);

// Row-major C [m, n] = op(A) op(B) + beta C, op(A) [m, k], op(B) [k, n].
struct Operand {
  const float* data;
  int64_t stride;  // of a row as it lies in memory
  bool transposed;
};
void sgemm(int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, float beta,
           float* c, int64_t c_stride);

}  // namespace jax_mok::cpu

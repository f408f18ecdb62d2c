// Loads OpenBLAS and holds the one function that is used of it.
#include "cpu/blas.h"

#include <dlfcn.h>

#include <mutex>
#include <stdexcept>

namespace jax_mok::cpu {
namespace {

// CBLAS of the scipy-openblas32 wheel: 32-bit integers, names with a prefix.
enum Order : int { kRowMajor = 101 };
enum Transpose : int { kNoTrans = 111, kTrans = 112 };
using Sgemm = void (*)(Order, Transpose, Transpose, int m, int n, int k, float alpha,
                       const float* a, int lda, const float* b, int ldb, float beta, float* c,
                       int ldc);
using SetNumThreads = void (*)(int);

Sgemm loaded_sgemm = nullptr;

}  // namespace

std::string load_blas(const std::string& path) {
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded_sgemm != nullptr) return "";
  void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return "cannot load OpenBLAS: " + std::string(dlerror());
  const auto sgemm = reinterpret_cast<Sgemm>(dlsym(library, "scipy_cblas_sgemm"));
  const auto set_threads =
      reinterpret_cast<SetNumThreads>(dlsym(library, "scipy_openblas_set_num_threads"));
  if (sgemm == nullptr || set_threads == nullptr)
    return path + " is not the OpenBLAS of the scipy-openblas32 package";
  set_threads(1);
  loaded_sgemm = sgemm;
  return "";
}

void sgemm(int64_t m, int64_t n, int64_t k, const Operand& a, const Operand& b, float beta,
           float* c, int64_t c_stride) {
  if (loaded_sgemm == nullptr) throw std::runtime_error("OpenBLAS has not been loaded");
  const auto narrow = [](int64_t value) { return static_cast<int>(value); };
  loaded_sgemm(kRowMajor, a.transposed ? kTrans : kNoTrans, b.transposed ? kTrans : kNoTrans,
               narrow(m), narrow(n), narrow(k), 1.0f, a.data, narrow(a.stride), b.data,
               narrow(b.stride), beta, c, narrow(c_stride));
}

}  // namespace jax_mok::cpu

// The persistent kernel of the forward, as the host launches it.
#pragma once

#include "cuda/params.cuh"

namespace jax_mok::cuda {

constexpr int kForwardThreads = 384;
extern const int kForwardSharedBytes;

const void* forward_kernel(ActivationKind kind);

}  // namespace jax_mok::cuda

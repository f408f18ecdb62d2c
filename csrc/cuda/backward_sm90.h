// The persistent kernel of the backward, as the host launches it.
#pragma once

#include "cuda/backward_params.cuh"

namespace jax_mok::cuda {

constexpr int kBackwardThreads = 384;
extern const int kBackwardSharedBytes;

// `plain`: no biases, alpha 1, no limit, no offset. A kernel of its own: consumers have no
// registers to spare for what it leaves out.
const void* backward_kernel(ActivationKind kind, bool plain);

}  // namespace jax_mok::cuda

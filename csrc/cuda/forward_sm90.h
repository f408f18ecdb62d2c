// The persistent kernel of the forward, as the host launches it.
#pragma once

#include "cuda/params.cuh"

namespace jax_mok::cuda {

constexpr int kForwardThreads = 384;
extern const int kForwardSharedBytes;

const void* forward_kernel(ActivationKind kind);
const void* meeting_kernel();  // one CTA of kMaxRanks threads, between Part::kWork and Part::kSum

}  // namespace jax_mok::cuda

// Where ranks on different GPUs wait for each other: kernels of one CTA, see Part.
#pragma once

#include "cuda/params.cuh"

namespace jax_mok::cuda {

cudaError_t prepare_meetings();

// Before the plan: until the ids of all peers can be read.
cudaError_t launch_await_ids(const CallParams& params, cudaStream_t stream);
// Before Part::kWork: until their tokens can be read.
cudaError_t launch_await_tokens(const CallParams& params, cudaStream_t stream);
// Before Part::kSum: until all peers have pushed their results, and decides whether there will be
// sums. If not, also until all of them have ended the call.
cudaError_t launch_hear(const CallParams& params, cudaStream_t stream);

}  // namespace jax_mok::cuda

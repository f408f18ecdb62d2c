// Where ranks on different GPUs wait for each other: kernels of one CTA, see Part.
#pragma once

#include "cuda/params.cuh"

namespace jax_mok::cuda {

cudaError_t prepare_meetings();

// After publish: until all peers have published.
cudaError_t launch_await(const CallParams& params, cudaStream_t stream);
// After Part::kWork: tells the peers that all results are pushed, or that the call has failed.
// Waits for nobody.
cudaError_t launch_tell(const CallParams& params, cudaStream_t stream);
// After that: until all peers have told, and decides whether there will be sums.
cudaError_t launch_hear(const CallParams& params, cudaStream_t stream);

}  // namespace jax_mok::cuda

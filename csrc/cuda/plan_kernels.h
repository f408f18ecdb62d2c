// The first steps of a call, as short kernels in stream order: publish what the peers read, then
// turn the ids of all ranks into this rank's plan.
#pragma once

#include "cuda/params.cuh"

namespace jax_mok::cuda {

cudaError_t prepare_plan_kernels();
cudaError_t launch_publish(const CallParams& params, int num_sms, cudaStream_t stream);
cudaError_t launch_plan(const CallParams& params, cudaStream_t stream);

}  // namespace jax_mok::cuda

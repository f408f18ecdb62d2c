// The first steps of a call, as short kernels: publish what the peers read, then turn the ids of
// all ranks into this rank's plan. The tokens may be copied beside the plan, which does not need
// them.
#pragma once

#include "cuda/params.cuh"

namespace jax_mok::cuda {

cudaError_t prepare_plan_kernels();
cudaError_t launch_publish(const CallParams& params, int num_sms, cudaStream_t stream);
cudaError_t launch_copy(const CallParams& params, int num_sms, cudaStream_t stream);
cudaError_t launch_plan(const CallParams& params, cudaStream_t stream);

}  // namespace jax_mok::cuda

// Where ranks on different GPUs wait for each other.
#include "cuda/meeting.h"

#include "cuda/combine.cuh"

namespace jax_mok::cuda {
namespace {

__global__ void __launch_bounds__(kMaxRanks) await(const __grid_constant__ CallParams p) {
  const Watch watch = make_watch(p, 0);
  const HeapControl* own = p.heap_control(watch.rank);
  const int peer = threadIdx.x;
  if (peer < p.geometry.shape.num_ranks)
    wait_peer(watch, own, &own->started[peer], peer, FaultPhase::kStart, p.start_timeout_ns);
}

__global__ void __launch_bounds__(kMaxRanks) tell(const __grid_constant__ CallParams p) {
  tell_peers(p, make_watch(p, 0));
}

__global__ void __launch_bounds__(kMaxRanks) hear(const __grid_constant__ CallParams p) {
  const Watch watch = make_watch(p, 0);
  hear_peers(p, watch, __syncthreads_and(load_acquire_gpu(&watch.control->abort) == 0));
}

}  // namespace

cudaError_t prepare_meetings() {
  cudaFuncAttributes attributes;  // asking for them loads a kernel
  if (cudaError_t e = cudaFuncGetAttributes(&attributes, await)) return e;
  if (cudaError_t e = cudaFuncGetAttributes(&attributes, tell)) return e;
  return cudaFuncGetAttributes(&attributes, hear);
}

cudaError_t launch_await(const CallParams& p, cudaStream_t stream) {
  await<<<1, kMaxRanks, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_tell(const CallParams& p, cudaStream_t stream) {
  tell<<<1, kMaxRanks, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_hear(const CallParams& p, cudaStream_t stream) {
  hear<<<1, kMaxRanks, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace jax_mok::cuda

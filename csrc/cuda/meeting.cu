// Where ranks on different GPUs wait for each other.
#include "cuda/meeting.h"

#include "cuda/combine.cuh"

namespace jax_mok::cuda {
namespace {

// Once a rank has told that it has given a call up, the waits of its peers end at once, but for
// those inside their persistent kernels, each of at most the time-out. More than that waits for
// nobody.
constexpr uint64_t kEndsAfterNs = 5'000'000'000;

__global__ void __launch_bounds__(kMaxRanks) await_ids(const __grid_constant__ CallParams p) {
  const Watch watch = make_watch(p, 0);
  const HeapControl* own = p.heap_control(watch.rank);
  const int peer = threadIdx.x;
  __threadfence_system();  // this rank has said that it has come: see peers.cuh
  if (peer < p.geometry.shape.num_ranks)
    wait_peer(watch, own, &own->at[peer], peer, FaultPhase::kStart, p.start_timeout_ns);
}

__global__ void __launch_bounds__(kMaxRanks) await_tokens(const __grid_constant__ CallParams p) {
  const Watch watch = make_watch(p, 0);
  const HeapControl* own = p.heap_control(watch.rank);
  const int peer = threadIdx.x;
  if (peer < p.geometry.shape.num_ranks)
    wait_peer(watch, own, &own->copied[peer], peer, FaultPhase::kStart, p.timeout_ns);
}

__global__ void __launch_bounds__(kMaxRanks) hear(const __grid_constant__ CallParams p) {
  const Watch watch = make_watch(p, 0);
  const int peer = threadIdx.x;
  const bool good = __syncthreads_and(load_acquire_gpu(&watch.control->abort) == 0);
  if (!hear_peers(p, watch, good) && peer < p.geometry.shape.num_ranks)
    wait_ended(p.heap_control(watch.rank), peer,
               min(p.start_timeout_ns, 2 * p.timeout_ns + kEndsAfterNs));
}

}  // namespace

cudaError_t prepare_meetings() {
  if (cudaError_t e = prepare_small_kernel(await_ids)) return e;
  if (cudaError_t e = prepare_small_kernel(await_tokens)) return e;
  return prepare_small_kernel(hear);
}

cudaError_t launch_await_ids(const CallParams& p, cudaStream_t stream) {
  await_ids<<<1, kMaxRanks, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_await_tokens(const CallParams& p, cudaStream_t stream) {
  await_tokens<<<1, kMaxRanks, 0, stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_hear(const CallParams& p, cudaStream_t stream) {
  hear<<<1, kMaxRanks, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace jax_mok::cuda

// The forward's host interface with C linkage, so that Python tests can call it without JAX.
#include <cstring>

#include "cuda/forward.h"

using namespace jax_mok::cuda;

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void mok_check(const ForwardFacts* facts, char* message, size_t capacity) {
  std::strncpy(message, check(*facts).c_str(), capacity - 1);
  message[capacity - 1] = 0;
}
EXPORT size_t mok_workspace_bytes(const ForwardFacts* facts, int num_sms) {
  return workspace_bytes(*facts, num_sms);
}
EXPORT size_t mok_heap_bytes(const ForwardFacts* facts) { return heap_bytes(*facts); }
EXPORT int mok_prepare() { return prepare_module(); }
EXPORT int mok_init_heap(void* heap, void* stream) {
  return init_heap(heap, static_cast<cudaStream_t>(stream));
}
EXPORT int mok_launch(const ForwardFacts* facts, int rank, const ForwardBuffers* buffers,
                      void* stream, const TestHooks* hooks) {
  return launch_forward(*facts, rank, *buffers, static_cast<cudaStream_t>(stream), *hooks);
}
EXPORT const char* mok_error(int code) {
  return cudaGetErrorString(static_cast<cudaError_t>(code));
}
EXPORT size_t mok_sizeof(int which) {
  const size_t sizes[] = {sizeof(ForwardFacts), sizeof(ForwardBuffers), sizeof(TestHooks),
                          sizeof(Status)};
  return sizes[which];
}

// Decodes and checks what XLA hands to a CUDA handler: attributes, operands and results by name.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/exchange.h"
#include "ffi/cuda_facts.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mok::ffi {

// The calls: what is the handlers' business of the differences between them.
struct ForwardPass {
  using Facts = cuda::ForwardFacts;
  using Buffers = cuda::ForwardBuffers;
  static constexpr auto heap_bytes = layer_heap_bytes;
  static constexpr auto launch = cuda::launch_forward;
};
struct BackwardPass {
  using Facts = cuda::BackwardFacts;
  using Buffers = cuda::BackwardBuffers;
  static constexpr auto heap_bytes = layer_heap_bytes;
  static constexpr auto launch = cuda::launch_backward;
};
// No pass of a layer, but a call like one.
struct ExchangePass {
  using Facts = cuda::ExchangeFacts;
  using Buffers = cuda::ExchangeBuffers;
  static constexpr auto heap_bytes = cuda::exchange_heap_bytes;
  static constexpr auto launch = cuda::launch_exchange;
};

// What the attributes say: all that Prepare and Initialize know.
template <typename Pass>
struct CudaCall {
  typename Pass::Facts facts;
  cuda::TestHooks hooks;
  int32_t failing_rank = -1;  // for tests: this rank's device fails before the call
  // Every group of ranks of the mesh, each as flattened ids (XLA's numbers of the program's
  // devices) in the order of their ranks. Empty where a call has no peers.
  std::vector<std::vector<int64_t>> groups;

  bool has_peers() const { return facts.num_ranks != facts.num_virtual_ranks; }
};

// Both name what is wrong, what was given and what is expected. Everything that they look at is the
// same on all ranks, so that none fails alone.
template <typename Pass>
xla::ffi::ErrorOr<CudaCall<Pass>> decode_call(xla::ffi::Dictionary attributes);
template <typename Pass>
xla::ffi::Error decode_buffers(const CudaCall<Pass>& call, xla::ffi::RemainingArgs operands,
                               xla::ffi::RemainingRets results, typename Pass::Buffers* buffers);

}  // namespace jax_mok::ffi

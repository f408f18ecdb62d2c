// The static facts of a call by name: one list for the attributes of the custom call and for the
// Python side, which asks for sizes before there is a call.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/backward.h"
#include "cuda/exchange.h"

namespace jax_mok::ffi {

// `source` has integer(name) -> int64_t and real(name) -> double.
template <typename Source>
cuda::ForwardFacts read_facts(const Source& source) {
  cuda::ForwardFacts f;
  const auto integer = [&](const char* name, int32_t* field) {
    *field = static_cast<int32_t>(source.integer(name));
  };
  integer("num_ranks", &f.num_ranks);
  integer("num_virtual_ranks", &f.num_virtual_ranks);
  integer("num_tokens", &f.num_tokens);
  integer("hidden", &f.hidden);
  integer("intermediate", &f.intermediate);
  integer("top_k", &f.top_k);
  integer("num_experts", &f.num_experts);
  integer("shared_intermediate", &f.shared_intermediate);
  integer("num_comm_sms", &f.num_comm_sms);
  integer("minibatch_size", &f.minibatch_size);
  integer("macrobatch_size", &f.macrobatch_size);
  integer("ring_size", &f.ring_size);
  f.has_biases = source.integer("has_biases") != 0;
  f.has_shared_gate = source.integer("has_shared_gate") != 0;
  f.save = source.integer("save") != 0;
  f.activation.kind = static_cast<cuda::ActivationKind>(source.integer("activation"));
  f.activation.alpha = static_cast<float>(source.real("alpha"));
  f.activation.limit = static_cast<float>(source.real("limit"));
  f.activation.up_offset = static_cast<float>(source.real("up_offset"));
  f.timeout_seconds = source.real("timeout_seconds");
  f.start_timeout_seconds = source.real("start_timeout_seconds");
  return f;
}

// The same and what only a backward call has.
template <typename Source>
cuda::BackwardFacts read_backward_facts(const Source& source) {
  cuda::BackwardFacts f{read_facts(source)};
  f.float32_weight_grads = source.integer("float32_weight_grads") != 0;
  return f;
}

// Of an exchange of rows.
template <typename Source>
cuda::ExchangeFacts read_exchange_facts(const Source& source) {
  cuda::ExchangeFacts f;
  const auto integer = [&](const char* name, int32_t* field) {
    *field = static_cast<int32_t>(source.integer(name));
  };
  integer("num_ranks", &f.num_ranks);
  integer("num_virtual_ranks", &f.num_virtual_ranks);
  integer("num_tokens", &f.num_tokens);
  integer("num_rows", &f.num_rows);
  integer("num_moves", &f.num_moves);
  integer("row_bytes", &f.row_bytes);
  integer("num_sms", &f.num_sms);
  f.push = source.integer("push") != 0;
  f.timeout_seconds = source.real("timeout_seconds");
  f.start_timeout_seconds = source.real("start_timeout_seconds");
  return f;
}

template <typename Source>
cuda::TestHooks read_hooks(const Source& source) {
  cuda::TestHooks hooks;
  hooks.jitter_seed = static_cast<uint32_t>(source.integer("jitter_seed"));
  hooks.absent_rank = static_cast<int32_t>(source.integer("absent_rank"));
  return hooks;
}

// Of one rank's peer heap. The passes of a layer ask for the same, the larger of their needs, so
// that they share a heap.
inline size_t layer_heap_bytes(const cuda::ForwardFacts& facts) {
  return std::max(cuda::heap_bytes(facts), cuda::backward_heap_bytes(cuda::BackwardFacts{facts}));
}

}  // namespace jax_mok::ffi

// The tables of attributes, operands and results, in the order of jax_mok/_cuda.py, and their
// checks.
#include "ffi/cuda_arguments.h"

#include <string>
#include <type_traits>

#include "ffi/arguments.h"
#include "ffi/cuda_facts.h"

namespace jax_mok::ffi {

namespace xffi = xla::ffi;

namespace {

constexpr xffi::DataType kBf16 = xffi::DataType::BF16, kF32 = xffi::DataType::F32,
                         kS32 = xffi::DataType::S32;

struct Attributes {
  const xffi::Dictionary& dictionary;

  int64_t integer(const char* name) const {
    const int64_t value = get_attribute<int64_t>(dictionary, name);
    if (value < -1 || value > INT32_MAX)
      fail(std::string("attribute ") + name + " is " + std::to_string(value) +
           ", allowed are 32-bit numbers");
    return value;
  }
  double real(const char* name) const { return get_attribute<double>(dictionary, name); }
};

template <typename Pass>
CudaCall<Pass> decode_all(const xffi::Dictionary& dictionary) {
  const Attributes attributes{dictionary};
  CudaCall<Pass> call;
  std::string problem;
  if constexpr (std::is_same_v<Pass, ForwardPass>) {
    call.facts = read_facts(attributes);
    problem = cuda::check(call.facts);
  } else if constexpr (std::is_same_v<Pass, BackwardPass>) {
    call.facts = read_backward_facts(attributes);
    problem = cuda::check_backward(call.facts);
  } else {
    call.facts = read_exchange_facts(attributes);
    problem = cuda::check_exchange(call.facts);
  }
  if (!problem.empty()) fail(problem);
  call.hooks = read_hooks(attributes);
  call.failing_rank = static_cast<int32_t>(attributes.integer("failing_rank"));
  if (!call.has_peers()) return call;

  const auto ids = get_attribute<xffi::Span<const int64_t>>(dictionary, "groups");
  const size_t ranks = call.facts.num_ranks;
  if (ids.size() == 0 || ids.size() % ranks != 0)
    fail("attribute groups has " + std::to_string(ids.size()) +
         " entries, expected a multiple of num_ranks, which is " + std::to_string(ranks));
  for (size_t first = 0; first < ids.size(); first += ranks)
    call.groups.emplace_back(ids.begin() + first, ids.begin() + first + ranks);
  return call;
}

// The sizes of a call's arrays. With virtual ranks this device holds the tokens and experts of all
// of them.
struct Sizes {
  int64_t tokens, experts, hidden, intermediate, top_k, shared, saved_rows;

  explicit Sizes(const cuda::ForwardFacts& f)
      : tokens(int64_t{f.num_tokens} * f.num_virtual_ranks),
        experts(int64_t{f.num_experts} / f.num_ranks * f.num_virtual_ranks),
        hidden(f.hidden),
        intermediate(f.intermediate),
        top_k(f.top_k),
        shared(f.shared_intermediate),
        saved_rows(f.save ? cuda::saved_rows(f) * f.num_virtual_ranks : 0) {}
};

// From x on; the same operands for both passes.
template <typename Buffers>
void take_layer(Reader& in, const cuda::ForwardFacts& f, Buffers* b) {
  const Sizes n(f);
  const int64_t e = n.experts, h = n.hidden, i = n.intermediate, s = n.shared;
  b->x = in.take("x", {n.tokens, h}, {kBf16});
  b->expert_ids = static_cast<int32_t*>(in.take("expert_ids", {n.tokens, n.top_k}, {kS32}));
  b->expert_weights = static_cast<float*>(in.take("expert_weights", {n.tokens, n.top_k}, {kF32}));
  b->w_gate = in.take("w_gate", {e, h, i}, {kBf16});
  b->w_up = in.take("w_up", {e, h, i}, {kBf16});
  b->w_down = in.take("w_down", {e, i, h}, {kBf16});
  b->b_gate = in.take_if(f.has_biases, "b_gate", {e, i}, {kBf16});
  b->b_up = in.take_if(f.has_biases, "b_up", {e, i}, {kBf16});
  b->b_down = in.take_if(f.has_biases, "b_down", {e, h}, {kBf16});
  b->s_gate = in.take_if(s > 0, "s_gate", {h, s}, {kBf16});
  b->s_up = in.take_if(s > 0, "s_up", {h, s}, {kBf16});
  b->s_down = in.take_if(s > 0, "s_down", {s, h}, {kBf16});
  b->s_scale = static_cast<float*>(in.take_if(f.has_shared_gate, "s_scale", {n.tokens}, {kF32}));
}

// Results of the forward, operands of the backward.
template <typename Buffers>
void take_saved(Reader& reader, const cuda::ForwardFacts& f, Buffers* b) {
  const Sizes n(f);
  b->saved_x = reader.take_if(f.save, "saved_x", {n.saved_rows, n.hidden}, {kBf16});
  b->saved_gate_up =
      reader.take_if(f.save, "saved_gate_up", {n.saved_rows, 2 * n.intermediate}, {kBf16});
}

void* take_workspace(Reader& out, size_t needed) {
  const xffi::AnyBuffer given = out.peek();
  const int64_t bytes = static_cast<int64_t>(given.element_count());
  if (given.element_type() == xffi::DataType::U8 && given.element_count() < needed)
    fail("the workspace has " + std::to_string(bytes) + " bytes, expected at least " +
         std::to_string(needed) + ": the program was compiled with another version of jax_mok");
  return out.take("workspace", {bytes}, {xffi::DataType::U8});
}

void decode_all(const cuda::ForwardFacts& f, const xffi::RemainingArgs& operands,
                const xffi::RemainingRets& results, cuda::ForwardBuffers* b) {
  Reader in("operand", buffers_of(operands), 13);
  take_layer(in, f, b);
  Reader out("result", buffers_of(results), 4);
  b->y = out.take("y", {Sizes(f).tokens, f.hidden}, {kBf16});
  take_saved(out, f, b);
  b->workspace = take_workspace(out, cuda::workspace_bytes(f));
}

void decode_all(const cuda::BackwardFacts& f, const xffi::RemainingArgs& operands,
                const xffi::RemainingRets& results, cuda::BackwardBuffers* b) {
  const Sizes n(f);
  const int64_t e = n.experts, h = n.hidden, i = n.intermediate, s = n.shared;
  Reader in("operand", buffers_of(operands), 16);
  b->dy = in.take("dy", {n.tokens, h}, {kBf16});
  take_layer(in, f, b);
  take_saved(in, f, b);

  Reader out("result", buffers_of(results), 13);
  b->dx = out.take("dx", {n.tokens, h}, {kBf16});
  b->d_expert_weights =
      static_cast<float*>(out.take("d_expert_weights", {n.tokens, n.top_k}, {kF32}));
  const xffi::DataType weights = f.float32_weight_grads ? kF32 : kBf16;
  b->dw_gate = out.take("dw_gate", {e, h, i}, {weights});
  b->dw_up = out.take("dw_up", {e, h, i}, {weights});
  b->dw_down = out.take("dw_down", {e, i, h}, {weights});
  b->db_gate = out.take_if(f.has_biases, "db_gate", {e, i}, {kBf16});
  b->db_up = out.take_if(f.has_biases, "db_up", {e, i}, {kBf16});
  b->db_down = out.take_if(f.has_biases, "db_down", {e, h}, {kBf16});
  // Every virtual rank has its own.
  const auto shared = [&](int64_t rows, int64_t columns) {
    return f.num_virtual_ranks > 1 ? Dims{f.num_virtual_ranks, rows, columns} : Dims{rows, columns};
  };
  b->ds_gate = out.take_if(s > 0, "ds_gate", shared(h, s), {kBf16});
  b->ds_up = out.take_if(s > 0, "ds_up", shared(h, s), {kBf16});
  b->ds_down = out.take_if(s > 0, "ds_down", shared(s, h), {kBf16});
  b->ds_scale = static_cast<float*>(out.take_if(f.has_shared_gate, "ds_scale", {n.tokens}, {kF32}));
  b->workspace = take_workspace(out, cuda::backward_workspace_bytes(f));
}

void decode_all(const cuda::ExchangeFacts& f, const xffi::RemainingArgs& operands,
                const xffi::RemainingRets& results, cuda::ExchangeBuffers* b) {
  const int64_t ranks = f.num_virtual_ranks, columns = f.row_bytes / 2;
  Reader in("operand", buffers_of(operands), 2);
  b->x = in.take("x", {ranks * f.num_tokens, columns}, {kBf16});
  b->moves = static_cast<const cuda::Move*>(in.take("moves", {ranks * f.num_moves, 4}, {kS32}));
  Reader out("result", buffers_of(results), 3);
  b->rows = out.take("rows", {ranks * f.num_rows, columns}, {kBf16});
  b->ns = static_cast<int32_t*>(out.take("ns", {ranks}, {kS32}));
  b->workspace = take_workspace(out, cuda::exchange_workspace_bytes(f));
}

}  // namespace

template <typename Pass>
xffi::ErrorOr<CudaCall<Pass>> decode_call(xffi::Dictionary attributes) {
  try {
    return decode_all<Pass>(attributes);
  } catch (const Fault& fault) {
    return xffi::Unexpected(xffi::Error::InvalidArgument(fault.text));
  }
}

template <typename Pass>
xffi::Error decode_buffers(const CudaCall<Pass>& call, xffi::RemainingArgs operands,
                           xffi::RemainingRets results, typename Pass::Buffers* buffers) {
  try {
    decode_all(call.facts, operands, results, buffers);
    return xffi::Error::Success();
  } catch (const Fault& fault) {
    return xffi::Error::InvalidArgument(fault.text);
  }
}

template xffi::ErrorOr<CudaCall<ForwardPass>> decode_call<ForwardPass>(xffi::Dictionary);
template xffi::ErrorOr<CudaCall<BackwardPass>> decode_call<BackwardPass>(xffi::Dictionary);
template xffi::ErrorOr<CudaCall<ExchangePass>> decode_call<ExchangePass>(xffi::Dictionary);
template xffi::Error decode_buffers<ForwardPass>(const CudaCall<ForwardPass>&, xffi::RemainingArgs,
                                                 xffi::RemainingRets, cuda::ForwardBuffers*);
template xffi::Error decode_buffers<BackwardPass>(const CudaCall<BackwardPass>&,
                                                  xffi::RemainingArgs, xffi::RemainingRets,
                                                  cuda::BackwardBuffers*);
template xffi::Error decode_buffers<ExchangePass>(const CudaCall<ExchangePass>&,
                                                  xffi::RemainingArgs, xffi::RemainingRets,
                                                  cuda::ExchangeBuffers*);

}  // namespace jax_mok::ffi

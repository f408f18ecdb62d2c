// The tables of attributes, operands and results, in the order of jax_mok/_cuda.py, and their
// checks.
#include "ffi/cuda_arguments.h"

#include <string>

#include "ffi/arguments.h"
#include "ffi/cuda_facts.h"

namespace jax_mok::ffi {

namespace xffi = xla::ffi;

namespace {

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

void* take(const char* name, const xffi::AnyBuffer& buffer, xffi::DataType dtype,
           const Dims& dims) {
  return ffi::take(name, buffer, dims, {dtype});
}

// An absent optional is a scalar.
void* take_if(bool there, const char* name, const xffi::AnyBuffer& buffer, xffi::DataType dtype,
              const Dims& dims) {
  void* const data = take(name, buffer, dtype, there ? dims : Dims{});
  return there ? data : nullptr;
}

xffi::AnyBuffer checked(const xffi::ErrorOr<xffi::AnyBuffer>& buffer) {
  if (!buffer.has_value()) fail(buffer.error().message());
  return buffer.value();
}

CudaCall decode_all(const xffi::Dictionary& dictionary) {
  const Attributes attributes{dictionary};
  CudaCall call;
  call.facts = read_facts(attributes);
  call.hooks = read_hooks(attributes);
  if (std::string problem = cuda::check(call.facts); !problem.empty()) fail(problem);
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

void decode_all(const CudaCall& call, int num_sms, const xffi::RemainingArgs& in,
                const xffi::RemainingRets& out, cuda::ForwardBuffers* b) {
  constexpr auto bf16 = xffi::DataType::BF16, f32 = xffi::DataType::F32, s32 = xffi::DataType::S32;
  const cuda::ForwardFacts& f = call.facts;
  // With virtual ranks this device holds the tokens and experts of all of them.
  const int64_t tokens = int64_t{f.num_tokens} * f.num_virtual_ranks;
  const int64_t experts = int64_t{f.num_experts} / f.num_ranks * f.num_virtual_ranks;
  const int64_t h = f.hidden, i = f.intermediate, k = f.top_k, s = f.shared_intermediate;
  if (in.size() != 13 || out.size() != 2)
    fail("expected 13 operands and 2 results, got " + std::to_string(in.size()) + " and " +
         std::to_string(out.size()));
  const auto arg = [&](size_t index) { return checked(in.get<xffi::AnyBuffer>(index)); };

  b->x = take("x", arg(0), bf16, {tokens, h});
  b->expert_ids = static_cast<int32_t*>(take("expert_ids", arg(1), s32, {tokens, k}));
  b->expert_weights = static_cast<float*>(take("expert_weights", arg(2), f32, {tokens, k}));
  b->w_gate = take("w_gate", arg(3), bf16, {experts, h, i});
  b->w_up = take("w_up", arg(4), bf16, {experts, h, i});
  b->w_down = take("w_down", arg(5), bf16, {experts, i, h});
  b->b_gate = take_if(f.has_biases, "b_gate", arg(6), bf16, {experts, i});
  b->b_up = take_if(f.has_biases, "b_up", arg(7), bf16, {experts, i});
  b->b_down = take_if(f.has_biases, "b_down", arg(8), bf16, {experts, h});
  b->s_gate = take_if(s > 0, "s_gate", arg(9), bf16, {h, s});
  b->s_up = take_if(s > 0, "s_up", arg(10), bf16, {h, s});
  b->s_down = take_if(s > 0, "s_down", arg(11), bf16, {s, h});
  b->s_scale = static_cast<float*>(take_if(f.has_shared_gate, "s_scale", arg(12), f32, {tokens}));

  const auto ret = [&](size_t index) {
    const auto buffer = out.get<xffi::AnyBuffer>(index);
    if (!buffer.has_value()) fail(buffer.error().message());
    return *buffer.value();
  };
  b->y = take("y", ret(0), bf16, {tokens, h});
  const xffi::AnyBuffer workspace = ret(1);
  const size_t needed = cuda::workspace_bytes(f, num_sms), given = workspace.element_count();
  if (workspace.element_type() != xffi::DataType::U8 || given < needed)
    fail("the workspace is " + name_of(workspace.element_type(), workspace.dimensions()) +
         ", expected at least " + std::to_string(needed) + " bytes on a GPU with " +
         std::to_string(num_sms) + " multiprocessors: the program was compiled for another GPU");
  b->workspace = workspace.untyped_data();
}

}  // namespace

xffi::ErrorOr<CudaCall> decode_call(xffi::Dictionary attributes) {
  try {
    return decode_all(attributes);
  } catch (const Fault& fault) {
    return xffi::Unexpected(xffi::Error::InvalidArgument(fault.text));
  }
}

xffi::Error decode_buffers(const CudaCall& call, int num_sms, xffi::RemainingArgs operands,
                           xffi::RemainingRets results, cuda::ForwardBuffers* buffers) {
  try {
    decode_all(call, num_sms, operands, results, buffers);
    return xffi::Error::Success();
  } catch (const Fault& fault) {
    return xffi::Error::InvalidArgument(fault.text);
  }
}

}  // namespace jax_mok::ffi

// The tables of operands and results, in the order of jax_mok/ffi.py, and their checks.
#include "ffi/cpu_arguments.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "cpu/batch.h"
#include "ffi/arguments.h"
#include "plan/host_plan.h"

namespace jax_mok::ffi {

namespace xffi = xla::ffi;

namespace {

constexpr int64_t kMostInt32 = std::numeric_limits<int32_t>::max();

// Rows of the rings where the caller leaves the choice: enough for the usual layer in one
// macrobatch, and the rings stay within some hundred MB.
constexpr int64_t kDefaultMacrobatchRows = 8192;
// Rows of an expert that go through the GEMMs together: each weight panel is copied, or widened
// from bfloat16, once for them all, and they still stay in the L2 cache.
constexpr int64_t kDefaultMinibatchRows = 512;
constexpr int64_t kRowsStep = 64;  // the settings above are given in multiples of this

int64_t bounded(const xffi::Dictionary& attributes, const char* name, int64_t least, int64_t most) {
  const int64_t value = get_attribute<int64_t>(attributes, name);
  if (value < least || value > most)
    fail(std::string("attribute ") + name + " is " + std::to_string(value) + ", allowed are " +
         std::to_string(least) + " to " + std::to_string(most));
  return value;
}

int64_t rows_setting(const xffi::Dictionary& attributes, const char* name) {
  const int64_t rows = bounded(attributes, name, 0, kMostInt32);
  if (rows % kRowsStep != 0)
    fail(std::string("attribute ") + name + " is " + std::to_string(rows) +
         ", allowed are multiples of " + std::to_string(kRowsStep) + ", and 0 for a default");
  return rows;
}

cpu::Dtype engine_dtype(xffi::DataType dtype) {
  return dtype == xffi::DataType::F32 ? cpu::Dtype::kFloat32 : cpu::Dtype::kBfloat16;
}

// Decodes one call. Dimensions are read off x, expert_ids, w_gate and s_gate; all else must agree.
class Decoder {
 public:
  Decoder(Direction direction, const xffi::Dictionary& attributes, Arrival* arrival)
      : backward_(direction == Direction::kBackward), attributes_(attributes), arrival_(*arrival) {
    arrival_.direction = direction;
  }

  void run(std::vector<xffi::AnyBuffer> operands, std::vector<xffi::AnyBuffer> results) {
    read_attributes();
    Reader in("operand", std::move(operands), backward_ ? 16 : 14);
    topology(static_cast<const int32_t*>(in.take("topology", {4}, {xffi::DataType::S32})));
    // dy stands before x, whose shape it must have.
    const xffi::AnyBuffer first = in.peek();
    set_dims(first);
    if (backward_) buffers().dy = {in.take("dy", {tokens_, hidden_}, {dtype_}), engine_dtype_};
    read_operands(in);
    const int64_t saved_rows = backward_ ? read_saved(in) : 0;

    Reader out("result", std::move(results), backward_ ? 12 : 2);
    if (backward_)
      read_gradients(out);
    else
      read_outputs(out);
    finish_shape(backward_ ? saved_rows : output_saved_rows_);
    check_ids();
  }

 private:
  cpu::BackwardBuffers& buffers() { return arrival_.buffers; }
  cpu::ForwardBuffers& inputs() { return arrival_.buffers.forward; }
  cpu::LayerShape& shape() { return arrival_.shape; }

  void read_attributes() {
    arrival_.world = bounded(attributes_, "world", 1, kMostInt32);
    const int64_t ranks = bounded(attributes_, "num_ranks", 1, arrival_.world);
    if (arrival_.world % ranks != 0)
      fail("attribute world is " + std::to_string(arrival_.world) +
           ", expected a multiple of num_ranks, which is " + std::to_string(ranks));
    const int64_t experts = bounded(attributes_, "num_experts", 1, kMostInt32);
    if (experts % ranks != 0)
      fail("attribute num_experts is " + std::to_string(experts) +
           ", expected a multiple of num_ranks, which is " + std::to_string(ranks));
    shape().num_ranks = static_cast<int32_t>(ranks);
    local_experts_ = experts / ranks;
    shape().num_local_experts = static_cast<int32_t>(local_experts_);
    shape().macrobatch_rows = rows_setting(attributes_, "macrobatch_rows");
    shape().minibatch_rows = rows_setting(attributes_, "minibatch_rows");
    save_ = bounded(attributes_, "save", 0, 1) == 1;
    shape().activation.gate = static_cast<cpu::Gate>(bounded(attributes_, "activation", 0, 2));
    shape().activation.alpha = get_attribute<float>(attributes_, "alpha");
    shape().activation.limit = get_attribute<float>(attributes_, "limit");
    shape().activation.up_offset = get_attribute<float>(attributes_, "up_offset");
    if (!(shape().activation.limit > 0.0f)) fail("attribute limit must be positive");
  }

  void topology(const int32_t* values) {
    const int64_t groups = arrival_.world / shape().num_ranks;
    const auto part = [&](int index, const char* what, int64_t end) {
      if (values[index] < 0 || values[index] >= end)
        fail("operand topology: the " + std::string(what) + " is " + std::to_string(values[index]) +
             ", allowed are 0 to " + std::to_string(end - 1));
      return values[index];
    };
    arrival_.rank = part(0, "rank", shape().num_ranks);
    arrival_.group = part(1, "index of the group", groups);
    arrival_.device = part(2, "index of the device", arrival_.world);
    arrival_.meeting = part(3, "index of the meeting", kMostInt32);
  }

  void set_dims(const xffi::AnyBuffer& x) {
    const char* const name = backward_ ? "dy" : "x";
    const auto dims = x.dimensions();
    dtype_ = x.element_type();
    if (dims.size() != 2 || dims[0] > kMostInt32 || dims[1] < 1 || dims[1] > kMostInt32 ||
        (dtype_ != xffi::DataType::F32 && dtype_ != xffi::DataType::BF16))
      fail(std::string("operand ") + name + " is " + name_of(dtype_, dims) +
           ", expected float32 or bfloat16 [tokens, hidden], hidden at least 1");
    tokens_ = dims[0];
    hidden_ = dims[1];
    engine_dtype_ = engine_dtype(dtype_);
  }

  // Last dimension of the next operand, which must be matrix-like.
  int64_t last_dim(const Reader& in, const char* name, size_t rank) {
    const auto dims = in.peek().dimensions();
    if (dims.size() != rank || dims[rank - 1] < 1 || dims[rank - 1] > kMostInt32)
      fail(std::string("operand ") + name + " is " + name_of(in.peek().element_type(), dims) +
           ", expected " + std::to_string(rank) + " dimensions, the last from 1 to 2^31 - 1");
    return dims[rank - 1];
  }

  void read_operands(Reader& in) {
    cpu::ForwardBuffers& to = inputs();
    const auto wide = [&](void* data) {
      return data != nullptr ? cpu::ConstArray{data, engine_dtype_} : cpu::ConstArray{};
    };
    // Empty arrays may come without memory; only absent optionals are null for the engine.
    to.x = {in.take("x", {tokens_, hidden_}, {dtype_}), engine_dtype_};
    top_k_ = last_dim(in, "expert_ids", 2);
    to.ids = static_cast<const int32_t*>(
        in.take("expert_ids", {tokens_, top_k_}, {xffi::DataType::S32}));
    to.weights = static_cast<const float*>(
        in.take("expert_weights", {tokens_, top_k_}, {xffi::DataType::F32}));
    const int64_t e = local_experts_, h = hidden_;
    const int64_t i = intermediate_ = last_dim(in, "w_gate", 3);
    to.experts.gate = wide(in.take("w_gate", {e, h, i}, {dtype_}));
    to.experts.up = wide(in.take("w_up", {e, h, i}, {dtype_}));
    to.experts.down = wide(in.take("w_down", {e, i, h}, {dtype_}));
    has_biases_ = !in.is_absent();
    to.experts.gate_bias = wide(in.take_if(has_biases_, "b_gate", {e, i}, {dtype_}));
    to.experts.up_bias = wide(in.take_if(has_biases_, "b_up", {e, i}, {dtype_}));
    to.experts.down_bias = wide(in.take_if(has_biases_, "b_down", {e, h}, {dtype_}));
    has_shared_ = !in.is_absent();
    const int64_t s = shared_intermediate_ = has_shared_ ? last_dim(in, "s_gate", 2) : 0;
    to.shared.gate = {wide(in.take_if(has_shared_, "s_gate", {h, s}, {dtype_})), h, s};
    to.shared.up = {wide(in.take_if(has_shared_, "s_up", {h, s}, {dtype_})), h, s};
    to.shared.down = {wide(in.take_if(has_shared_, "s_down", {s, h}, {dtype_})), s, h};
    has_scale_ = !in.is_absent();
    to.shared_scale = static_cast<const float*>(
        in.take_if(has_scale_, "s_scale", {tokens_}, {xffi::DataType::F32}));
  }

  // Rows of `saved`, 0 if it is absent.
  int64_t read_saved(Reader& in) {
    if (in.is_absent()) {
      in.take("saved", {}, {xffi::DataType::F32});
      return 0;
    }
    const auto dims = in.peek().dimensions();
    const int64_t rows = dims.size() == 2 ? dims[0] : -1;
    inputs().saved =
        static_cast<float*>(in.take("saved", {rows, 2 * intermediate_}, {xffi::DataType::F32}));
    return rows;
  }

  void read_outputs(Reader& out) {
    inputs().y = {out.take("y", {tokens_, hidden_}, {dtype_}), engine_dtype_};
    output_saved_rows_ = 0;
    if (!save_) {
      out.take("saved", {}, {xffi::DataType::F32});
      return;
    }
    const auto dims = out.peek().dimensions();
    output_saved_rows_ = dims.size() == 2 ? dims[0] : -1;
    inputs().saved = static_cast<float*>(
        out.take("saved", {output_saved_rows_, 2 * intermediate_}, {xffi::DataType::F32}));
  }

  void read_gradients(Reader& out) {
    cpu::BackwardBuffers& to = buffers();
    // Gradients of weights come in the weights' type or in float32, all alike.
    const auto typed = [&](xffi::DataType* dtype) {
      *dtype = out.peek().element_type() == xffi::DataType::F32 ? xffi::DataType::F32 : dtype_;
    };
    to.dx = {out.take("dx", {tokens_, hidden_}, {dtype_}), engine_dtype_};
    to.d_weights =
        static_cast<float*>(out.take("d_expert_weights", {tokens_, top_k_}, {xffi::DataType::F32}));
    const int64_t e = local_experts_, h = hidden_, i = intermediate_, s = shared_intermediate_;
    const auto array = [&](bool present, const char* name, const Dims& dims, xffi::DataType dtype) {
      if (!present) {
        out.take(name, {}, {xffi::DataType::F32, dtype_});
        return cpu::Array{};
      }
      return cpu::Array{out.take(name, dims, {dtype}), engine_dtype(dtype)};
    };
    xffi::DataType dtype;
    typed(&dtype);
    to.experts.gate = array(true, "dw_gate", {e, h, i}, dtype);
    to.experts.up = array(true, "dw_up", {e, h, i}, dtype);
    to.experts.down = array(true, "dw_down", {e, i, h}, dtype);
    typed(&dtype);
    to.experts.gate_bias = array(has_biases_, "db_gate", {e, i}, dtype);
    to.experts.up_bias = array(has_biases_, "db_up", {e, i}, dtype);
    to.experts.down_bias = array(has_biases_, "db_down", {e, h}, dtype);
    typed(&dtype);
    to.shared.gate = array(has_shared_, "ds_gate", {h, s}, dtype);
    to.shared.up = array(has_shared_, "ds_up", {h, s}, dtype);
    to.shared.down = array(has_shared_, "ds_down", {s, h}, dtype);
    const cpu::Array d_scale = array(has_scale_, "ds_scale", {tokens_}, xffi::DataType::F32);
    to.d_shared_scale = static_cast<float*>(d_scale.data);
  }

  void finish_shape(int64_t saved_rows) {
    cpu::LayerShape& s = shape();
    s.num_tokens = static_cast<int32_t>(tokens_);
    s.top_k = static_cast<int32_t>(top_k_);
    s.hidden = hidden_;
    s.intermediate = intermediate_;
    s.shared_intermediate = shared_intermediate_;
    if (inputs().saved != nullptr || saved_rows != 0) {
      if (saved_rows < kRowsStep || saved_rows > kMostInt32 || saved_rows % kRowsStep != 0 ||
          (s.macrobatch_rows != 0 && s.macrobatch_rows != saved_rows))
        fail("saved has " + std::to_string(saved_rows) +
             " rows, expected macrobatch_rows, which is " +
             (s.macrobatch_rows != 0 ? std::to_string(s.macrobatch_rows)
                                     : "a positive multiple of " + std::to_string(kRowsStep)));
      s.macrobatch_rows = saved_rows;
    }
    if (s.macrobatch_rows == 0) s.macrobatch_rows = kDefaultMacrobatchRows;
    if (s.minibatch_rows == 0) s.minibatch_rows = kDefaultMinibatchRows;
    s.minibatch_rows = std::min(s.minibatch_rows, s.macrobatch_rows);
    if (const char* wrong = plan::check(cpu::plan_shape(s))) fail(wrong);
  }

  void check_ids() {
    plan::IdError error{};
    const int32_t experts = shape().num_experts();
    if (!plan::check_ids(cpu::plan_shape(shape()), experts, inputs().ids, arrival_.rank, &error))
      arrival_.id_fault = plan::describe(error, experts);
  }

  const bool backward_;
  const xffi::Dictionary& attributes_;
  Arrival& arrival_;
  xffi::DataType dtype_ = xffi::DataType::INVALID;
  cpu::Dtype engine_dtype_ = cpu::Dtype::kFloat32;
  int64_t tokens_ = 0, hidden_ = 0, top_k_ = 0, local_experts_ = 0, intermediate_ = 0;
  int64_t shared_intermediate_ = 0, output_saved_rows_ = 0;
  bool save_ = false, has_biases_ = false, has_shared_ = false, has_scale_ = false;
};

}  // namespace

xffi::Error decode(Direction direction, xffi::RemainingArgs operands, xffi::RemainingRets results,
                   xffi::Dictionary attributes, Arrival* arrival) {
  try {
    Decoder(direction, attributes, arrival).run(buffers_of(operands), buffers_of(results));
    return xffi::Error::Success();
  } catch (const Fault& fault) {
    return xffi::Error::InvalidArgument(fault.text);
  }
}

}  // namespace jax_mok::ffi

// The CPU handlers: decode, check, join the meeting; no arithmetic here.
#include "ffi/cpu_handlers.h"

#include <atomic>
#include <exception>
#include <memory>
#include <string>

#include "ffi/cpu_arguments.h"
#include "ffi/cpu_meeting.h"
#include "plan/host_plan.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mok::ffi {

namespace xffi = xla::ffi;

namespace {

std::atomic<int64_t> num_forward_calls{0}, num_backward_calls{0};

// No exception may reach XLA, which is built without them.
xffi::Future call(Direction direction, xffi::RunId run, MeetingPlace* place,
                  xffi::RemainingArgs operands, xffi::RemainingRets results,
                  xffi::Dictionary attributes) {
  try {
    (direction == Direction::kForward ? num_forward_calls : num_backward_calls)
        .fetch_add(1, std::memory_order_relaxed);
    Arrival arrival{};
    xffi::Error error = decode(direction, operands, results, attributes, &arrival);
    if (error.failure()) return failed(std::move(error));
    return place->arrive(run.run_id, std::move(arrival));
  } catch (const std::exception& e) {
    return failed(xffi::Error::Internal(std::string("jax_mok: ") + e.what()));
  }
}

auto call_binding() {
  return xffi::Ffi::Bind()
      .Ctx<xffi::RunId>()
      .Ctx<xffi::State<MeetingPlace>>()
      .RemainingArgs()
      .RemainingRets()
      .Attrs();
}

xffi::Future forward(xffi::RunId run, MeetingPlace* place, xffi::RemainingArgs operands,
                     xffi::RemainingRets results, xffi::Dictionary attributes) {
  return call(Direction::kForward, run, place, operands, results, attributes);
}

xffi::Future backward(xffi::RunId run, MeetingPlace* place, xffi::RemainingArgs operands,
                      xffi::RemainingRets results, xffi::Dictionary attributes) {
  return call(Direction::kBackward, run, place, operands, results, attributes);
}

xffi::ErrorOr<std::unique_ptr<MeetingPlace>> make_place() {
  return std::make_unique<MeetingPlace>();
}

xffi::Error check(xffi::Buffer<xffi::DataType::S32> flag,
                  xffi::Result<xffi::Buffer<xffi::DataType::S32>> kind) {
  if (flag.element_count() != 4 || kind->element_count() != 1)
    return xffi::Error::InvalidArgument(
        "jax_mok: the check takes int32 [4] and gives int32 [1], got " +
        std::to_string(flag.element_count()) + " and " + std::to_string(kind->element_count()) +
        " elements");
  const int32_t* const values = flag.typed_data();
  kind->typed_data()[0] = values[0];
  if (values[0] == 0) return xffi::Error::Success();
  const plan::IdError error{
      -1, values[1], values[2], values[3],
      values[0] == 2 ? plan::IdError::Kind::kRepeated : plan::IdError::Kind::kOutOfRange};
  return xffi::Error::InvalidArgument(
      "jax_mok.moe: " + plan::describe(error, "one rank", "the number of experts - 1"));
}

XLA_FFI_TypeInfo the_meeting_type_info = xffi::MakeTypeInfo<MeetingPlace>();

}  // namespace

XLA_FFI_TypeId* meeting_type_id() { return &MeetingPlace::id; }
XLA_FFI_TypeInfo* meeting_type_info() { return &the_meeting_type_info; }
int64_t forward_calls() { return num_forward_calls.load(); }
int64_t backward_calls() { return num_backward_calls.load(); }

}  // namespace jax_mok::ffi

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokMeetingInstantiate, jax_mok::ffi::make_place,
                              xla::ffi::Ffi::BindInstantiate());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokForwardCpu, jax_mok::ffi::forward,
                              jax_mok::ffi::call_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokBackwardCpu, jax_mok::ffi::backward,
                              jax_mok::ffi::call_binding());
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxMokCheckCpu, jax_mok::ffi::check,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::Buffer<xla::ffi::DataType::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::DataType::S32>>());

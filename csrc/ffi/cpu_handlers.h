// What the extension module needs of the CPU side: the XLA FFI handlers, the type of their state,
// and counters.
#pragma once

#include <cstdint>

#include "xla/ffi/api/c_api.h"

extern "C" {
// Makes the state of a call site, for both directions.
XLA_FFI_Error* JaxMokMeetingInstantiate(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokForwardCpu(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokBackwardCpu(XLA_FFI_CallFrame* call_frame);
// Stateless: fails if its operand s32 [4] = (kind, token, slot, id) reports a bad expert id.
XLA_FFI_Error* JaxMokCheckCpu(XLA_FFI_CallFrame* call_frame);
}

namespace jax_mok::ffi {

XLA_FFI_TypeId* meeting_type_id();
XLA_FFI_TypeInfo* meeting_type_info();

// Calls so far, one for each device.
int64_t forward_calls();
int64_t backward_calls();

}  // namespace jax_mok::ffi

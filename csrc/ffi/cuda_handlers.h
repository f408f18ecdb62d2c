// What the extension module needs of the CUDA side: the XLA FFI handlers, one for each pass and
// stage, and counters.
#pragma once

#include <cstdint>

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* JaxMokForwardCudaPrepare(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokForwardCudaInitialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokForwardCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokBackwardCudaPrepare(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokBackwardCudaInitialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokBackwardCuda(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokExchangeCudaPrepare(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokExchangeCudaInitialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokExchangeCuda(XLA_FFI_CallFrame* call_frame);
}

namespace jax_mok::ffi {

// Launches so far, one for each device and call.
int64_t cuda_forward_calls();
int64_t cuda_backward_calls();

}  // namespace jax_mok::ffi

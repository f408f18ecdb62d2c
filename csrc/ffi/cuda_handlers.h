// The CUDA side's XLA FFI handlers, one for each stage.
#pragma once

#include <cstdint>

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Error* JaxMokForwardCudaPrepare(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokForwardCudaInitialize(XLA_FFI_CallFrame* call_frame);
XLA_FFI_Error* JaxMokForwardCuda(XLA_FFI_CallFrame* call_frame);
}

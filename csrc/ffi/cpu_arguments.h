// Decodes and checks what XLA hands to a CPU handler: every operand, result and attribute by name.
#pragma once

#include <cstdint>

#include "ffi/cpu_meeting.h"
#include "xla/ffi/api/ffi.h"

namespace jax_mok::ffi {

// Fills *arrival. The error names what is wrong, what was given and what is expected. Static faults
// are the same on every device of a program, so each may return its error by itself; wrong expert
// ids are not, and go into arrival->id_fault.
xla::ffi::Error decode(Direction direction, xla::ffi::RemainingArgs operands,
                       xla::ffi::RemainingRets results, xla::ffi::Dictionary attributes,
                       Arrival* arrival);

}  // namespace jax_mok::ffi

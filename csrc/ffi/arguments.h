// What the decoders of the CPU's and the GPU's calls share: faults that name what is wrong, what
// was given and what is expected, and the check of one buffer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jax_mok::ffi {

// Thrown and caught inside a decoder: XLA is built without exceptions.
struct Fault {
  std::string text;
};

[[noreturn]] inline void fail(const std::string& text) { throw Fault{"jax_mok: " + text}; }

inline std::string name_of(xla::ffi::DataType dtype) {
  switch (dtype) {
    case xla::ffi::DataType::BF16:
      return "bfloat16";
    case xla::ffi::DataType::F32:
      return "float32";
    case xla::ffi::DataType::S32:
      return "int32";
    case xla::ffi::DataType::U8:
      return "uint8";
    default:
      return "dtype code " + std::to_string(static_cast<int>(dtype));
  }
}

using Dims = std::vector<int64_t>;

// "float32 [4, 8]"; dims: Dims or what a buffer returns.
template <typename AnyDims>
std::string name_of(xla::ffi::DataType dtype, const AnyDims& dims) {
  std::string text = name_of(dtype) + " [";
  bool first = true;
  for (const int64_t dim : dims) {
    text += (first ? "" : ", ") + std::to_string(dim);
    first = false;
  }
  return text + "]";
}

// The memory of a buffer, which must have these dimensions and one of these types.
inline void* take(const std::string& name, const xla::ffi::AnyBuffer& buffer, const Dims& dims,
                  const std::vector<xla::ffi::DataType>& dtypes) {
  const auto given = buffer.dimensions();
  const bool right_dims = std::equal(given.begin(), given.end(), dims.begin(), dims.end());
  if (!right_dims || std::count(dtypes.begin(), dtypes.end(), buffer.element_type()) == 0) {
    std::string allowed;
    for (const xla::ffi::DataType dtype : dtypes)
      allowed += (allowed.empty() ? "" : " or ") + name_of(dtype, dims);
    fail(name + " is " + name_of(buffer.element_type(), given) + ", expected " + allowed);
  }
  return buffer.untyped_data();
}

template <typename T>
T get_attribute(const xla::ffi::Dictionary& attributes, const char* name) {
  const xla::ffi::ErrorOr<T> value = attributes.get<T>(name);
  if (!value.has_value())
    fail(std::string("attribute ") + name +
         " is missing or of another type: " + value.error().message());
  return value.value();
}

}  // namespace jax_mok::ffi

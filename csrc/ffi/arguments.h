// What the decoders of the CPU's and the GPU's calls share: faults that name what is wrong, what
// was given and what is expected, and the reading of buffers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
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

inline std::vector<xla::ffi::AnyBuffer> buffers_of(const xla::ffi::RemainingArgs& operands) {
  std::vector<xla::ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto buffer = operands.get<xla::ffi::AnyBuffer>(i);
    if (!buffer.has_value()) fail(buffer.error().message());
    buffers.push_back(*buffer);
  }
  return buffers;
}

inline std::vector<xla::ffi::AnyBuffer> buffers_of(const xla::ffi::RemainingRets& results) {
  std::vector<xla::ffi::AnyBuffer> buffers;
  for (size_t i = 0; i < results.size(); ++i) {
    auto buffer = results.get<xla::ffi::AnyBuffer>(i);
    if (!buffer.has_value()) fail(buffer.error().message());
    buffers.push_back(**buffer);
  }
  return buffers;
}

// Takes operands or results one by one, in order.
class Reader {
 public:
  Reader(const char* what, std::vector<xla::ffi::AnyBuffer> buffers, size_t expected)
      : what_(what), buffers_(std::move(buffers)) {
    if (buffers_.size() != expected)
      fail("expected " + std::to_string(expected) + " " + what + "s, got " +
           std::to_string(buffers_.size()));
  }

  // The next one, of any shape.
  xla::ffi::AnyBuffer peek() const { return buffers_[next_]; }

  void* take(const char* name, const Dims& dims, const std::vector<xla::ffi::DataType>& dtypes) {
    return ffi::take(std::string(what_) + " " + name, buffers_[next_++], dims, dtypes);
  }

  // Null if it is absent, though the scalar in its place has an address.
  void* take_if(bool there, const char* name, const Dims& dims,
                const std::vector<xla::ffi::DataType>& dtypes) {
    void* const data = take(name, there ? dims : Dims{}, dtypes);
    return there ? data : nullptr;
  }

  // Whether the next one is an absent optional: a scalar.
  bool is_absent() const { return peek().dimensions().size() == 0; }

 private:
  const char* what_;
  std::vector<xla::ffi::AnyBuffer> buffers_;
  size_t next_ = 0;
};

template <typename T>
T get_attribute(const xla::ffi::Dictionary& attributes, const char* name) {
  const xla::ffi::ErrorOr<T> value = attributes.get<T>(name);
  if (!value.has_value())
    fail(std::string("attribute ") + name +
         " is missing or of another type: " + value.error().message());
  return value.value();
}

}  // namespace jax_mok::ffi

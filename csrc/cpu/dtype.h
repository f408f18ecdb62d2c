// float32 and bfloat16 arrays: reading widens to float32, writing rounds once, to nearest even.
#pragma once

#include <cstdint>
#include <cstring>

namespace jax_mok::cpu {

enum class Dtype : uint8_t { kFloat32, kBfloat16 };

inline int64_t byte_width(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

inline float widen(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

inline uint16_t round_to_bfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;  // rounding could carry a NaN into infinity
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(is_nan ? quiet_nan : rounded);
}

// Array of either type that is only read. Null when an optional operand is absent.
struct ConstArray {
  const void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;

  explicit operator bool() const { return data != nullptr; }
  const float* f32() const { return static_cast<const float*>(data); }
  const uint16_t* bf16() const { return static_cast<const uint16_t*>(data); }
  ConstArray at(int64_t index) const {
    return {static_cast<const char*>(data) + index * byte_width(dtype), dtype};
  }
};

struct Array {
  void* data = nullptr;
  Dtype dtype = Dtype::kFloat32;

  explicit operator bool() const { return data != nullptr; }
  Array at(int64_t index) const {
    return {static_cast<char*>(data) + index * byte_width(dtype), dtype};
  }
};

inline void read(ConstArray from, int64_t count, float* to) {
  if (from.dtype == Dtype::kFloat32) {
    std::memcpy(to, from.data, count * sizeof(float));
    return;
  }
  const uint16_t* bits = from.bf16();
  for (int64_t i = 0; i < count; ++i) to[i] = widen(bits[i]);
}

inline void write(const float* from, int64_t count, Array to) {
  if (to.dtype == Dtype::kFloat32) {
    std::memcpy(to.data, from, count * sizeof(float));
    return;
  }
  uint16_t* bits = static_cast<uint16_t*>(to.data);
  for (int64_t i = 0; i < count; ++i) bits[i] = round_to_bfloat16(from[i]);
}

}  // namespace jax_mok::cpu

#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "runtime/unroll.h"

// Floats of any type and their conversion from and to float32, in loops that the compiler
// vectorises. Every instruction set gives the same bits.

namespace mmfree {

enum class FloatType { float32, float16, bfloat16 };

// Floats in memory, or none.
struct Floats {
  const void* data;
  FloatType type;
};

MMFREE_INLINE inline size_t size_of(FloatType type) {
  return type == FloatType::float32 ? 4 : 2;
}

MMFREE_INLINE inline Floats offset(const Floats& floats, size_t count) {
  const char* data = static_cast<const char*>(floats.data);
  return {data ? data + count * size_of(floats.type) : data, floats.type};
}

template <class Isa>
void widen(const Floats& x, size_t start, size_t count, float* values) {
  if (x.type == FloatType::float32) {
    memcpy(values, static_cast<const float*>(x.data) + start, count * sizeof(float));
    return;
  }
  const uint16_t* halves = static_cast<const uint16_t*>(x.data) + start;
  if (x.type == FloatType::bfloat16) {
    for (size_t j = 0; j < count; ++j) {
      values[j] = __builtin_bit_cast(float, static_cast<uint32_t>(halves[j]) << 16);
    }
    return;
  }
  for (size_t j = 0; j < count; ++j) {
    // scaled from the exponent range of float16 to that of float32, but for infinity and NaN
    const uint32_t magnitude = static_cast<uint32_t>(halves[j] & 0x7fff) << 13;
    uint32_t bits = __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) * 0x1p112f);
    bits |= magnitude >= 0x0f800000 ? 0x7f800000 : 0;
    bits |= static_cast<uint32_t>(halves[j] & 0x8000) << 16;
    values[j] = __builtin_bit_cast(float, bits);
  }
}

// The values themselves if they are float32, else widened ones. scratch: (count,).
template <class Isa>
const float* as_float32(const Floats& x, size_t start, size_t count, float* scratch) {
  if (x.type == FloatType::float32) {
    return static_cast<const float*>(x.data) + start;
  }
  widen<Isa>(x, start, count, scratch);
  return scratch;
}

// Where the float32 values of a result are computed: in the result itself if it is float32.
MMFREE_INLINE inline float* values_of(void* result, FloatType type, float* scratch) {
  return type == FloatType::float32 ? static_cast<float*>(result) : scratch;
}

// Rounds to the nearest, ties to even. The values may be those of `values_of`.
template <class Isa>
void narrow(const float* values, size_t count, FloatType type, void* result) {
  if (type == FloatType::float32) {
    if (values != result) {
      memcpy(result, values, count * sizeof(float));
    }
    return;
  }
  uint16_t* halves = static_cast<uint16_t*>(result);
  if (type == FloatType::bfloat16) {
    for (size_t j = 0; j < count; ++j) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, values[j]);
      const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      halves[j] = (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded;
    }
    return;
  }
  for (size_t j = 0; j < count; ++j) {
    const uint32_t bits = __builtin_bit_cast(uint32_t, values[j]);
    const uint32_t magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // the sum with 0.5 has the last bit of the half at the place of a float's last bit
    const uint32_t small =
        __builtin_bit_cast(uint32_t, __builtin_bit_cast(float, magnitude) + 0.5f) - 0x3f000000;
    uint32_t half = magnitude < 0x38800000 ? small : normal;
    half = magnitude >= 0x477ff000 ? 0x7c00 : half;
    half = magnitude > 0x7f800000 ? 0x7e00 : half;
    halves[j] = half | (bits >> 16 & 0x8000);
  }
}

}  // namespace mmfree

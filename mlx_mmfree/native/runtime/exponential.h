#pragma once

#include <stdint.h>

#include "runtime/unroll.h"

// One file for each instruction set includes this. Loops over these functions vectorise, and
// without contraction every set gives the same bits.

namespace mmfree {

// e^x to about two units in the last place. x is limited to [-87, 88].
template <class Isa>
MMFREE_INLINE inline float exponential(float x) {
  constexpr float kRounder = 12582912.0f;
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  // x = n log 2 + r, |r| <= log(2) / 2
  const float shifted = x * 1.44269504f + kRounder;
  const float n = shifted - kRounder;
  const float r = (x - n * 0.693145751953125f) - n * 1.42860677e-6f;
  float y = 1.0f / 720;
  y = y * r + 1.0f / 120;
  y = y * r + 1.0f / 24;
  y = y * r + 1.0f / 6;
  y = y * r + 0.5f;
  y = y * r + 1.0f;
  y = y * r + 1.0f;
  const uint32_t power = __builtin_bit_cast(uint32_t, shifted) << 23;
  const float scaled = __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, y) + power);
  return x == x ? scaled : x;
}

template <class Isa>
MMFREE_INLINE inline float sigmoid(float x) {
  return 1.0f / (1.0f + exponential<Isa>(-x));
}

}  // namespace mmfree

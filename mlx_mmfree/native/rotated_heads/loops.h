#pragma once

#include "rotated_heads/kernels.h"
#include "runtime/floats.h"

namespace mmfree {

template <class Isa>
MMFREE_INLINE inline void rotate_pairs(const float* __restrict__ x, const float* cosines,
                                       const float* sines, float sign, size_t half,
                                       bool is_interleaved, float* __restrict__ y) {
  if (is_interleaved) {
    for (size_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1], sine = sign * sines[i];
      y[2 * i] = a * cosines[i] - b * sine;
      y[2 * i + 1] = a * sine + b * cosines[i];
    }
    return;
  }
  for (size_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[half + i], sine = sign * sines[i];
    y[i] = a * cosines[i] - b * sine;
    y[half + i] = a * sine + b * cosines[i];
  }
}

// Calls move(in the token, in an array, cosines or null, sines) with the values of each head.
template <class Move>
MMFREE_INLINE inline void each_head(const TokenHeads& t, size_t first, size_t last, Move&& move) {
  const size_t counts[] = {t.queries, t.groups, t.groups};
  const size_t step = t.dims * size_of(t.type);
  char* token = static_cast<char*>(t.tokens) + first * (t.queries + 2 * t.groups) * step;
  for (size_t n = first; n < last; ++n) {
    const size_t row = n / t.length, place = n % t.length;
    const size_t angles = row * t.row_angles + place * (t.dims / 2);
    for (size_t kind = 0; kind < 3; ++kind) {
      for (size_t head = 0; head < counts[kind]; ++head, token += step) {
        char* own = static_cast<char*>(t.arrays[kind]) +
                    ((row * counts[kind] + head) * t.length + place) * step;
        move(token, own, kind < 2 ? t.cosines + angles : nullptr, t.sines + angles);
      }
    }
  }
}

template <class Isa>
MMFREE_INLINE inline void move_head(const TokenHeads& t, const char* from, const float* cosines,
                                    const float* sines, float sign, char* to, float* scratch) {
  if (!cosines) {
    memcpy(to, from, t.dims * size_of(t.type));
  } else if (t.type == FloatType::float32) {
    rotate_pairs<Isa>(reinterpret_cast<const float*>(from), cosines, sines, sign, t.dims / 2,
                      t.is_interleaved, reinterpret_cast<float*>(to));
  } else {
    widen<Isa>({from, t.type}, 0, t.dims, scratch);
    rotate_pairs<Isa>(scratch, cosines, sines, sign, t.dims / 2, t.is_interleaved,
                      scratch + t.dims);
    narrow<Isa>(scratch + t.dims, t.dims, t.type, to);
  }
}

template <class Isa>
void split_heads(const TokenHeads& t, size_t first, size_t last, float* scratch) {
  each_head(t, first, last, [&](char* token, char* own, const float* cosines, const float* sines) {
    move_head<Isa>(t, token, cosines, sines, 1.0f, own, scratch);
  });
}

template <class Isa>
void join_heads(const TokenHeads& t, size_t first, size_t last, float* scratch) {
  each_head(t, first, last, [&](char* token, char* own, const float* cosines, const float* sines) {
    move_head<Isa>(t, own, cosines, sines, -1.0f, token, scratch);
  });
}

template <class Isa, class Dense>
constexpr RotatedHeadsKernels RotatedHeadsKernels::of() {
  return {mmfree::split_heads<Isa>, mmfree::join_heads<Isa>};
}

}  // namespace mmfree

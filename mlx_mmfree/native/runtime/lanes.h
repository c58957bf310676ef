#pragma once

#include <math.h>
#include <string.h>

#include "runtime/unroll.h"

// Sums and maxima of a row in 16 lanes, those of every 16th value, which are joined in their order.
// Every instruction set gives the same bits.

namespace mmfree {

constexpr size_t kRowLanes = 16;

template <class Isa>
struct Lanes {
  static constexpr size_t kVectors = kRowLanes / Isa::kLanes;
  typename Isa::Floats at[kVectors];
};

template <class Isa>
MMFREE_INLINE inline typename Isa::Floats load_floats(const float* x) {
  typename Isa::Floats values;
  memcpy(&values, x, sizeof(values));
  return values;
}

// Joins all rows[...][j] to one number, where combine(lane, values...) takes vectors or numbers.
template <class Isa, class Combine, class... Rows>
MMFREE_INLINE inline void fold_lanes(float (&lanes)[kRowLanes], size_t count, Combine&& combine,
                                     const Rows*... rows) {
  Lanes<Isa> vectors;
  memcpy(&vectors, lanes, sizeof(vectors));
  size_t j = 0;
  for (; j + kRowLanes <= count; j += kRowLanes) {
    unroll<Lanes<Isa>::kVectors>([&](auto v) MMFREE_INLINE {
      vectors.at[v] = combine(vectors.at[v], load_floats<Isa>(rows + j + v * Isa::kLanes)...);
    });
  }
  memcpy(lanes, &vectors, sizeof(vectors));
  for (size_t l = 0; j + l < count; ++l) {
    lanes[l] = combine(lanes[l], rows[j + l]...);
  }
}

// -infinity if there are no values. NaN is never the largest.
template <class Isa>
float largest_of(const float* values, size_t count) {
  alignas(64) float lanes[kRowLanes];
  for (float& lane : lanes) {
    lane = -INFINITY;
  }
  const auto larger = [](auto most, auto x) MMFREE_INLINE { return x > most ? x : most; };
  fold_lanes<Isa>(lanes, count, larger, values);
  float most = -INFINITY;
  for (float lane : lanes) {
    most = larger(most, lane);
  }
  return most;
}

inline float total_of(const float (&lanes)[kRowLanes]) {
  float total = 0.0f;
  for (float lane : lanes) {
    total += lane;
  }
  return total;
}

template <class Isa>
float sum_of(const float* values, size_t count) {
  alignas(64) float lanes[kRowLanes] = {};
  fold_lanes<Isa>(lanes, count, [](auto sum, auto x) MMFREE_INLINE { return sum + x; }, values);
  return total_of(lanes);
}

template <class Isa>
float sum_of_products(const float* a, const float* b, size_t count) {
  alignas(64) float lanes[kRowLanes] = {};
  const auto add = [](auto sum, auto x, auto y) MMFREE_INLINE { return sum + x * y; };
  fold_lanes<Isa>(lanes, count, add, a, b);
  return total_of(lanes);
}

}  // namespace mmfree

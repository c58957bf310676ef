#pragma once

#include "activate/kernels.h"
#include "gated_activation/loops.h"
#include "runtime/floats.h"

namespace mmfree {

// Calls body(first, count) for the parts of a range.
template <class Body>
MMFREE_INLINE inline void each_activated(size_t first, size_t last, Body&& body) {
  for (; first < last; first += kActivated) {
    body(first, last - first < kActivated ? last - first : kActivated);
  }
}

template <class Isa>
void activate_values(const ActivateValues& a, size_t first, size_t last) {
  alignas(64) float values[kActivated];
  each_activated(first, last, [&](size_t start, size_t count) {
    widen<Isa>(a.x, start, count, values);
    activate<Isa>(a.activation, values, count);
    narrow<Isa>(values, count, a.type, static_cast<char*>(a.y) + start * size_of(a.type));
  });
}

template <class Isa>
void differentiate_activated(const ActivateGradientValues& a, size_t first, size_t last) {
  alignas(64) float values[kActivated], slope[kActivated], d_y[kActivated];
  each_activated(first, last, [&](size_t start, size_t count) {
    widen<Isa>(a.x, start, count, values);
    widen<Isa>(a.d_y, start, count, d_y);
    activate_with_slope<Isa>(a.activation, values, slope, count);
    for (size_t j = 0; j < count; ++j) {
      slope[j] *= d_y[j];
    }
    narrow<Isa>(slope, count, a.x.type, static_cast<char*>(a.d_x) + start * size_of(a.x.type));
  });
}

template <class Isa, class Dense>
constexpr ActivateKernels ActivateKernels::of() {
  return {mmfree::activate_values<Isa>, mmfree::differentiate_activated<Isa>};
}

}  // namespace mmfree

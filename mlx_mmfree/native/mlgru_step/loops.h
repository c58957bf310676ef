#pragma once

#include "mlgru_step/kernels.h"
#include "runtime/exponential.h"
#include "runtime/floats.h"

namespace mmfree {

constexpr size_t kChannels = 256;

// Computes at most kChannels channels from `first` on.
template <class Isa>
void recur_part(const RecurrenceStep& s, size_t first, size_t count) {
  float i[kChannels], f[kChannels], g[kChannels], h[kChannels], weight[kChannels];
  float bound[kChannels] = {};
  memcpy(h, s.state + first, count * sizeof(float));
  widen<Isa>(s.weight, first, count, weight);
  if (s.lower_bound.data) {
    widen<Isa>(s.lower_bound, first, count, bound);
  }
  for (size_t row = 0; row < s.rows; ++row) {
    const size_t start = 3 * row * s.dims + first;
    widen<Isa>(s.gates, start, count, i);
    widen<Isa>(s.gates, start + s.dims, count, f);
    widen<Isa>(s.gates, start + 2 * s.dims, count, g);
    if (!s.valid || s.valid[row]) {
      for (size_t c = 0; c < count; ++c) {
        const float forget = bound[c] + (1.0f - bound[c]) * sigmoid<Isa>(f[c]);
        const float input = i[c] * sigmoid<Isa>(i[c]) * (1.0f - forget);
        h[c] = forget * h[c] + input;
      }
    }
    const float inverse = s.inverse[row];
    for (size_t c = 0; c < count; ++c) {
      g[c] = g[c] * inverse * weight[c] * (h[c] * sigmoid<Isa>(h[c]));
    }
    narrow<Isa>(g, count, s.gates.type,
                static_cast<char*>(s.y) + (row * s.dims + first) * size_of(s.gates.type));
  }
  memcpy(s.last + first, h, count * sizeof(float));
}

template <class Isa>
void recur(const RecurrenceStep& s, size_t first, size_t last) {
  for (; first < last; first += kChannels) {
    recur_part<Isa>(s, first, last - first < kChannels ? last - first : kChannels);
  }
}

template <class Isa, class Dense>
constexpr MlgruStepKernels MlgruStepKernels::of() {
  return {mmfree::recur<Isa>};
}

}  // namespace mmfree

#pragma once

#include "mlgru_step/kernels.h"
#include "runtime/exponential.h"
#include "runtime/floats.h"

namespace mmfree {

constexpr size_t kChannels = 256;

// Computes at most kChannels channels from `first` on.
template <class Isa>
void recur_part(const RecurrenceStep& s, size_t first, size_t count) {
  float scratch[4][kChannels], h[kChannels], bound[kChannels] = {};
  memcpy(h, s.state + first, count * sizeof(float));
  const float* weight = as_float32<Isa>(s.weight, first, count, scratch[3]);
  if (s.lower_bound.data) {
    widen<Isa>(s.lower_bound, first, count, bound);
  }
  for (size_t row = 0; row < s.rows; ++row) {
    const size_t start = 3 * row * s.dims + first;
    const float* i = as_float32<Isa>(s.gates, start, count, scratch[0]);
    const float* f = as_float32<Isa>(s.gates, start + s.dims, count, scratch[1]);
    const float* g = as_float32<Isa>(s.gates, start + 2 * s.dims, count, scratch[2]);
    void* result = static_cast<char*>(s.y) + (row * s.dims + first) * size_of(s.gates.type);
    float* y = values_of(result, s.gates.type, scratch[2]);
    if (!s.valid || s.valid[row]) {
      for (size_t c = 0; c < count; ++c) {
        const float forget = bound[c] + (1.0f - bound[c]) * sigmoid<Isa>(f[c]);
        const float input = i[c] * sigmoid<Isa>(i[c]) * (1.0f - forget);
        h[c] = forget * h[c] + input;
      }
    }
    const float inverse = s.inverse[row];
    for (size_t c = 0; c < count; ++c) {
      y[c] = g[c] * inverse * weight[c] * (h[c] * sigmoid<Isa>(h[c]));
    }
    narrow<Isa>(y, count, s.gates.type, result);
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

#pragma once

#include "bit_linear/kernels.h"
#include "runtime/floats.h"

namespace mmfree {

// Values that are finished at once.
constexpr size_t kFinished = 256;

template <class Isa>
void finish_part(const Results& r, size_t row, size_t first, size_t count) {
  const float* sums = r.sums + row * r.sum_stride + first;
  const size_t start = row * r.stride + first;
  float own[kFinished], scratch[kFinished];
  void* y = static_cast<char*>(r.y) + start * size_of(r.type);
  float* values = values_of(y, r.type, own);
  const float divisor = r.input_scales ? r.input_scales[row] : 1.0f;
  if (r.has_scales) {
    for (size_t n = 0; n < count; ++n) {
      values[n] = sums[n] * (r.scale[first + n] / divisor);
    }
  } else {
    const float factor = *r.scale / divisor;
    for (size_t n = 0; n < count; ++n) {
      values[n] = sums[n] * factor;
    }
  }
  if (r.residual.data) {
    const float* residual = as_float32<Isa>(r.residual, start, count, scratch);
    for (size_t n = 0; n < count; ++n) {
      values[n] += residual[n];
    }
  }
  narrow<Isa>(values, count, r.type, y);
}

template <class Isa>
void finish(const Results& r) {
  for (size_t row = 0; row < r.rows; ++row) {
    for (size_t first = 0; first < r.outputs; first += kFinished) {
      const size_t left = r.outputs - first;
      finish_part<Isa>(r, row, first, left < kFinished ? left : kFinished);
    }
  }
}

}  // namespace mmfree

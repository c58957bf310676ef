#pragma once

#include <string.h>

#include "rms_norm/kernels.h"
#include "rms_norm_quantize/loops.h"
#include "runtime/floats.h"
#include "runtime/lanes.h"

namespace mmfree {

// The weight in float32, or ones.
template <class Isa>
void widen_weight(const Floats& weight, size_t dims, float* values) {
  if (weight.data) {
    widen<Isa>(weight, 0, dims, values);
    return;
  }
  for (size_t j = 0; j < dims; ++j) {
    values[j] = 1.0f;
  }
}

template <class Isa>
void normalize_rows(const NormRows& n, size_t first, size_t last, float* scratch) {
  float *weight = scratch, *values = scratch + n.dims;
  widen_weight<Isa>(n.weight, n.dims, weight);
  for (size_t row = first; row < last; ++row) {
    widen<Isa>(n.x, row * n.dims, n.dims, values);
    const float inverse = inverse_of<Isa>(values, n.dims, n.eps);
    for (size_t j = 0; j < n.dims; ++j) {
      values[j] = values[j] * inverse * weight[j];
    }
    narrow<Isa>(values, n.dims, n.x.type,
                static_cast<char*>(n.y) + row * n.dims * size_of(n.x.type));
  }
}

template <class Isa>
void differentiate_norm(const NormGradientRows& n, size_t first, size_t last, float* d_weight,
                        float* scratch) {
  float *weight = scratch, *x = weight + n.dims, *d_y = x + n.dims;
  widen_weight<Isa>(n.weight, n.dims, weight);
  memset(d_weight, 0, n.dims * sizeof(float));
  for (size_t row = first; row < last; ++row) {
    widen<Isa>(n.x, row * n.dims, n.dims, x);
    widen<Isa>(n.d_y, row * n.dims, n.dims, d_y);
    const float inverse = inverse_of<Isa>(x, n.dims, n.eps);
    const float scale = n.scale ? n.scale[row] : 1.0f;
    for (size_t j = 0; j < n.dims; ++j) {
      x[j] *= inverse;
      d_y[j] *= scale;
      d_weight[j] += d_y[j] * x[j];
      d_y[j] *= weight[j];
    }
    const float mean = sum_of_products<Isa>(x, d_y, n.dims) / static_cast<float>(n.dims);
    for (size_t j = 0; j < n.dims; ++j) {
      d_y[j] = (d_y[j] - x[j] * mean) * inverse;
    }
    narrow<Isa>(d_y, n.dims, n.x.type,
                static_cast<char*>(n.d_x) + row * n.dims * size_of(n.x.type));
  }
}

template <class Isa, class Dense>
constexpr RmsNormKernels RmsNormKernels::of() {
  return {mmfree::normalize_rows<Isa>, mmfree::differentiate_norm<Isa>};
}

}  // namespace mmfree

#pragma once

#include <math.h>
#include <string.h>

#include "layer_norm/kernels.h"
#include "rms_norm/loops.h"
#include "runtime/floats.h"
#include "runtime/lanes.h"

namespace mmfree {

// x = x - mean(x). Returns 1 / sqrt(mean(x^2) + eps) of the result.
template <class Isa>
float centre_row(float* x, size_t dims, float eps) {
  const float count = static_cast<float>(dims), mean = sum_of<Isa>(x, dims) / count;
  for (size_t j = 0; j < dims; ++j) {
    x[j] -= mean;
  }
  return 1.0f / sqrtf(sum_of_products<Isa>(x, x, dims) / count + eps);
}

template <class Isa>
void normalize_centred_rows(const LayerNormRows& n, size_t first, size_t last, float* scratch) {
  float *weight = scratch, *bias = weight + n.dims, *values = bias + n.dims;
  widen_weight<Isa>(n.weight, n.dims, weight);
  if (n.bias.data) {
    widen<Isa>(n.bias, 0, n.dims, bias);
  } else {
    memset(bias, 0, n.dims * sizeof(float));
  }
  for (size_t row = first; row < last; ++row) {
    widen<Isa>(n.x, row * n.dims, n.dims, values);
    const float inverse = centre_row<Isa>(values, n.dims, n.eps);
    for (size_t j = 0; j < n.dims; ++j) {
      values[j] = values[j] * inverse * weight[j] + bias[j];
    }
    narrow<Isa>(values, n.dims, n.x.type,
                static_cast<char*>(n.y) + row * n.dims * size_of(n.x.type));
  }
}

template <class Isa>
void differentiate_centred_rows(const LayerNormGradientRows& n, size_t first, size_t last,
                                float* d_weight, float* scratch) {
  float *weight = scratch, *x = weight + n.dims, *d_y = x + n.dims, *d_bias = d_weight + n.dims;
  widen_weight<Isa>(n.weight, n.dims, weight);
  memset(d_weight, 0, 2 * n.dims * sizeof(float));
  const float count = static_cast<float>(n.dims);
  for (size_t row = first; row < last; ++row) {
    widen<Isa>(n.x, row * n.dims, n.dims, x);
    widen<Isa>(n.d_y, row * n.dims, n.dims, d_y);
    const float inverse = centre_row<Isa>(x, n.dims, n.eps);
    for (size_t j = 0; j < n.dims; ++j) {
      x[j] *= inverse;
      d_weight[j] += d_y[j] * x[j];
      d_bias[j] += d_y[j];
      d_y[j] *= weight[j];
    }
    const float slope = sum_of_products<Isa>(x, d_y, n.dims) / count;
    const float mean = sum_of<Isa>(d_y, n.dims) / count;
    for (size_t j = 0; j < n.dims; ++j) {
      d_y[j] = (d_y[j] - mean - x[j] * slope) * inverse;
    }
    narrow<Isa>(d_y, n.dims, n.x.type,
                static_cast<char*>(n.d_x) + row * n.dims * size_of(n.x.type));
  }
}

template <class Isa, class Dense>
constexpr LayerNormKernels LayerNormKernels::of() {
  return {mmfree::normalize_centred_rows<Isa>, mmfree::differentiate_centred_rows<Isa>};
}

}  // namespace mmfree

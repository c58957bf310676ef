#pragma once

#include <cstddef>

#include "runtime/floats.h"

namespace mmfree {

// y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias.
struct LayerNormRows {
  Floats x;             // (rows, dims)
  Floats weight, bias;  // (dims,) or none
  size_t dims;
  float eps;
  void* y;  // (rows, dims) of the type of x
};

// The gradients of x, the weight and the bias.
struct LayerNormGradientRows {
  Floats x, d_y;  // (rows, dims)
  Floats weight;  // (dims,) or none
  size_t dims;
  float eps;
  void* d_x;  // (rows, dims) of the type of x
};

// The loops of one instruction set. Every set gives the same bits. They compute the rows [first,
// last).
struct LayerNormKernels {
  // scratch: (3 * dims,).
  void (*normalize)(const LayerNormRows&, size_t first, size_t last, float* scratch);
  // d_weight: (2 * dims,), the sums over these rows for the weight and for the bias. scratch:
  // (3 * dims,).
  void (*differentiate)(const LayerNormGradientRows&, size_t first, size_t last, float* d_weight,
                        float* scratch);

  template <class Isa, class Dense>
  static constexpr LayerNormKernels of();
};

}  // namespace mmfree

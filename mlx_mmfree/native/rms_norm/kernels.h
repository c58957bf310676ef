#pragma once

#include <cstddef>

#include "runtime/floats.h"

namespace mmfree {

// y = x / sqrt(mean(x^2) + eps) * weight.
struct NormRows {
  Floats x;       // (rows, dims)
  Floats weight;  // (dims,) or none
  size_t dims;
  float eps;
  void* y;  // (rows, dims) of the type of x
};

// The gradients of x and of the weight. A scale multiplies y.
struct NormGradientRows {
  Floats x, d_y;       // (rows, dims)
  Floats weight;       // (dims,) or none
  const float* scale;  // (rows,) or null
  size_t dims;
  float eps;
  void* d_x;  // (rows, dims) of the type of x
};

// The loops of one instruction set. Every set gives the same bits. They compute the rows [first,
// last).
struct RmsNormKernels {
  // scratch: (2 * dims,).
  void (*normalize)(const NormRows&, size_t first, size_t last, float* scratch);
  // d_weight: (dims,), the sum over these rows. scratch: (3 * dims,).
  void (*differentiate)(const NormGradientRows&, size_t first, size_t last, float* d_weight,
                        float* scratch);

  template <class Isa, class Dense>
  static constexpr RmsNormKernels of();
};

}  // namespace mmfree

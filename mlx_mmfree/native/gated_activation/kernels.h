#pragma once

#include <cstddef>

#include "runtime/floats.h"

namespace mmfree {

enum class Activation { none, silu, relu2, gelu, relu };

// Rows of floats, `stride` floats apart.
struct FloatRows {
  Floats floats;
  size_t stride;
};

// y = a(gate) * up.
struct GatedRows {
  FloatRows gate, up;
  size_t dims;
  Activation activation;
  void* y;  // (rows, dims) of `type`
  FloatType type;
};

// The gradients of gate and up, in their types.
struct GatedGradientRows {
  FloatRows gate, up, d_y;
  size_t dims;
  Activation activation;
  void *d_gate, *d_up;  // rows `d_stride` values apart
  size_t d_stride;
};

// The loops of one instruction set. They compute the rows [first, last).
struct GatedActivationKernels {
  // scratch: (2 * dims,).
  void (*compute)(const GatedRows&, size_t first, size_t last, float* scratch);
  // scratch: (4 * dims,).
  void (*differentiate)(const GatedGradientRows&, size_t first, size_t last, float* scratch);

  template <class Isa, class Dense>
  static constexpr GatedActivationKernels of();
};

}  // namespace mmfree

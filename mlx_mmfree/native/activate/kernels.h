#pragma once

#include <cstddef>

#include "gated_activation/kernels.h"
#include "runtime/floats.h"

namespace mmfree {

// Values that are computed at once, in the first-level cache.
constexpr size_t kActivated = 2048;

struct ActivateValues {
  Floats x;
  Activation activation;
  void* y;
  FloatType type;  // of y
};

// The gradient of x, in its type.
struct ActivateGradientValues {
  Floats x, d_y;
  Activation activation;
  void* d_x;
};

// The loops of one instruction set. They compute the values [first, last). Every set gives the same
// bits.
struct ActivateKernels {
  void (*compute)(const ActivateValues&, size_t first, size_t last);
  void (*differentiate)(const ActivateGradientValues&, size_t first, size_t last);

  template <class Isa, class Dense>
  static constexpr ActivateKernels of();
};

}  // namespace mmfree

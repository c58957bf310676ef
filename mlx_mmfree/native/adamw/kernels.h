#pragma once

#include <cstddef>

namespace mmfree {

// What an update depends on beside the arrays.
struct AdamFactors {
  float decay;                          // what the parameter is multiplied by
  float of_mean, of_gradient;           // the first moment is a mean of it and the gradient
  float of_square, of_gradient_square;  // the second moment likewise
  float numerator, denominator, eps;    // of the moments in the update
};

// The loops of one instruction set. Every set gives the same bits.
struct AdamwKernels {
  // Changes the parameter and its moments in place, `count` numbers each.
  void (*update)(const AdamFactors&, const float* gradient, size_t count, float* parameter,
                 float* m, float* v);

  template <class Isa, class Dense>
  static constexpr AdamwKernels of();
};

}  // namespace mmfree

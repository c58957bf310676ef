#pragma once

#include <math.h>

#include "adamw/kernels.h"
#include "runtime/unroll.h"

namespace mmfree {

// In the order of the plain operations, so that the bits are theirs.
template <class Isa>
void update_parameter(const AdamFactors& f, const float* __restrict__ gradient, size_t count,
                      float* __restrict__ parameter, float* __restrict__ m, float* __restrict__ v) {
  for (size_t j = 0; j < count; ++j) {
    const float g = gradient[j];
    m[j] = f.of_mean * m[j] + f.of_gradient * g;
    v[j] = f.of_square * v[j] + f.of_gradient_square * (g * g);
    parameter[j] =
        parameter[j] * f.decay - f.numerator * m[j] / (sqrtf(v[j]) * f.denominator + f.eps);
  }
}

template <class Isa, class Dense>
constexpr AdamwKernels AdamwKernels::of() {
  return {mmfree::update_parameter<Isa>};
}

}  // namespace mmfree

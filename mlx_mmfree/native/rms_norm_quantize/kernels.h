#pragma once

#include <cstddef>

#include "runtime/floats.h"

namespace mmfree {

struct RowQuantizer {
  Floats x;             // (rows, dims)
  const float* weight;  // (dims,) or null
  size_t dims;
  bool has_norm;
  float eps;
  bool half_away;
  float* codes;  // (rows, dims)
  float* scale;  // (rows,) or null
};

// The loops of one instruction set. Every set gives the same bits.
struct RmsNormQuantizeKernels {
  // Computes the rows [first, last).
  void (*quantize_rows)(const RowQuantizer&, size_t first, size_t last);
  // Likewise, but divides the codes by their scale, which is not written.
  void (*round_rows)(const RowQuantizer&, size_t first, size_t last);
  // 1 / sqrt(mean(x^2) + eps) of the `dims` values from `start` on. scratch: (dims,).
  float (*rms_inverse)(const Floats& x, size_t start, size_t dims, float eps, float* scratch);

  template <class Isa, class Dense>
  static constexpr RmsNormQuantizeKernels of();
};

}  // namespace mmfree

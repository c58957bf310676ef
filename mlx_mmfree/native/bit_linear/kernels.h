#pragma once

#include <cstddef>
#include <cstdint>

#include "gated_activation/kernels.h"
#include "runtime/floats.h"

namespace mmfree {

// z = RMSNorm(u) for u = x or, with an activation a, u = a(x[:dims]) * x[dims:].
struct RowInput {
  Floats x;  // (rows, dims), or (rows, 2 dims) with an activation
  size_t dims;
  Activation gate;
  Floats norm;  // (dims,) or none: no norm
  float norm_eps;
  size_t stride;  // of a prepared row, which is filled up with zeros
};

// Makes of z what meets the matrix: RMSNorm(z) with the weight of one projection, and its codes.
struct RowEncoder {
  size_t dims;
  Floats norm;  // (dims,) or none: no norm
  float eps;
  bool half_away;
  size_t stride;  // of a prepared and of an encoded row
};

// y = sums * scale / input scale + residual.
struct Results {
  const float* sums;  // (rows, outputs), whose rows are `sum_stride` values apart
  size_t sum_stride, rows, outputs;
  const float* scale;  // (outputs,) or one
  bool has_scales;
  const float* input_scales;  // (rows,) or null
  Floats residual;            // (rows, outputs) or none; begins at the first output, as y does
  void* y;  // (rows, outputs) of `type`; the rows of both are `stride` values apart
  FloatType type;
  size_t stride;
};

// The loops of one instruction set. Every set gives the same bits.
struct BitLinearKernels {
  // Returns the prepared row: that of x if nothing is to be done, else z. z and scratch: (stride,)
  const float* (*prepare_row)(const RowInput&, size_t row, float* z, float* scratch);
  // Writes the permuted codes of z, their sum, and their scale, which is NaN if z has no codes.
  void (*encode_row)(const RowEncoder&, const float* z, float* scratch, int8_t* codes, int32_t* sum,
                     float* scale);
  // Writes RMSNorm(z), permuted.
  void (*normalize_row)(const RowEncoder&, const float* z, float* scratch, float* permuted);
  void (*finish)(const Results&);

  template <class Isa, class Dense>
  static constexpr BitLinearKernels of();
};

}  // namespace mmfree

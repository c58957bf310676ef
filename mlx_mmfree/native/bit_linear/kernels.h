#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/floats.h"

namespace mmfree {

enum class Activation { none, silu, relu2, gelu, relu };

// z = RMSNorm(u), of u = x or u = a(x[:dims]) * x[dims:].
struct RowInput {
  Floats x;  // (rows, dims), or (rows, 2 dims) with an activation
  size_t dims;
  Activation gate;
  Floats norm;  // (dims,) or none: no norm
  float norm_eps;
};

// What meets the matrix: RMSNorm(z) of one projection's own, and its codes.
struct RowEncoder {
  size_t dims;
  Floats norm;  // (dims,) or none: no norm
  float eps;
  bool half_away;
};

// y = sums * scale / input scale + residual.
struct Results {
  const float* sums;  // (rows, outputs)
  size_t rows, outputs;
  const float* scale;  // (outputs,) or one
  bool has_scales;
  const float* input_scales;  // (rows,) or null
  Floats residual;            // or none; both start at the first output,
  void* y;                    // of the type, and have rows at a distance of
  FloatType type;
  size_t stride;
};

// The loops of one instruction set; every set gives the same bits.
struct BitLinearKernels {
  // z: (blocks * 256,), filled up with zeros; scratch of the same size.
  void (*prepare_row)(const RowInput&, size_t row, float* z, float* scratch);
  // Permuted codes of z, their sum and their scale, NaN where there are no codes.
  void (*encode_row)(const RowEncoder&, const float* z, float* scratch, int8_t* codes, int32_t* sum,
                     float* scale);
  // Permuted RMSNorm(z).
  void (*normalize_row)(const RowEncoder&, const float* z, float* scratch, float* permuted);
  void (*finish)(const Results&);

  template <class Isa, class Dense>
  static constexpr BitLinearKernels of();
};

}  // namespace mmfree

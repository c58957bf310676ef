#pragma once

#include <vector>

#include "bit_linear/kernels.h"
#include "ternary_matmul/kernels.h"

namespace mmfree {

struct Projection {
  PackedMatrix weight;
  const float* scale;  // (outputs,) or one
  bool has_scales;
  Floats norm;  // (dims,) or none
};

// y = [scaled product of matrix p and the codes of RMSNorm_p(z)]_p + residual, with z of
// `RowInput`.
struct BitLinearCall {
  RowInput input;  // but its stride
  size_t rows;
  std::vector<Projection> projections;
  float eps;
  bool half_away, has_codes;
  Floats residual;  // (rows, all outputs) or none
  void* y;          // (rows, all outputs) of `type`
  FloatType type;
};

// Computes on plain memory and shares the work out over the threads. No row of the result depends
// on the number of rows or threads.
void project(const BitLinearCall& call);

}  // namespace mmfree

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

// y = [product of the codes of RMSNorm_p(z) with matrix p, scaled]_p + residual, z as in
// `RowInput`.
struct BitLinearCall {
  RowInput input;
  size_t rows;
  std::vector<Projection> projections;
  float eps;
  bool half_away, has_codes;
  Floats residual;  // (rows, all outputs) or none
  void* y;          // (rows, all outputs) of the type
  FloatType type;
};

// On plain memory, shared out over the threads. No row of the result depends on the number of rows
// or threads.
void project(const BitLinearCall& call);

}  // namespace mmfree

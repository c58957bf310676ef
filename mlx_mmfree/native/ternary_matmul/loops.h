#pragma once

#include "ternary_matmul/code_product.h"
#include "ternary_matmul/float_product.h"
#include "ternary_matmul/kernels.h"
#include "ternary_matmul/permute.h"

namespace mmfree {

template <class Isa, class Dense>
constexpr TernaryMatmulKernels TernaryMatmulKernels::of() {
  return {Isa::kTransposedRows,
          mmfree::permute_codes<Isa>,
          mmfree::permute_floats<Isa>,
          mmfree::multiply_codes<Isa>,
          mmfree::multiply_floats<Isa>,
          mmfree::multiply_transposed<Isa>,
          Isa::kStreamRows};
}

}  // namespace mmfree

#pragma once

#include "dense_matmul/few_bits_tile.h"
#include "dense_matmul/kernels.h"
#include "dense_matmul/quantized_tile.h"
#include "dense_matmul/transposed_tile.h"

namespace mmfree {

template <class Isa, class Dense>
constexpr DenseMatmulKernels DenseMatmulKernels::of() {
  return {2 * Dense::kLanes,
          mmfree::multiply_dense<Dense>,
          QuantizedKernels::of<Quantized<Dense>>(),
          QuantizedKernels::of<FewBits<Dense, kParts>>(),
          QuantizedKernels::of<FewBits<Dense, 1>>(),
          mmfree::multiply_quantized_transposed<Dense>,
          mmfree::transposed_scratch<Dense>};
}

}  // namespace mmfree

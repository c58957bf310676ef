#pragma once

#include "attention_step/loops.h"
#include "bit_linear/finish.h"
#include "bit_linear/prepare_row.h"
#include "dense_matmul/quantized_tile.h"
#include "instruction_sets/kernels.h"
#include "mlgru_step/recur.h"
#include "probe/loops.h"
#include "rms_norm_quantize/quantize_row.h"
#include "ternary_matmul/code_product.h"
#include "ternary_matmul/float_product.h"
#include "ternary_matmul/permute.h"

namespace mmfree {

template <class Isa, class Dense>
constexpr Kernels kernel_set(const char* name, bool (*is_supported)()) {
  return {name,
          is_supported,
          Isa::kTransposedRows,
          permute_codes<Isa>,
          permute_floats<Isa>,
          multiply_codes<Isa>,
          multiply_floats<Isa>,
          multiply_transposed<Isa>,
          quantize_rows<Isa>,
          Isa::kStreamRows,
          prepare_row<Isa>,
          encode_row<Isa>,
          normalize_row<Isa>,
          finish<Isa>,
          rms_inverse<Isa>,
          recur<Isa>,
          prepare_heads<Isa>,
          weigh<Dense>,
          merge<Isa>,
          dense_kernels<Dense>(),
          probe_kernels<Dense>()};
}

}  // namespace mmfree

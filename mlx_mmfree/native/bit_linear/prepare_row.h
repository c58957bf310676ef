#pragma once

#include <math.h>
#include <string.h>

#include "bit_linear/kernels.h"
#include "gated_activation/loops.h"
#include "rms_norm_quantize/loops.h"
#include "runtime/floats.h"
#include "ternary_matmul/permute.h"

// Turns a row of activations into what meets a ternary matrix.

namespace mmfree {

// result = values * inverse * weight; scratch and result: (dims,)
template <class Isa>
void scale_row(const float* values, float inverse, const Floats& weight, size_t dims,
               float* scratch, float* result) {
  const float* factors = as_float32<Isa>(weight, 0, dims, scratch);
  for (size_t j = 0; j < dims; ++j) {
    result[j] = values[j] * inverse * factors[j];
  }
}

template <class Isa>
const float* prepare_row(const RowInput& input, size_t row, float* z, float* scratch) {
  const size_t dims = input.dims;
  if (input.gate == Activation::none) {
    if (!input.norm.data && input.x.type == FloatType::float32 && dims == input.stride) {
      return static_cast<const float*>(input.x.data) + row * dims;
    }
    widen<Isa>(input.x, row * dims, dims, z);
  } else {
    widen<Isa>(input.x, 2 * row * dims, dims, z);
    activate<Isa>(input.gate, z, dims);
    const float* up = as_float32<Isa>(input.x, (2 * row + 1) * dims, dims, scratch);
    for (size_t j = 0; j < dims; ++j) {
      z[j] *= up[j];
    }
  }
  if (input.norm.data) {
    scale_row<Isa>(z, inverse_of<Isa>(z, dims, input.norm_eps), input.norm, dims, scratch, z);
  }
  memset(z + dims, 0, (input.stride - dims) * sizeof(float));
  return z;
}

// Returns the row that meets the matrix, (stride,), which may be z itself.
template <class Isa>
const float* normalized(const RowEncoder& encoder, const float* z, float* scratch) {
  if (!encoder.norm.data) {
    return z;
  }
  const size_t dims = encoder.dims;
  scale_row<Isa>(z, inverse_of<Isa>(z, dims, encoder.eps), encoder.norm, dims, scratch, scratch);
  memset(scratch + dims, 0, (encoder.stride - dims) * sizeof(float));
  return scratch;
}

template <class Isa>
void encode_row(const RowEncoder& encoder, const float* z, float* scratch, int8_t* codes,
                int32_t* sum, float* scale) {
  const float* values = normalized<Isa>(encoder, z, scratch);
  const float factor = code_scale<Isa>(values, encoder.dims);
  int32_t total = 0;
  size_t start = 0;
  for (; start < encoder.dims; start += kBlockWeights) {
    alignas(64) int8_t block[kBlockWeights];
    for (size_t j = 0; j < kBlockWeights; ++j) {
      const float scaled = values[start + j] * factor;
      const float whole = encoder.half_away ? round_half_away<Isa>(scaled) : scaled;
      // the lowest bits of the sum are the whole number
      const int32_t code = __builtin_bit_cast(int32_t, whole + kRounder) << 24 >> 24;
      block[j] = static_cast<int8_t>(code);
      total += code;
    }
    permute_block<Isa>(block, codes + start);
  }
  memset(codes + start, 0, encoder.stride - start);
  *sum = total;
  // an infinite value makes the scale zero
  *scale = factor > 0.0f ? factor : NAN;
}

template <class Isa>
void normalize_row(const RowEncoder& encoder, const float* z, float* scratch, float* permuted) {
  permute_floats<Isa>(normalized<Isa>(encoder, z, scratch), encoder.dims, permuted);
}

}  // namespace mmfree

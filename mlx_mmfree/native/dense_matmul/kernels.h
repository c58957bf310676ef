#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/floats.h"

namespace mmfree {

// y = x W^T for floats.
struct DenseProduct {
  const float* x;  // (rows, stride), zeros beyond dims
  size_t rows, stride, dims;
  const void* weight;  // (outputs, dims) of `type`
  FloatType type;
  size_t outputs;
  float* y;  // (rows, outputs)
};

// y = x W^T for W = scale * code + bias, with a scale and a bias for each group of inputs.
struct QuantizedProduct {
  uint8_t* x;  // (rows, stride) bytes as `arrange` wrote them
  size_t rows, stride, dims;
  const uint8_t* codes;  // (outputs, dims * bits / 8), lowest bits first
  const void* scales;    // (outputs, dims / group) of `type`
  const void* biases;
  FloatType type;
  size_t outputs, group;
  int bits;
  float* y;  // (rows, outputs)
};

// dx = dy W for W = scale * code + bias with codes of 1 or 2 bits.
struct QuantizedTransposed {
  const float* dy;  // (rows, outputs)
  size_t rows, dims;
  const uint8_t* codes;  // as in `QuantizedProduct`
  const void* scales;
  const void* biases;
  FloatType type;
  size_t outputs, group;
  int bits;
  float* dx;  // (rows, dims)
};

struct QuantizedKernels {
  // Bytes of one arranged row, a multiple of 64.
  size_t (*bytes)(size_t dims, size_t group, int bits);
  // x: (dims,). Returns whether all values are finite.
  bool (*arrange)(const float* x, size_t dims, size_t group, int bits, uint8_t* row);
  // Outputs [first, last) of every row.
  void (*multiply)(const QuantizedProduct&, size_t first, size_t last);

  template <class Tiles>
  static constexpr QuantizedKernels of() {
    return {Tiles::bytes, Tiles::arrange, Tiles::multiply};
  }
};

// The loops of one instruction set. No row of a result depends on the others.
struct DenseMatmulKernels {
  // A row of x is padded to a multiple of this many floats.
  size_t padding;
  // Outputs [first, last) of every row.
  void (*multiply)(const DenseProduct&, size_t first, size_t last);
  // For codes of 4, 6 and 8 bits, and for those of 1 and 2 with activations as they are or rounded
  // to 8 bits by block.
  QuantizedKernels quantized, few_bits, rounded;
  // One group of inputs of every row of dx.
  void (*multiply_quantized_transposed)(const QuantizedTransposed&, size_t group, float* scratch);
  // Floats of the scratch memory.
  size_t (*transposed_scratch)(size_t outputs);

  template <class Isa, class Dense>
  static constexpr DenseMatmulKernels of();
};

}  // namespace mmfree

#pragma once

#include <cstdint>

#include "runtime/floats.h"

namespace mmfree {

// The products on plain memory. Their work is shared out over the threads, and no row of a result
// depends on the number of rows or threads.

struct FloatMatrix {
  const void* values;  // (outputs, dims) of `type`
  FloatType type;
  size_t outputs;
};

// W = scale * code + bias, with a scale and a bias for each group of inputs.
struct QuantizedMatrix {
  const uint8_t* codes;  // (outputs, dims * bits / 8)
  const void* scales;    // (outputs, dims / group) of `type`
  const void* biases;
  FloatType type;
  size_t outputs, group;
  int bits;
};

// x: (rows, dims), y: (rows, outputs).
void dense_product(const float* x, size_t rows, size_t dims, const FloatMatrix& weight, float* y);

// x: (rows, dims), y: (rows, outputs). A row with a value that is not finite gives NaN. With
// `rounds`, activations are rounded to 8 bits in each 32 inputs, for codes of 1 or 2 bits.
void quantized_product(const float* x, size_t rows, size_t dims, const QuantizedMatrix& weight,
                       bool rounds, float* y);

// dx = dy W for codes of 1 or 2 bits. dy: (rows, outputs), dx: (rows, dims).
void quantized_transposed(const float* dy, size_t rows, size_t dims, const QuantizedMatrix& weight,
                          float* dx);

}  // namespace mmfree

#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/floats.h"

namespace mmfree {

// sums[c] = sum_r |weight[r, c]|, added in the order of r.
struct SizeSums {
  Floats weight;  // (rows, columns)
  size_t rows, columns;
  float* sums;  // (columns,)
};

// Packs clip(round(weight * inverse), -1, 1), ties to zero, as codes trit + 1.
struct RowPacker {
  Floats weight;  // (rows, dims)
  size_t dims;
  float inverse;
  size_t row_bytes;
  uint8_t* packed;  // (rows, row_bytes), padded with zero trits
};

// Unpacks values that a table has for each byte of four codes.
struct RowUnpacker {
  const uint8_t* packed;  // (rows, row_bytes)
  size_t row_bytes, dims;
  const float* table;  // (256, 4)
  float* values;       // (rows, dims)
};

// The loops of one instruction set. Every set gives the same bits.
struct TernaryLinearKernels {
  // Computes the sums of the columns [first, last). scratch: (last - first,).
  void (*add_sizes)(const SizeSums&, size_t first, size_t last, float* scratch);
  // Compute the rows [first, last).
  void (*pack_rows)(const RowPacker&, size_t first, size_t last);
  void (*unpack_rows)(const RowUnpacker&, size_t first, size_t last);

  template <class Isa, class Dense>
  static constexpr TernaryLinearKernels of();
};

}  // namespace mmfree

#pragma once

#include <cstddef>

#include "runtime/floats.h"

namespace mmfree {

// Each block of a row is transformed: y = H (s x) / sqrt(block), or s H x / sqrt(block).
struct HadamardBlocks {
  Floats x;            // (rows, dims)
  const float* signs;  // (dims,), or null where all are 1
  size_t dims, block;
  bool inverse;
  void* y;  // (rows, dims) of the type of x
};

// The loops of one instruction set. Every set gives the same bits. They compute the blocks [first,
// last) of all rows.
struct HadamardKernels {
  // scratch: (block,).
  void (*transform)(const HadamardBlocks&, size_t first, size_t last, float* scratch);

  template <class Isa, class Dense>
  static constexpr HadamardKernels of();
};

}  // namespace mmfree

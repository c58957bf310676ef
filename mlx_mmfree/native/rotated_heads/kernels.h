#pragma once

#include <cstddef>

#include "runtime/floats.h"

namespace mmfree {

// Heads of queries, keys and values: one behind the other in each token, or in arrays (batch,
// heads, length, dims) of their own.
struct TokenHeads {
  size_t length, queries, groups, dims;
  FloatType type;
  void* tokens;                  // (batch, length, queries + 2 * groups, dims)
  void* arrays[3];               // queries, keys, values
  const float *cosines, *sines;  // (length, dims / 2) for each batch row
  size_t row_angles;             // how far the angles of two batch rows lie apart
  bool is_interleaved;           // pairs are neighbours, else halves
};

// The loops of one instruction set. They move the tokens [first, last) of batch * length. Every set
// gives the same bits. scratch: (2 * dims,).
struct RotatedHeadsKernels {
  // Fills the arrays, with queries and keys rotated.
  void (*split)(const TokenHeads&, size_t first, size_t last, float* scratch);
  // Fills the tokens, with queries and keys rotated back.
  void (*join)(const TokenHeads&, size_t first, size_t last, float* scratch);

  template <class Isa, class Dense>
  static constexpr RotatedHeadsKernels of();
};

}  // namespace mmfree

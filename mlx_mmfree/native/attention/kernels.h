#pragma once

#include <cstddef>

#include "runtime/floats.h"

namespace mmfree {

// c = a b, or c += a b, where element (m, k) of a lies at a[m * a_row + k * a_step].
struct TileProduct {
  const float* a;
  size_t a_row, a_step;
  const float* b;  // (steps, columns), rows `b_row` apart
  size_t b_row;
  float* c;  // (rows, columns), rows `c_row` apart
  size_t c_row;
  size_t rows, steps, columns;
  bool adds;
};

// Rows that are to be columns.
struct RowsToTurn {
  Floats rows;  // (count, dims), `distance` values apart
  size_t distance, count, dims;
  float* columns;  // (dims, count), rows `row` floats apart
  size_t row;
};

// A tile of scores and what their gradient needs. Rows of (tokens, keys) are `row` floats apart.
struct ScoreTile {
  float* scores;     // without their scale; the call leaves the weights there
  float* gradients;  // of the weights; the call leaves those of the scores there, with their scale
  size_t tokens, keys, row;
  const float* log_totals;  // (tokens,), log of the sum of e^score
  const float* deltas;      // (tokens,), the products of the result and its gradient
  const bool* seen;         // (tokens, keys), rows `row` apart; null: everything
  float scale;
};

// The loops of one instruction set.
struct AttentionKernels {
  // Each sum begins at zero and is then added to c.
  void (*multiply)(const TileProduct&);
  void (*weigh)(const ScoreTile&);
  void (*turn)(const RowsToTurn&);

  template <class Isa, class Dense>
  static constexpr AttentionKernels of();
};

}  // namespace mmfree

#pragma once

#include <cstddef>

// Arrays (B, H, L, N) as rows, whose heads may lie side by side in memory.

namespace mmfree {

// Rows of one head, `row` floats apart.
struct PositionRows {
  const float* data;
  size_t row;

  const float* at(size_t position) const {
    return data + position * row;
  }
};

// Rows of all heads: how far apart batches, heads and positions lie.
struct HeadArray {
  const float* data;
  size_t batch, head, row;

  PositionRows of(size_t b, size_t h) const {
    return {data + b * batch + h * head, row};
  }
};

}  // namespace mmfree

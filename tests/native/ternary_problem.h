#pragma once

#include <cstdint>
#include <vector>

#include "check.h"
#include "ternary_matmul/kernels.h"

namespace {

// Whole numbers, a packed matrix, and its trits.
struct Problem {
  size_t rows, dims, outputs, row_bytes;
  Buffer<float> x, dy;
  std::vector<int> trits;
  Buffer<uint8_t> packed;

  Problem(size_t rows, size_t dims, size_t outputs)
      : rows(rows), dims(dims), outputs(outputs),
        row_bytes((dims + 31) / 32 * 8), x(rows * dims), dy(rows * outputs),
        trits(outputs * dims), packed(outputs * row_bytes) {
    for (size_t i = 0; i < x.size; ++i) {
      x[i] = draw(0, 9) ? draw(-128, 127) : -128;
    }
    for (size_t i = 0; i < dy.size; ++i) {
      dy[i] = draw(-100, 100);
    }
    for (size_t n = 0; n < outputs; ++n) {
      for (size_t i = 0; i < 4 * row_bytes; ++i) {
        const int trit = i < dims ? draw(-1, 1) : 0;
        if (i < dims) {
          trits[n * dims + i] = trit;
        }
        packed[n * row_bytes + i / 4] |= (trit + 1) << (2 * (i % 4));
      }
    }
  }

  PackedMatrix weight() { return {packed.data(), outputs, row_bytes}; }
};

} // namespace

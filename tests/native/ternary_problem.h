#pragma once

#include <cstdint>
#include <vector>

#include "check.h"
#include "ternary_matmul/kernels.h"

namespace {

// Whole numbers, a matrix packed in two ways, and its trits.
struct Problem {
  size_t rows, dims, outputs, row_bytes, five_bytes;
  Buffer<float> x, dy;
  std::vector<int> trits;
  Buffer<uint8_t> packed, fives;

  Problem(size_t rows, size_t dims, size_t outputs)
      : rows(rows), dims(dims), outputs(outputs),
        row_bytes((dims + 31) / 32 * 8), five_bytes((dims + 4) / 5),
        x(rows * dims), dy(rows * outputs), trits(outputs * dims),
        packed(outputs * row_bytes), fives(outputs * five_bytes) {
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
      for (size_t j = 0; j < five_bytes; ++j) {
        int number = 0;
        for (size_t i = 5 * j + 5; i-- > 5 * j;) {
          number = 3 * number + (i < dims ? trits[n * dims + i] + 1 : 1);
        }
        fives[n * five_bytes + j] =
            static_cast<uint8_t>((256 * number + 242) / 243);
      }
    }
  }

  PackedMatrix weight() { return {packed.data(), outputs, row_bytes}; }

  PackedMatrix five_trits() {
    return {fives.data(), outputs, five_bytes, true};
  }
};

} // namespace

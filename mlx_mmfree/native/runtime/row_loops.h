#pragma once

#include <algorithm>
#include <cstddef>

#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

// Values of one piece of work. Fewer are done by the caller alone, because another thread wakes up
// too late.
constexpr size_t kPieceValues = 16 << 10;
// Rows that are one sum in float32. They do not depend on the number of threads.
constexpr size_t kSumRows = 64;

// Calls body(first, last, scratch) for ranges that together are all rows of `dims` values. Each
// thread has `own` floats of scratch.
template <class F>
void for_rows(size_t rows, size_t dims, size_t own, F&& body) {
  own = round_up(own, 16);
  auto* scratch = static_cast<float*>(workspace(threads() * own * sizeof(float)));
  const size_t step = std::max<size_t>(kPieceValues / dims, 1);
  parallel_region(rows, step, threads(), [&](Claims& claims) {
    for (size_t first, last; claims.next(first, last);) {
      body(first, last, scratch + claims.thread() * own);
    }
  });
}

// Adds up `count` rows of `width` floats in double and writes the sums over the first row.
inline void add_rows(float* rows, size_t count, size_t width) {
  constexpr size_t kColumns = 256;
  double sums[kColumns];
  for (size_t first = 0; first < width; first += kColumns) {
    const size_t columns = std::min(kColumns, width - first);
    std::fill_n(sums, columns, 0.0);
    for (size_t row = 0; row < count; ++row) {
      for (size_t j = 0; j < columns; ++j) {
        sums[j] += rows[row * width + first + j];
      }
    }
    for (size_t j = 0; j < columns; ++j) {
      rows[first + j] = static_cast<float>(sums[j]);
    }
  }
}

// The sums of `width` values over all rows of `dims` values. body(first, last, sums, scratch)
// writes those over a few rows; each thread has `own` floats of scratch. The result lasts as the
// workspace does.
template <class F>
const float* sum_rows(size_t rows, size_t dims, size_t width, size_t own, F&& body) {
  own = round_up(own, 16);
  const size_t parts = (rows + kSumRows - 1) / kSumRows;
  const size_t size = threads() * own + std::max<size_t>(parts, 1) * width;
  auto* scratch = static_cast<float*>(workspace(size * sizeof(float)));
  float* sums = scratch + threads() * own;
  const size_t step = std::max<size_t>(kPieceValues / (dims * kSumRows), 1);
  parallel_region(parts, step, threads(), [&](Claims& claims) {
    for (size_t part, last; claims.next(part, last);) {
      for (; part < last; ++part) {
        body(part * kSumRows, std::min((part + 1) * kSumRows, rows), sums + part * width,
             scratch + claims.thread() * own);
      }
    }
  });
  add_rows(sums, parts, width);
  return sums;
}

}  // namespace mmfree

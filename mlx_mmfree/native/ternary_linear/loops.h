#pragma once

#include <math.h>
#include <string.h>

#include "runtime/floats.h"
#include "ternary_linear/kernels.h"

namespace mmfree {

// Weights that are packed at once.
constexpr size_t kPackedWeights = 256;

template <class Isa>
void add_sizes(const SizeSums& s, size_t first, size_t last, float* scratch) {
  const size_t count = last - first;
  float* sums = s.sums + first;
  for (size_t row = 0; row < s.rows; ++row) {
    const float* values = as_float32<Isa>(s.weight, row * s.columns + first, count, scratch);
    for (size_t c = 0; c < count; ++c) {
      sums[c] = row ? sums[c] + fabsf(values[c]) : fabsf(values[c]);
    }
  }
}

template <class Isa>
void pack_row(const RowPacker& p, size_t row) {
  uint8_t* packed = p.packed + row * p.row_bytes;
  for (size_t start = 0; start < 4 * p.row_bytes; start += kPackedWeights) {
    alignas(64) float scratch[kPackedWeights];
    alignas(64) uint32_t fours[kPackedWeights / 4];
    alignas(64) uint8_t codes[kPackedWeights];
    const size_t left = p.dims > start ? p.dims - start : 0;
    const size_t count = left < kPackedWeights ? left : kPackedWeights;
    const float* values = as_float32<Isa>(p.weight, row * p.dims + start, count, scratch);
    for (size_t j = 0; j < count; ++j) {
      const float scaled = values[j] * p.inverse;
      codes[j] = static_cast<uint8_t>((scaled > 0.5f) + (scaled >= -0.5f));
    }
    memset(codes + count, 1, kPackedWeights - count);
    memcpy(fours, codes, kPackedWeights);
    const size_t left_bytes = p.row_bytes - start / 4;
    const size_t bytes = left_bytes < kPackedWeights / 4 ? left_bytes : kPackedWeights / 4;
    for (size_t b = 0; b < bytes; ++b) {
      // four bytes become the four pairs of bits of the lowest one
      const uint32_t pairs = fours[b] | fours[b] >> 6;
      packed[start / 4 + b] = static_cast<uint8_t>(pairs | pairs >> 12);
    }
  }
}

template <class Isa>
void pack_rows(const RowPacker& p, size_t first, size_t last) {
  for (size_t row = first; row < last; ++row) {
    pack_row<Isa>(p, row);
  }
}

template <class Isa>
void unpack_rows(const RowUnpacker& u, size_t first, size_t last) {
  for (size_t row = first; row < last; ++row) {
    const uint8_t* packed = u.packed + row * u.row_bytes;
    float* values = u.values + row * u.dims;
    const size_t bytes = u.dims / 4, rest = u.dims % 4;
    for (size_t b = 0; b < bytes; ++b) {
      memcpy(values + 4 * b, u.table + 4 * packed[b], 4 * sizeof(float));
    }
    if (rest) {
      memcpy(values + 4 * bytes, u.table + 4 * packed[bytes], rest * sizeof(float));
    }
  }
}

template <class Isa, class Dense>
constexpr TernaryLinearKernels TernaryLinearKernels::of() {
  return {mmfree::add_sizes<Isa>, mmfree::pack_rows<Isa>, mmfree::unpack_rows<Isa>};
}

}  // namespace mmfree

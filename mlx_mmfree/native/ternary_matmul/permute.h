#pragma once

#include <string.h>

#include "runtime/unroll.h"
#include "ternary_matmul/kernels.h"

// One file for each instruction set includes this. Everything is templated on a type local to that
// file, so that the linker cannot mix the sets.

namespace mmfree {

// Codes 4 b + k of one block go to 64 k + b, the order in which packed bytes unpack by shifts.
template <class Isa>
MMFREE_INLINE inline void permute_block(const int8_t* codes, int8_t* permuted) {
  uint32_t fours[kBlockBytes];
  memcpy(fours, codes, sizeof(fours));
  for (int k = 0; k < 4; ++k) {
    for (size_t b = 0; b < kBlockBytes; ++b) {
      permuted[kBlockBytes * k + b] = static_cast<int8_t>(fours[b] >> (8 * k));
    }
  }
}

template <class Isa>
bool permute_codes(const float* x, size_t dims, int8_t* permuted, int32_t* sum) {
  int bad = 0;
  int32_t total = 0;
  for (size_t start = 0; start < dims; start += kBlockWeights, permuted += kBlockWeights) {
    alignas(64) float values[kBlockWeights] = {};
    const size_t count = dims - start < kBlockWeights ? dims - start : kBlockWeights;
    memcpy(values, x + start, count * sizeof(float));
    alignas(64) int8_t codes[kBlockWeights];
    for (size_t j = 0; j < kBlockWeights; ++j) {
      // a NaN fails the first comparison, so that the conversion is always defined
      float bounded = values[j] >= -128.0f ? values[j] : -128.0f;
      bounded = bounded <= 127.0f ? bounded : 127.0f;
      const int32_t code = static_cast<int32_t>(bounded);
      bad |= static_cast<float>(code) != values[j];
      codes[j] = static_cast<int8_t>(code);
      total += code;
    }
    permute_block<Isa>(codes, permuted);
  }
  *sum = total;
  return bad == 0;
}

// Values 16 w + s of a block go to 16 s + w. They meet the weights of one shift of sixteen words.
template <class Isa>
void permute_floats(const float* x, size_t dims, float* permuted) {
  for (size_t start = 0; start < dims; start += kBlockWeights, permuted += kBlockWeights) {
    alignas(64) float values[kBlockWeights] = {};
    const size_t count = dims - start < kBlockWeights ? dims - start : kBlockWeights;
    memcpy(values, x + start, count * sizeof(float));
    for (size_t s = 0; s < 16; ++s) {
      for (size_t w = 0; w < 16; ++w) {
        permuted[16 * s + w] = values[16 * w + s];
      }
    }
  }
}

}  // namespace mmfree

#pragma once

#include "runtime/floats.h"
#include "runtime/unroll.h"

namespace mmfree {

namespace {

// Vectors that the compiler itself offers.
struct DensePortable {
  static constexpr size_t kLanes = 4, kRows = 2, kStreamOutputs = 1, kTransposedRows = 4;
  static constexpr bool kMasks = false;
  using Floats = float __attribute__((vector_size(16)));
  using Integers = int32_t __attribute__((vector_size(16)));
  using Shorts = int16_t __attribute__((vector_size(16)));
  using Words = uint16_t __attribute__((vector_size(16)));
  using Products = int32_t __attribute__((vector_size(32)));
  template <int bits>
  static constexpr size_t kCodes = bits == 4 ? 4 : 2;

  MMFREE_INLINE static Floats zero() {
    return Floats{};
  }
  MMFREE_INLINE static Floats fill(float value) {
    return Floats{} + value;
  }
  template <FloatType type>
  MMFREE_INLINE static Floats load(const void* values) {
    if constexpr (type == FloatType::float32) {
      Floats floats;
      memcpy(&floats, values, sizeof(floats));
      return floats;
    } else {
      using Halves = uint16_t __attribute__((vector_size(8)));
      Halves halves;
      memcpy(&halves, values, sizeof(halves));
      const Integers bits = __builtin_convertvector(halves, Integers);
      if constexpr (type == FloatType::bfloat16) {
        return (Floats)(bits << 16);
      } else {
        // scaled from the exponent range of float16, but for infinity and NaN
        const Integers magnitude = (bits & 0x7fff) << 13;
        const Integers scaled = (Integers)((Floats)magnitude * 0x1p112f);
        const Integers special = (magnitude >= 0x0f800000) & 0x7f800000;
        return (Floats)(scaled | special | (bits & 0x8000) << 16);
      }
    }
  }
  MMFREE_INLINE static Floats multiply_add(Floats x, Floats w, Floats sum) {
    return sum + x * w;
  }
  MMFREE_INLINE static Floats multiply(Floats a, Floats b) {
    return a * b;
  }
  MMFREE_INLINE static float total(Floats sum) {
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }

  template <int bits>
  MMFREE_INLINE static Floats lowest_codes(Integers words) {
    return __builtin_convertvector(words & ((1 << bits) - 1), Floats);
  }

  template <int bits>
  MMFREE_INLINE static Words load_words(const uint8_t* bytes) {
    Words words;
    if constexpr (bits == 6) {
      // three bytes hold four codes: words take bytes 0 and 1, or 1 and 2
      for (int j = 0; j < 8; ++j) {
        const uint8_t* pair = bytes + j / 2 * 3 + j % 2;
        words[j] = static_cast<uint16_t>(pair[0] | pair[1] << 8);
      }
    } else {
      memcpy(&words, bytes, sizeof(words));
    }
    return words;
  }
  template <int bits, int k>
  MMFREE_INLINE static Words codes(Words words) {
    constexpr uint16_t a = bits * k, b = bits == 6 ? a + 4 : a, mask = (1 << bits) - 1;
    return (words >> Words{a, b, a, b, a, b, a, b}) & mask;
  }
  MMFREE_INLINE static Integers no_sums() {
    return Integers{};
  }
  MMFREE_INLINE static Integers dot(Integers sums, Words codes, const int16_t* x) {
    Shorts values;
    memcpy(&values, x, sizeof(values));
    const Products products =
        __builtin_convertvector(codes, Products) * __builtin_convertvector(values, Products);
    const Products others = __builtin_shufflevector(products, products, 1, 0, 3, 2, 5, 4, 7, 6);
    const Products pairs = products + others;
    return sums + __builtin_shufflevector(pairs, pairs, 0, 2, 4, 6);
  }
  MMFREE_INLINE static Floats to_floats(Integers sums) {
    return __builtin_convertvector(sums, Floats);
  }
  template <size_t count>
  MMFREE_INLINE static Floats spread(Floats values, size_t first) {
    constexpr size_t n = kLanes / count;
    return Floats{values[first], values[first + 1 / n], values[first + 2 / n],
                  values[first + 3 / n]};
  }

  using Vector = uint32_t __attribute__((vector_size(16)));
  static constexpr size_t kDotMacs = 0;

  MMFREE_INLINE static Vector load_vector(const uint8_t* bytes) {
    Vector vector;
    memcpy(&vector, bytes, sizeof(vector));
    return vector;
  }
  template <int bits, int k>
  MMFREE_INLINE static Vector bytes(Vector words) {
    constexpr uint32_t mask = (1 << bits) - 1;
    return (words >> (bits * k)) & (mask | mask << 8 | mask << 16 | mask << 24);
  }
  MMFREE_INLINE static Integers dot_signed(Integers sums, Vector codes, Vector x) {
    using Bytes = int8_t __attribute__((vector_size(16)));
    using Wide = int16_t __attribute__((vector_size(32)));
    // 16-bit sums of four: at most 4 * 3 * 127
    const Wide products =
        __builtin_convertvector((Bytes)codes, Wide) * __builtin_convertvector((Bytes)x, Wide);
    const Shorts pairs = __builtin_shufflevector(products, products, 0, 2, 4, 6, 8, 10, 12, 14) +
                         __builtin_shufflevector(products, products, 1, 3, 5, 7, 9, 11, 13, 15);
    const Integers even =
        __builtin_convertvector(__builtin_shufflevector(pairs, pairs, 0, 2, 4, 6), Integers);
    const Integers odd =
        __builtin_convertvector(__builtin_shufflevector(pairs, pairs, 1, 3, 5, 7), Integers);
    return sums + even + odd;
  }
  MMFREE_INLINE static Integers lane_sums(Integers sums) {
    return sums;
  }
  MMFREE_INLINE static Vector join(Vector a, Vector b) {
    return a ^ b;
  }
  MMFREE_INLINE static uint32_t first(Vector vector) {
    return vector[0];
  }
};

}  // namespace

}  // namespace mmfree

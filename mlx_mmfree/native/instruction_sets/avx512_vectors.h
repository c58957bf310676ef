#pragma once

#include <immintrin.h>

#include "runtime/floats.h"
#include "runtime/unroll.h"

namespace mmfree {

namespace {

struct DenseAvx512 {
  static constexpr size_t kLanes = 16, kRows = 4, kStreamOutputs = 2, kTransposedRows = 12;
  static constexpr bool kMasks = true;
  using Floats = __m512;
  using Words = __m512i;
  template <int bits>
  static constexpr size_t kCodes = bits == 4 ? 4 : 2;

  MMFREE_INLINE static Floats zero() {
    return _mm512_setzero_ps();
  }
  MMFREE_INLINE static Floats fill(float value) {
    return _mm512_set1_ps(value);
  }
  template <FloatType type>
  MMFREE_INLINE static Floats load(const void* values) {
    if constexpr (type == FloatType::float32) {
      return _mm512_loadu_ps(values);
    } else {
      const __m256i halves = _mm256_loadu_si256(static_cast<const __m256i*>(values));
      if constexpr (type == FloatType::float16) {
        return _mm512_cvtph_ps(halves);
      } else {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
      }
    }
  }
  template <FloatType type>
  MMFREE_INLINE static Floats load(const void* values, size_t count) {
    const auto mask = static_cast<__mmask16>((1u << count) - 1);
    if constexpr (type == FloatType::float32) {
      return _mm512_maskz_loadu_ps(mask, values);
    } else {
      const __m256i halves = _mm256_maskz_loadu_epi16(mask, values);
      return load<type>(&halves);
    }
  }
  MMFREE_INLINE static Floats multiply_add(Floats x, Floats w, Floats sum) {
    return _mm512_fmadd_ps(x, w, sum);
  }
  MMFREE_INLINE static Floats multiply(Floats a, Floats b) {
    return _mm512_mul_ps(a, b);
  }
  MMFREE_INLINE static float total(Floats sum) {
    return _mm512_reduce_add_ps(sum);
  }

  // the permutation looks only at the lowest two bits of each word
  template <int bits, class Integers>
  MMFREE_INLINE static Floats lowest_codes(Integers words) {
    const __m128 values = bits == 1 ? _mm_setr_ps(0, 1, 0, 1) : _mm_setr_ps(0, 1, 2, 3);
    return _mm512_permutevar_ps(_mm512_broadcast_f32x4(values), (__m512i)words);
  }

  template <int bits>
  MMFREE_INLINE static Words load_words(const uint8_t* bytes) {
    if constexpr (bits != 6) {
      return _mm512_loadu_si512(bytes);
    } else {
      // three bytes hold four codes: words take bytes 0 and 1, or 1 and 2
      const __m512i packed = _mm512_maskz_loadu_epi32(0x0fff, bytes);
      const __m512i spread = _mm512_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11);
      const __m512i pairs =
          _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11));
      return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(spread, packed), pairs);
    }
  }
  template <int bits, int k>
  MMFREE_INLINE static Words codes(Words words) {
    const __m512i mask = _mm512_set1_epi16((1 << bits) - 1);
    if constexpr (bits == 6) {
      const __m512i shift = _mm512_set1_epi32((6 * k + 4) << 16 | (6 * k));
      return _mm512_and_si512(_mm512_srlv_epi16(words, shift), mask);
    } else if constexpr (k == 0) {
      return _mm512_and_si512(words, mask);
    } else if constexpr (k + 1 == 16 / bits) {
      return _mm512_srli_epi16(words, bits * k);
    } else {
      return _mm512_and_si512(_mm512_srli_epi16(words, bits * k), mask);
    }
  }
  MMFREE_INLINE static __m512i no_sums() {
    return _mm512_setzero_si512();
  }
  MMFREE_INLINE static __m512i dot(__m512i sums, Words codes, const int16_t* x) {
    return _mm512_dpwssd_epi32(sums, codes, _mm512_loadu_si512(x));
  }
  MMFREE_INLINE static Floats to_floats(__m512i sums) {
    return _mm512_cvtepi32_ps(sums);
  }
  template <size_t count>
  MMFREE_INLINE static Floats spread(Floats values, size_t first) {
    constexpr int n = 16 / count;
    const __m512i lanes =
        _mm512_setr_epi32(0, 1 / n, 2 / n, 3 / n, 4 / n, 5 / n, 6 / n, 7 / n, 8 / n, 9 / n, 10 / n,
                          11 / n, 12 / n, 13 / n, 14 / n, 15 / n);
    return _mm512_permutexvar_ps(
        _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(first))), values);
  }

  using Vector = __m512i;
  static constexpr size_t kDotMacs = 64;

  MMFREE_INLINE static Vector load_vector(const uint8_t* bytes) {
    return _mm512_loadu_si512(bytes);
  }
  MMFREE_INLINE static Vector join(Vector a, Vector b) {
    return _mm512_xor_si512(a, b);
  }
  MMFREE_INLINE static uint32_t first(Vector vector) {
    return _mm512_cvtsi512_si32(vector);
  }
  template <int bits, int k>
  MMFREE_INLINE static Vector bytes(Vector words) {
    return _mm512_and_si512(_mm512_srli_epi16(words, bits * k), _mm512_set1_epi8((1 << bits) - 1));
  }
  MMFREE_INLINE static Vector dot_signed(Vector sums, Vector codes, Vector x) {
    return _mm512_dpbusd_epi32(sums, codes, x);
  }
  MMFREE_INLINE static Vector lane_sums(Vector sums) {
    return sums;
  }
  MMFREE_INLINE static Vector dot_bytes(Vector sums, Vector a, Vector b) {
    return _mm512_dpbusd_epi32(sums, a, b);
  }
  MMFREE_INLINE static void keep(Vector& vector) {
    asm volatile("" : "+v"(vector));
  }
};

}  // namespace

}  // namespace mmfree

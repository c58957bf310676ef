#pragma once

#include <immintrin.h>

#include "instruction_sets/kernel_set.h"

// The files that are built for AVX2 and for sets beyond it include this.

namespace mmfree {

namespace {

// What the 256-bit instruction sets share.
struct Avx2Base {
  static constexpr size_t kBytes = 32;
  using Sum = __m256i;
  using Codes = __m256i;

  MMFREE_INLINE static Sum zero() {
    return _mm256_setzero_si256();
  }
  MMFREE_INLINE static __m256i load(const uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
  }
  MMFREE_INLINE static __m256i activations(const int8_t* codes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  }
  template <int k>
  MMFREE_INLINE static Codes codes(__m256i packed) {
    return _mm256_and_si256(_mm256_srli_epi16(packed, 2 * k), _mm256_set1_epi8(3));
  }
  MMFREE_INLINE static Sum add(Sum a, Sum b) {
    return _mm256_add_epi32(a, b);
  }
  MMFREE_INLINE static int32_t total(Sum sum) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 1)));
  }
  MMFREE_INLINE static void totals(Sum a, Sum b, Sum c, Sum d, int32_t* result) {
    const __m256i lanes = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(result),
        _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1)));
  }

  static constexpr size_t kLanes = 8, kFloatRows = 1, kTransposedRows = 3, kTransposedShifts = 2;
  using Floats = __m256;
  using Words = __m256i;

  // the permutation looks only at the lowest three bits of each word
  template <int s>
  MMFREE_INLINE static Floats trits(Words words) {
    const __m256 table = _mm256_setr_ps(-1, 0, 1, 2, -1, 0, 1, 2);
    return _mm256_permutevar8x32_ps(table, _mm256_srli_epi32(words, 2 * s));
  }
  MMFREE_INLINE static Floats broadcast(float x) {
    return _mm256_set1_ps(x);
  }
  MMFREE_INLINE static Floats multiply_add(Floats x, Floats trits, Floats sum) {
    return _mm256_fmadd_ps(x, trits, sum);
  }
};

}  // namespace

}  // namespace mmfree

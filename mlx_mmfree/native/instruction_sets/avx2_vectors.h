#pragma once

#include <cpuid.h>
#include <immintrin.h>

#include "runtime/floats.h"
#include "runtime/unroll.h"

namespace mmfree {

namespace {

struct DenseAvx2 {
  static constexpr size_t kLanes = 8, kRows = 2, kStreamOutputs = 1, kTransposedRows = 4;
  static constexpr bool kMasks = false;
  using Floats = __m256;
  using Words = __m256i;
  template <int bits>
  static constexpr size_t kCodes = bits == 4 ? 4 : 2;

  MMFREE_INLINE static Floats zero() {
    return _mm256_setzero_ps();
  }
  MMFREE_INLINE static Floats fill(float value) {
    return _mm256_set1_ps(value);
  }
  template <FloatType type>
  MMFREE_INLINE static Floats load(const void* values) {
    if constexpr (type == FloatType::float32) {
      return _mm256_loadu_ps(static_cast<const float*>(values));
    } else {
      const __m128i halves = _mm_loadu_si128(static_cast<const __m128i*>(values));
      if constexpr (type == FloatType::float16) {
        return _mm256_cvtph_ps(halves);
      } else {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
      }
    }
  }
  MMFREE_INLINE static Floats multiply_add(Floats x, Floats w, Floats sum) {
    return _mm256_fmadd_ps(x, w, sum);
  }
  MMFREE_INLINE static Floats multiply(Floats a, Floats b) {
    return _mm256_mul_ps(a, b);
  }
  MMFREE_INLINE static float total(Floats sum) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
  }

  // the permutation looks only at the lowest two bits of each word
  template <int bits, class Integers>
  MMFREE_INLINE static Floats lowest_codes(Integers words) {
    const __m128 values = bits == 1 ? _mm_setr_ps(0, 1, 0, 1) : _mm_setr_ps(0, 1, 2, 3);
    return _mm256_permutevar_ps(_mm256_set_m128(values, values), (__m256i)words);
  }

  template <int bits>
  MMFREE_INLINE static Words load_words(const uint8_t* bytes) {
    if constexpr (bits != 6) {
      return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
    } else {
      // three bytes hold four codes: words take bytes 0 and 1, or 1 and 2
      const __m256i packed = _mm256_maskload_epi32(reinterpret_cast<const int*>(bytes),
                                                   _mm256_setr_epi32(-1, -1, -1, -1, -1, -1, 0, 0));
      const __m256i spread = _mm256_setr_epi32(0, 1, 2, 2, 3, 4, 5, 5);
      const __m256i pairs = _mm256_broadcastsi128_si256(
          _mm_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11));
      return _mm256_shuffle_epi8(_mm256_permutevar8x32_epi32(packed, spread), pairs);
    }
  }
  template <int bits, int k>
  MMFREE_INLINE static Words codes(Words words) {
    const __m256i mask = _mm256_set1_epi16((1 << bits) - 1);
    if constexpr (bits == 6) {
      const __m256i shifted = _mm256_blend_epi16(_mm256_srli_epi16(words, 6 * k),
                                                 _mm256_srli_epi16(words, 6 * k + 4), 0xaa);
      return _mm256_and_si256(shifted, mask);
    } else if constexpr (k == 0) {
      return _mm256_and_si256(words, mask);
    } else if constexpr (k + 1 == 16 / bits) {
      return _mm256_srli_epi16(words, bits * k);
    } else {
      return _mm256_and_si256(_mm256_srli_epi16(words, bits * k), mask);
    }
  }
  MMFREE_INLINE static __m256i no_sums() {
    return _mm256_setzero_si256();
  }
  MMFREE_INLINE static __m256i dot(__m256i sums, Words codes, const int16_t* x) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(codes, values));
  }
  MMFREE_INLINE static Floats to_floats(__m256i sums) {
    return _mm256_cvtepi32_ps(sums);
  }
  template <size_t count>
  MMFREE_INLINE static Floats spread(Floats values, size_t first) {
    constexpr int n = 8 / count;
    const __m256i lanes = _mm256_setr_epi32(0, 1 / n, 2 / n, 3 / n, 4 / n, 5 / n, 6 / n, 7 / n);
    return _mm256_permutevar8x32_ps(
        values, _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(first))));
  }

  using Vector = __m256i;
  static constexpr size_t kDotMacs = 32;

  MMFREE_INLINE static Vector load_vector(const uint8_t* bytes) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
  }
  MMFREE_INLINE static Vector join(Vector a, Vector b) {
    return _mm256_xor_si256(a, b);
  }
  MMFREE_INLINE static uint32_t first(Vector vector) {
    return _mm256_cvtsi256_si32(vector);
  }
  template <int bits, int k>
  MMFREE_INLINE static Vector bytes(Vector words) {
    return _mm256_and_si256(_mm256_srli_epi16(words, bits * k), _mm256_set1_epi8((1 << bits) - 1));
  }
  MMFREE_INLINE static Vector dot_signed(Vector sums, Vector codes, Vector x) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, codes, x);
#else
    // 16-bit sums of pairs: at most 4 * 2 * 3 * 127 in a chunk of 2 bits, and 8 * 2 * 127 of 1 bit
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x));
#endif
  }
  MMFREE_INLINE static Vector lane_sums(Vector sums) {
#if defined(__AVXVNNI__)
    return sums;
#else
    return _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
#endif
  }
  MMFREE_INLINE static Vector dot_bytes(Vector sums, Vector a, Vector b) {
#if defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(sums, a, b);
#else
    return _mm256_add_epi16(sums, _mm256_maddubs_epi16(a, b));
#endif
  }
  MMFREE_INLINE static void keep(Vector& vector) {
    asm volatile("" : "+x"(vector));
  }
};

// Every known processor with AVX2 has them.
inline bool has_half_floats() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
}

}  // namespace

}  // namespace mmfree

#include <immintrin.h>

#include "instruction_sets/avx512_vectors.h"
#include "instruction_sets/kernel_set.h"

namespace mmfree {

namespace {

struct Avx512Vnni {
  static constexpr size_t kBytes = 64, kStreamRows = 2, kTileRows = 6;
  static constexpr bool kPartialSums = false, kInterleaves = true;
  using Sum = __m512i;
  using Codes = __m512i;

  MMFREE_INLINE static Sum zero() {
    return _mm512_setzero_si512();
  }
  MMFREE_INLINE static __m512i load(const uint8_t* bytes) {
    return _mm512_loadu_si512(bytes);
  }
  MMFREE_INLINE static __m512i activations(const int8_t* codes) {
    return _mm512_loadu_si512(codes);
  }
  MMFREE_INLINE static __m512i repeat(const int8_t* codes) {
    int32_t four;
    memcpy(&four, codes, sizeof(four));
    return _mm512_set1_epi32(four);
  }
  template <int k>
  MMFREE_INLINE static Codes codes(__m512i packed) {
    return _mm512_and_si512(_mm512_srli_epi16(packed, 2 * k), _mm512_set1_epi8(3));
  }
  template <int k>
  MMFREE_INLINE static Codes masked(__m512i packed) {
    return _mm512_and_si512(packed, _mm512_set1_epi8(static_cast<char>(3 << (2 * k))));
  }
  MMFREE_INLINE static Sum dot(Sum sum, Codes codes, __m512i x) {
#if defined(__clang__)
    return _mm512_dpbusd_epi32(sum, codes, x);
#else
    // GCC copies every sum around the intrinsic
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    return sum;
#endif
  }
  MMFREE_INLINE static Sum join(const Sum (&s)[4]) {
    return _mm512_add_epi32(
        _mm512_add_epi32(s[0], _mm512_srai_epi32(s[1], 2)),
        _mm512_add_epi32(_mm512_srai_epi32(s[2], 4), _mm512_srai_epi32(s[3], 6)));
  }
  MMFREE_INLINE static Sum add(Sum a, Sum b) {
    return _mm512_add_epi32(a, b);
  }
  MMFREE_INLINE static int32_t total(Sum sum) {
    return _mm512_reduce_add_epi32(sum);
  }

  MMFREE_INLINE static void totals(Sum a, Sum b, Sum c, Sum d, int32_t* result) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i lanes =
        _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i half =
        _mm256_add_epi32(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(result),
        _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
  }

  static constexpr size_t kLanes = 16, kFloatRows = 6, kTransposedRows = 6, kTransposedShifts = 4;
  using Floats = __m512;
  using Words = __m512i;

  // the permutation looks only at the lowest four bits of each word
  template <int s>
  MMFREE_INLINE static Floats trits(Words words) {
    const __m512 table = _mm512_setr_ps(-1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2, -1, 0, 1, 2);
    return _mm512_permutexvar_ps(_mm512_srli_epi32(words, 2 * s), table);
  }
  MMFREE_INLINE static Floats broadcast(float x) {
    return _mm512_set1_ps(x);
  }
  MMFREE_INLINE static Floats multiply_add(Floats x, Floats trits, Floats sum) {
    return _mm512_fmadd_ps(x, trits, sum);
  }
};

bool is_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}

}  // namespace

extern const Kernels avx512_vnni_kernels;
constinit const Kernels avx512_vnni_kernels =
    kernel_set<Avx512Vnni, DenseAvx512>("avx512_vnni", is_supported);

}  // namespace mmfree

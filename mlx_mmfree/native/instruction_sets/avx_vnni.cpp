#include <cpuid.h>

#include "instruction_sets/avx2.h"
#include "instruction_sets/avx2_vectors.h"

namespace mmfree {

namespace {

struct AvxVnni : Avx2Base {
  static constexpr size_t kStreamRows = 2, kTileRows = 2;
  static constexpr bool kPartialSums = false, kInterleaves = false;

  template <int k>
  MMFREE_INLINE static Codes masked(__m256i packed) {
    return _mm256_and_si256(packed, _mm256_set1_epi8(static_cast<char>(3 << (2 * k))));
  }
  MMFREE_INLINE static Sum dot(Sum sum, Codes codes, __m256i x) {
#if defined(__clang__)
    return _mm256_dpbusd_avx_epi32(sum, codes, x);
#else
    // GCC copies every sum around the intrinsic
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(x));
    return sum;
#endif
  }
  MMFREE_INLINE static Sum join(const Sum (&s)[4]) {
    return _mm256_add_epi32(
        _mm256_add_epi32(s[0], _mm256_srai_epi32(s[1], 2)),
        _mm256_add_epi32(_mm256_srai_epi32(s[2], 4), _mm256_srai_epi32(s[3], 6)));
  }
};

bool is_supported() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_vnni = __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 4 & 1);
  return has_vnni && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         has_half_floats();
}

}  // namespace

extern const Kernels avx_vnni_kernels;
constinit const Kernels avx_vnni_kernels = kernel_set<AvxVnni, DenseAvx2>("avx_vnni", is_supported);

}  // namespace mmfree

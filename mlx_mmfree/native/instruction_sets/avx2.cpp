#include "instruction_sets/avx2.h"

#include "instruction_sets/avx2_vectors.h"

namespace mmfree {

namespace {

struct Avx2 : Avx2Base {
  static constexpr size_t kStreamRows = 2, kTileRows = 2;
  static constexpr bool kPartialSums = true, kInterleaves = false;
  using Partial = __m256i;

  // 16-bit sums of pairs: at most 2 * 2 * 128 in magnitude each, and eight of them in a block
  MMFREE_INLINE static Partial dot(Partial partial, Codes codes, __m256i x) {
    return _mm256_add_epi16(partial, _mm256_maddubs_epi16(codes, x));
  }
  MMFREE_INLINE static Sum widen(Sum sum, Partial partial) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(partial, _mm256_set1_epi16(1)));
  }
};

bool is_supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_half_floats();
}

}  // namespace

extern const Kernels avx2_kernels;
constinit const Kernels avx2_kernels = kernel_set<Avx2, DenseAvx2>("avx2", is_supported);

}  // namespace mmfree

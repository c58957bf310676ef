#include "instruction_sets/arm_features.h"
#include "instruction_sets/neon.h"
#include "instruction_sets/neon_vectors.h"

namespace mmfree {

namespace {

// With dot products of unsigned and signed bytes the codes need no shift.
struct NeonI8mm : Neon {
  static constexpr size_t kStreamRows = 4, kTileRows = 4;
  using Codes = uint8x16_t;

  template <int k>
  MMFREE_INLINE static Codes codes(uint8x16_t packed) {
    return vandq_u8(packed >> (2 * k), vdupq_n_u8(3));
  }
  template <int k>
  MMFREE_INLINE static Codes masked(uint8x16_t packed) {
    return vandq_u8(packed, vdupq_n_u8(3 << (2 * k)));
  }
  MMFREE_INLINE static Sum dot(Sum sum, Codes codes, int8x16_t x) {
    return vusdotq_s32(sum, codes, x);
  }
  MMFREE_INLINE static Sum join(const Sum (&s)[4]) {
    return vaddq_s32(vaddq_s32(s[0], vshrq_n_s32(s[1], 2)),
                     vaddq_s32(vshrq_n_s32(s[2], 4), vshrq_n_s32(s[3], 6)));
  }
};

bool is_supported() {
  return has_dot_products() && has_int8_matrices();
}

}  // namespace

extern const Kernels neon_i8mm_kernels;
constinit const Kernels neon_i8mm_kernels =
    kernel_set<NeonI8mm, DenseNeon>("neon_i8mm", is_supported);

}  // namespace mmfree

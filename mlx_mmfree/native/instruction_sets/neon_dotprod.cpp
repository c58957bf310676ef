#include "instruction_sets/arm_features.h"
#include "instruction_sets/neon.h"
#include "instruction_sets/neon_vectors.h"

namespace mmfree {

namespace {

struct NeonDotprod : Neon {
  static constexpr size_t kStreamRows = 4, kTileRows = 4;
  using Codes = int8x16_t;

  template <int k>
  MMFREE_INLINE static Codes codes(uint8x16_t packed) {
    return vreinterpretq_s8_u8(vandq_u8(packed >> (2 * k), vdupq_n_u8(3)));
  }
  template <int k>
  MMFREE_INLINE static Codes masked(uint8x16_t packed) {
    return codes<k>(packed);
  }
  MMFREE_INLINE static Sum dot(Sum sum, Codes codes, int8x16_t x) {
    return vdotq_s32(sum, codes, x);
  }
  MMFREE_INLINE static Sum join(const Sum (&s)[4]) {
    return vaddq_s32(vaddq_s32(s[0], s[1]), vaddq_s32(s[2], s[3]));
  }
};

}  // namespace

extern const Kernels neon_dotprod_kernels;
constinit const Kernels neon_dotprod_kernels =
    kernel_set<NeonDotprod, DenseNeon>("neon_dotprod", has_dot_products);

}  // namespace mmfree

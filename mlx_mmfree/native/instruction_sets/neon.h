#pragma once

#include <arm_neon.h>

#include "instruction_sets/kernel_set.h"

// The files that are built for the dot products of Arm include this.

namespace mmfree {

namespace {

struct Neon {
  static constexpr size_t kBytes = 16;
  static constexpr bool kPartialSums = false, kInterleaves = false;
  using Sum = int32x4_t;

  MMFREE_INLINE static Sum zero() {
    return vdupq_n_s32(0);
  }
  MMFREE_INLINE static uint8x16_t load(const uint8_t* bytes) {
    return vld1q_u8(bytes);
  }
  MMFREE_INLINE static int8x16_t activations(const int8_t* codes) {
    return vld1q_s8(codes);
  }
  MMFREE_INLINE static Sum add(Sum a, Sum b) {
    return vaddq_s32(a, b);
  }
  MMFREE_INLINE static int32_t total(Sum sum) {
    return vaddvq_s32(sum);
  }
  MMFREE_INLINE static void totals(Sum a, Sum b, Sum c, Sum d, int32_t* result) {
    vst1q_s32(result, vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)));
  }

  static constexpr size_t kLanes = 4, kFloatRows = 1, kTransposedRows = 6, kTransposedShifts = 1;
  using Floats = float32x4_t;
  using Words = uint32x4_t;

  template <int s>
  MMFREE_INLINE static Floats trits(Words words) {
    const uint32x4_t codes = vandq_u32(words >> (2 * s), vdupq_n_u32(3));
    return vcvtq_f32_s32(vsubq_s32(vreinterpretq_s32_u32(codes), vdupq_n_s32(1)));
  }
  MMFREE_INLINE static Floats broadcast(float x) {
    return vdupq_n_f32(x);
  }
  MMFREE_INLINE static Floats multiply_add(Floats x, Floats trits, Floats sum) {
    return vfmaq_f32(sum, x, trits);
  }
};

}  // namespace

}  // namespace mmfree

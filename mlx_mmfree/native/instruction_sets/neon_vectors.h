#pragma once

#include <arm_neon.h>

#include "runtime/floats.h"
#include "runtime/unroll.h"

namespace mmfree {

namespace {

struct DenseNeon {
  static constexpr size_t kLanes = 4, kRows = 4, kStreamOutputs = 2, kTransposedRows = 4;
  static constexpr bool kMasks = false;
  using Floats = float32x4_t;
  using Words = uint16x8_t;
  template <int bits>
  static constexpr size_t kCodes = bits == 4 ? 4 : 2;

  MMFREE_INLINE static Floats zero() {
    return vdupq_n_f32(0);
  }
  MMFREE_INLINE static Floats fill(float value) {
    return vdupq_n_f32(value);
  }
  template <FloatType type>
  MMFREE_INLINE static Floats load(const void* values) {
    if constexpr (type == FloatType::float32) {
      return vld1q_f32(static_cast<const float*>(values));
    } else {
      const uint16x4_t halves = vld1_u16(static_cast<const uint16_t*>(values));
      if constexpr (type == FloatType::float16) {
        return vcvt_f32_f16(vreinterpret_f16_u16(halves));
      } else {
        return vreinterpretq_f32_u32(vshll_n_u16(halves, 16));
      }
    }
  }
  MMFREE_INLINE static Floats multiply_add(Floats x, Floats w, Floats sum) {
    return vfmaq_f32(sum, x, w);
  }
  MMFREE_INLINE static Floats multiply(Floats a, Floats b) {
    return vmulq_f32(a, b);
  }
  MMFREE_INLINE static float total(Floats sum) {
    return vaddvq_f32(sum);
  }

  template <int bits>
  MMFREE_INLINE static Floats lowest_codes(int32x4_t words) {
    return vcvtq_f32_s32(vandq_s32(words, vdupq_n_s32((1 << bits) - 1)));
  }

  template <int bits>
  MMFREE_INLINE static Words load_words(const uint8_t* bytes) {
    if constexpr (bits == 6) {
      // three bytes hold four codes: words take bytes 0 and 1, or 1 and 2
      static constexpr uint8_t kPairs[16] = {0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11};
      uint8_t packed[16] = {};
      memcpy(packed, bytes, 12);
      return vreinterpretq_u16_u8(vqtbl1q_u8(vld1q_u8(packed), vld1q_u8(kPairs)));
    } else {
      return vreinterpretq_u16_u8(vld1q_u8(bytes));
    }
  }
  template <int bits, int k>
  MMFREE_INLINE static Words codes(Words words) {
    static constexpr int16_t kShifts[8] = {-bits * k, -bits * k - 4, -bits * k, -bits * k - 4,
                                           -bits * k, -bits * k - 4, -bits * k, -bits * k - 4};
    const uint16x8_t mask = vdupq_n_u16((1 << bits) - 1);
    if constexpr (bits == 6) {
      return vandq_u16(vshlq_u16(words, vld1q_s16(kShifts)), mask);
    } else {
      return vandq_u16(words >> (bits * k), mask);
    }
  }
  MMFREE_INLINE static int32x4_t no_sums() {
    return vdupq_n_s32(0);
  }
  MMFREE_INLINE static int32x4_t dot(int32x4_t sums, Words codes, const int16_t* x) {
    const int16x8_t c = vreinterpretq_s16_u16(codes), values = vld1q_s16(x);
    const int32x4_t low = vmull_s16(vget_low_s16(c), vget_low_s16(values));
    return vaddq_s32(sums, vpaddq_s32(low, vmull_high_s16(c, values)));
  }
  MMFREE_INLINE static Floats to_floats(int32x4_t sums) {
    return vcvtq_f32_s32(sums);
  }
  template <size_t count>
  MMFREE_INLINE static Floats spread(Floats values, size_t first) {
    constexpr size_t n = kLanes / count;
    const float lanes[kLanes] = {values[first], values[first + 1 / n], values[first + 2 / n],
                                 values[first + 3 / n]};
    return vld1q_f32(lanes);
  }

  using Vector = uint8x16_t;
  static constexpr size_t kDotMacs = 16;

  MMFREE_INLINE static Vector load_vector(const uint8_t* bytes) {
    return vld1q_u8(bytes);
  }
  MMFREE_INLINE static Vector join(Vector a, Vector b) {
    return veorq_u8(a, b);
  }
  MMFREE_INLINE static uint32_t first(Vector vector) {
    return vgetq_lane_u32(vreinterpretq_u32_u8(vector), 0);
  }
  template <int bits, int k>
  MMFREE_INLINE static Vector bytes(Vector words) {
    return vandq_u8(words >> (bits * k), vdupq_n_u8((1 << bits) - 1));
  }
  MMFREE_INLINE static int32x4_t dot_signed(int32x4_t sums, Vector codes, Vector x) {
    return vdotq_s32(sums, vreinterpretq_s8_u8(codes), vreinterpretq_s8_u8(x));
  }
  MMFREE_INLINE static int32x4_t lane_sums(int32x4_t sums) {
    return sums;
  }
  MMFREE_INLINE static Vector dot_bytes(Vector sums, Vector a, Vector b) {
    return vreinterpretq_u8_u32(vdotq_u32(vreinterpretq_u32_u8(sums), a, b));
  }
  MMFREE_INLINE static void keep(Vector& vector) {
    asm volatile("" : "+w"(vector));
  }
};

}  // namespace

}  // namespace mmfree

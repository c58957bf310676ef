#pragma once

#include <math.h>
#include <string.h>

#include "rms_norm_quantize/kernels.h"
#include "runtime/floats.h"
#include "ternary_matmul/float_product.h"

// RMSNorm and 8-bit codes of one row. These loops are built without contraction of a multiply and
// an add, so that every instruction set gives the bits of the plain operations. The sum of squares
// has the 64 partial sums of `float_product.h`.

namespace mmfree {

constexpr size_t kSumWidth = 64;

// Added and subtracted again, it rounds |x| < 2^22 to a whole number, ties to even.
constexpr float kRounder = 12582912.0f;
// The float just below 0.5. Adding it before the floor rounds ties away from zero, and 0.49999997
// down.
constexpr float kBelowHalf = 0.49999997f;

// Calls add(64 values) for the whole row, filled up with zeros.
template <class Isa, class Add>
MMFREE_INLINE inline void each_64(const float* values, size_t dims, Add&& add) {
  size_t j = 0;
  for (; j + kSumWidth <= dims; j += kSumWidth) {
    add(values + j);
  }
  if (j < dims) {
    alignas(64) float last[kSumWidth] = {};
    memcpy(last, values + j, (dims - j) * sizeof(float));
    add(&last[0]);
  }
}

template <class Isa>
float sum_of_squares(const float* values, size_t dims) {
  Lanes<Isa> sums[4] = {};
  each_64<Isa>(values, dims, [&](const float* x) MMFREE_INLINE {
    unroll<4>([&](auto s) MMFREE_INLINE {
      unroll<Lanes<Isa>::kVectors>([&](auto v) MMFREE_INLINE {
        const auto value = load_floats<Isa>(x + 16 * s + v * Isa::kLanes);
        sums[s].at[v] = sums[s].at[v] + value * value;
      });
    });
  });
  return total<Isa>(sums);
}

// max |x|, or NaN if one of the values is.
template <class Isa>
float largest(const float* values, size_t dims) {
  Lanes<Isa> most[4] = {}, nan[4] = {};
  each_64<Isa>(values, dims, [&](const float* x) MMFREE_INLINE {
    unroll<4>([&](auto s) MMFREE_INLINE {
      unroll<Lanes<Isa>::kVectors>([&](auto v) MMFREE_INLINE {
        const auto value = load_floats<Isa>(x + 16 * s + v * Isa::kLanes);
        const auto magnitude = value < 0 ? -value : value;
        most[s].at[v] = magnitude > most[s].at[v] ? magnitude : most[s].at[v];
        nan[s].at[v] = value == value ? nan[s].at[v] : value;
      });
    });
  });
  // the larger one of a and b, and NaN if one of them is
  const auto join = [](auto& a, auto& a_nan, auto b, auto b_nan) MMFREE_INLINE {
    a = b > a ? b : a;
    a_nan = b_nan == b_nan ? a_nan : b_nan;
  };
  unroll<3>([&](auto s) MMFREE_INLINE {
    unroll<Lanes<Isa>::kVectors>([&](auto v) MMFREE_INLINE {
      join(most[0].at[v], nan[0].at[v], most[s + 1].at[v], nan[s + 1].at[v]);
    });
  });
  float lanes[2][kRowLanes];
  memcpy(lanes[0], &most[0], sizeof(lanes[0]));
  memcpy(lanes[1], &nan[0], sizeof(lanes[1]));
  for (size_t j = 1; j < kRowLanes; ++j) {
    join(lanes[0][0], lanes[1][0], lanes[0][j], lanes[1][j]);
  }
  return lanes[1][0] == lanes[1][0] ? lanes[0][0] : lanes[1][0];
}

template <class Isa>
float inverse_of(const float* values, size_t dims, float eps) {
  const float mean = sum_of_squares<Isa>(values, dims) * static_cast<float>(1.0 / dims);
  return 1.0f / sqrtf(mean + eps);
}

template <class Isa>
float rms_inverse(const Floats& x, size_t start, size_t dims, float eps, float* scratch) {
  return inverse_of<Isa>(as_float32<Isa>(x, start, dims, scratch), dims, eps);
}

template <class Isa>
float code_scale(const float* values, size_t dims) {
  const float most = largest<Isa>(values, dims);
  return 127.0f / (most < 1e-5f ? 1e-5f : most);
}

// There is nothing to clip, because |scaled| <= 127 up to rounding.
template <class Isa>
MMFREE_INLINE inline float round_half_away(float scaled) {
  const float raised = fabsf(scaled) + kBelowHalf;
  float whole = raised + kRounder - kRounder;
  whole -= whole > raised ? 1.0f : 0.0f;
  return copysignf(whole, scaled);
}

// Returns the scale of the codes.
template <class Isa>
float quantize_row(const RowQuantizer& q, size_t row) {
  float* values = q.codes + row * q.dims;
  widen<Isa>(q.x, row * q.dims, q.dims, values);
  if (q.has_norm) {
    const float inverse = inverse_of<Isa>(values, q.dims, q.eps);
    if (q.weight) {
      for (size_t j = 0; j < q.dims; ++j) {
        values[j] = values[j] * inverse * q.weight[j];
      }
    } else {
      for (size_t j = 0; j < q.dims; ++j) {
        values[j] *= inverse;
      }
    }
  }
  const float scale = code_scale<Isa>(values, q.dims);
  if (q.half_away) {
    for (size_t j = 0; j < q.dims; ++j) {
      values[j] = round_half_away<Isa>(values[j] * scale);
    }
  } else {
    for (size_t j = 0; j < q.dims; ++j) {
      values[j] = values[j] * scale + kRounder - kRounder;
    }
  }
  return scale;
}

template <class Isa>
void quantize_rows(const RowQuantizer& q, size_t first, size_t last) {
  for (size_t row = first; row < last; ++row) {
    q.scale[row] = quantize_row<Isa>(q, row);
  }
}

template <class Isa>
void round_rows(const RowQuantizer& q, size_t first, size_t last) {
  for (size_t row = first; row < last; ++row) {
    const float inverse = 1.0f / quantize_row<Isa>(q, row);
    float* values = q.codes + row * q.dims;
    for (size_t j = 0; j < q.dims; ++j) {
      values[j] *= inverse;
    }
  }
}

template <class Isa, class Dense>
constexpr RmsNormQuantizeKernels RmsNormQuantizeKernels::of() {
  return {mmfree::quantize_rows<Isa>, mmfree::round_rows<Isa>, mmfree::rms_inverse<Isa>};
}

}  // namespace mmfree

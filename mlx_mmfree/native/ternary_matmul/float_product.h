#pragma once

#include <string.h>

#include "runtime/lanes.h"
#include "runtime/unroll.h"
#include "ternary_matmul/kernels.h"

// Products of float activations and trits. An instruction set `Isa` gives
//   kLanes                         floats of one vector
//   Floats, Words                  vectors of kLanes floats, or 32-bit words
//   kFloatRows                     rows that share one decoding of a weight row
//   kTransposedRows, kTransposedShifts   rows and shifts of one tile of the transposed product
//   trits<s>(words)                the weights of shift s as floats
//   multiply_add(x, trits, sum)    fused or not: a product with a trit is exact either way
// The order of every sum is fixed: 64 partial sums, element 16 w + s of a block going to
// (s mod 4, w), so the bits depend on neither the rows, the threads nor the instruction set.

namespace mmfree {

template <class Isa>
MMFREE_INLINE inline typename Isa::Words load_words(const uint8_t* bytes) {
  typename Isa::Words words;
  memcpy(&words, bytes, sizeof(words));
  return words;
}

template <class Isa, size_t M>
MMFREE_INLINE inline void add_float_block(Lanes<Isa> (&sums)[M][4], const float* x, size_t stride,
                                          const uint8_t* weight) {
  unroll<Lanes<Isa>::kVectors>([&](auto v) MMFREE_INLINE {
    const auto words = load_words<Isa>(weight + v * sizeof(typename Isa::Words));
    unroll<16>([&](auto s) MMFREE_INLINE {
      const auto trits = Isa::template trits<s>(words);
      unroll<M>([&](auto m) MMFREE_INLINE {
        const auto values = load_floats<Isa>(x + m * stride + 16 * s + v * Isa::kLanes);
        auto& sum = sums[m][s % 4].at[v];
        sum = Isa::multiply_add(values, trits, sum);
      });
    });
  });
}

template <class Isa>
float total(const Lanes<Isa> (&sums)[4]) {
  alignas(64) float lanes[16];
  unroll<Lanes<Isa>::kVectors>([&](auto v) MMFREE_INLINE {
    const typename Isa::Floats sum =
        (sums[0].at[v] + sums[1].at[v]) + (sums[2].at[v] + sums[3].at[v]);
    memcpy(lanes + v * Isa::kLanes, &sum, sizeof(sum));
  });
  for (size_t half = 8; half > 0; half /= 2) {
    for (size_t i = 0; i < half; ++i) {
      lanes[i] += lanes[i + half];
    }
  }
  return lanes[0];
}

template <class Isa, size_t M>
void float_tile(const FloatProduct& p, size_t row, size_t output) {
  Lanes<Isa> sums[M][4] = {};
  const uint8_t* weight = p.weight.bytes + output * p.weight.row_bytes;
  const float* x = p.x + row * p.stride;
  size_t byte = 0;
  for (; byte + kBlockBytes <= p.weight.row_bytes; byte += kBlockBytes) {
    add_float_block<Isa, M>(sums, x + 4 * byte, p.stride, weight + byte);
  }
  if (byte < p.weight.row_bytes) {
    alignas(64) uint8_t last[kBlockBytes] = {};
    memcpy(last, weight + byte, p.weight.row_bytes - byte);
    add_float_block<Isa, M>(sums, x + 4 * byte, p.stride, last);
  }
  unroll<M>([&](auto m) MMFREE_INLINE {
    p.y[(row + m) * p.weight.outputs + output] = total<Isa>(sums[m]);
  });
}

template <class Isa>
void multiply_floats(const FloatProduct& p, size_t first, size_t last) {
  for (size_t row = 0; row < p.rows; row += Isa::kFloatRows) {
    const size_t rows = p.rows - row < Isa::kFloatRows ? p.rows - row : Isa::kFloatRows;
    unroll<Isa::kFloatRows>([&](auto m) {
      if (rows == m + 1) {
        for (size_t output = first; output < last; ++output) {
          float_tile<Isa, m + 1>(p, row, output);
        }
      }
    });
  }
}

// Computes the shifts [S, S + kTransposedShifts) of one block of dx. Outputs are summed in their
// order.
template <class Isa, size_t M, size_t S>
void transposed_tile(const TransposedProduct& p, size_t block, size_t row,
                     float (&dx)[M][kBlockWeights]) {
  constexpr size_t kShifts = Isa::kTransposedShifts;
  const size_t row_bytes = p.weight.row_bytes, start = block * kBlockBytes;
  const size_t bytes = row_bytes - start < kBlockBytes ? row_bytes - start : kBlockBytes;
  Lanes<Isa> sums[M][kShifts] = {};
  const auto add = [&](size_t output, const uint8_t* weight) MMFREE_INLINE {
    unroll<Lanes<Isa>::kVectors>([&](auto v) MMFREE_INLINE {
      const auto words = load_words<Isa>(weight + v * sizeof(typename Isa::Words));
      unroll<kShifts>([&](auto s) MMFREE_INLINE {
        const auto trits = Isa::template trits<S + s>(words);
        unroll<M>([&](auto m) MMFREE_INLINE {
          const auto dy = Isa::broadcast(p.dy[(row + m) * p.weight.outputs + output]);
          sums[m][s].at[v] = Isa::multiply_add(dy, trits, sums[m][s].at[v]);
        });
      });
    });
  };
  if (bytes == kBlockBytes) {
    for (size_t output = 0; output < p.weight.outputs; ++output) {
      add(output, p.weight.bytes + output * row_bytes + start);
    }
  } else {
    alignas(64) uint8_t last[kBlockBytes] = {};
    for (size_t output = 0; output < p.weight.outputs; ++output) {
      memcpy(last, p.weight.bytes + output * row_bytes + start, bytes);
      add(output, last);
    }
  }
  unroll<M>([&](auto m) MMFREE_INLINE {
    unroll<kShifts>([&](auto s) MMFREE_INLINE {
      memcpy(dx[m] + 16 * (S + s), &sums[m][s], 16 * sizeof(float));
    });
  });
}

template <class Isa, size_t M>
void transposed_block(const TransposedProduct& p, size_t block, size_t row) {
  alignas(64) float permuted[M][kBlockWeights];
  unroll<16 / Isa::kTransposedShifts>([&](auto group) {
    transposed_tile<Isa, M, group * Isa::kTransposedShifts>(p, block, row, permuted);
  });
  const size_t start = block * kBlockWeights;
  const size_t count = p.dims - start < kBlockWeights ? p.dims - start : kBlockWeights;
  for (size_t m = 0; m < M; ++m) {
    float* dx = p.dx + (row + m) * p.dims + start;
    for (size_t j = 0; j < count; ++j) {
      dx[j] = permuted[m][16 * (j % 16) + j / 16];
    }
  }
}

template <class Isa>
void multiply_transposed(const TransposedProduct& p, size_t block, size_t first, size_t rows) {
  unroll<Isa::kTransposedRows>([&](auto m) {
    if (rows == m + 1) {
      transposed_block<Isa, m + 1>(p, block, first);
    }
  });
}

}  // namespace mmfree

#pragma once

#include <string.h>

#include "runtime/unroll.h"
#include "ternary_matmul/kernels.h"

// A tile of rows of 8-bit activation codes and of outputs, four of which are read side by side.
// Beside what code_stream.h needs, an instruction set `Isa` gives
//   kTileRows           rows that share one decoding of four weight rows
//   codes<k>(packed)    weight codes 0, 1, 2 of shift k
//   totals(four sums, result)

namespace mmfree {

// codes: one block of M rows; weight: one block of N rows
template <class Isa, size_t M, size_t N>
MMFREE_INLINE inline void add_block(typename Isa::Sum (&sums)[M][N], const int8_t* codes,
                                    size_t stride, const uint8_t* weight, size_t row_bytes) {
  if constexpr (Isa::kPartialSums) {
    unroll<N>([&](auto n) MMFREE_INLINE {
      // the activations are loaded again for each weight row, because registers are few
      asm volatile("" ::: "memory");
      typename Isa::Partial partial[M] = {};
      for (size_t byte = 0; byte < kBlockBytes; byte += Isa::kBytes) {
        const auto packed = Isa::load(weight + n * row_bytes + byte);
        unroll<4>([&](auto k) MMFREE_INLINE {
          const auto decoded = Isa::template codes<k>(packed);
          unroll<M>([&](auto m) MMFREE_INLINE {
            const auto x = Isa::activations(codes + m * stride + k * kBlockBytes + byte);
            partial[m] = Isa::dot(partial[m], decoded, x);
          });
        });
      }
      unroll<M>([&](auto m) MMFREE_INLINE { sums[m][n] = Isa::widen(sums[m][n], partial[m]); });
    });
  } else {
    for (size_t byte = 0; byte < kBlockBytes; byte += Isa::kBytes) {
      unroll<4>([&](auto k) MMFREE_INLINE {
        // the packed words are loaded again for each shift, because the sums need the registers
        asm volatile("" ::: "memory");
        typename Isa::Codes decoded[N];
        unroll<N>([&](auto n) MMFREE_INLINE {
          decoded[n] = Isa::template codes<k>(Isa::load(weight + n * row_bytes + byte));
        });
        unroll<M>([&](auto m) MMFREE_INLINE {
          const auto x = Isa::activations(codes + m * stride + k * kBlockBytes + byte);
          unroll<N>([&](auto n)
                        MMFREE_INLINE { sums[m][n] = Isa::dot(sums[m][n], decoded[n], x); });
        });
      });
    }
  }
}

// Multiplies M rows by N weight rows from `output` on.
template <class Isa, size_t M, size_t N>
void multiply_side_by_side(const CodeTile& p, size_t output) {
  typename Isa::Sum sums[M][N];
  unroll<M>([&](auto m) MMFREE_INLINE {
    unroll<N>([&](auto n) MMFREE_INLINE { sums[m][n] = Isa::zero(); });
  });
  const size_t row_bytes = p.words * sizeof(uint32_t);
  const uint8_t* weight = p.weight + output * row_bytes;
  size_t byte = 0;
  for (; byte + kBlockBytes <= row_bytes; byte += kBlockBytes) {
    if (p.ahead) {
      unroll<N>([&](auto n) MMFREE_INLINE {
        __builtin_prefetch(p.ahead + (output + n) * row_bytes + byte, 0, 2);
      });
    }
    add_block<Isa>(sums, p.codes + 4 * byte, p.stride, weight + byte, row_bytes);
  }
  // the last block may end before its 64 bytes do
  if (byte < row_bytes) {
    alignas(64) uint8_t last[N][kBlockBytes] = {};
    for (size_t n = 0; n < N; ++n) {
      memcpy(last[n], weight + n * row_bytes + byte, row_bytes - byte);
    }
    add_block<Isa>(sums, p.codes + 4 * byte, p.stride, last[0], kBlockBytes);
  }
  unroll<M>([&](auto m) MMFREE_INLINE {
    int32_t totals[N];
    if constexpr (N == 4) {
      Isa::totals(sums[m][0], sums[m][1], sums[m][2], sums[m][3], totals);
    } else {
      unroll<N>([&](auto n) MMFREE_INLINE { totals[n] = Isa::total(sums[m][n]); });
    }
    const int32_t sum = p.sums[m];
    float* y = p.y + m * kCodeTileOutputs + output;
    for (size_t n = 0; n < N; ++n) {
      y[n] = static_cast<float>(totals[n] - sum);
    }
  });
}

template <class Isa, size_t M>
void side_by_side_tile(const CodeTile& p) {
  size_t output = 0;
  for (; output + 4 <= p.outputs; output += 4) {
    multiply_side_by_side<Isa, M, 4>(p, output);
  }
  for (; output < p.outputs; ++output) {
    multiply_side_by_side<Isa, M, 1>(p, output);
  }
}

}  // namespace mmfree

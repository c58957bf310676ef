#pragma once

#include <string.h>

#include "runtime/unroll.h"
#include "ternary_matmul/kernels.h"

// Sums of 8-bit activation codes times trits. An instruction set `Isa` gives
//   kBytes              packed bytes of one vector
//   kPartialSums        whether `dot` sums in 16 bits, to be widened once a block
//   kStreamRows         rows up to which weights are read row after row, as one stream
//   kTileRows           rows that share one decoding of four weight rows
//   load(bytes), activations(codes)
//   codes<k>(packed)    weight codes 0, 1, 2 of shift k
//   masked<k>(packed)   the same times 4^k, and join(sums of the four shifts), without kPartialSums
//   dot(sum, codes, activations), widen(sum, partial), zero(), add(sum, sum)
//   total(sum), totals(four sums, result)

namespace mmfree {

template <class Isa, size_t M, size_t N>
struct Sums {
  typename Isa::Sum at[M][N];

  MMFREE_INLINE Sums() {
    unroll<M>([&](auto m) MMFREE_INLINE {
      unroll<N>([&](auto n) MMFREE_INLINE { at[m][n] = Isa::zero(); });
    });
  }
};

// codes: one block of M rows; weight: one block of N rows
template <class Isa, size_t M, size_t N>
MMFREE_INLINE inline void add_block(Sums<Isa, M, N>& sums, const int8_t* codes, size_t stride,
                                    const uint8_t* weight, size_t row_bytes) {
  if constexpr (Isa::kPartialSums) {
    unroll<N>([&](auto n) MMFREE_INLINE {
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
      unroll<M>([&](auto m)
                    MMFREE_INLINE { sums.at[m][n] = Isa::widen(sums.at[m][n], partial[m]); });
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
                        MMFREE_INLINE { sums.at[m][n] = Isa::dot(sums.at[m][n], decoded[n], x); });
        });
      });
    }
  }
}

// Calls add(block of codes, block of weights, distance of weight rows) for every block. The last
// one may end before its 64 bytes do and is copied first.
template <class Isa, size_t N, class Add>
MMFREE_INLINE inline void each_block(const CodeProduct& p, size_t row, size_t output, Add&& add) {
  const size_t row_bytes = p.weight.row_bytes;
  const uint8_t* weight = p.weight.bytes + output * row_bytes;
  const int8_t* codes = p.codes + row * p.stride;
  size_t byte = 0;
  for (; byte + kBlockBytes <= row_bytes; byte += kBlockBytes) {
    add(codes + 4 * byte, weight + byte, row_bytes);
  }
  if (byte < row_bytes) {
    alignas(64) uint8_t last[N][kBlockBytes] = {};
    for (size_t n = 0; n < N; ++n) {
      memcpy(last[n], weight + n * row_bytes + byte, row_bytes - byte);
    }
    add(codes + 4 * byte, &last[0][0], kBlockBytes);
  }
}

template <class Isa, size_t M, size_t N>
MMFREE_INLINE inline void store(const CodeProduct& p, size_t row, size_t output,
                                const Sums<Isa, M, N>& sums) {
  unroll<M>([&](auto m) MMFREE_INLINE {
    int32_t totals[N];
    if constexpr (N == 4) {
      Isa::totals(sums.at[m][0], sums.at[m][1], sums.at[m][2], sums.at[m][3], totals);
    } else {
      unroll<N>([&](auto n) MMFREE_INLINE { totals[n] = Isa::total(sums.at[m][n]); });
    }
    const int32_t sum = p.sums[row + m];
    float* y = p.y + (row + m) * p.weight.outputs + output;
    for (size_t n = 0; n < N; ++n) {
      y[n] = static_cast<float>(totals[n] - sum);
    }
  });
}

// How many bytes the stream of weights is prefetched ahead, to the second-level cache, which waits
// for more lines at once than the first. They cover the latency of memory at its full rate.
constexpr size_t kAheadBytes = 8 << 10;

// The address may lie beyond the weights, because nothing is read from it.
MMFREE_INLINE inline void prefetch_ahead(const uint8_t* weight) {
  __builtin_prefetch(
      reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(weight) + kAheadBytes), 0, 2);
}

// Multiplies M rows by N weight rows, which are read side by side.
template <class Isa, size_t M, size_t N>
void code_tile(const CodeProduct& p, size_t row, size_t output) {
  Sums<Isa, M, N> sums;
  each_block<Isa, N>(
      p, row, output,
      [&](const int8_t* codes, const uint8_t* weight, size_t row_bytes) MMFREE_INLINE {
        // later rows find the weights in the cache
        if (row == 0) {
          unroll<N>([&](auto n) MMFREE_INLINE { prefetch_ahead(weight + n * row_bytes); });
        }
        add_block<Isa, M, N>(sums, codes, p.stride, weight, row_bytes);
      });
  store<Isa, M, N>(p, row, output, sums);
}

// codes: one block of M rows; weight: one block
template <class Isa, size_t M>
MMFREE_INLINE inline void add_shifts(Sums<Isa, M, 4>& sums, const int8_t* codes, size_t stride,
                                     const uint8_t* weight) {
  for (size_t byte = 0; byte < kBlockBytes; byte += Isa::kBytes) {
    auto packed = Isa::load(weight + byte);
    keep(packed);
    unroll<4>([&](auto k) MMFREE_INLINE {
      const auto masked = Isa::template masked<k>(packed);
      unroll<M>([&](auto m) MMFREE_INLINE {
        const auto x = Isa::activations(codes + m * stride + k * kBlockBytes + byte);
        sums.at[m][k] = Isa::dot(sums.at[m][k], masked, x);
      });
    });
  }
}

// Multiplies M rows by one weight row and writes one sum for each row. There are eight chains of
// sums at least, because a dot product has a latency of several cycles.
template <class Isa, size_t M>
MMFREE_INLINE inline void stream_row(const CodeProduct& p, size_t row, size_t output,
                                     Sums<Isa, M, 1>& sums) {
  constexpr size_t kUnrolled = M == 1 ? 2 : 1;
  Sums<Isa, M, 4> chains[kUnrolled];
  const size_t row_bytes = p.weight.row_bytes;
  const uint8_t* weight = p.weight.bytes + output * row_bytes;
  const int8_t* codes = p.codes + row * p.stride;
  size_t byte = 0;
  for (; byte + kUnrolled * kBlockBytes <= row_bytes; byte += kUnrolled * kBlockBytes) {
    unroll<kUnrolled>([&](auto u) MMFREE_INLINE {
      const size_t at = byte + u * kBlockBytes;
      prefetch_ahead(weight + at);
      add_shifts<Isa, M>(chains[u], codes + 4 * at, p.stride, weight + at);
    });
  }
  if (byte + kBlockBytes <= row_bytes) {
    prefetch_ahead(weight + byte);
    add_shifts<Isa, M>(chains[0], codes + 4 * byte, p.stride, weight + byte);
    byte += kBlockBytes;
  }
  if (byte < row_bytes) {
    alignas(64) uint8_t last[kBlockBytes] = {};
    memcpy(last, weight + byte, row_bytes - byte);
    add_shifts<Isa, M>(chains[0], codes + 4 * byte, p.stride, last);
  }
  unroll<M>([&](auto m) MMFREE_INLINE {
    unroll<4>([&](auto k) MMFREE_INLINE {
      for (size_t u = 1; u < kUnrolled; ++u) {
        chains[0].at[m][k] = Isa::add(chains[0].at[m][k], chains[u].at[m][k]);
      }
    });
    sums.at[m][0] = Isa::join(chains[0].at[m]);
  });
}

// Multiplies M rows by one weight row. All weight rows go through the same few instructions, so
// that the processor learns the stride of each and fetches ahead.
template <class Isa, size_t M>
void code_stream(const CodeProduct& p, size_t row, size_t output) {
  Sums<Isa, M, 1> sums;
  if constexpr (Isa::kPartialSums) {
    each_block<Isa, 1>(p, row, output,
                       [&](const int8_t* codes, const uint8_t* weight, size_t row_bytes)
                           MMFREE_INLINE {
                             prefetch_ahead(weight);
                             add_block<Isa, M, 1>(sums, codes, p.stride, weight, row_bytes);
                           });
  } else {
    stream_row<Isa, M>(p, row, output, sums);
  }
  store<Isa, M, 1>(p, row, output, sums);
}

template <class Isa, size_t M>
void code_rows(const CodeProduct& p, size_t row, size_t first, size_t last) {
  size_t output = first;
  if constexpr (M <= Isa::kStreamRows) {
    // the weights of few rows come from memory, and those of many from the cache
    if (p.rows <= Isa::kStreamRows) {
      for (; output < last; ++output) {
        code_stream<Isa, M>(p, row, output);
      }
    }
  }
  for (; output + 4 <= last; output += 4) {
    code_tile<Isa, M, 4>(p, row, output);
  }
  for (; output < last; ++output) {
    code_tile<Isa, M, 1>(p, row, output);
  }
}

template <class Isa>
void multiply_codes(const CodeProduct& p, size_t first, size_t last) {
  constexpr size_t kRows = Isa::kTileRows > Isa::kStreamRows ? Isa::kTileRows : Isa::kStreamRows;
  const size_t limit = p.rows <= Isa::kStreamRows ? Isa::kStreamRows : Isa::kTileRows;
  for (size_t row = 0; row < p.rows; row += limit) {
    const size_t rows = p.rows - row < limit ? p.rows - row : limit;
    unroll<kRows>([&](auto m) {
      if (rows == m + 1) {
        code_rows<Isa, m + 1>(p, row, first, last);
      }
    });
  }
}

}  // namespace mmfree

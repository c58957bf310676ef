#pragma once

#include <string.h>

#include "runtime/unroll.h"
#include "ternary_matmul/kernels.h"

// Few rows of 8-bit activation codes times trits. The weights come from memory and are read row
// after row, as one stream. Beside what code_tile.h needs, an instruction set `Isa` gives
//   kStreamRows         rows up to which this is faster than tiles
//   activations(codes)  the codes of one vector
//   masked<k>(packed)   weight codes times 4^k, and join(sums of the four shifts), without
//                       kPartialSums
//   add(sum, sum), total(sum)

namespace mmfree {

// The address may lie beyond the weights, because nothing is read from it.
MMFREE_INLINE inline void prefetch_ahead(const uint8_t* weight) {
  __builtin_prefetch(
      reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(weight) + kAheadBytes), 0, 2);
}

// The sums of M rows with one weight row. There are eight chains of sums at least, because a dot
// product has a latency of several cycles.
template <class Isa, size_t M>
struct StreamSums {
  static constexpr size_t kUnrolled = M == 1 ? 2 : 1;
  typename Isa::Sum chains[kUnrolled][M][4];

  MMFREE_INLINE StreamSums() {
    unroll<kUnrolled>([&](auto u) MMFREE_INLINE {
      unroll<M>([&](auto m) MMFREE_INLINE {
        unroll<4>([&](auto k) MMFREE_INLINE { chains[u][m][k] = Isa::zero(); });
      });
    });
  }

  // codes: one block of M rows; weight: one block
  MMFREE_INLINE void add(size_t u, const int8_t* codes, size_t stride, const uint8_t* weight) {
    for (size_t byte = 0; byte < kBlockBytes; byte += Isa::kBytes) {
      auto packed = Isa::load(weight + byte);
      keep(packed);
      unroll<4>([&](auto k) MMFREE_INLINE {
        const auto masked = Isa::template masked<k>(packed);
        unroll<M>([&](auto m) MMFREE_INLINE {
          const auto x = Isa::activations(codes + m * stride + k * kBlockBytes + byte);
          chains[u][m][k] = Isa::dot(chains[u][m][k], masked, x);
        });
      });
    }
  }

  MMFREE_INLINE int32_t total(size_t m) {
    unroll<4>([&](auto k) MMFREE_INLINE {
      for (size_t u = 1; u < kUnrolled; ++u) {
        chains[0][m][k] = Isa::add(chains[0][m][k], chains[u][m][k]);
      }
    });
    return Isa::total(Isa::join(chains[0][m]));
  }
};

template <class Isa, size_t M>
  requires Isa::kPartialSums
struct StreamSums<Isa, M> {
  static constexpr size_t kUnrolled = 1;
  typename Isa::Sum sums[M];

  MMFREE_INLINE StreamSums() {
    unroll<M>([&](auto m) MMFREE_INLINE { sums[m] = Isa::zero(); });
  }

  MMFREE_INLINE void add(size_t, const int8_t* codes, size_t stride, const uint8_t* weight) {
    typename Isa::Partial partial[M] = {};
    for (size_t byte = 0; byte < kBlockBytes; byte += Isa::kBytes) {
      const auto packed = Isa::load(weight + byte);
      unroll<4>([&](auto k) MMFREE_INLINE {
        const auto decoded = Isa::template codes<k>(packed);
        unroll<M>([&](auto m) MMFREE_INLINE {
          const auto x = Isa::activations(codes + m * stride + k * kBlockBytes + byte);
          partial[m] = Isa::dot(partial[m], decoded, x);
        });
      });
    }
    unroll<M>([&](auto m) MMFREE_INLINE { sums[m] = Isa::widen(sums[m], partial[m]); });
  }

  MMFREE_INLINE int32_t total(size_t m) const {
    return Isa::total(sums[m]);
  }
};

// Multiplies M rows by one weight row. All weight rows go through the same few instructions, so
// that the processor learns the stride of each and fetches ahead.
template <class Isa, size_t M>
void stream_row(const CodeProduct& p, size_t output) {
  using Sums = StreamSums<Isa, M>;
  constexpr size_t kTogether = Sums::kUnrolled * kBlockBytes;
  Sums sums;
  const size_t row_bytes = p.weight.row_bytes;
  const uint8_t* weight = p.weight.bytes + output * row_bytes;
  size_t byte = 0;
  for (; byte + kTogether <= row_bytes; byte += kTogether) {
    unroll<Sums::kUnrolled>([&](auto u) MMFREE_INLINE {
      const size_t at = byte + u * kBlockBytes;
      prefetch_ahead(weight + at);
      sums.add(u, p.codes + 4 * at, p.stride, weight + at);
    });
  }
  if (Sums::kUnrolled > 1 && byte + kBlockBytes <= row_bytes) {
    prefetch_ahead(weight + byte);
    sums.add(0, p.codes + 4 * byte, p.stride, weight + byte);
    byte += kBlockBytes;
  }
  // the last block may end before its 64 bytes do
  if (byte < row_bytes) {
    alignas(64) uint8_t last[kBlockBytes] = {};
    memcpy(last, weight + byte, row_bytes - byte);
    sums.add(0, p.codes + 4 * byte, p.stride, last);
  }
  unroll<M>([&](auto m) MMFREE_INLINE {
    p.y[m * p.weight.outputs + output] = static_cast<float>(sums.total(m) - p.sums[m]);
  });
}

// Multiplies one row by two short weight rows, which load each activation once for both. Longer
// rows are slower in pairs: the processor fetches one stream ahead better than two.
template <class Isa>
void stream_pair(const CodeProduct& p, size_t output) {
  typename Isa::Sum sums[2][4];
  unroll<2>([&](auto n) MMFREE_INLINE {
    unroll<4>([&](auto k) MMFREE_INLINE { sums[n][k] = Isa::zero(); });
  });
  const auto add = [&](const int8_t* codes, const uint8_t* weight, size_t distance) MMFREE_INLINE {
    for (size_t byte = 0; byte < kBlockBytes; byte += Isa::kBytes) {
      auto a = Isa::load(weight + byte), b = Isa::load(weight + distance + byte);
      keep(a);
      keep(b);
      unroll<4>([&](auto k) MMFREE_INLINE {
        const auto x = Isa::activations(codes + k * kBlockBytes + byte);
        sums[0][k] = Isa::dot(sums[0][k], Isa::template masked<k>(a), x);
        sums[1][k] = Isa::dot(sums[1][k], Isa::template masked<k>(b), x);
      });
    }
  };
  const size_t row_bytes = p.weight.row_bytes;
  const uint8_t* weight = p.weight.bytes + output * row_bytes;
  size_t byte = 0;
  for (; byte + kBlockBytes <= row_bytes; byte += kBlockBytes) {
    prefetch_ahead(weight + byte);
    prefetch_ahead(weight + row_bytes + byte);
    add(p.codes + 4 * byte, weight + byte, row_bytes);
  }
  if (byte < row_bytes) {
    alignas(64) uint8_t last[2][kBlockBytes] = {};
    memcpy(last[0], weight + byte, row_bytes - byte);
    memcpy(last[1], weight + row_bytes + byte, row_bytes - byte);
    add(p.codes + 4 * byte, last[0], kBlockBytes);
  }
  unroll<2>([&](auto n) MMFREE_INLINE {
    p.y[output + n] = static_cast<float>(Isa::total(Isa::join(sums[n])) - p.sums[0]);
  });
}

template <class Isa>
void stream_codes(const CodeProduct& p, size_t first, size_t last) {
  if constexpr (!Isa::kPartialSums) {
    if (p.rows == 1 && p.weight.row_bytes < kShortBytes) {
      for (; first + 2 <= last; first += 2) {
        stream_pair<Isa>(p, first);
      }
    }
  }
  unroll<Isa::kStreamRows>([&](auto m) {
    if (p.rows == m + 1) {
      for (size_t output = first; output < last; ++output) {
        stream_row<Isa, m + 1>(p, output);
      }
    }
  });
}

}  // namespace mmfree

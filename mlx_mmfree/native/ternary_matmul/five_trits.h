#pragma once

#include <string.h>

#include <type_traits>

#include "runtime/unroll.h"
#include "ternary_matmul/code_product.h"
#include "ternary_matmul/kernels.h"

// Sums of 8-bit activation codes times trits of which a byte holds five. An instruction set `Isa`
// gives, beside what code_product.h says,
//   kFiveOutputs           weight rows that share the loads of one row of codes
//   kMultipliesFractions   whether `dot` takes any byte as a weight, instead of 0, 1 and 2 only
//   tripled(bytes)         three times each byte, modulo 256
//   digits(bytes)          three times each byte, divided by 256; without kMultipliesFractions
//   join_fives(own, next)  (3 own - next) / 256; with kMultipliesFractions
// A byte f0 is a fraction of 256, and its digits in base 3 are five codes. With
// f(k+1) = 3 f(k) mod 256 digit k is (3 f(k) - f(k+1)) / 256. So sums of bytes times activations
// give those of digits.

namespace mmfree {

// Sums of M rows times N weight rows.
template <class Isa, size_t M, size_t N>
struct FiveSums {
  // the sums of one row need a chain for each digit, since a dot product has a latency of several
  // cycles
  static constexpr size_t kChains = !Isa::kMultipliesFractions ? 1 : M == 1 ? kFive : 2;
  Sums<Isa, M * N, kChains> own, next;
};

// codes: one block of M rows; weight: one block of N rows
template <class Isa, size_t M, size_t N>
MMFREE_INLINE inline void add_fives(FiveSums<Isa, M, N>& sums, const int8_t* codes, size_t stride,
                                    const uint8_t* const (&weight)[N]) {
  const auto each_digit = [&](size_t byte, auto&& add) MMFREE_INLINE {
    decltype(Isa::load(weight[0])) fractions[N], next[N];
    unroll<N>([&](auto n) MMFREE_INLINE {
      fractions[n] = Isa::load(weight[n] + byte);
      keep(fractions[n]);
    });
    unroll<kFive>([&](auto k) MMFREE_INLINE {
      unroll<N>([&](auto n) MMFREE_INLINE { next[n] = Isa::tripled(fractions[n]); });
      unroll<M>([&](auto m) MMFREE_INLINE {
        const auto x = Isa::activations(codes + m * stride + k * kBlockBytes + byte);
        unroll<N>([&](auto n) MMFREE_INLINE {
          add(std::integral_constant<size_t, m * N + n>{}, k, fractions[n], next[n], x);
        });
      });
      unroll<N>([&](auto n) MMFREE_INLINE { fractions[n] = next[n]; });
    });
  };
  if constexpr (Isa::kMultipliesFractions) {
    constexpr size_t kChains = FiveSums<Isa, M, N>::kChains;
    for (size_t byte = 0; byte < kBlockBytes; byte += Isa::kBytes) {
      each_digit(byte, [&](auto i, auto k, auto own, auto next, auto x) MMFREE_INLINE {
        sums.own.at[i][k % kChains] = Isa::dot(sums.own.at[i][k % kChains], own, x);
        sums.next.at[i][k % kChains] = Isa::dot(sums.next.at[i][k % kChains], next, x);
      });
    }
  } else if constexpr (Isa::kPartialSums) {
    typename Isa::Partial partial[M * N] = {};
    for (size_t byte = 0; byte < kBlockBytes; byte += Isa::kBytes) {
      each_digit(byte, [&](auto i, auto, auto own, auto, auto x) MMFREE_INLINE {
        partial[i] = Isa::dot(partial[i], Isa::digits(own), x);
      });
    }
    unroll<M * N>([&](auto i) MMFREE_INLINE {
      sums.own.at[i][0] = Isa::widen(sums.own.at[i][0], partial[i]);
    });
  } else {
    for (size_t byte = 0; byte < kBlockBytes; byte += Isa::kBytes) {
      each_digit(byte, [&](auto i, auto, auto own, auto, auto x) MMFREE_INLINE {
        sums.own.at[i][0] = Isa::dot(sums.own.at[i][0], Isa::digits(own), x);
      });
    }
  }
}

template <class Isa, size_t M, size_t N>
MMFREE_INLINE inline Sums<Isa, M, N> total_fives(FiveSums<Isa, M, N>& sums) {
  Sums<Isa, M, N> result;
  unroll<M * N>([&](auto i) MMFREE_INLINE {
    auto &own = sums.own.at[i], &next = sums.next.at[i];
    auto& total = result.at[i / N][i % N];
    if constexpr (Isa::kMultipliesFractions) {
      unroll<FiveSums<Isa, M, N>::kChains - 1>([&](auto k) MMFREE_INLINE {
        own[0] = Isa::add(own[0], own[k + 1]);
        next[0] = Isa::add(next[0], next[k + 1]);
      });
      total = Isa::join_fives(own[0], next[0]);
    } else {
      total = own[0];
    }
  });
  return result;
}

// Multiplies M rows by N weight rows.
template <class Isa, size_t M, size_t N>
void five_stream(const CodeProduct& p, size_t row, size_t output) {
  FiveSums<Isa, M, N> sums;
  const size_t row_bytes = p.weight.row_bytes;
  const uint8_t* first = p.weight.bytes + output * row_bytes;
  const int8_t* codes = p.codes + row * p.stride;
  const uint8_t* weight[N];
  size_t byte = 0;
  for (; byte + kBlockBytes <= row_bytes; byte += kBlockBytes) {
    unroll<N>([&](auto n) MMFREE_INLINE {
      weight[n] = first + n * row_bytes + byte;
      prefetch_ahead(weight[n]);
    });
    add_fives<Isa, M, N>(sums, codes + kFive * byte, p.stride, weight);
  }
  if (byte < row_bytes) {
    // what follows a row meets zeros, but nothing may be read beyond the matrix
    alignas(64) uint8_t last[N][kBlockBytes] = {};
    const uint8_t* end = p.weight.bytes + p.weight.outputs * row_bytes;
    unroll<N>([&](auto n) MMFREE_INLINE {
      weight[n] = first + n * row_bytes + byte;
      if (static_cast<size_t>(end - weight[n]) < kBlockBytes) {
        memcpy(last[n], weight[n], row_bytes - byte);
        weight[n] = last[n];
      }
    });
    add_fives<Isa, M, N>(sums, codes + kFive * byte, p.stride, weight);
  }
  store<Isa, M, N>(p, row, output, total_fives<Isa, M, N>(sums));
}

template <class Isa>
void multiply_fives(const CodeProduct& p, size_t first, size_t last) {
  unroll<Isa::kStreamRows>([&](auto m) {
    constexpr size_t kRows = m + 1, kOutputs = kRows == 1 ? Isa::kFiveOutputs : 1;
    if (p.rows == kRows) {
      size_t output = first;
      for (; output + kOutputs <= last; output += kOutputs) {
        five_stream<Isa, kRows, kOutputs>(p, 0, output);
      }
      for (; output < last; ++output) {
        five_stream<Isa, kRows, 1>(p, 0, output);
      }
    }
  });
}

// Adds digit k of each fraction, at the place of one shift, to a block of 2-bit codes, and makes of
// the fractions those of the digits that follow.
template <class Isa, size_t shift>
MMFREE_INLINE inline void move_digits(uint8_t* __restrict fractions, uint8_t* __restrict block) {
  for (size_t b = 0; b < kBlockBytes; ++b) {
    // a digit is 1 from 86 / 256 on, and 2 from 171 / 256 on; vectors hold most numbers as bytes
    const uint8_t fraction = fractions[b], one = 1 << shift;
    const uint8_t low = fraction > 85 ? one : 0, high = fraction > 170 ? one : 0;
    block[b] = static_cast<uint8_t>((shift ? block[b] : 0) + low + high);
    fractions[b] = static_cast<uint8_t>(fraction + fraction + fraction);
  }
}

template <class Isa>
void unpack_fives(const PackedMatrix& weight, uint8_t* words) {
  const size_t words_bytes = five_words_bytes(weight.row_bytes);
  for (size_t output = 0; output < weight.outputs; ++output, words += words_bytes) {
    const uint8_t* row = weight.bytes + output * weight.row_bytes;
    for (size_t start = 0, place = 0; start < weight.row_bytes; start += kBlockBytes) {
      alignas(64) uint8_t fractions[kBlockBytes] = {};
      const size_t left = weight.row_bytes - start;
      if (left < kBlockBytes) {
        memcpy(fractions, row + start, left);
      } else {
        memcpy(fractions, row + start, kBlockBytes);
      }
      for (size_t k = 0; k < kFive; ++k, ++place) {
        uint8_t* block = words + place / 4 * kBlockBytes;
        unroll<4>([&](auto part) MMFREE_INLINE {
          if (place % 4 == part) {
            move_digits<Isa, 2 * part>(fractions, block);
          }
        });
      }
    }
  }
}

}  // namespace mmfree

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "runtime/unroll.h"

namespace mmfree {

// Sixteen words of 32 bits.
using WordVector = uint32_t __attribute__((vector_size(64)));

// Interleaves the lower or, with `from` = 2, the upper halves of each four lanes.
template <size_t from, size_t... lane>
MMFREE_INLINE inline WordVector interleaved(WordVector a, WordVector b,
                                            std::index_sequence<lane...>) {
  return __builtin_shufflevector(a, b, (lane % 2 * 16 + lane / 4 * 4 + lane % 4 / 2 + from)...);
}

// Takes every second group of four lanes of both, from the first or the second on.
template <size_t from, size_t... lane>
MMFREE_INLINE inline WordVector every_second(WordVector a, WordVector b,
                                             std::index_sequence<lane...>) {
  return __builtin_shufflevector(a, b, (lane / 4 * 8 + 4 * from + lane % 4)...);
}

MMFREE_INLINE inline void transpose(WordVector (&rows)[16]) {
  constexpr auto lanes = std::make_index_sequence<16>();
  // each four rows in groups of four lanes
  unroll<4>([&](auto group) MMFREE_INLINE {
    unroll<2>([&](auto) MMFREE_INLINE {
      WordVector* r = rows + 4 * group;
      const WordVector a = r[0], b = r[1];
      r[0] = interleaved<0>(a, r[2], lanes);
      r[1] = interleaved<2>(a, r[2], lanes);
      r[2] = interleaved<0>(b, r[3], lanes);
      r[3] = interleaved<2>(b, r[3], lanes);
    });
  });
  // then the groups
  unroll<4>([&](auto word) MMFREE_INLINE {
    unroll<2>([&](auto) MMFREE_INLINE {
      const WordVector a = rows[word], b = rows[4 + word];
      const WordVector c = rows[8 + word], d = rows[12 + word];
      rows[word] = every_second<0>(a, b, lanes);
      rows[4 + word] = every_second<0>(c, d, lanes);
      rows[8 + word] = every_second<1>(a, b, lanes);
      rows[12 + word] = every_second<1>(c, d, lanes);
    });
  });
}

}  // namespace mmfree

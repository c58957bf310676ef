#pragma once

#include <string.h>

#include "runtime/transpose.h"
#include "runtime/unroll.h"
#include "ternary_matmul/kernels.h"

// A tile of rows of 8-bit activation codes and of outputs, whose packed words are interleaved, so
// that each lane of a vector sums for an output of its own. Wide vectors need it: to join the lanes
// of a sum takes them a fifth of the time where a row has 1,024 inputs. An instruction set `Isa`
// with vectors of 64 bytes gives
//   kTileRows                 rows of a tile, whose sums fill four vectors each
//   repeat(codes)             four activation codes for every lane
//   load(bytes), codes<k>(packed), dot(sum, codes, activations), zero()

namespace mmfree {

constexpr size_t kVectorOutputs = sizeof(WordVector) / sizeof(uint32_t);
constexpr size_t kTileVectors = kCodeTileOutputs / kVectorOutputs;

// Writes a block of each row, word by word at a distance of `step`.
MMFREE_INLINE inline void interleave_block(const uint8_t* const* bytes, size_t byte, uint8_t* to,
                                           size_t step) {
  WordVector rows[kVectorOutputs];
  unroll<kVectorOutputs>(
      [&](auto lane) MMFREE_INLINE { memcpy(&rows[lane], bytes[lane] + byte, kBlockBytes); });
  transpose(rows);
  unroll<kVectorOutputs>([&](auto word)
                             MMFREE_INLINE { memcpy(to + word * step, &rows[word], kBlockBytes); });
}

// Writes the outputs from `first` on, as many as fill N vectors, as (words, N, lanes). The last
// output takes the places of those that lie beyond it, and zeros fill up the last block.
template <class Isa, size_t N>
void interleave_vectors(const PackedMatrix& weight, size_t first, uint8_t* tile) {
  constexpr size_t kStep = N * sizeof(WordVector), kWord = sizeof(uint32_t);
  for (size_t n = 0; n < N; ++n, first += kVectorOutputs, tile += sizeof(WordVector)) {
    const uint8_t* bytes[kVectorOutputs];
    for (size_t lane = 0; lane < kVectorOutputs; ++lane) {
      const size_t output = first + lane;
      bytes[lane] =
          weight.bytes + (output < weight.outputs ? output : weight.outputs - 1) * weight.row_bytes;
    }
    size_t byte = 0;
    for (; byte + kBlockBytes <= weight.row_bytes; byte += kBlockBytes) {
      interleave_block(bytes, byte, tile + byte / kWord * kStep, kStep);
    }
    if (byte < weight.row_bytes) {
      alignas(64) uint8_t last[kVectorOutputs][kBlockBytes] = {};
      for (size_t lane = 0; lane < kVectorOutputs; ++lane) {
        memcpy(last[lane], bytes[lane] + byte, weight.row_bytes - byte);
        bytes[lane] = last[lane];
      }
      interleave_block(bytes, 0, tile + byte / kWord * kStep, kStep);
    }
  }
}

template <class Isa>
void interleave(const PackedMatrix& weight, size_t first, size_t outputs, uint8_t* tile) {
  if (outputs > kVectorOutputs) {
    interleave_vectors<Isa, kTileVectors>(weight, first, tile);
  } else {
    interleave_vectors<Isa, 1>(weight, first, tile);
  }
}

template <class Isa, size_t M, size_t N>
void multiply_vectors(const CodeTile& p) {
  constexpr size_t kBlockWords = kBlockBytes / sizeof(uint32_t), kStep = N * sizeof(WordVector);
  typename Isa::Sum sums[M][N];
  unroll<M>([&](auto m) MMFREE_INLINE {
    unroll<N>([&](auto n) MMFREE_INLINE { sums[m][n] = Isa::zero(); });
  });
  const size_t stride = p.stride;
  const uint8_t* weight = p.weight;
  for (size_t word = 0; word < p.words; ++word, weight += kStep) {
    const int8_t* codes =
        p.codes + word / kBlockWords * kBlockWeights + word % kBlockWords * sizeof(uint32_t);
    for (size_t line = 0; line < p.lines; ++line) {
      __builtin_prefetch(p.ahead + (word * p.lines + line) * kBlockBytes, 0, 2);
    }
    unroll<4>([&](auto k) MMFREE_INLINE {
      // the packed words are loaded again for each shift, because the sums need the registers
      asm volatile("" ::: "memory");
      typename Isa::Codes decoded[N];
      unroll<N>([&](auto n) MMFREE_INLINE {
        decoded[n] = Isa::template codes<k>(Isa::load(weight + n * sizeof(WordVector)));
      });
      unroll<M>([&](auto m) MMFREE_INLINE {
        const auto x = Isa::repeat(codes + m * stride + k * kBlockBytes);
        unroll<N>([&](auto n) MMFREE_INLINE { sums[m][n] = Isa::dot(sums[m][n], decoded[n], x); });
      });
    });
  }
  unroll<M>([&](auto m) MMFREE_INLINE {
    int32_t totals[N * kVectorOutputs];
    unroll<N>([&](auto n) MMFREE_INLINE {
      const auto sum = sums[m][n];
      memcpy(totals + n * kVectorOutputs, &sum, sizeof(sum));
    });
    const int32_t sum = p.sums[m];
    float* y = p.y + m * kCodeTileOutputs;
    for (size_t output = 0; output < N * kVectorOutputs; ++output) {
      y[output] = static_cast<float>(totals[output] - sum);
    }
  });
}

template <class Isa, size_t M>
void interleaved_tile(const CodeTile& p) {
  if (p.outputs > kVectorOutputs) {
    multiply_vectors<Isa, M, kTileVectors>(p);
  } else {
    multiply_vectors<Isa, M, 1>(p);
  }
}

}  // namespace mmfree

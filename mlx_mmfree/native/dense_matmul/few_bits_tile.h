#pragma once

#include <string.h>

#include "dense_matmul/quantized_tile.h"

// Products with codes of 1 or 2 bits. Activations are numbers of 8 bits with a scale for each
// kBlock inputs: three of them, each for what the one before leaves, or one, which rounds them. A
// lane takes one 32-bit word of codes, which lies in one block, so that the sums of a chunk are
// exact integers. An instruction set `Isa` gives, beside what `quantized_tile.h` asks for,
//   Vector, load_vector(bytes)     kLanes words
//   bytes<bits, k>(vector)         code k of every byte
//   dot_signed(sums, codes, x)     adds the products of bytes 4 l to 4 l + 3 to lane l, or to the
//                                  two halves of it
//   lane_sums(sums)                the sum of each lane
//   kStreamOutputs                 outputs of one tile, which share the loads of x

namespace mmfree {

constexpr size_t kBlock = 32;
// Three numbers leave at most 2^-24 of the largest activation of a block.
constexpr size_t kParts = 3;
constexpr float kLargestByte = 127.0f;
// What rounding leaves is at most one half, which becomes the largest byte of the next number.
constexpr float kNextByte = 2 * kLargestByte;

// The codes that one vector of words holds.
template <class Isa, int bits>
struct WordChunk {
  static constexpr size_t kShifts = 8 / bits;
  static constexpr size_t kBytes = 4 * Isa::kLanes;
  static constexpr size_t kInputs = kBytes * kShifts;

  static constexpr size_t count(size_t dims) {
    return (dims + kInputs - 1) / kInputs;
  }
};

// An arranged row. Each part of a chunk has the numbers that meet code k of byte j at kBytes k + j.
// After the chunks come the scale of each word and the sum of each group, filled up with zeros.
template <class Isa, int bits, size_t parts>
struct ByteRow {
  int8_t* codes;
  float* scales;
  float* sums;
  size_t bytes;

  MMFREE_INLINE ByteRow(uint8_t* memory, size_t dims, size_t group) {
    using C = WordChunk<Isa, bits>;
    const size_t chunks = C::count(dims), groups = dims / group;
    const size_t padded = (groups + Isa::kLanes - 1) / Isa::kLanes * Isa::kLanes;
    const size_t code_bytes = parts * chunks * C::kInputs;
    codes = reinterpret_cast<int8_t*>(memory);
    scales = reinterpret_cast<float*>(memory + code_bytes);
    sums = scales + chunks * Isa::kLanes;
    bytes = code_bytes + (chunks * Isa::kLanes + padded) * sizeof(float);
    bytes = (bytes + 63) / 64 * 64;
  }
};

// Moves number k of every kShifts to the k-th share.
template <class C>
MMFREE_INLINE inline void deal(const int8_t* codes, int8_t* dealt) {
  std::conditional_t<C::kShifts == 8, uint64_t, uint32_t> words[C::kBytes];
  memcpy(words, codes, sizeof(words));
  for (size_t k = 0; k < C::kShifts; ++k) {
    for (size_t j = 0; j < C::kBytes; ++j) {
      dealt[C::kBytes * k + j] = static_cast<int8_t>(words[j] >> (8 * k));
    }
  }
}

template <class Isa, int bits, size_t parts>
bool arrange_bytes(const float* x, size_t dims, size_t group, uint8_t* memory) {
  using C = WordChunk<Isa, bits>;
  const ByteRow<Isa, bits, parts> row(memory, dims, group);
  memset(row.scales, 0, memory + row.bytes - reinterpret_cast<uint8_t*>(row.scales));
  for (size_t chunk = 0; chunk < dims; chunk += C::kInputs) {
    alignas(64) int8_t codes[parts][C::kInputs] = {};
    const size_t end = dims - chunk < C::kInputs ? dims : chunk + C::kInputs;
    for (size_t start = chunk; start < end; start += kBlock) {
      const uint32_t largest_of_block = largest_bits<Isa>(x + start, kBlock);
      if (largest_of_block >= 0x7f800000) {
        return false;
      }
      float largest;
      memcpy(&largest, &largest_of_block, sizeof(largest));
      if (largest < kSmallest) {
        continue;
      }
      const float scale = largest / kLargestByte, inverse = kLargestByte / largest;
      float left[kBlock], total = 0.0f, unit = scale;
      for (size_t i = 0; i < kBlock; ++i) {
        left[i] = x[start + i] * inverse;
      }
      for (size_t part = 0; part < parts; ++part) {
        int32_t sum = 0;
        for (size_t i = 0; i < kBlock; ++i) {
          const float whole = (left[i] + kRound) - kRound;
          left[i] = (left[i] - whole) * kNextByte;
          codes[part][start - chunk + i] = static_cast<int8_t>(whole);
          sum += static_cast<int32_t>(whole);
        }
        total += static_cast<float>(sum) * unit;
        unit /= kNextByte;
      }
      for (size_t word = start * bits / 32; word < (start + kBlock) * bits / 32; ++word) {
        row.scales[word] = scale;
      }
      row.sums[start / group] += total;
    }
    for (size_t part = 0; part < parts; ++part) {
      deal<C>(codes[part], row.codes + parts * chunk + part * C::kInputs);
    }
  }
  return true;
}

// Computes N outputs of M rows.
template <class Isa, int bits, size_t group, size_t parts, size_t M, size_t N>
void few_bits_tile(const QuantizedProduct& p, size_t row, size_t output) {
  using C = WordChunk<Isa, bits>;
  constexpr size_t kLanes = Isa::kLanes, kGroupWords = group * bits / 32;
  constexpr size_t kChunkGroups = kLanes > kGroupWords ? kLanes / kGroupWords : 1;
  const size_t groups = p.dims / group, row_bytes = p.dims * bits / 8;
  const uint8_t* codes = p.codes + output * row_bytes;
  const ByteRow<Isa, bits, parts> x(p.x + row * p.stride, p.dims, group);
  const auto floats = [&](const float* pointer, size_t m) MMFREE_INLINE {
    return Isa::template load<FloatType::float32>(reinterpret_cast<const uint8_t*>(pointer) +
                                                  m * p.stride);
  };
  typename Isa::Floats sums[M][N];
  unroll<M * N>([&](auto i) MMFREE_INLINE { sums[i / N][i % N] = Isa::zero(); });
  for (size_t start = 0; start < groups; start += kLanes) {
    const size_t count = groups - start < kLanes ? groups - start : kLanes;
    typename Isa::Floats scales[N];
    float each[N][kLanes];
    unroll<N>([&](auto n) MMFREE_INLINE {
      const size_t first = (output + n) * groups + start;
      prefetch_scales(p, first);
      scales[n] = widen<Isa>(p.scales, p.type, first, count);
      memcpy(each[n], &scales[n], sizeof(each[n]));
      const auto biases = widen<Isa>(p.biases, p.type, first, count);
      unroll<M>([&](auto m) MMFREE_INLINE {
        sums[m][n] = Isa::multiply_add(floats(x.sums + start, m), biases, sums[m][n]);
      });
    });
    // words: the chunk of the first output
    const auto add = [&](size_t chunk, const uint8_t* words, size_t distance) MMFREE_INLINE {
      const size_t first = chunk * kLanes / kGroupWords - start;
      typename Isa::Vector packed[N];
      unroll<N>([&](auto n) MMFREE_INLINE {
        packed[n] = Isa::load_vector(words + n * distance);
        // loaded once, because lines of weights are seldom aligned
        keep(packed[n]);
      });
      decltype(Isa::no_sums()) dots[M][N][parts];
      unroll<M * N * parts>([&](auto i) MMFREE_INLINE {
        dots[i / parts / N][i / parts % N][i % parts] = Isa::no_sums();
      });
      unroll<C::kShifts>([&](auto k) MMFREE_INLINE {
        // one shift after another, because the sums need the registers
        asm volatile("" ::: "memory");
        typename Isa::Vector decoded[N];
        unroll<N>([&](auto n)
                      MMFREE_INLINE { decoded[n] = Isa::template bytes<bits, k>(packed[n]); });
        unroll<M * parts>([&](auto i) MMFREE_INLINE {
          constexpr size_t m = i / parts, part = i % parts;
          const int8_t* values = x.codes + m * p.stride + parts * chunk * C::kInputs;
          auto loaded = Isa::load_vector(
              reinterpret_cast<const uint8_t*>(values + part * C::kInputs + k * C::kBytes));
          if constexpr (N > 1) {
            keep(loaded);
          }
          unroll<N>([&](auto n) MMFREE_INLINE {
            dots[m][n][part] = Isa::dot_signed(dots[m][n][part], decoded[n], loaded);
          });
        });
      });
      unroll<M * N>([&](auto i) MMFREE_INLINE {
        constexpr size_t m = i / N, n = i % N;
        const auto number = [&](size_t part) MMFREE_INLINE {
          return Isa::to_floats(Isa::lane_sums(dots[m][n][part]));
        };
        auto sum = number(parts - 1);
        unroll<parts - 1>([&](auto later) MMFREE_INLINE {
          sum = Isa::multiply_add(sum, Isa::fill(1 / kNextByte), number(parts - 2 - later));
        });
        const auto factor = kChunkGroups == 1
                                ? Isa::fill(each[n][first])
                                : Isa::template spread<kChunkGroups>(scales[n], first);
        const auto scaled = Isa::multiply(floats(x.scales + chunk * kLanes, m), factor);
        sums[m][n] = Isa::multiply_add(sum, scaled, sums[m][n]);
      });
    };
    size_t chunk = start * group / C::kInputs;
    const size_t end = (start + count) * group;
    for (; (chunk + 1) * C::kInputs <= end; ++chunk) {
      unroll<N>([&](auto n)
                    MMFREE_INLINE { prefetch_weights(codes + n * row_bytes + chunk * C::kBytes); });
      add(chunk, codes + chunk * C::kBytes, row_bytes);
    }
    if (chunk * C::kInputs < end) {
      alignas(64) uint8_t last[N][C::kBytes] = {};
      for (size_t n = 0; n < N; ++n) {
        memcpy(last[n], codes + n * row_bytes + chunk * C::kBytes, row_bytes - chunk * C::kBytes);
      }
      add(chunk, last[0], C::kBytes);
    }
  }
  unroll<M * N>([&](auto i) MMFREE_INLINE {
    p.y[(row + i / N) * p.outputs + output + i % N] = Isa::total(sums[i / N][i % N]);
  });
}

// Calls `call` with the number of bits, 1 or 2, as a constant.
template <class Call>
MMFREE_INLINE inline auto with_few_bits(int bits, Call&& call) {
  return bits == 1 ? call(std::integral_constant<int, 1>{})
                   : call(std::integral_constant<int, 2>{});
}

template <class Isa, size_t parts>
struct FewBits {
  static constexpr size_t kOutputs = Isa::kStreamOutputs;

  template <int bits, size_t group, size_t M, size_t N>
  static void tile(const QuantizedProduct& p, size_t row, size_t output) {
    few_bits_tile<Isa, bits, group, parts, M, N>(p, row, output);
  }
  static void multiply(const QuantizedProduct& p, size_t first, size_t last) {
    with_few_bits(p.bits, [&](auto bits) { multiply_bits<FewBits, bits>(p, first, last); });
  }
  static bool arrange(const float* x, size_t dims, size_t group, int bits, uint8_t* row) {
    return with_few_bits(bits,
                         [&](auto b) { return arrange_bytes<Isa, b, parts>(x, dims, group, row); });
  }
  static size_t bytes(size_t dims, size_t group, int bits) {
    return with_few_bits(
        bits, [&](auto b) { return ByteRow<Isa, b, parts>(nullptr, dims, group).bytes; });
  }
};

}  // namespace mmfree

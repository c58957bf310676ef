#pragma once

#include <string.h>

#include "dense_matmul/quantized_tile.h"

// Products with codes of 1 or 2 bits and activations that are rounded to 8 bits, with a scale for
// each kBlock inputs. A lane takes one 32-bit word of codes, which lies in one block. An
// instruction set `Isa` gives, beside what `quantized_tile.h` asks for,
//   Vector, load_vector(bytes)     kLanes words
//   bytes<bits, k>(vector)         code k of every byte
//   dot_signed(sums, codes, x)     adds the products of bytes 4 l to 4 l + 3 to lane l

namespace mmfree {

constexpr size_t kBlock = 32;
constexpr float kLargestByte = 127.0f;

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

// A rounded row. Each chunk has the numbers that meet code k of byte j at kBytes k + j. After the
// chunks come the scale of each word and the sum of each group, filled up with zeros.
template <class Isa, int bits>
struct RoundedRow {
  int8_t* codes;
  float* scales;
  float* sums;
  size_t bytes;

  MMFREE_INLINE RoundedRow(uint8_t* memory, size_t dims, size_t group) {
    using C = WordChunk<Isa, bits>;
    const size_t chunks = C::count(dims), groups = dims / group;
    const size_t padded = (groups + Isa::kLanes - 1) / Isa::kLanes * Isa::kLanes;
    codes = reinterpret_cast<int8_t*>(memory);
    scales = reinterpret_cast<float*>(memory + chunks * C::kInputs);
    sums = scales + chunks * Isa::kLanes;
    bytes = chunks * C::kInputs + (chunks * Isa::kLanes + padded) * sizeof(float);
    bytes = (bytes + 63) / 64 * 64;
  }
};

template <class Isa, int bits>
bool round_row(const float* x, size_t dims, size_t group, uint8_t* memory) {
  using C = WordChunk<Isa, bits>;
  const RoundedRow<Isa, bits> row(memory, dims, group);
  memset(memory, 0, row.bytes);
  if (largest_bits<Isa>(x, dims) >= 0x7f800000) {
    return false;
  }
  for (size_t start = 0; start < dims; start += kBlock) {
    const uint32_t largest_of_block = largest_bits<Isa>(x + start, kBlock);
    float largest;
    memcpy(&largest, &largest_of_block, sizeof(largest));
    if (largest < kSmallest) {
      continue;
    }
    const float scale = largest / kLargestByte, inverse = kLargestByte / largest;
    int32_t sum = 0;
    for (size_t i = start; i < start + kBlock; ++i) {
      const auto code = static_cast<int8_t>((x[i] * inverse + kRound) - kRound);
      const size_t place = i % C::kInputs;
      row.codes[i - place + place % C::kShifts * C::kBytes + place / C::kShifts] = code;
      sum += code;
    }
    for (size_t word = start * bits / 32; word < (start + kBlock) * bits / 32; ++word) {
      row.scales[word] = scale;
    }
    row.sums[start / group] += static_cast<float>(sum) * scale;
  }
  return true;
}

// Computes one output of M rows.
template <class Isa, int bits, size_t group, size_t M>
void rounded_tile(const QuantizedProduct& p, size_t row, size_t output) {
  using C = WordChunk<Isa, bits>;
  constexpr size_t kLanes = Isa::kLanes, kGroupWords = group * bits / 32;
  constexpr size_t kChunkGroups = kLanes > kGroupWords ? kLanes / kGroupWords : 1;
  const size_t groups = p.dims / group, row_bytes = p.dims * bits / 8;
  const uint8_t* codes = p.codes + output * row_bytes;
  const RoundedRow<Isa, bits> x(p.x + row * p.stride, p.dims, group);
  const auto of_row = [&](const auto* pointer, size_t m) MMFREE_INLINE {
    return reinterpret_cast<decltype(pointer)>(reinterpret_cast<const uint8_t*>(pointer) +
                                               m * p.stride);
  };
  const auto floats = [&](const float* pointer, size_t m) MMFREE_INLINE {
    return Isa::template load<FloatType::float32>(of_row(pointer, m));
  };
  typename Isa::Floats sums[M];
  unroll<M>([&](auto m) MMFREE_INLINE { sums[m] = Isa::zero(); });
  for (size_t start = 0; start < groups; start += kLanes) {
    const size_t count = groups - start < kLanes ? groups - start : kLanes;
    prefetch_scales(p, output * groups + start);
    const auto scales = widen<Isa>(p.scales, p.type, output * groups + start, count);
    const auto biases = widen<Isa>(p.biases, p.type, output * groups + start, count);
    float each[kLanes];
    memcpy(each, &scales, sizeof(each));
    unroll<M>([&](auto m) MMFREE_INLINE {
      sums[m] = Isa::multiply_add(floats(x.sums + start, m), biases, sums[m]);
    });
    const auto add = [&](size_t chunk, const uint8_t* bytes) MMFREE_INLINE {
      const auto words = Isa::load_vector(bytes);
      const size_t first = chunk * kLanes / kGroupWords - start;
      const auto factor = kChunkGroups == 1 ? Isa::fill(each[first])
                                            : Isa::template spread<kChunkGroups>(scales, first);
      typename Isa::Vector decoded[C::kShifts];
      unroll<C::kShifts>([&](auto k)
                             MMFREE_INLINE { decoded[k] = Isa::template bytes<bits, k>(words); });
      unroll<M>([&](auto m) MMFREE_INLINE {
        const int8_t* values = of_row(x.codes, m) + chunk * C::kInputs;
        auto sum = Isa::no_sums();
        unroll<C::kShifts>([&](auto k) MMFREE_INLINE {
          sum = Isa::dot_signed(sum, decoded[k], values + k * C::kBytes);
        });
        const auto scaled = Isa::multiply(floats(x.scales + chunk * kLanes, m), factor);
        sums[m] = Isa::multiply_add(Isa::to_floats(sum), scaled, sums[m]);
      });
    };
    size_t chunk = start * group / C::kInputs;
    const size_t end = (start + count) * group;
    for (; (chunk + 1) * C::kInputs <= end; ++chunk) {
      prefetch_weights(codes + chunk * C::kBytes);
      add(chunk, codes + chunk * C::kBytes);
    }
    if (chunk * C::kInputs < end) {
      alignas(64) uint8_t last[C::kBytes] = {};
      memcpy(last, codes + chunk * C::kBytes, row_bytes - chunk * C::kBytes);
      add(chunk, last);
    }
  }
  unroll<M>([&](auto m)
                MMFREE_INLINE { p.y[(row + m) * p.outputs + output] = Isa::total(sums[m]); });
}

// Calls `call` with the number of bits, 1 or 2, as a constant.
template <class Call>
MMFREE_INLINE inline auto with_few_bits(int bits, Call&& call) {
  return bits == 1 ? call(std::integral_constant<int, 1>{})
                   : call(std::integral_constant<int, 2>{});
}

template <class Isa>
struct Rounded {
  template <int bits, size_t group, size_t M>
  static void tile(const QuantizedProduct& p, size_t row, size_t output) {
    rounded_tile<Isa, bits, group, M>(p, row, output);
  }
  static void multiply(const QuantizedProduct& p, size_t first, size_t last) {
    with_few_bits(p.bits, [&](auto bits) { multiply_bits<Rounded, bits>(p, first, last); });
  }
  static bool arrange(const float* x, size_t dims, size_t group, int bits, uint8_t* row) {
    return with_few_bits(bits, [&](auto b) { return round_row<Isa, b>(x, dims, group, row); });
  }
  static size_t bytes(size_t dims, size_t group, int bits) {
    return with_few_bits(bits,
                         [&](auto b) { return RoundedRow<Isa, b>(nullptr, dims, group).bytes; });
  }
};

}  // namespace mmfree

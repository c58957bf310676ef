#pragma once

#include <string.h>

#include "dense_matmul/float_tile.h"
#include "dense_matmul/kernels.h"
#include "runtime/unroll.h"

// Products with codes of 4, 6 or 8 bits. Activations are two 16-bit whole numbers, high and
// low, with a scale for each group: together they keep what a float holds beside the group's
// largest, and the sums of a chunk are exact integers. An instruction set `Isa` gives, beside what
// `float_tile.h` asks for,
//   Words, Sums            vectors of 2 kLanes 16-bit words and of kLanes 32-bit sums
//   kCodes<bits>           codes of one word; those of 6 bits are spread over words first
//   load_words<bits>(bytes)    the words of one chunk
//   codes<bits, k>(words)      code k of every word
//   dot(sums, codes, x)        adds the products of words 2 l and 2 l + 1 to lane l
//   to_floats(sums), multiply(a, b), no_sums(), fill(value)
//   spread<count>(values, first)   `count` lanes from `first` on, each over an equal share of lanes
//   load<type>(pointer, count)     where kMasks: up to kLanes values, then zeros

namespace mmfree {

constexpr float kLargestCode = 32767.0f;
// How many low numbers make a high one. What rounding leaves is at most one half of a high number.
constexpr float kLowCodes = 2 * kLargestCode;
// Added and subtracted again, it rounds |x| < 2^22 to a whole number.
constexpr float kRound = 12582912.0f;
// Smaller values count as zeros, because their scale would be no normal number.
constexpr float kSmallest = 1e-30f;

// The place in memory of a chunk of codes, which is one vector of words.
template <class Isa, int bits>
struct Chunk {
  static constexpr size_t kCodes = Isa::template kCodes<bits>;
  static constexpr size_t kWords = 2 * Isa::kLanes;
  static constexpr size_t kInputs = kWords * kCodes;
  static constexpr size_t kBytes = kInputs * bits / 8;

  static constexpr size_t count(size_t dims) {
    return (dims + kInputs - 1) / kInputs;
  }
};

// An arranged row. Each chunk has its high 16-bit codes and then its low ones, with word j of code
// k at kWords k + j. Behind the chunks are the scale and the sum of each group, filled up with
// zeros to whole vectors.
template <class Isa>
struct Row {
  int16_t* codes;
  float* scales;
  float* sums;
  size_t bytes;

  MMFREE_INLINE Row(uint8_t* memory, size_t inputs, size_t groups) {
    const size_t padded = (groups + Isa::kLanes - 1) / Isa::kLanes * Isa::kLanes;
    codes = reinterpret_cast<int16_t*>(memory);
    scales = reinterpret_cast<float*>(memory + 2 * inputs * sizeof(int16_t));
    sums = scales + padded;
    bytes = 2 * inputs * sizeof(int16_t) + 2 * padded * sizeof(float);
    bytes = (bytes + 63) / 64 * 64;
  }
};

template <class Isa, int bits>
Row<Isa> arranged_row(uint8_t* memory, size_t dims, size_t group) {
  const size_t chunks = Chunk<Isa, bits>::count(dims);
  return Row<Isa>(memory, chunks * Chunk<Isa, bits>::kInputs, dims / group);
}

// The bits of the largest magnitude. Bits are ordered as the magnitudes are, and NaN is beyond
// infinity.
template <class Isa>
MMFREE_INLINE inline uint32_t largest_bits(const float* values, size_t count) {
  uint32_t largest = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    memcpy(&bits, values + i, sizeof(bits));
    bits &= 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <class Isa, int bits>
bool arrange_bits(const float* x, size_t dims, size_t group, uint8_t* memory) {
  using C = Chunk<Isa, bits>;
  const Row<Isa> row = arranged_row<Isa, bits>(memory, dims, group);
  memset(memory, 0, row.bytes);
  if (largest_bits<Isa>(x, dims) >= 0x7f800000) {
    return false;
  }
  for (size_t start = 0; start < dims; start += group) {
    const uint32_t largest_of_group = largest_bits<Isa>(x + start, group);
    float largest;
    memcpy(&largest, &largest_of_group, sizeof(largest));
    if (largest < kSmallest) {
      continue;
    }
    const float scale = largest / kLargestCode, inverse = kLargestCode / largest;
    int32_t high_sum = 0, low_sum = 0;
    for (size_t i = start; i < start + group; ++i) {
      const float scaled = x[i] * inverse;
      const float high = (scaled + kRound) - kRound;
      const float low = ((scaled - high) * kLowCodes + kRound) - kRound;
      const size_t place = i % C::kInputs;
      int16_t* codes =
          row.codes + 2 * (i - place) + place % C::kCodes * C::kWords + place / C::kCodes;
      codes[0] = static_cast<int16_t>(high);
      codes[C::kInputs] = static_cast<int16_t>(low);
      high_sum += codes[0];
      low_sum += codes[C::kInputs];
    }
    row.sums[start / group] =
        (static_cast<float>(high_sum) + static_cast<float>(low_sum) / kLowCodes) * scale;
    row.scales[start / group] = scale;
  }
  return true;
}

// Loads up to kLanes values as floats and fills up with zeros.
template <class Isa>
MMFREE_INLINE inline typename Isa::Floats widen(const void* values, FloatType type, size_t first,
                                                size_t count) {
  const uint8_t* bytes = static_cast<const uint8_t*>(values) + first * float_bytes(type);
  switch (type) {
    case FloatType::float32:
      return load_some<Isa, FloatType::float32>(bytes, count);
    case FloatType::float16:
      return load_some<Isa, FloatType::float16>(bytes, count);
    default:
      return load_some<Isa, FloatType::bfloat16>(bytes, count);
  }
}

// Fetches the scales, which lie apart from the codes and are what each output begins with.
MMFREE_INLINE inline void prefetch_scales(const QuantizedProduct& p, size_t first) {
  prefetch_weights(static_cast<const uint8_t*>(p.scales) + first * float_bytes(p.type));
  prefetch_weights(static_cast<const uint8_t*>(p.biases) + first * float_bytes(p.type));
}

// Computes one output of M rows.
template <class Isa, int bits, size_t group, size_t M>
void quantized_tile(const QuantizedProduct& p, size_t row, size_t output) {
  using C = Chunk<Isa, bits>;
  constexpr size_t kLanes = Isa::kLanes, kChunkGroups = C::kInputs > group ? C::kInputs / group : 1;
  const size_t groups = p.dims / group, row_bytes = p.dims * bits / 8;
  const uint8_t* codes = p.codes + output * row_bytes;
  const Row<Isa> x = arranged_row<Isa, bits>(p.x + row * p.stride, p.dims, group);
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
    // scales of weights and activations together, from which the lanes pick theirs
    typename Isa::Floats factors[M];
    float each[M][kLanes];
    unroll<M>([&](auto m) MMFREE_INLINE {
      sums[m] = Isa::multiply_add(floats(x.sums + start, m), biases, sums[m]);
      factors[m] = Isa::multiply(floats(x.scales + start, m), scales);
      memcpy(each[m], &factors[m], sizeof(each[m]));
    });
    const auto add = [&](size_t chunk, const uint8_t* bytes) MMFREE_INLINE {
      auto words = Isa::template load_words<bits>(bytes);
      // loaded once, because lines of weights are seldom aligned
      keep(words);
      const size_t first = chunk * C::kInputs / group - start;
      typename Isa::Words decoded[C::kCodes];
      unroll<C::kCodes>([&](auto k)
                            MMFREE_INLINE { decoded[k] = Isa::template codes<bits, k>(words); });
      unroll<M>([&](auto m) MMFREE_INLINE {
        const int16_t* values = of_row(x.codes, m) + 2 * chunk * C::kInputs;
        auto high = Isa::no_sums(), low = Isa::no_sums();
        unroll<C::kCodes>([&](auto k) MMFREE_INLINE {
          high = Isa::dot(high, decoded[k], values + k * C::kWords);
          low = Isa::dot(low, decoded[k], values + C::kInputs + k * C::kWords);
        });
        const auto sum =
            Isa::multiply_add(Isa::to_floats(low), Isa::fill(1 / kLowCodes), Isa::to_floats(high));
        const auto factor = kChunkGroups == 1
                                ? Isa::fill(each[m][first])
                                : Isa::template spread<kChunkGroups>(factors[m], first);
        sums[m] = Isa::multiply_add(sum, factor, sums[m]);
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

// `Tiles` computes N outputs of M rows as `tile<bits, group, M, N>(p, row, output)`, where N is
// kOutputs or 1.
template <class Tiles, int bits, size_t group, size_t M>
void tiled_rows(const QuantizedProduct& p, size_t row, size_t first, size_t last) {
  size_t output = first;
  for (; output + Tiles::kOutputs <= last; output += Tiles::kOutputs) {
    Tiles::template tile<bits, group, M, Tiles::kOutputs>(p, row, output);
  }
  for (; output < last; ++output) {
    Tiles::template tile<bits, group, M, 1>(p, row, output);
  }
}

template <class Tiles, int bits, size_t group>
void multiply_group(const QuantizedProduct& p, size_t first, size_t last) {
  size_t row = 0;
  for (; row + 4 <= p.rows; row += 4) {
    tiled_rows<Tiles, bits, group, 4>(p, row, first, last);
  }
  for (; row + 2 <= p.rows; row += 2) {
    tiled_rows<Tiles, bits, group, 2>(p, row, first, last);
  }
  if (row < p.rows) {
    tiled_rows<Tiles, bits, group, 1>(p, row, first, last);
  }
}

template <class Tiles, int bits>
void multiply_bits(const QuantizedProduct& p, size_t first, size_t last) {
  if (p.group == 32) {
    multiply_group<Tiles, bits, 32>(p, first, last);
  } else if (p.group == 64) {
    multiply_group<Tiles, bits, 64>(p, first, last);
  } else {
    multiply_group<Tiles, bits, 128>(p, first, last);
  }
}

// Calls `call` with the number of bits, 4, 6 or 8, as a constant.
template <class Call>
MMFREE_INLINE inline auto with_bits(int bits, Call&& call) {
  switch (bits) {
    case 4:
      return call(std::integral_constant<int, 4>{});
    case 6:
      return call(std::integral_constant<int, 6>{});
    default:
      return call(std::integral_constant<int, 8>{});
  }
}

template <class Isa>
struct Quantized {
  static constexpr size_t kOutputs = 1;

  template <int bits, size_t group, size_t M, size_t N>
  static void tile(const QuantizedProduct& p, size_t row, size_t output) {
    quantized_tile<Isa, bits, group, M>(p, row, output);
  }
  static void multiply(const QuantizedProduct& p, size_t first, size_t last) {
    with_bits(p.bits, [&](auto bits) { multiply_bits<Quantized, bits>(p, first, last); });
  }
  static bool arrange(const float* x, size_t dims, size_t group, int bits, uint8_t* row) {
    return with_bits(bits, [&](auto b) { return arrange_bits<Isa, b>(x, dims, group, row); });
  }
  static size_t bytes(size_t dims, size_t group, int bits) {
    return with_bits(bits,
                     [&](auto b) { return arranged_row<Isa, b>(nullptr, dims, group).bytes; });
  }
};

}  // namespace mmfree

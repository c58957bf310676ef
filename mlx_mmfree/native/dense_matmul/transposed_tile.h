#pragma once

#include <string.h>

#include "dense_matmul/quantized_tile.h"

// dx = dy W for codes of 1 or 2 bits. The codes of kColumns inputs meet some rows of dy. Outputs
// are summed in their order, whatever the number of rows. An instruction set `Isa` gives, beside
// what `quantized_tile.h` asks for,
//   kTransposedRows             rows of dy that share the codes
//   lowest_codes<bits>(words)   the lowest code of each 32-bit word as a float

namespace mmfree {

// The scales and biases of one group, and the values of some rows of dy times the scales, for all
// outputs and zeros up to whole vectors. There is one vector more, so that rows of a power of two
// do not share the sets of a cache.
template <class Isa>
struct GroupScales {
  size_t padded;
  float *scales, *biases, *scaled;

  MMFREE_INLINE GroupScales(float* memory, size_t outputs)
      : padded(((outputs + Isa::kLanes - 1) / Isa::kLanes + 1) * Isa::kLanes),
        scales(memory),
        biases(memory + padded),
        scaled(memory + 2 * padded) {
  }
};

template <class Isa, int bits, size_t M>
void transposed_rows(const QuantizedTransposed& p, size_t first_input, size_t row,
                     const GroupScales<Isa>& own) {
  using Floats = typename Isa::Floats;
  using Integers = decltype(Floats{} < Floats{});
  constexpr size_t kLanes = Isa::kLanes, kColumns = 2 * kLanes, kBytes = kColumns * bits / 8;
  const float* dy = p.dy + row * p.outputs;
  Floats offsets[M];
  unroll<M>([&](auto m) MMFREE_INLINE { offsets[m] = Isa::zero(); });
  for (size_t n = 0; n < p.outputs; n += kLanes) {
    const size_t count = p.outputs - n < kLanes ? p.outputs - n : kLanes;
    const auto scales = Isa::template load<FloatType::float32>(own.scales + n);
    const auto biases = Isa::template load<FloatType::float32>(own.biases + n);
    unroll<M>([&](auto m) MMFREE_INLINE {
      const auto values = load_some<Isa, FloatType::float32>(
          reinterpret_cast<const uint8_t*>(dy + m * p.outputs + n), count);
      const Floats scaled = Isa::multiply(values, scales);
      memcpy(own.scaled + m * own.padded + n, &scaled, sizeof(scaled));
      offsets[m] = Isa::multiply_add(values, biases, offsets[m]);
    });
  }
  Integers shifts;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    shifts[lane] = static_cast<int32_t>(lane * bits);
  }
  const size_t row_bytes = p.dims * bits / 8;
  for (size_t start = first_input; start < first_input + p.group; start += kColumns) {
    const uint8_t* codes = p.codes + start * bits / 8;
    Floats sums[M][2];
    unroll<2 * M>([&](auto i) MMFREE_INLINE { sums[i / 2][i % 2] = Isa::zero(); });
    for (size_t n = 0; n < p.outputs; ++n) {
      uint64_t packed = 0;
      memcpy(&packed, codes + n * row_bytes, kBytes);
      unroll<2>([&](auto v) MMFREE_INLINE {
        const Integers words = Integers{} + static_cast<int32_t>(packed >> (v * kLanes * bits));
        const Floats floats = Isa::template lowest_codes<bits>(words >> shifts);
        unroll<M>([&](auto m) MMFREE_INLINE {
          const auto factor = Isa::fill(own.scaled[m * own.padded + n]);
          sums[m][v] = Isa::multiply_add(factor, floats, sums[m][v]);
        });
      });
    }
    unroll<M>([&](auto m) MMFREE_INLINE {
      const auto offset = Isa::fill(Isa::total(offsets[m]));
      float* dx = p.dx + (row + m) * p.dims + start;
      unroll<2>([&](auto v) MMFREE_INLINE {
        const Floats total = sums[m][v] + offset;
        memcpy(dx + v * kLanes, &total, sizeof(total));
      });
    });
  }
}

template <class Isa, int bits>
void transposed_group(const QuantizedTransposed& p, size_t group, float* scratch) {
  const GroupScales<Isa> own(scratch, p.outputs);
  memset(scratch, 0, 2 * own.padded * sizeof(float));
  const size_t groups = p.dims / p.group;
  for (size_t n = 0; n < p.outputs; ++n) {
    widen<Isa>(Floats{p.scales, p.type}, n * groups + group, 1, own.scales + n);
    widen<Isa>(Floats{p.biases, p.type}, n * groups + group, 1, own.biases + n);
  }
  constexpr size_t kRows = Isa::kTransposedRows;
  for (size_t row = 0; row < p.rows; row += kRows) {
    const size_t rows = p.rows - row < kRows ? p.rows - row : kRows;
    unroll<kRows>([&](auto m) {
      if (rows == m + 1) {
        transposed_rows<Isa, bits, m + 1>(p, group * p.group, row, own);
      }
    });
  }
}

template <class Isa>
void multiply_quantized_transposed(const QuantizedTransposed& p, size_t group, float* scratch) {
  if (p.bits == 1) {
    transposed_group<Isa, 1>(p, group, scratch);
  } else {
    transposed_group<Isa, 2>(p, group, scratch);
  }
}

template <class Isa>
size_t transposed_scratch(size_t outputs) {
  return (2 + Isa::kTransposedRows) * GroupScales<Isa>(nullptr, outputs).padded;
}

}  // namespace mmfree

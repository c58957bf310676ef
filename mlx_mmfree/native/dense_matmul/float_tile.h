#pragma once

#include <string.h>

#include "dense_matmul/kernels.h"
#include "runtime/unroll.h"

// Products of floats. An instruction set `Isa` gives
//   kLanes, Floats         32-bit floats of one vector
//   kRows                  rows of one tile
//   load<type>(pointer)    kLanes values, widened exactly
//   multiply_add(x, w, sum), total(sum), zero()
// Every sum is two chains, one of the even and one of the odd vectors, whatever the tile.

namespace mmfree {

constexpr size_t kTileOutputs = 3;
constexpr size_t kPrefetchBytes = 4096;

constexpr size_t float_bytes(FloatType type) {
  return type == FloatType::float32 ? 4 : 2;
}

// The work on one line of weights is too long for the processor to run ahead far enough by itself.
// The second-level cache waits for more lines at once than the first.
MMFREE_INLINE inline void prefetch_weights(const void* weights) {
  __builtin_prefetch(static_cast<const char*>(weights) + kPrefetchBytes, 0, 2);
}

// Loads up to kLanes values and fills up with zeros.
template <class Isa, FloatType type>
MMFREE_INLINE inline typename Isa::Floats load_some(const uint8_t* bytes, size_t count) {
  if (count == Isa::kLanes) {
    return Isa::template load<type>(bytes);
  }
  if constexpr (Isa::kMasks) {
    return Isa::template load<type>(bytes, count);
  } else {
    alignas(64) uint8_t some[Isa::kLanes * float_bytes(type)] = {};
    memcpy(some, bytes, count * float_bytes(type));
    return Isa::template load<type>(some);
  }
}

// Computes N outputs of M rows.
template <class Isa, FloatType type, size_t M, size_t N>
void dense_tile(const DenseProduct& p, size_t row, size_t output) {
  constexpr size_t kLanes = Isa::kLanes, kStep = 2 * kLanes;
  const size_t row_bytes = p.dims * float_bytes(type);
  const uint8_t* weight = static_cast<const uint8_t*>(p.weight) + output * row_bytes;
  const float* x = p.x + row * p.stride;
  typename Isa::Floats sums[M][N][2];
  unroll<M * N>([&](auto i) MMFREE_INLINE {
    sums[i / N][i % N][0] = Isa::zero();
    sums[i / N][i % N][1] = Isa::zero();
  });
  const auto add = [&](const float* values, const uint8_t* weights, size_t distance) MMFREE_INLINE {
    unroll<2>([&](auto c) MMFREE_INLINE {
      typename Isa::Floats w[N];
      unroll<N>([&](auto n) MMFREE_INLINE {
        w[n] = Isa::template load<type>(weights + n * distance + c * kLanes * float_bytes(type));
      });
      unroll<M>([&](auto m) MMFREE_INLINE {
        const auto value =
            Isa::template load<FloatType::float32>(values + m * p.stride + c * kLanes);
        unroll<N>([&](auto n) MMFREE_INLINE {
          sums[m][n][c] = Isa::multiply_add(value, w[n], sums[m][n][c]);
        });
      });
    });
  };
  size_t i = 0;
  for (; i + kStep <= p.dims; i += kStep) {
    unroll<N>([&](auto n) MMFREE_INLINE {
      for (size_t byte = 0; byte < kStep * float_bytes(type); byte += 64) {
        prefetch_weights(weight + n * row_bytes + i * float_bytes(type) + byte);
      }
    });
    add(x + i, weight + i * float_bytes(type), row_bytes);
  }
  if (i < p.dims) {
    alignas(64) uint8_t last[N][kStep * float_bytes(type)] = {};
    for (size_t n = 0; n < N; ++n) {
      memcpy(last[n], weight + n * row_bytes + i * float_bytes(type),
             (p.dims - i) * float_bytes(type));
    }
    add(x + i, &last[0][0], sizeof(last[0]));
  }
  unroll<M * N>([&](auto k) MMFREE_INLINE {
    constexpr size_t m = k / N, n = k % N;
    p.y[(row + m) * p.outputs + output + n] = Isa::total(sums[m][n][0] + sums[m][n][1]);
  });
}

template <class Isa, FloatType type, size_t M>
void dense_rows(const DenseProduct& p, size_t row, size_t first, size_t last) {
  size_t output = first;
  // with few rows the weights come from memory, where they are read as one stream
  if (p.rows > Isa::kRows) {
    for (; output + kTileOutputs <= last; output += kTileOutputs) {
      dense_tile<Isa, type, M, kTileOutputs>(p, row, output);
    }
  }
  for (; output < last; ++output) {
    dense_tile<Isa, type, M, 1>(p, row, output);
  }
}

template <class Isa, FloatType type>
void multiply_type(const DenseProduct& p, size_t first, size_t last) {
  for (size_t row = 0; row < p.rows; row += Isa::kRows) {
    const size_t rows = p.rows - row < Isa::kRows ? p.rows - row : Isa::kRows;
    unroll<Isa::kRows>([&](auto m) {
      if (rows == m + 1) {
        dense_rows<Isa, type, m + 1>(p, row, first, last);
      }
    });
  }
}

template <class Isa>
void multiply_dense(const DenseProduct& p, size_t first, size_t last) {
  switch (p.type) {
    case FloatType::float32:
      return multiply_type<Isa, FloatType::float32>(p, first, last);
    case FloatType::float16:
      return multiply_type<Isa, FloatType::float16>(p, first, last);
    case FloatType::bfloat16:
      return multiply_type<Isa, FloatType::bfloat16>(p, first, last);
  }
}

}  // namespace mmfree

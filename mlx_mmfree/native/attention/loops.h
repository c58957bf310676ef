#pragma once

#include <string.h>

#include "attention/kernels.h"
#include "dense_matmul/float_tile.h"
#include "runtime/exponential.h"
#include "runtime/transpose.h"

// Products of small tiles in the first-level cache, and the softmax between them.

namespace mmfree {

// Computes V vectors of M rows. Only a single vector may be cut short.
template <class Isa, size_t M, size_t V>
void tile_product(const TileProduct& p, size_t row, size_t column) {
  using Vector = typename Isa::Floats;
  constexpr size_t kLanes = Isa::kLanes;
  const size_t some = V == 1 && p.columns - column < kLanes ? p.columns - column : kLanes;
  Vector sums[M][V];
  unroll<M * V>([&](auto i) MMFREE_INLINE { sums[i / V][i % V] = Isa::zero(); });
  const float *a = p.a + row * p.a_row, *b = p.b + column;
  for (size_t k = 0; k < p.steps; ++k, a += p.a_step, b += p.b_row) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(b);
    Vector values[V];
    unroll<V>([&](auto v) MMFREE_INLINE {
      if constexpr (V > 1) {
        values[v] = Isa::template load<FloatType::float32>(b + v * kLanes);
      } else {
        values[v] = load_some<Isa, FloatType::float32>(bytes, some);
      }
    });
    unroll<M>([&](auto m) MMFREE_INLINE {
      const Vector factor = Isa::fill(a[m * p.a_row]);
      unroll<V>([&](auto v) MMFREE_INLINE {
        sums[m][v] = Isa::multiply_add(values[v], factor, sums[m][v]);
      });
    });
  }
  unroll<M * V>([&](auto i) MMFREE_INLINE {
    float* c = p.c + (row + i / V) * p.c_row + column + i % V * kLanes;
    Vector result = sums[i / V][i % V];
    if (p.adds) {
      result = result + load_some<Isa, FloatType::float32>(reinterpret_cast<uint8_t*>(c), some);
    }
    memcpy(c, &result, some * sizeof(float));
  });
}

template <class Isa, size_t V>
void product_columns(const TileProduct& p, size_t column) {
  for (size_t row = 0; row < p.rows; row += Isa::kRows) {
    const size_t rows = p.rows - row < Isa::kRows ? p.rows - row : Isa::kRows;
    unroll<Isa::kRows>([&](auto m) {
      if (rows == m + 1) {
        tile_product<Isa, m + 1, V>(p, row, column);
      }
    });
  }
}

template <class Isa>
void multiply_tile(const TileProduct& p) {
  size_t column = 0;
  for (; column + 4 * Isa::kLanes <= p.columns; column += 4 * Isa::kLanes) {
    product_columns<Isa, 4>(p, column);
  }
  for (; column + 2 * Isa::kLanes <= p.columns; column += 2 * Isa::kLanes) {
    product_columns<Isa, 2>(p, column);
  }
  for (; column < p.columns; column += Isa::kLanes) {
    product_columns<Isa, 1>(p, column);
  }
}

template <class Isa>
void weigh_scores(const ScoreTile& t) {
  for (size_t token = 0; token < t.tokens; ++token) {
    float *scores = t.scores + token * t.row, *gradients = t.gradients + token * t.row;
    const float log_total = t.log_totals[token], delta = t.deltas[token];
    for (size_t key = 0; key < t.keys; ++key) {
      scores[key] = exponential<Isa>(scores[key] * t.scale - log_total);
      gradients[key] = scores[key] * (gradients[key] - delta) * t.scale;
    }
    if (t.seen) {
      const bool* seen = t.seen + token * t.row;
      for (size_t key = 0; key < t.keys; ++key) {
        scores[key] = seen[key] ? scores[key] : 0.0f;
        gradients[key] = seen[key] ? gradients[key] : 0.0f;
      }
    }
  }
}

// Turns squares, so that columns are written whole lines at a time.
template <class Isa>
void turn_rows(const RowsToTurn& t) {
  constexpr size_t kSide = 16;
  for (size_t n = 0; n < t.count; n += kSide) {
    const size_t rows = t.count - n < kSide ? t.count - n : kSide;
    for (size_t d = 0; d < t.dims; d += kSide) {
      const size_t dims = t.dims - d < kSide ? t.dims - d : kSide;
      WordVector square[kSide] = {};
      for (size_t row = 0; row < rows; ++row) {
        alignas(64) float values[kSide] = {};
        widen<Isa>(t.rows, (n + row) * t.distance + d, dims, values);
        memcpy(&square[row], values, sizeof(values));
      }
      transpose(square);
      for (size_t column = 0; column < dims; ++column) {
        memcpy(t.columns + (d + column) * t.row + n, &square[column], rows * sizeof(float));
      }
    }
  }
}

template <class Isa, class Dense>
constexpr AttentionKernels AttentionKernels::of() {
  return {mmfree::multiply_tile<Dense>, mmfree::weigh_scores<Isa>, mmfree::turn_rows<Isa>};
}

}  // namespace mmfree

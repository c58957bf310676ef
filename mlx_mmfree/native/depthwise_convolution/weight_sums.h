#pragma once

#include <string.h>

#include "depthwise_convolution/kernels.h"
#include "depthwise_convolution/source_rows.h"
#include "runtime/unroll.h"

// Gradients of weights: sums over all places, a few of them in float32 and those sums in float64.

namespace mmfree {

// Adds the products of the places of a row to kTaps sums.
template <class Isa>
void add_products(const DepthwiseSum* taps, const float* d_target, size_t places, size_t step) {
  for (size_t lane = 0; lane < kBlockChannels; lane += Isa::kLanes) {
    typename Isa::Floats sums[kTaps];
    const float* from[kTaps];
    unroll<kTaps>([&](auto n) MMFREE_INLINE {
      sums[n] = Isa::template load<FloatType::float32>(taps[n].sum + lane);
      from[n] = taps[n].source + lane;
    });
    for (size_t place = 0; place < places; ++place) {
      const auto gradient =
          Isa::template load<FloatType::float32>(d_target + place * kBlockChannels + lane);
      const size_t at = place * step * kBlockChannels;
      unroll<kTaps>([&](auto n) MMFREE_INLINE {
        const auto value = Isa::template load<FloatType::float32>(from[n] + at);
        sums[n] = Isa::multiply_add(value, gradient, sums[n]);
      });
    }
    unroll<kTaps>([&](auto n)
                      MMFREE_INLINE { memcpy(taps[n].sum + lane, &sums[n], sizeof(sums[n])); });
  }
}

inline void add_places(const float* places, size_t count, float* sum) {
  for (size_t place = 0; place < count; ++place) {
    for (size_t lane = 0; lane < kBlockChannels; ++lane) {
      sum[lane] += places[place * kBlockChannels + lane];
    }
  }
}

// Adds the sums to those in float64, and begins anew.
inline void fold_sums(float* sums, size_t count, double* totals) {
  for (size_t i = 0; i < count; ++i) {
    totals[i] += sums[i];
    sums[i] = 0.0f;
  }
}

// Lists the weights that meet the map in a row of the target, and fills the last kTaps up.
template <class Isa>
size_t list_taps(const SourceRows<Isa>& source, const SourceWindow& window, size_t row,
                 const DepthwiseScratch& scratch) {
  const size_t side = window.side;
  size_t count = 0;
  for (int64_t from = window.first(row); from <= window.last(row); ++from) {
    if (source.has(from)) {
      const size_t tap = window.tap(row, from) * side;
      for (size_t column = 0; column < side; ++column) {
        scratch.of_taps[count++] = {source.row(from) + column * kBlockChannels,
                                    scratch.sums + (tap + column) * kBlockChannels};
      }
    }
  }
  float* unused = scratch.sums + (side * side + 1) * kBlockChannels;
  for (size_t n = 0; n < kTaps; ++n) {
    scratch.of_taps[count + n] = {scratch.of_taps[0].source, unused};
  }
  return count;
}

template <class Isa>
void sum_weight_rows(const DepthwiseWeightCall& c, size_t block, size_t first, size_t last,
                     size_t start, double* totals, const DepthwiseScratch& scratch) {
  const size_t taps = c.side * c.side, places = std::min(kPieceColumns, c.target_columns - start);
  const size_t channels = std::min(kBlockChannels, c.channels - block * kBlockChannels);
  const SourceWindow window{c.side, c.stride, false};
  const MapBlock map{c.source,   c.source_rows,          c.source_columns,
                     c.channels, block * kBlockChannels, channels};
  const MapBlock gradient{c.d_target, c.target_rows,          c.target_columns,
                          c.channels, block * kBlockChannels, channels};
  size_t added = 0;
  for (size_t row = first; row < last;) {
    const size_t image = row / c.target_rows;
    const size_t end = std::min(last, (image + 1) * c.target_rows);
    SourceRows<Isa> source(map, image, window.first(start),
                           source_columns_of(places, c.side, c.stride), c.side, scratch.rows);
    for (; row < end; ++row) {
      const size_t own = row - image * c.target_rows;
      source.read_until(window.first(own), window.last(own));
      widen_places<Isa>(gradient, (row * c.target_columns + start) * c.channels, places,
                        scratch.d_target);
      const size_t count = list_taps(source, window, own, scratch);
      for (size_t tap = 0; tap < count; tap += kTaps) {
        add_products<Isa>(scratch.of_taps + tap, scratch.d_target, places, c.stride);
      }
      add_places(scratch.d_target, places, scratch.sums + taps * kBlockChannels);
      added += places;
      if (added >= kFloatPlaces) {
        fold_sums(scratch.sums, (taps + 1) * kBlockChannels, totals);
        added = 0;
      }
    }
  }
  fold_sums(scratch.sums, (taps + 1) * kBlockChannels, totals);
}

template <class Isa>
void sum_weight_items(const DepthwiseWeightCall& c, size_t first, size_t last,
                      const DepthwiseScratch& scratch) {
  const size_t blocks = blocks_of(c.channels), count = (c.side * c.side + 1) * kBlockChannels;
  memset(scratch.sums, 0, (count + kBlockChannels) * sizeof(float));
  for (size_t item = first; item < last; ++item) {
    const size_t block = item % blocks, from = item / blocks * c.part_rows;
    const size_t until = std::min(from + c.part_rows, c.batch * c.target_rows);
    double* totals = c.sums + item * count;
    std::fill_n(totals, count, 0.0);
    for (size_t start = 0; start < c.target_columns; start += kPieceColumns) {
      sum_weight_rows<Isa>(c, block, from, until, start, totals, scratch);
    }
  }
}

}  // namespace mmfree
